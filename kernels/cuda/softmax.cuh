// softmax.cuh: parts of the decode kernel (attend_decode.cu) that compute logits and weights of a quarter of a step's
// cells, and write a block's results.
#pragma once

#include "decode.cuh"
#include "exact_part.cuh"

namespace subkv::cuda {

// Copies adjacent numbers to shared memory. A block calls this.
__device__ inline void copy_all(void * to, const void * from, int bytes) {
    const int at = (int) threadIdx.x * (int) sizeof(Sixteen);
    copy_part((uint8_t *) to + at, (const uint8_t *) from + at, bytes - at, THREADS);
}

// Starts the copies of the head's plan and of the words of the queries.
template <int F>
__device__ inline void copy_plan(const Attend & a, const Split & split, Plan * plan, uint32_t * words) {
    const int n = Queries<F>::size(a.layer.width_k);
    copy_all(plan, (const Plan *) a.layer.plan + split.h, (int) sizeof(Plan));
    copy_all(words, a.words + split.row * n, n * (int) sizeof(uint32_t));
}

// The shift and the slope of a thread's query rows. Element f is that of row FOUR * f + lane % FOUR.
template <int F> struct QueryRows {
    float shift[F], slope[F];

    __device__ QueryRows(const Attend & a, int h, int64_t row) {
        const int G = a.layer.n_group;
#pragma unroll
        for (int f = 0; f < F; ++f) {
            const int g  = FOUR * f + (int) threadIdx.x % FOUR;
            const int of = g < G ? g : 0;
            shift[f]     = a.shift[row * G + of];
            slope[f]     = a.layer.slope[h * G + of];
        }
    }
};

// The bias and the scales of a thread's cell of a step, which other lanes need.
struct Cell {
    float bias, key_scale, scale;
};

// The logits of[f][t][e] of these rows and cell 16 * quarter + 8 * e + lane / 4 of tile t, and their maxima.
template <int F> struct Logits {
    float of[F][MOST_TILES][2], top[F];
};

// Computes logits, in which add_halves has left the sums of halves.
template <int F>
__device__ inline void make_logits(const Shared<F> & s, const Layer & l, const Cell & cell, const QueryRows<F> & query,
                                   const Products<F> & products, Logits<F> & logits) {
    const int lane = (int) threadIdx.x % WARP;
#pragma unroll
    for (int f = 0; f < F; ++f) {
        logits.top[f] = -INFINITY;
    }
#pragma unroll
    for (int t = 0; t < MOST_TILES; ++t) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int   of         = 16 * t + 8 * e + lane / 4; // the lane that read the cell
            const float cell_bias  = __shfl_sync(ALL, cell.bias, of);
            const float cell_scale = __shfl_sync(ALL, cell.key_scale, of);
#pragma unroll
            for (int f = 0; f < F; ++f) {
                const int g = FOUR * f + lane % FOUR;
                // No overflow: 2 * 256 codes * 255 * 32639 fits 32 bits.
                const auto twice =
                    (int) (2 * (256 * (uint32_t) products.sum[f][t][2 * e] + (uint32_t) products.sum[f][t][2 * e + 1]) -
                           s.queries.centre[g]);
                float & x = logits.of[f][t][e];
                x         = cell_scale * (0.5f * s.queries.step[g]) * (float) twice + (cell_scale > 0.0f ? x : 0.0f) +
                            query.shift[f];
                x         = capped(finite_or_nan(x), l.softcap) + query.slope[f] * cell_bias;
                x         = g < l.n_group && cell_bias != -INFINITY ? x : -INFINITY;
                logits.top[f] = fmaxf(logits.top[f], x);
            }
        }
    }
}

// Updates a row's state for cells whose largest logit is `here`. Returns the logit to which their weights are relative.
__device__ inline float move_row(Softmax & row, float here, float weight_step) {
    const float old  = row.m;
    row.m            = fmaxf(old, here);
    const float m    = row.m == -INFINITY ? 0.0f : row.m;
    row.keep         = exponential(old - m);
    row.plain_factor = exponential(here - m);
    row.factor       = 0.5f * weight_step * row.plain_factor;
    row.z *= row.keep;
    return here == -INFINITY ? 0.0f : here;
}

