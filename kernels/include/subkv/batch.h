// batch.h: the description of a batch for ops on CPUs and GPUs, with one row per token and one per slot of the exact
// window. I32 tensors of a graph store the rows; shaders have the same fields in kernels/vulkan/tokens.glsl and
// slots.glsl.
#pragma once

#include <cstdint>

namespace subkv {

// A token of the batch.
struct TokenRow {
    int32_t pos;        // -1 for an image token, which attends to sinks exactly, and to which no token attends exactly
    int32_t cell;       // within its stream
    int32_t first_slot; // first window slot of its first sequence
};

// A slot of the window.
struct SlotRow {
    int32_t pos;   // position of the slot's key in this batch, or -1
    int32_t cell;  // cell of the same key, within its stream, or -1
    int32_t token; // index of the token whose row the slot stores after attention, or -1
};

static_assert(sizeof(TokenRow) == 3 * sizeof(int32_t) && sizeof(SlotRow) == 3 * sizeof(int32_t));

} // namespace subkv
