// recent_rows.h: rows of the exact window in integers, in loops that a compiler vectorizes. They give the same bytes
// and halves as ref/recent.cpp.
#pragma once

#include "../ref/half.h"
#include "subkv/ops.h"
#include "subkv/recent.h"

#include <stdint.h>
#include <string.h>

namespace subkv::cpu {

alignas(64) static constexpr float NO_MEAN[MAX_HEAD_SIZE] = {};

constexpr float ROUNDING = 12582912.0f; // 1.5 * 2^23; adding it rounds to an integer, to nearest even

static inline float within(float x, float most) {
    x = x > most ? most : x;
    return x < -most ? -most : x;
}

static inline int32_t bits_of(float x) {
    int32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    return bits;
}

// Fills a row with NaN if its step is not finite. Returns whether it did.
static inline bool fill_unless_finite(uint16_t step, int64_t d, uint16_t * out) {
    const bool bad = (step & 0x7c00) == 0x7c00;
    for (int64_t j = 0; bad && j < d; ++j) {
        out[j] = HALF_NAN;
    }
    return bad;
}

// ToHalf has the parameters of Ops::to_half.
template <void (*ToHalf)(const float *, uint16_t *, int64_t)>
static bool pack_recent(const float * x, const float * mean, int64_t d, uint8_t * row) {
    float   y[MAX_HEAD_SIZE];
    int32_t u[MAX_HEAD_SIZE];
    int32_t largest = 0, most = 0; // bits of floats that are not negative, integers of the same order
    mean = mean ? mean : NO_MEAN;
    for (int64_t j = 0; j < d; ++j) {
        const int32_t size    = bits_of(x[j]) & 0x7fffffff;
        most                  = size > most ? size : most;
        y[j]                  = within(x[j], HALF_MAX) - mean[j];
        const int32_t centred = bits_of(y[j]) & 0x7fffffff;
        largest               = centred > largest ? centred : largest;
    }
    const bool finite = most < 0x7f800000;
    float      scale  = 0.0f;
    uint16_t   half   = HALF_NAN;
    if (finite) {
        memcpy(&scale, &largest, sizeof(scale));
        scale /= (float) RECENT_MOST;
        ToHalf(&scale, &half, 1);
        scale = ref::half_to_float(half);
    }
    memcpy(row, &half, sizeof(half));
    uint8_t * high = row + sizeof(half);
    uint8_t * low  = high + d;
    if (scale > 0.0f) {
        for (int64_t j = 0; j < d; ++j) {
            u[j] = bits_of(within(y[j] / scale, (float) RECENT_MOST) + ROUNDING) - bits_of(ROUNDING) + RECENT_MOST + 1;
        }
    } else {
        for (int64_t j = 0; j < d; ++j) {
            u[j] = RECENT_MOST + 1;
        }
    }
    for (int64_t j = 0; j < d; ++j) {
        high[j] = (uint8_t) (u[j] >> 2);
    }
    const int64_t m = d / 4;
    for (int64_t j = 0; j < m; ++j) {
        low[j] = (uint8_t) ((u[j] & 3) | (u[m + j] & 3) << 2 | (u[2 * m + j] & 3) << 4 | (u[3 * m + j] & 3) << 6);
    }
    return finite;
}

template <void (*ToHalf)(const float *, uint16_t *, int64_t)>
static void unpack_recent(const uint8_t * row, const float * mean, int64_t d, uint16_t * out) {
    float    x[MAX_HEAD_SIZE];
    uint16_t half;
    memcpy(&half, row, sizeof(half));
    if (fill_unless_finite(half, d, out)) {
        return;
    }
    const float     step = ref::half_to_float(half);
    const uint8_t * high = row + sizeof(half);
    const uint8_t * low  = high + d;
    const int64_t   m    = d / 4;
    mean                 = mean ? mean : NO_MEAN;
    for (int32_t part = 0; part < 4; ++part) {
        for (int64_t j = 0; j < m; ++j) {
            const int64_t at = part * m + j;
            const int32_t u  = high[at] << 2 | (low[j] >> 2 * part & 3);
            x[at]            = within(mean[at] + step * (float) (u - RECENT_MOST - 1), HALF_MAX);
        }
    }
    ToHalf(x, out, d);
}

} // namespace subkv::cpu
