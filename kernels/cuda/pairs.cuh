// pairs.cuh: attention to coded cells where each warp of a block owns every WARPS-th pair of tiles of the block's
// split, so that no warp waits for another one before the end. It reads lines from global memory to registers. Built
// with SUBKV_WARP_PAIRS, it replaces the decode kernel's blocks of cells for up to FOUR query rows.
//
// For keys, lane l has cells l / 4 and l / 4 + 8 of each quarter of a tile, and every fourth octet of a run. The
// choices before a code come from the lanes with the octets before. Values are as in the decode kernel, but for all
// octets. Integer products and sums are those of the decode kernel, so that a split of one pair gives the same bits of
// maxima and sums of values.
#pragma once

#include "softmax.cuh"

namespace subkv::cuda {

// Whether the decode kernel of 4 * F query rows uses attend_pairs.
#ifdef SUBKV_WARP_PAIRS
template <int F> constexpr bool PAIRS = F == 1;
#else
template <int F> constexpr bool PAIRS = false;
#endif

constexpr int PAIR = MOST_TILES * TILE; // cells

// Shared memory of a block for 4 * F query rows.
template <int F> struct PairsShared {
    Plan *     plan;
    uint32_t * words;   // words of Queries
    float *    room;    // as in Shared
    float *    tops;    // [WARPS][4 * F]
    uint8_t *  weights; // [WARPS] weights, plain and sums as in Shared
    float *    plain;
    float *    sums;
    float *    scales;          // [WARPS][QUARTERS][WARP] scales of values
    int        width_k, octets; // octets of values
    size_t     bytes;

    __host__ __device__ PairsShared(unsigned char * base, const Layer & l) : width_k(l.width_k), octets(l.width_v / 8) {
        Carve shared{ base };
        plan    = shared.take<Plan>(1);
        words   = shared.take<uint32_t>((size_t) Queries<F>::size(width_k));
        room    = shared.take<float>(WARPS * (4 * F + 1));
        tops    = shared.take<float>(WARPS * 4 * F);
        weights = shared.take<uint8_t>(WARPS * F * 8 * WEIGHT_PITCH);
        plain   = shared.take<float>(WARPS * F * 4 * PAIR);
        sums    = shared.take<float>((size_t) WARPS * F * octets * WARP);
        scales  = shared.take<float>(WARPS * QUARTERS * WARP);
        bytes   = shared.used;
    }

    __device__ Shared<F> of_warp(int warp) const {
        Shared<F> s{ Queries<F>(words, width_k) };
        s.plan    = plan;
        s.weights = weights + warp * F * 8 * WEIGHT_PITCH;
        s.plain   = plain + warp * F * 4 * PAIR;
        s.sums    = sums + warp * F * octets * WARP;
        s.room    = room;
        s.octets  = octets;
        return s;
    }
};

// The choices in one of the last four octets on the path, by quarter and by the lane's two cells. Four lanes with the
// same l / 4 have the four octets, and lane 3 of them has the last one.
using LastChoices = uint32_t[QUARTERS][2];

// Integer products of a tile's keys with the queries, by quarter, as in Products.
template <int F> struct TileProducts {
    int sum[F][QUARTERS][4] = {};
};

// Reads the codes of registers q and q + 4 as nibbles to `low`, or from 5 bits on as bytes to `low` and `high`. Returns
// their choices.
template <int BITS>
__device__ inline uint32_t read_key(const Lines & lines, int q, const Levels & levels, uint32_t & low,
                                    uint32_t & high) {
    if constexpr (BITS <= 4) {
        low = nibbles_of<BITS>(lines, q);
        return low & levels.choices;
    } else {
        bytes_of<BITS>(lines, q, low, high);
        return ((low & BYTES) | (high << 4 & 16 * BYTES)) & levels.choices;
    }
}

// Multiplies `lanes` octets of a run, at most four, by the queries. Lane i of four has octet i, and `at` points to this
// octet's bytes of the lane's cell.
template <int BITS, int F>
__device__ inline void multiply_octets(const Levels & levels, const uint8_t * at, const uint32_t (&right)[F][2],
                                       int lanes, LastChoices & last, TileProducts<F> & products) {
    const int lane = (int) threadIdx.x % WARP, i = lane % 4;
#pragma unroll
    for (int q = 0; q < QUARTERS; ++q) {
        uint32_t left[2][2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            uint32_t       low, high;
            const uint32_t own = read_key<BITS>(Lines{ at + 32 * e }, q, levels, low, high);
            Choices        before;
            if (BITS <= TRELLIS_BITS) { // They come from the lanes before or from the last four octets.
                const uint32_t old = last[q][e];
                before             = { __shfl_sync(ALL, i == 3 ? old : own, lane / 4 * 4 + (i + 3) % 4),
                                       __shfl_sync(ALL, i >= 2 ? old : own, lane / 4 * 4 + (i + 2) % 4) };
                last[q][e]         = i < lanes ? own : old;
            }
            if constexpr (BITS <= 4) {
                nibble_levels<BITS>(low, levels, before, left[e]);
            } else {
                byte_levels<BITS>(low, high, levels, before, left[e]);
            }
        }
#pragma unroll
        for (int f = 0; f < F; ++f) {
            add_deep_product<true, true>(products.sum[f][q], left[0], left[1], right[f]);
        }
    }
}

template <int BITS, int F>
__device__ inline void multiply_run(Width<BITS>, const Shared<F> & s, const Run & run, const uint8_t * tile,
                                    LastChoices & last, TileProducts<F> & products) {
    const Levels levels = levels_of_width<BITS>(run.on_path());
    const int    lane = (int) threadIdx.x % WARP, i = lane % 4, n = run.n();
#pragma unroll 1
    for (int o = 0; o < n; o += 4) {
        const int        lanes = min(n - o, 4);
        const int        mine  = i < lanes ? o + i : o;
        const int        octet = run.first() + mine;
        const uint32_t * words = s.queries.words + octet / 2 * WARP + lane / 4 * 4 + octet % 2 * 2;
        uint32_t         right[F][2];
#pragma unroll
        for (int f = 0; f < F; ++f) {
            const auto two = *reinterpret_cast<const Loaded<uint32_t, 2> *>(words + f * s.queries.pairs * WARP);
            right[f][0]    = i < lanes ? two.of[0] : 0;
            right[f][1]    = i < lanes ? two.of[1] : 0;
        }
        multiply_octets<BITS>(levels, tile + run.at() + mine * BITS * LINE, right, lanes, last, products);
        if (BITS <= TRELLIS_BITS && lanes < 4) { // The last octet moves to lane 3.
#pragma unroll
            for (int x = 0; x < 2 * QUARTERS; ++x) {
                last[x / 2][x % 2] = __shfl_sync(ALL, last[x / 2][x % 2], lane / 4 * 4 + (i + lanes) % 4);
            }
        }
    }
}

// Returns the products of a tile's keys.
template <int F>
__device__ inline TileProducts<F> multiply_tile(const Shared<F> & s, const uint8_t * tile) {
    const Runs & runs = s.plan->keys.runs;
    tile += 4 * ((int) threadIdx.x % WARP / 4);
    LastChoices last = {};
#pragma unroll 1
    for (int i = 1; i >= 0 && runs.on_path; --i) {
        const Place place = runs.before[i];
        const bool  mine  = (int) threadIdx.x % 4 == 3 - i;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            read_choices(place, tile + 32 * e, [&](auto at) {
#pragma unroll
                for (int q = 0; q < QUARTERS; ++q) {
                    const uint32_t x = at(q);
                    const uint32_t y = place.wrapped ? x << 8 | x >> 28 | (x >> 20 & 16) : x;
                    last[q][e]       = mine ? y : last[q][e];
                }
            });
        }
    }
    TileProducts<F> products;
#pragma unroll 1
    for (int r = 0; r < runs.n; ++r) {
        const Run run = runs.run[r];
        by_width(run.kind(), [&](auto width) { multiply_run(width, s, run, tile, last, products); });
    }
    return products;
}

