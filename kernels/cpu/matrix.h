// matrix.h: splits matrices of bases by the type of their entries, for all versions. Definitions: subkv/ops.h. Static,
// like everything that ISA files include.
#pragma once

#include "scratch.h"
#include "subkv/ops.h"

#include <stdint.h>

namespace subkv::cpu {

// Calls rows(entries [n][d], step, first, n) for rows [first, first + n): for halves with nullptr, for bytes with their
// steps [n].
template <typename Rows> static inline void by_entries(const Matrix & m, int64_t r, const Rows & rows) {
    const int64_t n_halves = m.bytes ? m.n_halves : r;
    if (n_halves > 0) {
        rows(m.halves, (const uint16_t *) nullptr, (int64_t) 0, n_halves);
    }
    if (n_halves < r) {
        rows(m.bytes, m.step, n_halves, r - n_halves);
    }
}

// Weights e [r] times the steps of rows in bytes. to_float converts a half.
template <typename ToFloat>
static inline const float * with_steps(const float * e, const uint16_t * step, int64_t r, const ToFloat & to_float) {
    if (!step) {
        return e;
    }
    float * scaled = (float *) scratch(SLOT_STEPS, (size_t) r * sizeof(float));
    for (int64_t i = 0; i < r; ++i) {
        scaled[i] = e[i] * to_float(step[i]);
    }
    return scaled;
}

} // namespace subkv::cpu
