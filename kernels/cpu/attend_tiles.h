// attend_tiles.h: attention over tiles in integers, for any number of query rows; what does not depend on the instruction
// set. Definition: ref/attend.cpp. Layout: subkv/tiles.h.
//
// Steps of STEP cells, blocks of BLOCK query rows: products of all keys, one softmax over the step, products of all values.
// Queries and weights are integers of 16 bits, multiplied with the codes' bytes as they come out of the tile by a shift and
// a mask; several query rows share that work. Sums are exact: what is rounded is a query, to 1/65278 of its largest
// coefficient times band ratio, and a weight times scale, to 1/65278 of the step's largest weight times its largest scale.
// Coefficients of 16-bit bands, few if any, are multiplied in float beside that (halves.h).
// With many query rows the step's codes are unpacked once, into tiles of 8-bit bands: the same kernels then run on those.
//
// Isa, a type of the including file alone (its functions are compiled for its instructions), gives
//   W                     floats of a register, and dwords of four codes
//   KEYS_FROM_CODES       few rows multiply keys straight out of the tile; false: bytes first, registers are few
//   KEY_ROWS, KEY_REGS    query rows and registers of W cells whose logits are summed at once, 3 rows at most
//   octets(rows)          octets whose values are summed at once for as many of up to VALUE_ROWS = 4 rows
//   BYTES_FROM            query rows from which unpacking once is the cheaper way
//   F, I, Opened, Sum     a register of floats, of integers or codes, codes ready for products, W sums of products
//   and the functions used below.
#pragma once

#include "../ref/rows.h"
#include "cells.h"
#include "halves.h"
#include "scratch.h"

#include <string.h>

namespace subkv::cpu {

constexpr int STEP_TILES = 4;
constexpr int STEP       = STEP_TILES * TILE;
constexpr int BLOCK      = 12; // query rows whose logits are held at once: blocks of 1 to 4 divide it
constexpr int VALUE_ROWS = 4;  // query rows whose values are summed at once
constexpr int AHEAD      = 4;  // tiles of prefetching
static_assert(STEP == HALVES_STRIDE, "halves.h");
constexpr float LARGEST   = 32639.0f; // 127 * 256 + 127: high and low byte are signed
constexpr float MINUS_INF = -__builtin_inff();

// One query row during a call.
struct Row {
    float   delta; // logit of one unit of the integer product, without the cell's scale
    int32_t start; // of the product: what centring the codes takes off, rounded towards more
    float   half;  // the rest of it
    float   shift, slope;
    float   m, z;
    float   shrink;  // of the sums so far, at the step at hand
    float   share;   // of the step's weights, which are relative to its own top logit
    float   unit;    // of the step's integer weights
    int32_t weights; // their sum
};

struct alignas(64) Step {
    float   scale_k[STEP];
    float   scale_v[STEP];      // 0 where nobody looks
    float   logit[BLOCK][STEP]; // integer products, then logits, then weights
    int8_t  first[BLOCK][STEP]; // the weights' bytes or words for the two products
    int8_t  second[BLOCK][STEP];
    float   bias[STEP];   // of a row whose own ends within the step
    float   common[STEP]; // of a row's logits, where 16-bit bands add to the shift
    float   largest_v;    // of scale_v
    int32_t n;            // cells
    int32_t n_pad;        // whole tiles
};

struct Call {
    const AttendArgs & a;
    const Halves &     k_halves;
    const Halves &     v_halves;
    int8_t *           query; // [row][first, second][k->rank]
    float *            sum;   // [row][v->rank]
    Row *              row;
    uint8_t *          k_bytes; // [tile of the step][k->rank * TILE], in use as n_rows and the instruction set ask
    uint8_t *          v_bytes;
    bool               many; // rows: keys and values of the step are unpacked

