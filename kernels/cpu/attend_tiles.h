// attend_tiles.h: the part of attention over tiles that all instruction sets share. It computes in integers, for any
// number of query rows. ref/attend.cpp defines the result, and subkv/tiles.h defines the layout.
//
// For every step of STEP cells and block of BLOCK query rows it computes the products of all keys, one softmax over the
// step, and the products of all values. Codes are converted to bytes (tile_codes.h) once for all query rows, and
// multiplied by queries and weights, which are 16-bit integers. Only queries and weights are rounded, and sums are
// exact. The unit of a query row is 1/32639 of the largest product of a coefficient and its band's ratio. The unit of a
// step's weights times scales is 1/32639 of the largest weight times the largest scale of the step. Coefficients of
// 16-bit bands are multiplied as floats (halves.h).
//
// Isa is a type that is local to the including file, so that its functions are compiled for that file's instructions.
// It has
//   W                     floats per register, and dwords of four codes
//   ZERO_SHIFT            number that open() subtracts from a code
//   FROM_TILE             whether products can read codes from tiles, which takes many registers
//   FROM_TILE_ROWS        largest number of query rows for which they do
//   KEY_ROWS              query rows whose logits are summed together, at most 3
//   key_regs(rows)        registers of W cells whose logits are summed together for `rows` rows
//   VALUE_ROWS            query rows whose values are summed together, at most 4
//   octets(rows)          octets whose values are summed together for `rows` rows
//   F, I                  a register of floats (lanes.h), a register of integers or codes
//   Opened, Sum           codes prepared for products, W sums of products
//   and the functions used below.
#pragma once

#include "../ref/rows.h"
#include "lanes.h"
#include "scratch.h"
#include "tile_products.h"

