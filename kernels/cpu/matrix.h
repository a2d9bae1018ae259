// matrix.h: matrices of bases by the type of their entries, alike in every version. Definitions: subkv/ops.h. Static, as
// all that ISA files include.
#pragma once

#include "scratch.h"
#include "subkv/ops.h"

#include <stdint.h>

namespace subkv::cpu {

// rows(entries [r][d], step): halves and nullptr, or bytes and the steps [r] of their rows.
template <typename Rows> static inline void by_entries(const Matrix & m, const Rows & rows) {
    if (m.bytes) {
        rows(m.bytes, m.step);
    } else {
        rows(m.halves, (const uint16_t *) nullptr);
    }
}

// Weights e [r] of rows times their steps, if there are any. to_float: of a half.
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
