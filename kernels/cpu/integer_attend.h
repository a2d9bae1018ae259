// integer_attend.h: attention in integers, for any number of query rows; what does not depend on the instruction set.
// Definition: ref/attend.cpp.
//
// Tiles of 64 cells. Their codes are unpacked to bytes once and laid out in dwords for products of bytes that add up four:
// keys with four coefficients of a cell in a dword and several cells in a register, so that a logit needs no horizontal
// sum; values with four cells of a coefficient in a dword. Queries and weights are integers of 16 bits, four of them in
// two dwords that are multiplied apart: high and low bytes, or words. A few query rows share the loads of the codes. Sums
// are exact: what is rounded is a query, to 1/65278 of its largest coefficient times band ratio, and a weight times row
// scale, to 1/65278 of the tile's largest weight times its largest scale. Coefficients of 16-bit bands, few if any, are
// multiplied in float beside that.
//
// Isa, a type of the including file alone (its functions are compiled for its instructions), gives
//   LANES, MR, Plan             bytes of a register, query rows that share loads, a CodePlan
//   unpack_keys, unpack_values, read_scales, open_cells, widen8, quantize_query, dots, soften, add_values
#pragma once

#include "../ref/rows.h"
#include "byte_plan.h"
#include "plan.h"

#include <string.h>

namespace subkv::cpu {

constexpr int   TILE      = 64;                     // cells
constexpr int   AHEAD     = 256;                    // cells of prefetching
constexpr int   BLOCK     = TILE * sizeof(int32_t); // bytes of one dword of every cell
constexpr int   MAX_MR    = 3;
constexpr float LARGEST   = 32639.0f; // 127 * 256 + 127: high and low byte are signed
constexpr float MINUS_INF = -__builtin_inff();

// AVX2's attention uses the same numbers: neither runs inside the other.
enum IntegerSlot { SLOT_CODES, SLOT_QUERY, SLOT_SUM, SLOT_ROWS, SLOT_SHORT_K, SLOT_SHORT_V, SLOT_HALVES, SLOT_DRAWN };

// One query row during a call.
struct Row {
    float   delta; // logit of one unit of the integer product, without the cell's scale
    int32_t start; // of the product: what centring the codes takes off, rounded towards more
    float   half;  // the rest of it
    float   shift, slope;
    float   m, z;
    float   shrink;  // of the sums so far, at the tile at hand
    float   share;   // of the tile's weights, which are relative to its own top logit
    float   unit;    // of the tile's integer weights
    int32_t weights; // their sum
};

struct alignas(64) Tile {
    float   scale_k[TILE];
    float   scale_v[TILE];
    float   bias[MAX_MR][TILE];   // -inf beyond the last cell
    float   common[MAX_MR][TILE]; // of the logits: the shift, and what 16-bit bands add
    float   logit[MAX_MR][TILE];  // integer products, then weights
    uint8_t first[MAX_MR][TILE];  // dwords of the weights for the two products
    uint8_t second[MAX_MR][TILE];
    float   largest_v; // of scale_v
    int32_t n;
};

// Query row i of a block sees no cell of the tile.
static inline void skip_tile(Tile & tile, int i, Row & row) {
    row.shrink  = 1.0f;
    row.share   = 0.0f;
    row.unit    = 0.0f;
    row.weights = 0;
    memset(tile.logit[i], 0, sizeof(tile.logit[i]));
    memset(tile.first[i], 0, TILE);
    memset(tile.second[i], 0, TILE);
}

// The row's state after a tile of this top logit, total of weights relative to it, and sum of integer weights.
template <typename Isa>
static void take_tile(const Tile & tile, float tile_top, float total, int32_t weights, Row & row) {
    const float m = tile_top > row.m ? tile_top : row.m;
    row.share     = m == tile_top ? 1.0f : Isa::exp_nonpositive(tile_top - m);
    row.shrink    = m == row.m ? 1.0f : row.m == MINUS_INF ? 0.0f : Isa::exp_nonpositive(row.m - m);
    row.m         = m;
    row.z         = row.z * row.shrink + row.share * total;
    row.unit      = row.share * tile.largest_v / LARGEST;
    row.weights   = weights;
}

// The rows of a tile on one side.
struct Rows {
    const uint8_t * first;
    int64_t         stride;
    int32_t         row_bytes;
    int32_t         n; // rounded up to whole registers of cells

