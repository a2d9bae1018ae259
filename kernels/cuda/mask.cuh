// mask.cuh: the values that attend and combine add to logits, and which keys are exact.
#pragma once

#include "device.cuh"

namespace subkv::cuda {

// attend adds the mask's value times the head's slope to a logit; -INFINITY: the cell is masked, or the token attends
// to it exactly.
__device__ inline float mask_value(const Attend & a, int64_t at) {
    return a.mask_half ? from_half(((const uint16_t *) a.mask)[at]) : ((const float *) a.mask)[at];
}

__device__ inline bool is_exact(const Attend & a, int32_t key, int32_t query) {
    return key < a.n_sink || (key <= query && key > query - a.n_recent);
}

__device__ inline float coded_bias(const Attend & a, int64_t token, int64_t cell) {
    const int32_t pos = a.cell_pos[token / a.n_tps * a.n_kv + cell];
    return is_exact(a, pos, a.tokens[token].pos) ? -INFINITY : mask_value(a, token * a.n_kv + cell);
}

// softcap * tanh(x / softcap), by one exponential: tanhf has 30 instructions, and this is inlined for each logit.
__device__ inline float capped(float x, float softcap) {
    if (softcap <= 0.0f) {
        return x;
    }
    const float e = exponential(-2.0f * fabsf(__fdividef(x, softcap))); // the error of the result: 2^-22 softcap
    return copysignf(softcap, x) * __fdividef(1.0f - e, 1.0f + e);
}

// The maximum of a state that is stored: a lost row (z is NaN) is not one without visible cells.
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