// Returns the place in `plain` for the logit of query row FOUR * f + lane % FOUR and cell 16 * q + 8 * e + lane / 4 of
// tile t. store_weights replaces the logit there.
__device__ inline int place_of_logit(int f, int q, int t, int e) {
    const int lane = (int) threadIdx.x % WARP;
    return (FOUR * f + lane % FOUR) * PAIR + t * TILE + 16 * q + 8 * e + lane / 4;
}

// Keeps the products of tile t, which kept_products returns.
template <int F>
__device__ inline void keep_products(const Shared<F> & s, int t, const TileProducts<F> & products) {
#pragma unroll
    for (int f = 0; f < F; ++f) {
#pragma unroll
        for (int i = 0; i < 2 * QUARTERS; ++i) {
            const int (&sum)[4]  = products.sum[f][i / 2];
            const uint32_t whole = 256 * (uint32_t) sum[2 * (i % 2)] + (uint32_t) sum[2 * (i % 2) + 1];
            s.plain[place_of_logit(f, i / 2, t, i % 2)] = __uint_as_float(whole);
        }
    }
}

template <int F> __device__ inline Products<F> kept_products(const Shared<F> & s, int q) {
    Products<F> products; // The sums of high bytes stay zero.
#pragma unroll
    for (int f = 0; f < F; ++f) {
#pragma unroll
        for (int i = 0; i < 2 * MOST_TILES; ++i) {
            products.sum[f][i / 2][2 * (i % 2) + 1] =
                (int) __float_as_uint(s.plain[place_of_logit(f, q, i / 2, i % 2)]);
        }
    }
    return products;
}