    inline const uint8_t * at(int32_t c) const { return first + c * stride; }

    // What the same head reads AHEAD cells later: heads side by side in a cell's row bring in all its lines.
    inline void prefetch(int32_t c) const {
        const char * later = (const char *) at(c) + AHEAD * stride;
        __builtin_prefetch(later);
        __builtin_prefetch(later + row_bytes - 1);
    }
};

// The rows of cells [cell, cell + n). A tile that ends within 16 cells is copied, its last row standing in for those
// missing, and rows under 16 bytes too, since a register's worth is read.
template <typename Isa>
static Rows tile_rows(const HeadCodec & codec, const uint8_t * rows, int64_t stride, int32_t n, int slot) {
    const int32_t n16 = (n + 15) / 16 * 16;
    if (n == n16 && (Isa::LANES > LANES_128 || codec.row_bytes >= LANES_128)) {
        return { rows, stride, codec.row_bytes, n };
    }
    const int64_t width = codec.row_bytes < LANES_128 ? LANES_128 : codec.row_bytes;
    uint8_t *     copy  = (uint8_t *) scratch(slot, (size_t) (TILE * width));
    for (int32_t c = 0; c < n16; ++c) {
        memcpy(copy + c * width, rows + (c < n ? c : n - 1) * stride, (size_t) codec.row_bytes);
    }
    return { copy, width, codec.row_bytes, n16 };
}

// The coefficients of a side's 16-bit bands, eight by eight, and a tile of them: values[coefficient][TILE].
struct Halves {
    int32_t n; // blocks of eight
    int32_t first[MAX_HEAD_SIZE / 8];
    int32_t offset[MAX_HEAD_SIZE / 8];
    float * values;
};

static inline void find_halves(const HeadCodec & codec, Halves & halves) {
    halves.n = 0;
    for (int32_t i = 0; i < codec.n_bands; ++i) {
        const Band & band = codec.bands[i];
        for (int32_t j = 0; band.bits == 16 && j < band.n; j += 8) {
            halves.first[halves.n]    = band.first + j;
            halves.offset[halves.n++] = band.offset + 2 * j;
        }
    }
}

// Zeros for cells not in `seen`, which may hold NaN.
template <typename Isa> static void read_halves(const Rows & rows, uint64_t seen, const Halves & halves) {
    for (int32_t c = 0; halves.n > 0 && c < TILE; ++c) {
        const bool      here = (seen >> c & 1) != 0;
        const uint8_t * row  = rows.at(here ? c : 0);
        const bool      some = here && row[0] != 0;
        for (int32_t b = 0; b < halves.n; ++b) {
            float x[8] = {};
            if (some) {
                Isa::widen8(row + halves.offset[b], x);
            }
            for (int k = 0; k < 8; ++k) {
                halves.values[(8 * b + k) * TILE + c] = x[k];
            }
        }
    }
}

template <typename Isa> struct Work {
    using Plan = typename Isa::Plan;
    const AttendArgs & a;
    const Plan &       k;
    const Plan &       v;
    const Halves &     k_halves;
    const Halves &     v_halves;
    uint8_t *          k_codes;
    uint8_t *          v_codes;
    int8_t *           q;   // [row][first, second][k_pad]
    float *            sum; // [row][v_pad]
    Row *              row;
};

// Query rows [first, first + ROWS) against the tile of cells that begins at `cell`.
template <typename Isa, int ROWS> static void step(const Work<Isa> & w, int64_t first, int64_t cell, Tile & tile) {
    const int64_t k_pad = w.k.n_groups * Isa::LANES;
    const int64_t v_pad = w.v.n_groups * Isa::LANES;
    Row *         row   = w.row + first;
    for (int i = 0; i < ROWS; ++i) {
        memcpy(tile.bias[i], w.a.bias + (first + i) / w.a.n_group * w.a.bias_stride + cell,
               (size_t) tile.n * sizeof(float));
        for (int32_t c = tile.n; c < TILE; ++c) {
            tile.bias[i][c] = MINUS_INF;
        }
        for (int32_t c = 0; c < TILE; ++c) {
            tile.common[i][c] = row[i].shift;
        }
        const float * q = w.a.qt + (first + i) * w.a.k->rank;
        for (int32_t j = 0; j < 8 * w.k_halves.n; ++j) {
            const float x = q[w.k_halves.first[j / 8] + j % 8];
            for (int32_t c = 0; c < TILE; ++c) {
                tile.common[i][c] += x * w.k_halves.values[j * TILE + c];
            }
        }
    }
    Isa::template dots<ROWS>(w.k_codes, (int32_t) k_pad / 4, w.q + first * 2 * k_pad, k_pad, row, tile);
    Isa::template soften<ROWS>(tile, w.a.softcap, row);
    Isa::template add_values<ROWS>(w.v_codes, w.v, row, w.sum + first * v_pad, v_pad, tile);
    for (int i = 0; i < ROWS && w.v_halves.n > 0; ++i) {
        float * sum = w.sum + (first + i) * v_pad;
        for (int32_t j = 0; j < 8 * w.v_halves.n; ++j) {
            float total[16] = {}; // as many as the compiler likes to keep in registers
            for (int32_t c = 0; c < TILE; ++c) {
                total[c % 16] += tile.logit[i][c] * w.v_halves.values[j * TILE + c];
            }
            for (int k = 1; k < 16; ++k) {
                total[0] += total[k];
            }
            sum[w.v_halves.first[j / 8] + j % 8] += row[i].share * total[0];
        }
    }
}

// awake[t]: token t sees a cell of the tile. Returns the cells that any token sees.
template <typename Isa>
static uint64_t find_awake(const AttendArgs & a, int64_t cell, int32_t n, bool * awake) {
    uint64_t seen = 0;
    for (int64_t t = 0; t < a.n_tok; ++t) {
        const uint64_t open = Isa::open_cells(a.bias + t * a.bias_stride + cell, n);
        awake[t]            = open != 0;
        seen |= open;
    }
    return seen;
}

template <typename Isa>
static void steps(const Work<Isa> & w, const bool * awake, int64_t cell, Tile & tile) {
    static_assert(Isa::MR >= 2 && Isa::MR <= MAX_MR, "the cases below");
    const int64_t n_rows = w.a.n_tok * w.a.n_group;
    for (int64_t row = 0; row < n_rows;) {
        if (!awake[row / w.a.n_group]) {
            ++row;
            continue;
        }
        int64_t end = row + 1;
        while (end < n_rows && awake[end / w.a.n_group]) {
            ++end;
        }
        for (int64_t n_blocks = (end - row + Isa::MR - 1) / Isa::MR; n_blocks > 0; --n_blocks) {
            const int64_t n = (end - row) / n_blocks; // blocks of equal size: 4 rows are 2 + 2, not 3 + 1
            switch (n) {
                case 1: step<Isa, 1>(w, row, cell, tile); break;
                case 2: step<Isa, 2>(w, row, cell, tile); break;
                default: step<Isa, Isa::MR>(w, row, cell, tile); break;
            }
            row += n;
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

template <typename Isa>
static void attend_codes(const AttendArgs & a, const typename Isa::Plan & k, const typename Isa::Plan & v) {
    const int64_t n_rows = a.n_tok * a.n_group;
    const int64_t k_pad  = k.n_groups * Isa::LANES;
    const int64_t v_pad  = v.n_groups * Isa::LANES;
    uint8_t *     codes  = (uint8_t *) scratch(SLOT_CODES, (size_t) (TILE * (k_pad + v_pad)));
    Halves        k_halves, v_halves;
    find_halves(*a.k, k_halves);
    find_halves(*a.v, v_halves);
    k_halves.values   = (float *) scratch(SLOT_HALVES, (size_t) (8 * (k_halves.n + v_halves.n) * TILE) * sizeof(float));
    v_halves.values   = k_halves.values + 8 * k_halves.n * TILE;
    const Work<Isa> w = { a,
                          k,
                          v,
                          k_halves,
                          v_halves,
                          codes,
                          codes + TILE * k_pad,
                          (int8_t *) scratch(SLOT_QUERY, (size_t) (n_rows * 2 * k_pad)),
                          (float *) scratch(SLOT_SUM, (size_t) (n_rows * v_pad) * sizeof(float)),
                          (Row *) scratch(SLOT_ROWS, (size_t) n_rows * (sizeof(Row) + sizeof(bool))) };
    bool *          awake = (bool *) (w.row + n_rows);
    float           ratio[MAX_HEAD_SIZE];
    spread_ratios(*a.k, 0.0f, ratio);
    memset(w.sum, 0, (size_t) (n_rows * v_pad) * sizeof(float));
    for (int64_t i = 0; i < n_rows; ++i) {
        int8_t * first = w.q + i * 2 * k_pad;
        Isa::quantize_query(a.qt + i * a.k->rank, ratio, a.k->rank, k, first, first + k_pad, w.row[i]);
        w.row[i].shift = a.shift != nullptr ? a.shift[i] : 0.0f;
        w.row[i].slope = a.slope[i % a.n_group];
        w.row[i].m     = a.m[i];
        w.row[i].z     = a.z[i];
    }
    Tile tile;
    memset(tile.scale_k, 0, sizeof(tile.scale_k)); // beyond the last cell, too
    memset(tile.scale_v, 0, sizeof(tile.scale_v));
    for (int64_t cell = 0; cell < a.n_cells; cell += TILE) {
        const int64_t left  = a.n_cells - cell;
        tile.n              = (int32_t) (left < TILE ? left : TILE);
        const uint64_t seen = find_awake<Isa>(a, cell, tile.n, awake);
        if (seen == 0) {
            continue;
        }
        const uint8_t * k_rows = a.k_rows + cell * a.k_stride;
        const uint8_t * v_rows = a.v_rows + cell * a.v_stride;
        const Rows      k_tile = tile_rows<Isa>(*a.k, k_rows, a.k_stride, tile.n, SLOT_SHORT_K);
        const Rows      v_tile = tile_rows<Isa>(*a.v, v_rows, a.v_stride, tile.n, SLOT_SHORT_V);
        Isa::read_scales(k_tile, seen, tile.scale_k);
        tile.largest_v = Isa::read_scales(v_tile, seen, tile.scale_v);
        Isa::unpack_keys(k, k_tile, w.k_codes);
        Isa::unpack_values(v, v_tile, w.v_codes);
        read_halves<Isa>(k_tile, seen, k_halves);
        read_halves<Isa>(v_tile, seen, v_halves);
        steps<Isa>(w, awake, cell, tile);
    }
    spread_ratios(*a.v, 1.0f, ratio);
    for (int64_t i = 0; i < n_rows; ++i) {
        const float old    = a.m[i];
        const float shrink = old == w.row[i].m ? 1.0f :
                             old == MINUS_INF  ? 0.0f :
                                                 Isa::exp_nonpositive(old - w.row[i].m);
        float *     acc    = a.acc + i * a.acc_stride;
        for (int32_t j = 0; j < a.v->rank; ++j) {
            acc[j] = acc[j] * shrink + ratio[j] * w.sum[i * v_pad + j];
        }
        a.m[i] = w.row[i].m;
        a.z[i] = w.row[i].z;
    }
}

} // namespace subkv::cpu
