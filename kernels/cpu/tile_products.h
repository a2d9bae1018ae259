// tile_products.h: the products of attention over tiles: query rows times a tile's keys, and weights times a step's
// values. attend_tiles.h documents Isa.
#pragma once

#include "halves.h"
#include "tile_bytes.h"

#include <string.h>

namespace subkv::cpu {

constexpr int STEP_TILES     = STEP / TILE;
constexpr int BLOCK          = 12; // query rows whose logits are in memory together, a multiple of 1 to 4
constexpr int PREFETCH_TILES = 4;  // distance of prefetching, in tiles
static_assert(STEP == HALVES_STRIDE, "halves.h");
constexpr float LARGEST = 32639.0f; // 127 * 256 + 127, because high and low byte are signed
constexpr float SUMMED = 512.0f; // coefficients whose products fit an integer sum (more need larger steps of the query)
constexpr float MINUS_INF    = -__builtin_inff();
constexpr float NOT_A_NUMBER = __builtin_nanf("");

// One query row during a call.
struct Row {
    float   delta;       // logit of one unit of the integer product, without the cell's scale
    int32_t start;       // initial value of the product: the correction for centring the codes, rounded up
    float   start_error; // start minus that correction
    float   shift, slope;
    float   m, z;
    float   shrink;       // factor for earlier sums at this step
    float   weight_scale; // factor for the step's weights, which are relative to the step's largest logit
    float   weight_step;  // unit of the step's integer weights
    int32_t weights;      // sum of these weights
};

struct alignas(64) Step {
    float   scale_k[STEP];
    float   scale_v[STEP];      // 0 in masked cells
    float   logit[BLOCK][STEP]; // integer products, then logits, then weights
    int8_t  first[BLOCK][STEP]; // the weights' bytes or words for the two products
    int8_t  second[BLOCK][STEP];
    float   bias[STEP];   // copy of a row's bias that ends within the step
    float   common[STEP]; // for each cell, shift plus the contribution of 16-bit bands
    float   largest_v;    // maximum of scale_v in the tiles that the current token sees
    int32_t n;            // cells
    int32_t n_pad;        // n, rounded up to whole tiles
    // bits of each tile's visible cells whose value is not finite, for which scale_v and halves are 0
    uint64_t bad_v[STEP_TILES];
    bool     any_bad_v;
};

struct Call {
    const AttendArgs & a;
    const Halves &     k_halves;
    const Halves &     v_halves;
    Runs               k_runs;
    Runs               v_runs;
    int8_t *           query; // [row][first, second][k->rank]
    float *            sum;   // [row][v->rank]
    Row *              row;
    uint8_t *          k_bytes;   // memory for the bytes of a tile, or of a step if is_prompt
    uint8_t *          v_bytes;   // memory for the bytes of a step
    bool               is_prompt; // whether there are several tokens or blocks, so that keys are unpacked by steps
    bool               from_tile; // whether products read codes from the tiles
};

static inline int64_t n_rows_of(const AttendArgs & a) {
    return a.n_tok * a.n_group;
}

// Twice the number that centring subtracts from a byte in products.
template <typename Isa> static constexpr int32_t odd_of() {
    return 2 * BYTE_MIDDLE - 1 - 2 * Isa::ZERO_SHIFT;
}

//
// keys
//

// Opens registers FIRST + V, V < REGS, of W cells of half an octet.
template <typename Isa, typename Source, int HALF, int FIRST, int REGS, int V = 0>
static inline void open_keys(const uint8_t * octet, typename Source::Previous * before, typename Isa::Opened * out) {
    if constexpr (V < REGS) {
        constexpr int CELL = (FIRST + V) * Isa::W;
        out[V]             = Isa::open(Source::template bytes<4 * HALF + CELL / 16>(octet + CELL % 16 * 4, before[V]));
        open_keys<Isa, Source, HALF, FIRST, REGS, V + 1>(octet, before, out);
    }
}

// Adds the products of half an octet's keys and ROWS query rows to `sum`. `query` points to the first row's dwords at
// this octet. Those of its second product follow `second` bytes later, and those of the next row `stride` bytes later.
template <typename Isa, typename Source, int HALF, int FIRST, int ROWS, int REGS>
static inline void add_keys(const uint8_t * octet, typename Source::Previous * before, const int8_t * query,
                            int64_t second, int64_t stride, typename Isa::Sum (&sum)[ROWS][REGS]) {
    typename Isa::Opened c[REGS];
    open_keys<Isa, Source, HALF, FIRST, REGS>(octet, before, c);
#pragma GCC unroll 4
    for (int i = 0; i < ROWS; ++i) {
        const int8_t * q        = query + i * stride + 4 * HALF;
        const auto     q_first  = Isa::spread_dword(q);
        const auto     q_second = Isa::spread_dword(q + second);
#pragma GCC unroll 4
        for (int v = 0; v < REGS; ++v) {
            Isa::add(sum[i][v], c[v], q_first, q_second);
        }
    }
}

// Adds the products with a band's n coefficients. `before` holds the state of the octets' first and second halves.
template <typename Isa, typename Source, int FIRST, int ROWS, int REGS>
static inline void add_key_band(const uint8_t * octet, int32_t n, int64_t ahead,
                                typename Source::Previous (&before)[2][REGS], const int8_t * query, int64_t second,
                                int64_t stride, typename Isa::Sum (&sum)[ROWS][REGS]) {
    for (int32_t j = 0; j < n; j += 8, octet += Source::LINES * LINE, query += 8) {
        if (FIRST == 0 && ahead != 0) {
            prefetch_octet(octet, Source::LINES, ahead);
        }
        add_keys<Isa, Source, 0, FIRST, ROWS>(octet, before[0], query, second, stride, sum);
        add_keys<Isa, Source, 1, FIRST, ROWS>(octet, before[1], query, second, stride, sum);
    }
}

// The keys of a tile.
template <typename Isa> struct Keys {
    const uint8_t *    at;   // bytes, or the tile
    const Path8<Isa> * path; // start of the tile's path, used if `at` is the tile
    int64_t            ahead;
};

// Stores the products of ROWS query rows and a tile's keys in `logit`, whose rows are STEP apart. With FROM_TILE it
// reads codes from the tile.
template <typename Isa, bool FROM_TILE, int ROWS, int FIRST = 0>
static void multiply_keys(const Call & call, const Keys<Isa> & keys, int64_t row, float * logit) {
    if constexpr (FIRST < TILE / Isa::W) {
        const HeadCodec & codec  = *call.a.k;
        constexpr int     REGS   = FROM_TILE ? 2 : Isa::key_regs(ROWS);
        const int64_t     stride = 2 * codec.rank;
        typename Isa::Sum sum[ROWS][REGS];
        const Row * const r     = call.row + row;
        const int8_t *    query = call.query + row * stride;
#pragma GCC unroll 16
        for (int i = 0; i < ROWS; ++i) {
#pragma GCC unroll 16
            for (int v = 0; v < REGS; ++v) {
                sum[i][v] = Isa::start(r[i].start);
            }
        }
        if constexpr (FROM_TILE) {
            typename Isa::Previous before[2][REGS];
#pragma GCC unroll 4
            for (int v = 0; v < REGS; ++v) {
                before[0][v] = keys.path->before[0][FIRST + v];
                before[1][v] = keys.path->before[0][4 + FIRST + v];
            }
            for (int32_t b = 0; b < codec.n_bands; ++b) {
                const Band &    band  = codec.bands[b];
                const uint8_t * octet = keys.at + LINE * band.offset;
#define ADD(BITS, PATH)                                                                                                \
    add_key_band<Isa, FromCodes<Isa, BITS, PATH>, FIRST, ROWS>(octet, band.n, keys.ahead, before, query + band.first,  \
                                                               codec.rank, stride, sum)
                SUBKV_BY_CODE(on_path(codec, band), band.bits, ADD)
#undef ADD
            }
        } else {
            for (int32_t i = 0; i < call.k_runs.n; ++i) {
                const int32_t                     first = call.k_runs.first[i];
                typename FromBytes<Isa>::Previous before[2][REGS];
                add_key_band<Isa, FromBytes<Isa>, FIRST, ROWS>(keys.at + LINE * first, call.k_runs.end[i] - first, 0,
                                                               before, query + first, codec.rank, stride, sum);
            }
        }
#pragma GCC unroll 16
        for (int i = 0; i < ROWS; ++i) {
#pragma GCC unroll 16
            for (int v = 0; v < REGS; ++v) {
                const auto x = Isa::sub(Isa::to_float(Isa::total(sum[i][v])), Isa::set(r[i].start_error));
                Isa::store(logit + i * STEP + (FIRST + v) * Isa::W, x);
            }
        }
        multiply_keys<Isa, FROM_TILE, ROWS, FIRST + REGS>(call, keys, row, logit);
    }
}

// Does this for query rows [row, row + n).
template <typename Isa, bool FROM_TILE>
static void multiply_all_keys(const Call & call, Keys<Isa> keys, int64_t row, int64_t n, float * logit) {
    static_assert(Isa::KEY_ROWS <= 3, "the cases below");
    for (int64_t n_blocks = (n + Isa::KEY_ROWS - 1) / Isa::KEY_ROWS; n_blocks > 0; --n_blocks) {
        const int64_t rows = n / n_blocks; // Blocks have similar sizes, so 4 rows become 2 + 2, not 3 + 1.
        switch (rows) {
            case 1: multiply_keys<Isa, FROM_TILE, 1>(call, keys, row, logit); break;
            case 2: multiply_keys<Isa, FROM_TILE, 2>(call, keys, row, logit); break;
            default: multiply_keys<Isa, FROM_TILE, Isa::KEY_ROWS>(call, keys, row, logit); break;
        }
        row += rows;
        n -= rows;
        logit += rows * STEP;
        keys.ahead = 0; // The first block has prefetched the tile.
    }
}

//
// values
//

// Adds the products of OCTETS octets' values and ROWS rows' weights to `sum`. `before` holds the state of a tile's
// registers.
template <typename Isa, typename Source, int OCTETS, int ROWS, int RHO = 0>
static inline void add_values(const uint8_t * octet, typename Source::Previous * before, const int8_t * first,
                              const int8_t * second, typename Isa::Sum (&sum)[ROWS][OCTETS * (16 / Isa::W)]) {
    if constexpr (RHO < 8) {
        constexpr int        PARTS = 16 / Isa::W; // registers of a line
        typename Isa::Opened c[OCTETS * PARTS];
#pragma GCC unroll 4
        for (int p = 0; p < PARTS; ++p) {
            auto known = before[RHO];
#pragma GCC unroll 4
            for (int o = 0; o < OCTETS; ++o) {
                const uint8_t * at = octet + o * Source::LINES * LINE + p * 4 * Isa::W;
                c[o * PARTS + p]   = Isa::open(Source::template bytes<RHO>(at, known));
            }
            before[RHO] = known;
        }
#pragma GCC unroll 4
        for (int i = 0; i < ROWS; ++i) {
            const auto w_first  = Isa::spread_qword(first + i * STEP + 8 * RHO);
            const auto w_second = Isa::spread_qword(second + i * STEP + 8 * RHO);
#pragma GCC unroll 4
            for (int r = 0; r < OCTETS * PARTS; ++r) {
                Isa::add(sum[i][r], c[r], w_first, w_second);
            }
        }
        add_values<Isa, Source, OCTETS, ROWS, RHO + 1>(octet, before, first, second, sum);
    }
}

// The values of a step, and the query rows.
template <typename Isa> struct Values {
    const uint8_t * at[STEP_TILES]; // bytes, or tiles
    uint32_t        visible_tiles;  // bits of tiles visible to any row
    int64_t         ahead;          // distance of prefetching, or 0
    const Step &    step;
    int             i; // first row within the block
    const Row *     row;
    float *         sum; // sum of the first row
    int64_t         sum_stride;
};

// Sums the products with OCTETS octets at `offset` of every tile, whose coefficients begin at j. `before` is [tile][8].
template <typename Isa, typename Source, int OCTETS, int ROWS>
static void sum_octets(const Values<Isa> & v, int64_t offset, int32_t j, typename Source::Previous (*before)[8]) {
    constexpr int     PARTS = 16 / Isa::W;
    typename Isa::Sum sum[ROWS][OCTETS * PARTS];
#pragma GCC unroll 16
    for (int k = 0; k < ROWS; ++k) {
#pragma GCC unroll 16
        for (int r = 0; r < OCTETS * PARTS; ++r) {
            sum[k][r] = Isa::start(0);
        }
    }
    for (int t = 0; v.visible_tiles >> t != 0; ++t) {
        if ((v.visible_tiles >> t & 1) == 0) {
            continue;
        }
        const uint8_t * octet = v.at[t] + offset;
        if (v.ahead != 0) {
            prefetch_octet(octet, OCTETS * Source::LINES, v.ahead);
        }
        add_values<Isa, Source, OCTETS, ROWS>(octet, before[t], v.step.first[v.i] + t * TILE,
                                              v.step.second[v.i] + t * TILE, sum);
    }
#pragma GCC unroll 16
    for (int k = 0; k < ROWS; ++k) {
        const Row & row = v.row[k];
#pragma GCC unroll 16
        for (int o = 0; o < OCTETS; ++o) {
            Isa::add_octet(sum[k] + o * PARTS, row.weights * odd_of<Isa>(), row.shrink, 0.5f * row.weight_step,
                           v.sum + k * v.sum_stride + j + 8 * o);
        }
    }
}

// Does this for coefficients [first, end).
template <typename Isa, typename Source, int ROWS>
static void sum_band(const Values<Isa> & v, int64_t offset, int32_t first, int32_t end,
                     typename Source::Previous (*before)[8]) {
    constexpr int MOST = Isa::octets(ROWS), SIZE = Source::LINES * LINE;
    int32_t       j = first;
    for (; j + 8 * MOST <= end; j += 8 * MOST, offset += MOST * SIZE) {
        sum_octets<Isa, Source, MOST, ROWS>(v, offset, j, before);
    }
    for (; j < end; j += 8, offset += SIZE) {
        sum_octets<Isa, Source, 1, ROWS>(v, offset, j, before);
    }
}

// Does this for all bands. With FROM_TILE, `paths` holds the starts of the paths of the step's tiles.
template <typename Isa, bool FROM_TILE, int ROWS>
static void values(const Call & call, const Values<Isa> & v, const Path8<Isa> * paths) {
    if constexpr (FROM_TILE) {
        const HeadCodec &      codec = *call.a.v;
        typename Isa::Previous before[STEP_TILES][8];
        memcpy(before, paths, sizeof(before));
        for (int32_t b = 0; b < codec.n_bands; ++b) {
            const Band & band = codec.bands[b];
#define SUM(BITS, PATH)                                                                                                \
    sum_band<Isa, FromCodes<Isa, BITS, PATH>, ROWS>(v, LINE * band.offset, band.first, band.first + band.n, before)
            SUBKV_BY_CODE(on_path(codec, band), band.bits, SUM)
#undef SUM
        }
    } else {
        typename FromBytes<Isa>::Previous nothing[STEP_TILES][8];
        for (int32_t r = 0; r < call.v_runs.n; ++r) {
            const int32_t first = call.v_runs.first[r];
            sum_band<Isa, FromBytes<Isa>, ROWS>(v, LINE * first, first, call.v_runs.end[r], nothing);
        }
    }
}

// Does this for query rows [index, index + n).
template <typename Isa, bool FROM_TILE>
static void all_values(const Call & call, Values<Isa> v, const Path8<Isa> * paths, int64_t index, int64_t n) {
    const int64_t rank = call.a.v->rank;
    for (int64_t n_blocks = (n + Isa::VALUE_ROWS - 1) / Isa::VALUE_ROWS; n_blocks > 0; --n_blocks) {
        const int64_t rows = (n - v.i) / n_blocks;
        v.row              = call.row + index + v.i;
        v.sum              = call.sum + (index + v.i) * rank;
        v.sum_stride       = rank;
        switch (rows) {
            case 1: values<Isa, FROM_TILE, 1>(call, v, paths); break;
            case 2: values<Isa, FROM_TILE, 2>(call, v, paths); break;
            case 3: values<Isa, FROM_TILE, 3>(call, v, paths); break;
            default: values<Isa, FROM_TILE, Isa::VALUE_ROWS>(call, v, paths); break;
        }
        v.i += (int) rows;
        v.ahead = 0; // The first block has prefetched the tiles.
    }
}

} // namespace subkv::cpu
