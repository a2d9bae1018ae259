// mask.cuh: the values that attend and combine add to logits, and which keys are exact.
#pragma once

#include "device.cuh"

namespace subkv::cuda {

// The mask's value, times the head's slope, is added to a logit. It is -INFINITY if the cell is masked.
__device__ inline float mask_value(const Attend & a, int64_t at) {
    return a.mask_half ? from_half(((const uint16_t *) a.mask)[at]) : ((const float *) a.mask)[at];
}

__device__ inline bool is_exact(const Attend & a, int32_t key, int32_t query) {
    return key < a.n_sink || (key <= query && key > query - a.n_recent);
}

// Returns the mask's value, or -INFINITY if the token attends to the cell exactly.
__device__ inline float coded_bias(const Attend & a, int64_t token, int64_t cell) {
    const int32_t pos = a.cell_pos[token / a.n_tps * a.n_kv + cell];
    return is_exact(a, pos, a.tokens[token].pos) ? -INFINITY : mask_value(a, token * a.n_kv + cell);
}

// Returns softcap * tanh(x / softcap), by one exponential, because tanhf has 30 instructions and this is inlined for
// each logit.
__device__ inline float capped(float x, float softcap) {
    if (softcap <= 0.0f) {
        return x;
    }
    const float e = exponential(-2.0f * fabsf(__fdividef(x, softcap))); // The result has an error of 2^-22 softcap.
    return copysignf(softcap, x) * __fdividef(1.0f - e, 1.0f + e);
}

// Returns the maximum of a state to store. It is finite for a lost row (z is NaN), which differs from a row without
// visible cells.
__device__ inline float state_top(float m, float z) {
    return is_nan(z) && m == -INFINITY ? 0.0f : m;
}

// Updates the maximum for keys whose largest logit is `top`. Returns the factor for the old sums.
__device__ inline float move_top(float & m, float top) {
    const float larger = fmaxf(m, top);
    const float keep   = m == -INFINITY ? 0.0f : expf(m - larger);
    m                  = larger;
    return keep;
}

} // namespace subkv::cuda
