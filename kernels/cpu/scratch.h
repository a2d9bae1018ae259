// scratch.h: per-thread memory that kernels reuse from call to call.
#pragma once

#include <cstddef>

namespace subkv::cpu {

enum Slot {
    SLOT_QUERIES, // for attend, integers of query rows
    SLOT_SUMS,
    SLOT_ROWS,
    SLOT_STEP,
    SLOT_KEYS, // codes as bytes
    SLOT_VALUES,
    SLOT_HALVES,
    SLOT_EXACT_KEYS, // for attend_exact
    SLOT_EXACT_VALUES,
    SLOT_EXACT_ROWS,
    SLOT_EXACT_WEIGHTS,
    SLOT_EXACT_BIAS,
    SLOT_EXACT_VISIBLE,
    SLOT_EXACT_ZERO,   // never written
    SLOT_COEFFICIENTS, // for encode
    SLOT_STEPS,        // for reconstruct
    SLOT_MOMENT_ROWS,
    SLOT_MOMENT_SUMS,
    N_SLOTS
};

// Returns memory of this thread for the purpose `slot`, aligned to 64 bytes and zeroed at allocation. It grows and
// never shrinks. A call of another kernel that uses the slot overwrites it. Throws std::bad_alloc.
void * scratch(Slot slot, size_t bytes);

} // namespace subkv::cpu