// Keeps the logits of a quarter, which kept_logits returns, and their maxima.
template <int F>
__device__ inline void keep_logits(const Shared<F> & s, int q, const Logits<F> & logits, float (&top)[F]) {
#pragma unroll
    for (int f = 0; f < F; ++f) {
        top[f] = fmaxf(top[f], logits.top[f]);
#pragma unroll
        for (int i = 0; i < 2 * MOST_TILES; ++i) {
            s.plain[place_of_logit(f, q, i / 2, i % 2)] = logits.of[f][i / 2][i % 2];
        }
    }
}

template <int F> __device__ inline Logits<F> kept_logits(const Shared<F> & s, int q, const float (&top)[F]) {
    Logits<F> logits;
#pragma unroll
    for (int f = 0; f < F; ++f) {
        logits.top[f] = top[f];
#pragma unroll
        for (int i = 0; i < 2 * MOST_TILES; ++i) {
            logits.of[f][i / 2][i % 2] = s.plain[place_of_logit(f, q, i / 2, i % 2)];
        }
    }
    return logits;
}

// Adds the values of a pair to the sums of all octets.
template <int F>
__device__ inline void add_pair(const Shared<F> & s, const uint8_t * tiles, int to_second, const Softmax (&rows)[F]) {
    const Weights<F> weights = read_weights(s);
    Choices          before[QUARTERS];
    bool             begun = false;
#pragma unroll 1
    for (int w = 0; w < WARPS; ++w) {
        const Runs & runs = s.plan->values[w];
        if (!begun) {
            read_value_choices(runs, value_bytes(tiles, to_second), before);
            begun = runs.on_path;
        }
        add_runs(s, runs, tiles, to_second, before, weights, rows);
    }
}

// Merges the sums of all warps into those of warp 0, and makes the states of all warps relative to one maximum.
template <int F> __device__ inline void merge_warps(const PairsShared<F> & s, Softmax (&rows)[F]) {
    const int lane = (int) threadIdx.x % WARP, warp = (int) threadIdx.x / WARP;
#pragma unroll
    for (int f = 0; f < F; ++f) {
        if (lane < FOUR) {
            s.tops[warp * 4 * F + FOUR * f + lane] = rows[f].m;
        }
    }
    __syncthreads();
#pragma unroll
    for (int f = 0; f < F; ++f) {
        const float * tops = s.tops + FOUR * f + lane % FOUR;
        static_assert(WARPS == 4, "four maxima");
        const float top = fmaxf(fmaxf(tops[0], tops[4 * F]), fmaxf(tops[2 * 4 * F], tops[3 * 4 * F]));
        const float m   = top == -INFINITY ? 0.0f : top;
        float       factor[WARPS];
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            factor[w] = exponential(tops[w * 4 * F] - m);
        }
        rows[f].z *= exponential(rows[f].m - m);
        rows[f].m   = top;
        const int n = F * s.octets * WARP; // floats of a warp
#pragma unroll 1
        for (int i = f * s.octets * WARP + (int) threadIdx.x; i < (f + 1) * s.octets * WARP; i += THREADS) {
            float sum = factor[0] * s.sums[i];
#pragma unroll
            for (int w = 1; w < WARPS; ++w) {
                sum = fmaf(factor[w], s.sums[w * n + i], sum);
            }
            s.sums[i] = sum;
        }
    }
    __syncthreads();
}

