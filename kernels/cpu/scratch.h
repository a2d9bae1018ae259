// scratch.h: memory of a thread that kernels keep from call to call.
#pragma once

#include <cstddef>

namespace subkv::cpu {

enum Slot {
    SLOT_QUERIES, // attend: integers of query rows
    SLOT_SUMS,
    SLOT_ROWS,
    SLOT_STEP,
    SLOT_KEYS, // codes as bytes
    SLOT_VALUES,
    SLOT_HALVES,
    SLOT_EXACT_KEYS, // attend_exact
    SLOT_EXACT_VALUES,
    SLOT_EXACT_ROWS,
    SLOT_EXACT_WEIGHTS,
    SLOT_EXACT_BIAS,
    SLOT_EXACT_AWAKE,
    SLOT_EXACT_UNSEEN, // nobody writes it
    SLOT_COEFFICIENTS, // encode
    SLOT_STEPS,        // reconstruct
    SLOT_MOMENT_ROWS,
    SLOT_MOMENT_SUMS,
    N_SLOTS
};

// Zeroed-once, 64-byte aligned memory of this thread for purpose `slot`; grows, never shrinks. Nobody's who calls another
// kernel that uses the slot.
void * scratch(Slot slot, size_t bytes);

} // namespace subkv::cpu
