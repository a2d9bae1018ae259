// queries.cuh: the quantized queries of a token and KV head, as project writes them and the decode kernel copies them
// to shared memory. They are the right factors of its products, and the steps and centres of 4 * F query rows.
#pragma once

#include "plan.cuh"

namespace subkv::cuda {

constexpr int FOUR = 4; // query rows of a product; row 4 * i + g has columns 2 * g (high bytes) and 2 * g + 1

template <int F> struct Queries {
    uint32_t * words;  // [F][pairs][WARP]
    float *    step;   // [4 * F]
    uint32_t * centre; // [4 * F] twice the products with the zeros of all codes, in steps, modulo 2^32
    int        pairs;  // pairs of octets of keys

    __host__ __device__ Queries(uint32_t * at, int width_k) : words(at), pairs((width_k / 8 + 1) / 2) {
        step   = reinterpret_cast<float *>(words + F * pairs * WARP);
        centre = words + F * pairs * WARP + 4 * F;
    }

    __host__ __device__ static int size(int width_k) { return F * ((width_k / 8 + 1) / 2 * WARP + 8); }
};

// Quantizes query row g with the coefficients `row`. A warp calls this. Words of missing rows and octets stay zero.
template <int F> __device__ void quantize_row(const Queries<F> & to, const KeysPlan & keys, const float * row, int g) {
    const int lane    = (int) threadIdx.x % WARP;
    float     largest = 0.0f, bad = 0.0f; // bad is NaN if a coefficient is not finite.
#pragma unroll 1
    for (int r = 0; r < keys.runs.n; ++r) {
        const Run   run      = keys.runs.run[r];
        const float key_step = run.halves() ? 0.0f : keys.step[run.band()];
#pragma unroll 1
        for (int i = 8 * run.first() + lane; i < 8 * (run.first() + run.n()); i += WARP) {
            largest = fmaxf(largest, fabsf(row[i] * key_step));
            bad     = fmaf(row[i], 0.0f, bad);
        }
    }
    const float step    = warp_max(largest) * QUERY_STEP + warp_sum(bad);
    const float inverse = step > 1e-30f ? __fdividef(1.0f, step) : 0.0f;
    uint32_t    centre  = 0;
#pragma unroll 1
    for (int r = 0; r < keys.runs.n; ++r) {
        const Run   run      = keys.runs.run[r];
        const int   zero     = run.zero();
        const float key_step = keys.step[run.band()];
        const int   n        = run.halves() ? 0 : 2 * run.n();
#pragma unroll 1
        for (int w = lane; w < n; w += WARP) { // Words are in the order of interleave (levels.cuh).
            const int octet = run.first() + w / 2;
            uint32_t  high = 0, low = 0;
            for (int i = 0; i < 4; ++i) {
                const int j     = 8 * octet + 2 * (w % 2) + i / 2 + 4 * (i % 2);
                const int value = __float2int_rn(row[j] * key_step * inverse);
                const int upper = (value + 128) >> 8; // Both bytes are signed.
                high |= (uint32_t) (upper & 255) << 8 * i;
                low |= (uint32_t) (value & 255) << 8 * i;
                centre += (uint32_t) (value * zero);
            }
            uint32_t * word                   = to.words + (g / FOUR * to.pairs + octet / 2) * WARP + 8 * (g % FOUR);
            word[2 * (octet % 2) + w % 2]     = high;
            word[2 * (octet % 2) + w % 2 + 4] = low;
        }
    }
    for (int step_of = WARP / 2; step_of > 0; step_of /= 2) {
        centre += __shfl_xor_sync(ALL, centre, step_of);
    }
    if (lane == 0) {
        to.step[g]   = step;
        to.centre[g] = centre;
    }
}

} // namespace subkv::cuda