namespace subkv::cpu {

//
// softmax
//

// Marks a row as lost (ops.h). Its weights in the step become 0, so that integers stay in their range.
static inline void mark_lost(Step & step, int i, Row & row) {
    row.m            = row.m > MINUS_INF ? row.m : 0.0f;
    row.z            = NOT_A_NUMBER;
    row.shrink       = 1.0f;
    row.weight_scale = 0.0f;
    row.weight_step  = 0.0f;
    row.weights      = 0;
    memset(step.logit[i], 0, sizeof(step.logit[i]));
    memset(step.first[i], 0, STEP);
    memset(step.second[i], 0, STEP);
}

// Converts products to logits and returns the largest, or any number if one is NaN. Adds `common` to the logits of the
// cells, or the row's shift if `common` is nullptr.
template <typename Isa, bool CAP>
static float finish_logits(const Step & step, const Row & row, const float * bias, const float * common, float softcap,
                           float * x) {
    const auto delta = Isa::set(row.delta), slope = Isa::set(row.slope), shift = Isa::set(row.shift);
    auto       top = Isa::set(MINUS_INF);
#pragma GCC unroll 2
    for (int32_t c = 0; c < step.n_pad; c += Isa::W) {
        const auto key_step = Isa::mul(Isa::load(step.scale_k + c), delta);
        auto       l        = Isa::fma(Isa::load(x + c), key_step, common != nullptr ? Isa::load(common + c) : shift);
        if constexpr (CAP) {
            l = soft_cap<Isa>(l, softcap);
        }
        const auto b = Isa::load(bias + c);
        l            = Isa::hide(Isa::fma(slope, b, l), b); // The product is NaN for a masked cell if the slope is 0.
        top          = Isa::max(top, l);
        Isa::store(x + c, l);
    }
    return Isa::largest(top);
}

// Converts logits to integer weights relative to the step's largest logit, and updates m, z, shrink, weight_scale,
// weight_step and weights of the row. Earlier steps do not affect the weights. If a logit is NaN, z becomes NaN. With
// KEEP, `logit` keeps the weights as floats.
template <typename Isa, bool KEEP> static void quantize_weights(Step & step, int i, float top, Row & row) {
    const auto base    = Isa::set(top);
    const auto inverse = Isa::set(step.largest_v > 0.0f ? LARGEST / step.largest_v : 0.0f);
    auto       total   = Isa::set(0.0f);
    auto       sum     = Isa::zero();
    float *    x       = step.logit[i];
#pragma GCC unroll 4
    for (int32_t c = 0; c < step.n_pad; c += Isa::W) {
        const auto e = exp_nonpositive<Isa>(Isa::sub(Isa::load(x + c), base));
        const auto u = Isa::to_int(Isa::mul(e, Isa::mul(Isa::load(step.scale_v + c), inverse)));
        total        = Isa::plus(total, e);
        sum          = Isa::plus_int(sum, u);
        if constexpr (KEEP) {
            Isa::store(x + c, e);
        }
        Isa::split(u, step.first[i] + c, step.second[i] + c);
    }
    const float m    = top > row.m ? top : row.m;
    row.weight_scale = m == top ? 1.0f : exp_nonpositive<Isa>(top - m);
    row.shrink       = m == row.m ? 1.0f : row.m == MINUS_INF ? 0.0f : exp_nonpositive<Isa>(row.m - m);
    row.m            = m;
    row.z            = row.z * row.shrink + row.weight_scale * Isa::sum(total);
    row.weight_step  = row.weight_scale * step.largest_v / LARGEST;
    row.weights      = Isa::sum_int(sum);
}

// The largest scale of a value that a token with this bias sees.
template <typename Isa> static float largest_visible_scale(const Step & step, const float * bias) {
    auto top = Isa::set(0.0f);
    for (int32_t c = 0; c < step.n_pad; c += Isa::W) {
        top = Isa::max(top, Isa::hide(Isa::load(step.scale_v + c), Isa::load(bias + c)));
    }
    return Isa::largest(top);
}

// Returns whether the row gives weight to a value that is not finite. `weight` holds the step's weights as floats.
static inline bool has_bad_weight(const Step & step, const float * weight) {
    for (int32_t c = 0; c < step.n_pad; ++c) {
        if ((step.bad_v[c / TILE] >> c % TILE & 1) != 0 && weight[c] > 0.0f) {
            return true;
        }
    }
    return false;
}

// Converts a row's logits of the step to weights. The row sees at least one cell of the step.
template <typename Isa> static void softmax_step(const Call & call, Step & step, int64_t cell, int64_t index, int i) {
    Row &         row  = call.row[index];
    const float * bias = call.a.bias + index / call.a.n_group * call.a.bias_stride + cell;
    if (step.n < step.n_pad) {
        memcpy(step.bias, bias, (size_t) step.n * sizeof(float));
        for (int32_t c = step.n; c < step.n_pad; ++c) {
            step.bias[c] = MINUS_INF;
        }
        bias = step.bias;
    }
    if (call.a.n_tok > 1 && (i == 0 || index % call.a.n_group == 0)) {
        step.largest_v = largest_visible_scale<Isa>(step, bias);
    }
    const float * common = nullptr;
    if (call.k_halves.n > 0) {
        add_key_halves(call.k_halves, call.a.qt + index * call.a.k->rank, row.shift, step.n_pad, step.common);
        common = step.common;
    }
    const auto  finish = call.a.softcap > 0.0f ? finish_logits<Isa, true> : finish_logits<Isa, false>;
    const float top    = finish(step, row, bias, common, call.a.softcap, step.logit[i]);
    if (!(top > MINUS_INF)) { // no logit is finite
        mark_lost(step, i, row);
        return;
    }
    if (call.v_halves.n > 0 || step.any_bad_v) {
        quantize_weights<Isa, true>(step, i, top, row);
    } else {
        quantize_weights<Isa, false>(step, i, top, row);
    }
    if (row.z != row.z || (step.any_bad_v && has_bad_weight(step, step.logit[i]))) {
        mark_lost(step, i, row);
    }
}

//
// steps
//

// Reads the scales of a step's keys or values, and returns the largest. Masked cells, whose bytes may be anything, get
// 0. Visible cells that could not be coded also get 0, and a bit in `bad`.
template <typename Isa>
static float read_scales(const uint8_t * tile, int64_t stride, const uint64_t * visible_cells, int32_t n_tiles,
                         float * scale, uint64_t * bad) {
    auto largest = Isa::set(0.0f);
    for (int32_t t = 0; t < n_tiles; ++t, tile += stride) {
        bad[t] = Isa::equal_bytes(tile, SCALE_NAN) & visible_cells[t];
        for (int32_t c = 0; c < TILE; c += Isa::W) {
            const auto s = Isa::keep(Isa::scales_of(tile + c), (uint32_t) ((visible_cells[t] & ~bad[t]) >> c));
            largest      = Isa::max(largest, s);
            Isa::store(scale + t * TILE + c, s);
        }
        __builtin_prefetch(tile + PREFETCH_TILES * stride, 0, 2);
    }
    return Isa::largest(largest);
}

// The tiles of a step, either as bytes, or as they are with the starts of their paths.
template <typename Isa> struct Opened {
    const uint8_t * k[STEP_TILES];
    const uint8_t * v[STEP_TILES];
    Path8<Isa>      k_path[STEP_TILES];
    Path8<Isa>      v_path[STEP_TILES];
};

// Prepares the tiles whose bits are set in `all`. Keys are unpacked here for prompts only.
template <typename Isa> static void open_step(const Call & call, int64_t cell, uint32_t all, Opened<Isa> & opened) {
    const AttendArgs & a = call.a;
    for (int t = 0; all >> t != 0; ++t) {
        if ((all >> t & 1) == 0) {
            continue;
        }
        const uint8_t * k = opened.k[t] = a.k_tiles + (cell / TILE + t) * a.k_stride;
        const uint8_t * v = opened.v[t] = a.v_tiles + (cell / TILE + t) * a.v_stride;
        if constexpr (Isa::FROM_TILE) {
            if (call.from_tile) {
                begin_path<Isa>(*a.k, k, opened.k_path[t]);
                begin_path<Isa>(*a.v, v, opened.v_path[t]);
                continue;
            }
        }
        if (call.is_prompt) {
            opened.k[t] = unpack_tile<Isa>(*a.k, k, PREFETCH_TILES * a.k_stride, call.k_bytes + t * a.k->rank * TILE);
        }
        opened.v[t] = unpack_tile<Isa>(*a.v, v, PREFETCH_TILES * a.v_stride, call.v_bytes + t * a.v->rank * TILE);
    }
}

// Attends from query rows [index, index + n), n <= BLOCK, to the step at `cell`. visible_tiles has a bit for each tile
// that they see.
template <typename Isa>
static void attend_block(const Call & call, const Opened<Isa> & opened, Step & step, int64_t cell,
                         uint32_t visible_tiles, int64_t index, int64_t n) {
    const AttendArgs & a      = call.a;
    Values<Isa>        values = { {}, visible_tiles, 0, step, 0, nullptr, nullptr, 0 };
    for (int t = 0; visible_tiles >> t != 0; ++t) {
        if ((visible_tiles >> t & 1) == 0) {
            continue; // bias masks these logits
        }
        values.at[t]    = opened.v[t];
        float *   logit = step.logit[0] + t * TILE;
        Keys<Isa> keys  = { opened.k[t], &opened.k_path[t], 0 };
        if constexpr (Isa::FROM_TILE) {
            if (call.from_tile) {
                keys.ahead = PREFETCH_TILES * a.k_stride;
                multiply_all_keys<Isa, true>(call, keys, index, n, logit);
                continue;
            }
        }
        if (!call.is_prompt) {
            keys.at = unpack_tile<Isa>(*a.k, keys.at, PREFETCH_TILES * a.k_stride, call.k_bytes);
        }
        multiply_all_keys<Isa, false>(call, keys, index, n, logit);
    }
    for (int64_t i = 0; i < n; ++i) {
        softmax_step<Isa>(call, step, cell, index + i, (int) i);
    }
    if constexpr (Isa::FROM_TILE) {
        if (call.from_tile) {
            values.ahead = PREFETCH_TILES * a.v_stride;
            all_values<Isa, true>(call, values, opened.v_path, index, n);
        }
    }
    if (!call.from_tile) {
        all_values<Isa, false>(call, values, nullptr, index, n);
    }
    for (int64_t i = 0; i < n && call.v_halves.n > 0; ++i) {
        const Row & row = call.row[index + i];
        add_value_halves(call.v_halves, step.logit[i], step.n_pad, row.shrink, row.weight_scale,
                         call.sum + (index + i) * a.v->rank);
    }
}

// Sets a bit in visible_tiles[t] for each tile of the step with cells that token t sees, and a bit in
// visible_cells[tile] for each cell that any token sees. Returns the union of visible_tiles.
template <typename Isa>
static uint32_t find_visible(const AttendArgs & a, int64_t cell, int32_t n, uint8_t * visible_tiles,
                             uint64_t * visible_cells) {
    uint32_t all = 0;
    for (int t = 0; t < STEP_TILES; ++t) {
        visible_cells[t] = 0;
    }
    for (int64_t token = 0; token < a.n_tok; ++token) {
        const float * bias   = a.bias + token * a.bias_stride + cell;
        visible_tiles[token] = 0;
        for (int t = 0; t * TILE < n; ++t) {
            const int32_t  left     = n - t * TILE;
            const uint64_t of_token = Isa::visible_cells(bias + t * TILE, left < TILE ? left : TILE);
            visible_cells[t] |= of_token;
            visible_tiles[token] = (uint8_t) (visible_tiles[token] | (of_token != 0) << t);
        }
        all |= visible_tiles[token];
    }
    return all;
}

template <typename Isa> static void attend_step(const Call & call, Step & step, int64_t cell, uint8_t * visible_tiles) {
    const AttendArgs & a    = call.a;
    const int64_t      left = a.n_cells - cell;
    step.n                  = (int32_t) (left < STEP ? left : STEP);
    uint64_t       visible_cells[STEP_TILES];
    const uint32_t all = find_visible<Isa>(a, cell, step.n, visible_tiles, visible_cells);
    if (all == 0) {
        return;
    }
    const int32_t   n_tiles = 32 - __builtin_clz(all); // up to the last visible tile
    const uint8_t * k_tiles = a.k_tiles + cell / TILE * a.k_stride;
    const uint8_t * v_tiles = a.v_tiles + cell / TILE * a.v_stride;
    step.n                  = step.n < n_tiles * TILE ? step.n : n_tiles * TILE;
    step.n_pad              = n_tiles * TILE;
    uint64_t bad_k[STEP_TILES];
    read_scales<Isa>(k_tiles, a.k_stride, visible_cells, n_tiles, step.scale_k, bad_k);
    step.largest_v = read_scales<Isa>(v_tiles, a.v_stride, visible_cells, n_tiles, step.scale_v, step.bad_v);
    read_halves<Isa>(call.k_halves, k_tiles, a.k_stride, visible_cells, n_tiles, bad_k);
    read_halves<Isa>(call.v_halves, v_tiles, a.v_stride, visible_cells, n_tiles, step.bad_v);
    step.any_bad_v = false;
    for (int32_t t = 0; t < n_tiles; ++t) {
        step.any_bad_v = step.any_bad_v || step.bad_v[t] != 0;
        for (uint64_t cells = bad_k[t]; cells != 0; cells &= cells - 1) { // Their logits become NaN.
            step.scale_k[t * TILE + __builtin_ctzll(cells)] = NOT_A_NUMBER;
        }
    }
    Opened<Isa> opened;
    open_step(call, cell, all, opened);
    // Tokens of different sequences see different tiles. All rows of a block see the same ones.
    const int64_t n_rows = n_rows_of(a);
    for (int64_t index = 0, end = 0; index < n_rows; index = end) {
        const uint32_t of_block = visible_tiles[index / a.n_group];
        for (end = index + 1; end < n_rows && end - index < BLOCK && visible_tiles[end / a.n_group] == of_block;
             ++end) {
        }
        if (of_block != 0) {
            attend_block<Isa>(call, opened, step, cell, of_block, index, end - index);
        }
    }
}

// Writes the ratio of each coefficient's band, and of_halves for 16-bit bands.
static inline void spread_ratios(const HeadCodec & codec, float of_halves, float * ratio) {
    for (int32_t i = 0; i < codec.n_bands; ++i) {
        for (int32_t j = 0; j < codec.bands[i].n; ++j) {
            ratio[codec.bands[i].first + j] = codec.bands[i].bits == 16 ? of_halves : level_step(codec, codec.bands[i]);
        }
    }
}

// Multiplies a query row by ratio [MAX_HEAD_SIZE + 8], which is 0 in 16-bit bands, and converts it to integers. `first`
// and `second` receive their bytes or words.
template <typename Isa>
static void quantize_query(const HeadCodec & codec, const float * q, const float * ratio, int8_t * first,
                           int8_t * second, Row & row) {
    alignas(64) float   x[MAX_HEAD_SIZE + 8]; // a register may reach beyond the rank
    alignas(64) int32_t u[MAX_HEAD_SIZE + 8];
    alignas(64) int8_t  parts[2][MAX_HEAD_SIZE + 8];
    memcpy(x, q, (size_t) codec.rank * sizeof(float));
    memset(x + codec.rank, 0, 8 * sizeof(float));
    auto top = Isa::set(0.0f), bad = Isa::set(0.0f);
    for (int32_t j = 0; j < codec.rank; j += Isa::W) {
        const auto product = Isa::mul(Isa::load(x + j), Isa::load(ratio + j));
        top                = Isa::max(Isa::max(product, Isa::sub(Isa::set(0.0f), product)), top);
        bad                = Isa::plus(bad, Isa::sub(product, product)); // NaN if the product is not finite, else 0
        Isa::store(x + j, product);
    }
    const float largest = Isa::largest(top);
    const bool  finite  = Isa::sum(bad) == 0.0f;
    const float n_steps = codec.rank <= SUMMED ? LARGEST : LARGEST * SUMMED / MAX_HEAD_SIZE;
    const auto  inverse = Isa::set(largest > 1e-30f ? n_steps / largest : 0.0f);
    for (int32_t j = 0; j < codec.rank; j += Isa::W) {
        const auto i = Isa::to_int(Isa::mul(Isa::load(x + j), inverse));
        Isa::split(i, parts[0] + j, parts[1] + j);
        Isa::store_int(u + j, i);
    }
    memcpy(first, parts[0], (size_t) codec.rank);
    memcpy(second, parts[1], (size_t) codec.rank);
    uint32_t sum = 0;                          // It wraps if a query is not finite, but then delta is NaN.
    for (int32_t j = 0; j < codec.rank; ++j) { // u is 0 in 16-bit bands.
        sum += (uint32_t) u[j];
    }
    const int64_t twice = (int64_t) (int32_t) sum * odd_of<Isa>(); // twice what centring subtracts
    row.start           = (int32_t) -(twice >> 1);
    row.start_error     = (twice & 1) != 0 ? 0.5f : 0.0f;
    row.delta           = finite ? largest / n_steps : NOT_A_NUMBER;
}

template <typename Isa> static void attend(const AttendArgs & a) {
    const int64_t n_rows    = n_rows_of(a);
    const bool    is_prompt = a.n_tok > 1 || n_rows > BLOCK;
    const bool    from_tile = Isa::FROM_TILE && !is_prompt && n_rows <= Isa::FROM_TILE_ROWS;
    Halves        k_halves, v_halves;
    find_halves(*a.k, k_halves);
    find_halves(*a.v, v_halves);
    k_halves.values = (float *) scratch(SLOT_HALVES, (size_t) (8 * (k_halves.n + v_halves.n) * STEP) * sizeof(float));
    v_halves.values = k_halves.values + 8 * k_halves.n * STEP;
    const int32_t kept          = is_prompt ? STEP : TILE; // cells whose keys are converted together
    const Call    call          = { a,
                                    k_halves,
                                    v_halves,
                                    Runs(*a.k),
                                    Runs(*a.v),
                                    (int8_t *) scratch(SLOT_QUERIES, (size_t) (n_rows * 2 * a.k->rank)),
                                    (float *) scratch(SLOT_SUMS, (size_t) (n_rows * a.v->rank) * sizeof(float)),
                                    (Row *) scratch(SLOT_ROWS, (size_t) n_rows * sizeof(Row) + (size_t) a.n_tok),
                                    (uint8_t *) scratch(SLOT_KEYS, (size_t) (kept * a.k->rank)),
                                    (uint8_t *) scratch(SLOT_VALUES, (size_t) (STEP * a.v->rank)),
                                    is_prompt,
                                    from_tile };
    auto *        visible_tiles = (uint8_t *) (call.row + n_rows);
    float         ratio[MAX_HEAD_SIZE + 8] = {};
    spread_ratios(*a.k, 0.0f, ratio);
    memset(call.sum, 0, (size_t) (n_rows * a.v->rank) * sizeof(float));
    for (int64_t i = 0; i < n_rows; ++i) {
        Row &    row   = call.row[i];
        int8_t * first = call.query + i * 2 * a.k->rank;
        quantize_query<Isa>(*a.k, a.qt + i * a.k->rank, ratio, first, first + a.k->rank, row);
        row.shift = a.shift != nullptr ? a.shift[i] : 0.0f;
        row.delta = row.shift - row.shift == 0.0f ? row.delta : NOT_A_NUMBER; // an infinity would vanish in the cap
        row.slope = a.slope[i % a.n_group];
        row.m     = a.m[i];
        row.z     = a.z[i];
    }
    Step & step = *(Step *) scratch(SLOT_STEP, sizeof(Step));
    for (int64_t cell = 0; cell < a.n_cells; cell += STEP) {
        attend_step<Isa>(call, step, cell, visible_tiles);
    }
    spread_ratios(*a.v, 1.0f, ratio);
    for (int64_t i = 0; i < n_rows; ++i) {
        const Row & row    = call.row[i];
        const float old    = a.m[i];
        const float shrink = old == row.m ? 1.0f : old == MINUS_INF ? 0.0f : exp_nonpositive<Isa>(old - row.m);
        float *     acc    = a.acc + i * a.acc_stride;
        for (int32_t j = 0; j < a.v->rank; ++j) {
            acc[j] = acc[j] * shrink + ratio[j] * call.sum[i * a.v->rank + j];
        }
        a.m[i] = row.m;
        a.z[i] = row.z;
    }
}

} // namespace subkv::cpu
