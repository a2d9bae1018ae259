// batch.h: what ops on CPUs and GPUs read about a batch: one row per token and one per slot of the exact window. The
// rows lie in I32 tensors of a graph; shaders have the same fields in kernels/vulkan/tokens.glsl and slots.glsl.
#pragma once

#include <cstdint>

namespace subkv {

// A token of the batch.
struct TokenRow {
    int32_t pos;        // -1: a picture's, which sees sinks exactly, and which no token sees exactly
    int32_t stream;     // among those of the batch
    int32_t cell;       // within its stream
    int32_t first_slot; // of the window, of its first sequence
};

// A slot of the window.
struct SlotRow {
    int32_t pos;   // of the key that the slot holds for this batch, -1: none
    int32_t cell;  // of the same key, within its stream; -1: none
    int32_t token; // of the batch: its row is stored in the slot after attention, -1: none
};

static_assert(sizeof(TokenRow) == 4 * sizeof(int32_t) && sizeof(SlotRow) == 3 * sizeof(int32_t));

} // namespace subkv