// Stores the weights of the thread's logits in a quarter of the cells. `scale` is that of its cell's value, in units of
// the weights.
template <int F>
__device__ inline void store_weights(const Shared<F> & s, int quarter, const Logits<F> & logits, float scale,
                                     Softmax (&rows)[F]) {
    const int lane = (int) threadIdx.x % WARP;
    // the place of the weight of cell 16 * quarter + lane / 4 for query row lane % FOUR, in the order of read_weights
    uint8_t * const at     = s.weights + 2 * (lane % FOUR) * WEIGHT_PITCH + lane / 16 * (TILE / 2) + quarter % 2 * 16 +
                             lane / 4 % 4 * 2 + quarter / 2;
    const bool      halves = s.plan->v_halves != 0;
#pragma unroll
    for (int t = 0; t < MOST_TILES; ++t) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const float cell_scale = __shfl_sync(ALL, scale, 16 * t + 8 * e + lane / 4);
#pragma unroll
            for (int f = 0; f < F; ++f) {
                const float p     = exponential(logits.of[f][t][e] - logits.top[f]);
                rows[f].z         = fmaf(p, rows[f].plain_factor, rows[f].z);
                rows[f].z         = p > 0.0f ? fmaf(cell_scale, 0.0f, rows[f].z) : rows[f].z; // NaN if the value is NaN
                const auto weight = (uint32_t) __float2int_rn(p * cell_scale);
                uint8_t *  to     = at + 8 * f * WEIGHT_PITCH + t * TILE + e * 8;
                to[0]             = (uint8_t) (weight >> 8);
                to[WEIGHT_PITCH]  = (uint8_t) weight;
                if (halves) {
                    s.plain[(FOUR * f + lane % FOUR) * 2 * TILE + t * TILE + 16 * quarter + 8 * e + lane / 4] =
                        cell_scale > 0.0f ? p : 0.0f;
                }
            }
        }
    }
}

// Writes the sums of this warp's octets, and the rows' states. `first` is the number of the split's first query row.
template <int F>
__device__ inline void store_split(const Shared<F> & s, const Attend & a, int64_t first, Softmax (&rows)[F]) {
    const int    G = a.layer.n_group, lane = (int) threadIdx.x % WARP, warp = (int) threadIdx.x / WARP;
    const Runs & runs = s.plan->values[warp];
#pragma unroll 1
    for (int i = 0; i < runs.n; ++i) {
        const Run   run        = runs.run[i];
        const float value_step = s.plan->value_step[run.band()];
#pragma unroll 1
        for (int o = run.first(); o < run.first() + run.n(); ++o) {
#pragma unroll
            for (int f = 0; f < F; ++f) {
                const int g = FOUR * f + lane % FOUR;
                if (g < G) {
                    a.acc[(first + g) * a.layer.width_v + 8 * o + lane / 4] =
                        value_step * s.sums[(f * s.octets + o) * WARP + lane];
                }
            }
        }
    }
    constexpr int N = 4 * F + 1;
#pragma unroll
    for (int f = 0; f < F; ++f) {
        float z = rows[f].z;
        for (int to = FOUR; to < WARP; to *= 2) {
            z += __shfl_xor_sync(ALL, z, to);
        }
        if (lane < FOUR) {
            s.room[warp * N + FOUR * f + lane] = z;
        }
    }
    __syncthreads();
#pragma unroll
    for (int f = 0; f < F; ++f) {
        const int g = FOUR * f + lane;
        if (warp == 0 && lane < FOUR && g < G) {
            const float z  = (s.room[g] + s.room[N + g]) + (s.room[2 * N + g] + s.room[3 * N + g]);
            a.z[first + g] = z;
            a.m[first + g] = state_top(rows[f].m, z);
        }
    }
}

} // namespace subkv::cuda