// Reads a cell of the token's stream, whose scale codes are at k and v.
__device__ inline Cell read_cell(const Attend & a, const Split & split, int64_t cell, int32_t query, const uint8_t * k,
                                 const uint8_t * v) {
    const int32_t key  = a.cell_pos[split.stream * a.n_kv + cell];
    const float   seen = mask_value(a, split.token * a.n_kv + cell);
    const float   of_k = row_scale(*k), of_v = row_scale(*v);
    return is_exact(a, key, query) || seen == -INFINITY ? Cell{ -INFINITY, 0.0f, 0.0f } : Cell{ seen, of_k, of_v };
}

// Does the work of a block, as attend_cells does.
template <int F> __device__ void attend_pairs(const Job & job, const Split & split) {
    const Attend &       a    = job.c.a;
    const Layer &        l    = a.layer;
    const int            warp = (int) threadIdx.x / WARP, lane = (int) threadIdx.x % WARP;
    const PairsShared<F> block(block_memory, l);
    const Shared<F>      s      = block.of_warp(warp);
    float *              scales = block.scales + warp * QUARTERS * WARP + lane;
    copy_plan<F>(a, split, s.plan, s.queries.words);
    const QueryRows<F> query_rows(a, split.h, split.row);
    const int32_t      query = a.tokens[split.token].pos;
#pragma unroll 1
    for (int i = lane; i < F * s.octets * WARP; i += WARP) {
        s.sums[i] = 0.0f;
    }
    copies_done<0>();
    __syncthreads();

    Softmax rows[F];
#pragma unroll 1
    for (int c0 = warp * PAIR; c0 < split.cells; c0 += WARPS * PAIR) {
        const bool      two    = split.cells - c0 > TILE;
        const int       k_next = two ? (int) a.k_stride : 0, v_next = two ? (int) a.v_stride : 0;
        const uint8_t * k_tiles   = split.k_tiles + c0 / TILE * a.k_stride;
        const uint8_t * v_tiles   = split.v_tiles + c0 / TILE * a.v_stride;
        float           top_scale = 0.0f, top[F];
#pragma unroll
        for (int f = 0; f < F; ++f) {
            top[f] = -INFINITY;
        }
#pragma unroll 1
        for (int t = 0; t <= (two ? 1 : 0); ++t) {
            keep_products(s, t, multiply_tile(s, k_tiles + t * k_next));
        }
#pragma unroll 1
        for (int q = 0; q < QUARTERS; ++q) {
            const int  of_tile = 16 * q + lane % 16,
                       at      = c0 + lane / 16 * TILE + of_tile; // the cell that the lane reads
            const Cell cell   = at < split.cells ?
                                    read_cell(a, split, split.first + at, query, k_tiles + lane / 16 * k_next + of_tile,
                                              v_tiles + lane / 16 * v_next + of_tile) :
                                    Cell{ -INFINITY, 0.0f, 0.0f };
            Logits<F>  logits = {};
            if (s.plan->keys.runs.halves) {
                add_halves(s, a.qt + split.row * l.n_group * l.width_k, l.width_k, l.n_group, k_tiles, k_next, q,
                           logits.of);
            }
            make_logits(s, l, cell, query_rows, kept_products(s, q), logits);
            keep_logits(s, q, logits, top);
            scales[q * WARP] = cell.scale;
            top_scale        = fmaxf(top_scale, cell.scale); // Scales of NaN do not count.
        }
        const float weight_step = warp_max(top_scale) * WEIGHT_STEP;
#pragma unroll
        for (int f = 0; f < F; ++f) {
            for (int to = FOUR; to < WARP; to *= 2) {
                top[f] = fmaxf(top[f], __shfl_xor_sync(ALL, top[f], to));
            }
            top[f] = move_row(rows[f], top[f], weight_step);
        }
#pragma unroll 1
        for (int q = 0; q < QUARTERS; ++q) {
            const float scale = scales[q * WARP];
            store_weights(s, q, kept_logits(s, q, top), scale > 0.0f ? __fdividef(scale, weight_step) : scale, rows);
        }
        __syncwarp();
        add_pair(s, v_tiles, v_next, rows);
        __syncwarp(); // All reads of weights are done.
    }
    merge_warps(block, rows);
    store_split(block.of_warp(0), a, split.result, rows);
}

} // namespace subkv::cuda
