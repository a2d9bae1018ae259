// exact.cuh: the keys that a token attends to exactly.
#pragma once

#include "mask.cuh"

namespace subkv::cuda {

// Halves per window row and fresh row: K of all heads, then V. A latent layer's V are the first elements of K.
__device__ inline int64_t exact_width(const Layer & l) {
    return (int64_t) l.n_head_kv * (l.d_k + (l.latent ? 0 : l.d_v));
}

// Offset of a head's value in such a row.
__device__ inline int64_t exact_value(const Layer & l, int h) {
    return l.latent ? 0 : (int64_t) l.n_head_kv * l.d_k + h * l.d_v;
}

// An element of an exact row. All elements of a row that is not finite are HALF_NAN.
__device__ inline uint16_t exact_half(float x) {
    return to_half(fminf(fmaxf(x, -HALF_MAX), HALF_MAX));
}

// The cell of the key in a window slot of the token's sequence; -1: the token does not attend to it exactly.
__device__ inline int32_t slot_cell(const Combine & b, int64_t token, int64_t slot) {
    const SlotRow & key = b.slots[slot];
    return key.pos >= 0 && is_exact(b.a, key.pos, b.a.tokens[token].pos) ? key.cell : -1;
}

// The same for token `other` of this ubatch, in the same stream.
__device__ inline int32_t fresh_cell(const Combine & b, int64_t token, int64_t other) {
    const TokenRow & key = b.a.tokens[other];
    return key.pos >= 0 && is_exact(b.a, key.pos, b.a.tokens[token].pos) ? key.cell : -1;
}

// Attends to the exact keys alone: a launch before combine (exact.cu).
const char * attend_exact_keys(const Combine & args, void * stream);

} // namespace subkv::cuda