    int64_t n_rows() const { return a.n_tok * a.n_group; }
};

//
// codes of a register
//

// Register RHO of an octet, W dwords of it that begin at the pointer: a byte each.
template <typename Isa, int BITS, int RHO> static inline typename Isa::I codes_of(const uint8_t * octet) {
    constexpr TileFields f = tile_fields(BITS, RHO);
    constexpr TileField  a = f.field[0], b = f.field[1], c = f.field[2];
    if constexpr (BITS == 8) {
        return Isa::bytes(octet + a.line * LINE);
    } else {
        const auto part = [&](const TileField & field) { return Isa::bytes(octet + field.line * LINE); };
        auto       x    = Isa::mask(Isa::template shift<a.shift - a.from>(part(a)), ((1 << a.width) - 1) << a.from);
        if constexpr (f.n > 1) {
            x = Isa::join(x, Isa::template shift<b.shift - b.from>(part(b)), ((1 << b.width) - 1) << b.from);
        }
        if constexpr (f.n > 2) {
            x = Isa::join(x, Isa::template shift<c.shift - c.from>(part(c)), ((1 << c.width) - 1) << c.from);
        }
        return x;
    }
}

template <int BITS> static inline void prefetch_octet(const uint8_t * octet, int64_t ahead) {
#pragma GCC                            unroll 8
    for (int line = 0; line < BITS; ++line) {
        __builtin_prefetch(octet + ahead + line * LINE, 0, 2); // into L2: L1 waits for few lines at a time
    }
}

template <typename Isa, int BITS, int RHO = 0> static inline void unpack_octet(const uint8_t * octet, uint8_t * out) {
    if constexpr (RHO < 8) {
        for (int at = 0; at < LINE; at += 4 * Isa::W) {
            Isa::put_bytes(out + RHO * LINE + at, codes_of<Isa, BITS, RHO>(octet + at));
        }
        unpack_octet<Isa, BITS, RHO + 1>(octet, out);
    }
}

template <typename Isa, int BITS>
static void unpack_band(const uint8_t * from, int32_t n, int64_t ahead, uint8_t * out) {
    for (int32_t j = 0; j < n; j += 8, from += BITS * LINE, out += 8 * LINE) {
        prefetch_octet<BITS>(from, ahead);
        unpack_octet<Isa, BITS>(from, out);
    }
}

// A tile as one of 8-bit bands: coefficient j's octet at LINE * j. 16-bit bands are left out.
template <typename Isa>
static void unpack_tile(const HeadCodec & codec, const uint8_t * tile, int64_t ahead, uint8_t * out) {
    for (int32_t b = 0; b < codec.n_bands; ++b) {
        const Band &    band = codec.bands[b];
        const uint8_t * from = tile + LINE * band.offset;
        uint8_t *       to   = out + LINE * band.first;
#define UNPACK(BITS) unpack_band<Isa, BITS>(from, band.n, ahead, to)
        SUBKV_BY_BITS(band.bits, UNPACK)
#undef UNPACK
    }
}

//
// keys
//

// Opens cell registers FIRST + V, V < KEY_REGS, of half an octet.
template <typename Isa, int BITS, int HALF, int FIRST, int V = 0>
static inline void open_keys(const uint8_t * octet, typename Isa::Opened * out) {
    if constexpr (V < Isa::KEY_REGS) {
        constexpr int CELL = (FIRST + V) * Isa::W;
        out[V]             = Isa::open(codes_of<Isa, BITS, 4 * HALF + CELL / 16>(octet + CELL % 16 * 4));
        open_keys<Isa, BITS, HALF, FIRST, V + 1>(octet, out);
    }
}

// query: the first row's dwords at this octet, `second` bytes before those of its other product, rows `stride` apart
template <typename Isa, int BITS, int HALF, int FIRST, int ROWS>
static inline void add_keys(const uint8_t * octet, const int8_t * query, int64_t second, int64_t stride,
                            typename Isa::Sum (&sum)[ROWS][Isa::KEY_REGS]) {
    typename Isa::Opened c[Isa::KEY_REGS];
    open_keys<Isa, BITS, HALF, FIRST>(octet, c);
#pragma GCC unroll 4
    for (int i = 0; i < ROWS; ++i) {
        const int8_t * q    = query + i * stride + 4 * HALF;
        const auto     some = Isa::spread_dword(q);
        const auto     rest = Isa::spread_dword(q + second);
#pragma GCC unroll 4
        for (int v = 0; v < Isa::KEY_REGS; ++v) {
            Isa::add(sum[i][v], c[v], some, rest);
        }
    }
}

template <typename Isa, int BITS, int FIRST, int ROWS>
static inline void add_key_band(const uint8_t * octet, int32_t n, int64_t ahead, const int8_t * query, int64_t second,
                                int64_t stride, typename Isa::Sum (&sum)[ROWS][Isa::KEY_REGS]) {
    for (int32_t j = 0; j < n; j += 8, octet += BITS * LINE, query += 8) {
        if (FIRST == 0 && ahead != 0) {
            prefetch_octet<BITS>(octet, ahead);
        }
        add_keys<Isa, BITS, 0, FIRST, ROWS>(octet, query, second, stride, sum);
        add_keys<Isa, BITS, 1, FIRST, ROWS>(octet, query, second, stride, sum);
    }
}

// Products of ROWS query rows with a tile, to logit: rows STEP apart. BYTES: the tile is unpacked.
template <typename Isa, bool BYTES, int ROWS, int FIRST = 0>
static void dots(const Call & call, const uint8_t * tile, int64_t ahead, int64_t row, float * logit) {
    if constexpr (FIRST < TILE / Isa::W) {
        const HeadCodec & codec  = *call.a.k;
        const int64_t     stride = 2 * codec.rank;
        typename Isa::Sum sum[ROWS][Isa::KEY_REGS];
        const Row * const r = call.row + row;
        for (int i = 0; i < ROWS; ++i) {
            for (int v = 0; v < Isa::KEY_REGS; ++v) {
                sum[i][v] = Isa::start(r[i].start);
            }
        }
        for (int32_t b = 0; b < codec.n_bands; ++b) {
            const Band &   band  = codec.bands[b];
            const int8_t * query = call.query + row * stride + band.first;
            if constexpr (BYTES) {
                if (band.bits != 16) {
                    add_key_band<Isa, 8, FIRST, ROWS>(tile + LINE * band.first, band.n, 0, query, codec.rank, stride,
                                                      sum);
                }
            } else {
                const uint8_t * octet = tile + LINE * band.offset;
#define ADD(BITS) add_key_band<Isa, BITS, FIRST, ROWS>(octet, band.n, ahead, query, codec.rank, stride, sum)
                SUBKV_BY_BITS(band.bits, ADD)
#undef ADD
            }
        }
        for (int i = 0; i < ROWS; ++i) {
            for (int v = 0; v < Isa::KEY_REGS; ++v) {
                const auto x = Isa::sub(Isa::to_float(Isa::total(sum[i][v])), Isa::set(r[i].half));
                Isa::store(logit + i * STEP + (FIRST + v) * Isa::W, x);
            }
        }
        dots<Isa, BYTES, ROWS, FIRST + Isa::KEY_REGS>(call, tile, ahead, row, logit);
    }
}

// Query rows [row, row + n) against a tile.
template <typename Isa, bool BYTES>
static void all_dots(const Call & call, const uint8_t * tile, int64_t ahead, int64_t row, int64_t n, float * logit) {
    static_assert(Isa::KEY_ROWS <= 3, "the cases below");
    for (int64_t n_blocks = (n + Isa::KEY_ROWS - 1) / Isa::KEY_ROWS; n_blocks > 0; --n_blocks) {
        const int64_t rows = n / n_blocks; // blocks of equal size: 4 rows are 2 + 2, not 3 + 1
        switch (rows) {
            case 1: dots<Isa, BYTES, 1>(call, tile, ahead, row, logit); break;
            case 2: dots<Isa, BYTES, 2>(call, tile, ahead, row, logit); break;
            default: dots<Isa, BYTES, Isa::KEY_ROWS>(call, tile, ahead, row, logit); break;
        }
        row += rows;
        n -= rows;
        logit += rows * STEP;
        ahead = 0; // once is enough
    }
}

//
// softmax
//

// The row sees no cell of the step.
static inline void skip_step(Step & step, int i, Row & row) {
    row.shrink  = 1.0f;
    row.share   = 0.0f;
    row.unit    = 0.0f;
    row.weights = 0;
    memset(step.logit[i], 0, sizeof(step.logit[i]));
    memset(step.first[i], 0, STEP);
    memset(step.second[i], 0, STEP);
}

// Products become logits; returns the largest. common: of every cell, nullptr: the row's shift
template <typename Isa, bool CAP>
static float finish_logits(const Step & step, const Row & row, const float * bias, const float * common, float softcap,
                           float * x) {
    const auto delta = Isa::set(row.delta), slope = Isa::set(row.slope), shift = Isa::set(row.shift);
    auto       top = Isa::set(MINUS_INF);
#pragma GCC unroll 2
    for (int32_t c = 0; c < step.n_pad; c += Isa::W) {
        const auto unit = Isa::mul(Isa::load(step.scale_k + c), delta);
        auto       l    = Isa::fma(Isa::load(x + c), unit, common != nullptr ? Isa::load(common + c) : shift);
        if constexpr (CAP) {
            l = Isa::soft_cap(l, softcap);
        }
        const auto b = Isa::load(bias + c);
        l            = Isa::hide(Isa::fma(slope, b, l), b); // NaN where hidden and the slope is 0
        top          = Isa::max(top, l);
        Isa::store(x + c, l);
    }
    return Isa::largest(top);
}

// Logits become integer weights, relative to the step's own top logit, so that they wait for nothing else; m, z, shrink,
// share, unit and weights of the row follow. KEEP: the weights themselves are needed, too.
template <typename Isa, bool KEEP> static void weigh(Step & step, int i, float top, Row & row) {
    const auto base    = Isa::set(top);
    const auto inverse = Isa::set(step.largest_v > 0.0f ? LARGEST / step.largest_v : 0.0f);
    auto       total   = Isa::set(0.0f);
    auto       sum     = Isa::zero();
    float *    x       = step.logit[i];
#pragma GCC unroll 4
    for (int32_t c = 0; c < step.n_pad; c += Isa::W) {
        const auto e = Isa::exp_nonpositive(Isa::sub(Isa::load(x + c), base));
        const auto u = Isa::to_int(Isa::mul(e, Isa::mul(Isa::load(step.scale_v + c), inverse)));
        total        = Isa::plus(total, e);
        sum          = Isa::plus_int(sum, u);
        if constexpr (KEEP) {
            Isa::store(x + c, e);
        }
        Isa::split(u, step.first[i] + c, step.second[i] + c);
    }
    const float m = top > row.m ? top : row.m;
    row.share     = m == top ? 1.0f : Isa::exp_nonpositive(top - m);
    row.shrink    = m == row.m ? 1.0f : row.m == MINUS_INF ? 0.0f : Isa::exp_nonpositive(row.m - m);
    row.m         = m;
    row.z         = row.z * row.shrink + row.share * Isa::sum(total);
    row.unit      = row.share * step.largest_v / LARGEST;
    row.weights   = Isa::sum_int(sum);
}

template <typename Isa> static void soften(const Call & call, Step & step, int64_t cell, int64_t index, int i) {
    Row &         row  = call.row[index];
    const float * bias = call.a.bias + index / call.a.n_group * call.a.bias_stride + cell;
    if (step.n < step.n_pad) {
        memcpy(step.bias, bias, (size_t) step.n * sizeof(float));
        for (int32_t c = step.n; c < step.n_pad; ++c) {
            step.bias[c] = MINUS_INF;
        }
        bias = step.bias;
    }
    const float * common = nullptr;
    if (call.k_halves.n > 0) {
        add_key_halves(call.k_halves, call.a.qt + index * call.a.k->rank, row.shift, step.n_pad, step.common);
        common = step.common;
    }
    const auto  finish = call.a.softcap > 0.0f ? finish_logits<Isa, true> : finish_logits<Isa, false>;
    const float top    = finish(step, row, bias, common, call.a.softcap, step.logit[i]);
    if (!(top > MINUS_INF)) {
        skip_step(step, i, row);
    } else if (call.v_halves.n > 0) {
        weigh<Isa, true>(step, i, top, row);
    } else {
        weigh<Isa, false>(step, i, top, row);
    }
}

//
// values
//

template <typename Isa, int BITS, int OCTETS, int ROWS, int RHO = 0>
static inline void add_values(const uint8_t * octet, const int8_t * first, const int8_t * second,
                              typename Isa::Sum (&sum)[ROWS][OCTETS * (16 / Isa::W)]) {
    if constexpr (RHO < 8) {
        constexpr int        PARTS = 16 / Isa::W; // registers of a line
        typename Isa::Opened c[OCTETS * PARTS];
#pragma GCC unroll 4
        for (int o = 0; o < OCTETS; ++o) {
#pragma GCC unroll 4
            for (int p = 0; p < PARTS; ++p) {
                c[o * PARTS + p] = Isa::open(codes_of<Isa, BITS, RHO>(octet + o * BITS * LINE + p * 4 * Isa::W));
            }
        }
#pragma GCC unroll 4
        for (int i = 0; i < ROWS; ++i) {
            const auto some = Isa::spread_qword(first + i * STEP + 8 * RHO);
            const auto rest = Isa::spread_qword(second + i * STEP + 8 * RHO);
#pragma GCC unroll 4
            for (int r = 0; r < OCTETS * PARTS; ++r) {
                Isa::add(sum[i][r], c[r], some, rest);
            }
        }
        add_values<Isa, BITS, OCTETS, ROWS, RHO + 1>(octet, first, second, sum);
    }
}

// The values of a band to sum, and the rows that they are summed for.
struct Values {
    const uint8_t * octet;  // of the step's first tile
    int64_t         stride; // from tile to tile
    int64_t         ahead;  // of prefetching, 0: none
    uint32_t        awake;  // tiles that any row looks at, a bit each
    int32_t         odd;    // twice what centring takes off a code
    const Step &    step;
    int             i; // first row within the block
    const Row *     row;
    float *         sum; // of the first row, the band's first coefficient
    int64_t         sum_stride;
};

template <typename Isa, int BITS, int OCTETS, int ROWS> static void sum_octets(const Values & v, int32_t j) {
    constexpr int     PARTS = 16 / Isa::W;
    typename Isa::Sum sum[ROWS][OCTETS * PARTS];
    for (int k = 0; k < ROWS; ++k) {
        for (int r = 0; r < OCTETS * PARTS; ++r) {
            sum[k][r] = Isa::start(0);
        }
    }
    const uint8_t * octet = v.octet + j / 8 * BITS * LINE;
    for (int t = 0; v.awake >> t != 0; ++t, octet += v.stride) {
        if ((v.awake >> t & 1) == 0) {
            continue;
        }
        if (v.ahead != 0) {
#pragma GCC unroll 4
            for (int o = 0; o < OCTETS; ++o) {
                prefetch_octet<BITS>(octet + o * BITS * LINE, v.ahead);
            }
        }
        add_values<Isa, BITS, OCTETS, ROWS>(octet, v.step.first[v.i] + t * TILE, v.step.second[v.i] + t * TILE, sum);
    }
    for (int k = 0; k < ROWS; ++k) {
        const Row & row = v.row[k];
        for (int o = 0; o < OCTETS; ++o) {
            Isa::add_octet(sum[k] + o * PARTS, row.weights * v.odd, row.shrink, 0.5f * row.unit,
                           v.sum + k * v.sum_stride + j + 8 * o);
        }
    }
}

template <typename Isa, int BITS, int ROWS> static void sum_band(const Values & v, int32_t n) {
    constexpr int MOST = Isa::octets(ROWS);
    int32_t       j    = 0;
    for (; j + 8 * MOST <= n; j += 8 * MOST) {
        sum_octets<Isa, BITS, MOST, ROWS>(v, j);
    }
    for (; j < n; j += 8) {
        sum_octets<Isa, BITS, 1, ROWS>(v, j);
    }
}

// ROWS query rows from `index` on, row i of the block, against the tiles of a step.
template <typename Isa, bool BYTES, int ROWS>
static void values(const Call & call, const uint8_t * tiles, int64_t stride, uint32_t awake, const Step & step,
                   int64_t index, int i) {
    const HeadCodec & codec = *call.a.v;
    for (int32_t b = 0; b < codec.n_bands; ++b) {
        const Band & band = codec.bands[b];
        const Values v    = { tiles + LINE * (BYTES ? band.first : band.offset),
                              stride,
                              BYTES || index > 0 ? 0 : AHEAD * stride, // once is enough
                              awake,
                              (1 << band.bits) - 1,
                              step,
                              i,
                              call.row + index,
                              call.sum + index * codec.rank + band.first,
                              codec.rank };
        if constexpr (BYTES) {
            if (band.bits != 16) {
                sum_band<Isa, 8, ROWS>(v, band.n);
            }
        } else {
#define SUM(BITS) sum_band<Isa, BITS, ROWS>(v, band.n)
            SUBKV_BY_BITS(band.bits, SUM)
#undef SUM
        }
    }
}

template <typename Isa, bool BYTES>
static void all_values(const Call & call, const uint8_t * tiles, int64_t stride, uint32_t awake, const Step & step,
                       int64_t index, int64_t n) {
    int i = 0;
    for (int64_t n_blocks = (n + VALUE_ROWS - 1) / VALUE_ROWS; n_blocks > 0; --n_blocks) {
        const int64_t rows = (n - i) / n_blocks;
        switch (rows) {
            case 1: values<Isa, BYTES, 1>(call, tiles, stride, awake, step, index + i, i); break;
            case 2: values<Isa, BYTES, 2>(call, tiles, stride, awake, step, index + i, i); break;
            case 3: values<Isa, BYTES, 3>(call, tiles, stride, awake, step, index + i, i); break;
            default: values<Isa, BYTES, VALUE_ROWS>(call, tiles, stride, awake, step, index + i, i); break;
        }
        i += (int) rows;
    }
}

//
// steps
//

// What a side's tiles of a step begin with: scales of the cells that are seen, 0 of others, which may hold anything.
template <typename Isa>
static float read_scales(const uint8_t * tile, int64_t stride, const uint64_t * seen, int32_t n_tiles, float * scale) {
    auto largest = Isa::set(0.0f);
    for (int32_t t = 0; t < n_tiles; ++t, tile += stride) {
        for (int32_t c = 0; c < TILE; c += Isa::W) {
            const auto s = Isa::keep(Isa::scales_of(tile + c), (uint32_t) (seen[t] >> c));
            largest      = Isa::max(largest, s);
            Isa::store(scale + t * TILE + c, s);
        }
        __builtin_prefetch(tile + AHEAD * stride, 0, 2);
    }
    return Isa::largest(largest);
}

// Query rows [index, index + n), n <= BLOCK, against the step that begins at `cell`; awake: tiles that they look at.
template <typename Isa>
static void attend_block(const Call & call, Step & step, int64_t cell, uint32_t awake, int64_t index, int64_t n) {
    const AttendArgs & a       = call.a;
    const uint8_t *    k_tiles = a.k_tiles + cell / TILE * a.k_stride;
    const uint8_t *    v_tiles = a.v_tiles + cell / TILE * a.v_stride;
    for (int t = 0; awake >> t != 0; ++t) {
        if ((awake >> t & 1) == 0) { // its logits are hidden, but not to be anything
            for (int64_t i = 0; i < n; ++i) {
                memset(step.logit[i] + t * TILE, 0, TILE * sizeof(float));
            }
            continue;
        }
        const uint8_t * tile  = k_tiles + t * a.k_stride;
        uint8_t * const bytes = call.k_bytes + (call.many ? t * a.k->rank * TILE : 0);
        if (call.many) {
            all_dots<Isa, true>(call, bytes, 0, index, n, step.logit[0] + t * TILE);
        } else if constexpr (Isa::KEYS_FROM_CODES) {
            all_dots<Isa, false>(call, tile, AHEAD * a.k_stride, index, n, step.logit[0] + t * TILE);
        } else {
            unpack_tile<Isa>(*a.k, tile, AHEAD * a.k_stride, bytes);
            all_dots<Isa, true>(call, bytes, 0, index, n, step.logit[0] + t * TILE);
        }
    }
    for (int64_t i = 0; i < n; ++i) {
        soften<Isa>(call, step, cell, index + i, (int) i);
    }
    if (call.many) {
        all_values<Isa, true>(call, call.v_bytes, a.v->rank * TILE, awake, step, index, n);
    } else {
        all_values<Isa, false>(call, v_tiles, a.v_stride, awake, step, index, n);
    }
    for (int64_t i = 0; i < n && call.v_halves.n > 0; ++i) {
        const Row & row = call.row[index + i];
        add_value_halves(call.v_halves, step.logit[i], step.n_pad, row.shrink, row.share,
                         call.sum + (index + i) * a.v->rank);
    }
}

// awake[t]: tiles of the step that token t looks at; seen: cells of each tile that anybody looks at. Returns all tiles.
template <typename Isa>
static uint32_t find_awake(const AttendArgs & a, int64_t cell, int32_t n, uint8_t * awake, uint64_t * seen) {
    uint32_t all = 0;
    for (int t = 0; t < STEP_TILES; ++t) {
        seen[t] = 0;
    }
    for (int64_t token = 0; token < a.n_tok; ++token) {
        const float * bias = a.bias + token * a.bias_stride + cell;
        awake[token]       = 0;
        for (int t = 0; t * TILE < n; ++t) {
            const int32_t  left = n - t * TILE;
            const uint64_t open = Isa::open_cells(bias + t * TILE, left < TILE ? left : TILE);
            seen[t] |= open;
            awake[token] = (uint8_t) (awake[token] | (open != 0) << t);
        }
        all |= awake[token];
    }
    return all;
}

template <typename Isa> static void attend_step(const Call & call, Step & step, int64_t cell, uint8_t * awake) {
    const AttendArgs & a    = call.a;
    const int64_t      left = a.n_cells - cell;
    step.n                  = (int32_t) (left < STEP ? left : STEP);
    uint64_t       seen[STEP_TILES];
    const uint32_t all = find_awake<Isa>(a, cell, step.n, awake, seen);
    if (all == 0) {
        return;
    }
    const int32_t   n_tiles = 32 - __builtin_clz(all); // tiles after the last that anybody looks at do not count
    const uint8_t * k_tiles = a.k_tiles + cell / TILE * a.k_stride;
    const uint8_t * v_tiles = a.v_tiles + cell / TILE * a.v_stride;
    step.n                  = step.n < n_tiles * TILE ? step.n : n_tiles * TILE;
    step.n_pad              = n_tiles * TILE;
    read_scales<Isa>(k_tiles, a.k_stride, seen, n_tiles, step.scale_k);
    step.largest_v = read_scales<Isa>(v_tiles, a.v_stride, seen, n_tiles, step.scale_v);
    read_halves<Isa>(call.k_halves, k_tiles, a.k_stride, seen, n_tiles);
    read_halves<Isa>(call.v_halves, v_tiles, a.v_stride, seen, n_tiles);
    for (int32_t t = 0; call.many && t < n_tiles; ++t) {
        if ((all >> t & 1) != 0) {
            unpack_tile<Isa>(*a.k, k_tiles + t * a.k_stride, AHEAD * a.k_stride, call.k_bytes + t * a.k->rank * TILE);
            unpack_tile<Isa>(*a.v, v_tiles + t * a.v_stride, AHEAD * a.v_stride, call.v_bytes + t * a.v->rank * TILE);
        }
    }
    const int64_t n_rows = call.n_rows();
    for (int64_t index = 0; index < n_rows; index += BLOCK) {
        const int64_t n    = n_rows - index < BLOCK ? n_rows - index : BLOCK;
        uint32_t      some = 0;
        for (int64_t t = index / a.n_group; t <= (index + n - 1) / a.n_group; ++t) {
            some |= awake[t];
        }
        if (some != 0) {
            attend_block<Isa>(call, step, cell, some, index, n);
        }
    }
}

// half: what 16-bit bands get
static inline void spread_ratios(const HeadCodec & codec, float half, float * ratio) {
    for (int32_t i = 0; i < codec.n_bands; ++i) {
        for (int32_t j = 0; j < codec.bands[i].n; ++j) {
            ratio[codec.bands[i].first + j] = codec.bands[i].bits == 16 ? half : codec.bands[i].ratio;
        }
    }
}

// A query row as integers of its coefficients times ratio [rank] (0 in 16-bit bands): bytes or words to first and second.
template <typename Isa>
static void quantize_query(const HeadCodec & codec, const float * q, const float * ratio, int8_t * first,
                           int8_t * second, Row & row) {
    alignas(64) float   x[MAX_HEAD_SIZE + 8]; // a register may reach beyond the rank
    alignas(64) int32_t u[MAX_HEAD_SIZE + 8];
    alignas(64) int8_t  parts[2][MAX_HEAD_SIZE + 8];
    float               largest = 0.0f;
    bool                finite  = true;
    for (int32_t j = 0; j < codec.rank; ++j) {
        x[j]                  = q[j] * ratio[j];
        const float magnitude = __builtin_fabsf(x[j]);
        finite                = finite & (magnitude <= __FLT_MAX__);
        largest               = magnitude > largest ? magnitude : largest;
    }
    for (int32_t j = codec.rank; j < codec.rank + 8; ++j) {
        x[j] = 0.0f;
    }
    const auto inverse = Isa::set(largest > 1e-30f ? LARGEST / largest : 0.0f);
    for (int32_t j = 0; j < codec.rank; j += Isa::W) {
        const auto i = Isa::to_int(Isa::mul(Isa::load(x + j), inverse));
        Isa::split(i, parts[0] + j, parts[1] + j);
        Isa::store_int(u + j, i);
    }
    memcpy(first, parts[0], (size_t) codec.rank);
    memcpy(second, parts[1], (size_t) codec.rank);
    int64_t twice = 0; // what centring takes off
    for (int32_t i = 0; i < codec.n_bands; ++i) {
        int32_t sum = 0;
        for (int32_t j = 0; codec.bands[i].bits != 16 && j < codec.bands[i].n; ++j) {
            sum += u[codec.bands[i].first + j];
        }
        twice += (int64_t) sum * ((1 << codec.bands[i].bits) - 1);
    }
    row.start = (int32_t) -(twice >> 1);
    row.half  = (twice & 1) != 0 ? 0.5f : 0.0f;
    row.delta = finite ? largest / LARGEST : __builtin_nanf("");
}

template <typename Isa> static void attend(const AttendArgs & a) {
    const int64_t n_rows = a.n_tok * a.n_group;
    const bool    many   = n_rows >= Isa::BYTES_FROM;
    Halves        k_halves, v_halves;
    find_halves(*a.k, k_halves);
    find_halves(*a.v, v_halves);
    k_halves.values = (float *) scratch(SLOT_HALVES, (size_t) (8 * (k_halves.n + v_halves.n) * STEP) * sizeof(float));
    v_halves.values = k_halves.values + 8 * k_halves.n * STEP;
    const int32_t kept  = many ? STEP : Isa::KEYS_FROM_CODES ? 0 : TILE; // cells whose keys are bytes at once
    const Call    call  = { a,
                            k_halves,
                            v_halves,
                            (int8_t *) scratch(SLOT_QUERIES, (size_t) (n_rows * 2 * a.k->rank)),
                            (float *) scratch(SLOT_SUMS, (size_t) (n_rows * a.v->rank) * sizeof(float)),
                            (Row *) scratch(SLOT_ROWS, (size_t) n_rows * sizeof(Row) + (size_t) a.n_tok),
                            (uint8_t *) scratch(SLOT_KEYS, (size_t) (kept * a.k->rank)),
                            (uint8_t *) scratch(SLOT_VALUES, (size_t) (many ? STEP * a.v->rank : 0)),
                            many };
    auto *        awake = (uint8_t *) (call.row + n_rows);
    float         ratio[MAX_HEAD_SIZE];
    spread_ratios(*a.k, 0.0f, ratio);
    memset(call.sum, 0, (size_t) (n_rows * a.v->rank) * sizeof(float));
    for (int64_t i = 0; i < n_rows; ++i) {
        Row &    row   = call.row[i];
        int8_t * first = call.query + i * 2 * a.k->rank;
        quantize_query<Isa>(*a.k, a.qt + i * a.k->rank, ratio, first, first + a.k->rank, row);
        row.shift = a.shift != nullptr ? a.shift[i] : 0.0f;
        row.slope = a.slope[i % a.n_group];
        row.m     = a.m[i];
        row.z     = a.z[i];
    }
    Step & step = *(Step *) scratch(SLOT_STEP, sizeof(Step));
    for (int64_t cell = 0; cell < a.n_cells; cell += STEP) {
        attend_step<Isa>(call, step, cell, awake);
    }
    spread_ratios(*a.v, 1.0f, ratio);
    for (int64_t i = 0; i < n_rows; ++i) {
        const Row & row    = call.row[i];
        const float old    = a.m[i];
        const float shrink = old == row.m ? 1.0f : old == MINUS_INF ? 0.0f : Isa::exp_nonpositive(old - row.m);
        float *     acc    = a.acc + i * a.acc_stride;
        for (int32_t j = 0; j < a.v->rank; ++j) {
            acc[j] = acc[j] * shrink + ratio[j] * call.sum[i * a.v->rank + j];
        }
        a.m[i] = row.m;
        a.z[i] = row.z;
    }
}

} // namespace subkv::cpu
