// batch.h: the description of a batch for ops on CPUs and GPUs: one row per token and one per slot of the exact window.
// I32 tensors of a graph store the rows; shaders have the same fields in kernels/vulkan/tokens.glsl and slots.glsl.
#pragma once

#include <cstdint>

namespace subkv {

// A token of the batch.
struct TokenRow {
    int32_t pos;        // -1: an image token: it attends to sinks exactly, and no token attends to it exactly
    int32_t cell;       // within its stream
    int32_t first_slot; // first window slot of its first sequence
};

// A slot of the window.
struct SlotRow {
    int32_t pos;   // position of the slot's key in this batch; -1: none
    int32_t cell;  // cell of the same key, within its stream; -1: none
    int32_t token; // index of the token whose row the slot stores after attention; -1: none
};

static_assert(sizeof(TokenRow) == 3 * sizeof(int32_t) && sizeof(SlotRow) == 3 * sizeof(int32_t));

} // namespace subkv
