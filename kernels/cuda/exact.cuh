// exact.cuh: the keys that a token attends to exactly.
#pragma once

#include "mask.cuh"

namespace subkv::cuda {

// Returns the halves of a window row or fresh row, which has K of all heads, then V. A latent layer's V are the first
// elements of K.
__device__ inline int64_t exact_width(const Layer & l) {
    return (int64_t) l.n_head_kv * (l.d_k + (l.latent ? 0 : l.d_v));
}

// Returns the offset of a head's value in such a row.
__device__ inline int64_t exact_value(const Layer & l, int h) {
    return l.latent ? 0 : (int64_t) l.n_head_kv * l.d_k + h * l.d_v;
}

// Returns an element of a finite exact row. All elements of other exact rows are HALF_NAN.
__device__ inline uint16_t exact_half(float x) {
    return to_half(fminf(fmaxf(x, -HALF_MAX), HALF_MAX));
}

// Returns the cell of the key in a window slot of the token's sequence, or -1 if the token does not attend to it
// exactly.
__device__ inline int32_t slot_cell(const Combine & b, int64_t token, int64_t slot) {
    const SlotRow & key = b.slots[slot];
    return key.pos >= 0 && is_exact(b.a, key.pos, b.a.tokens[token].pos) ? key.cell : -1;
}

// Does the same for the key of token `other` of this ubatch, in the same stream.
__device__ inline int32_t fresh_cell(const Combine & b, int64_t token, int64_t other) {
    const TokenRow & key = b.a.tokens[other];
    return key.pos >= 0 && is_exact(b.a, key.pos, b.a.tokens[token].pos) ? key.cell : -1;
}

// Attends to the exact keys alone, in a launch before combine (exact.cu).
const char * attend_exact_keys(const Combine & args, void * stream);

} // namespace subkv::cuda
