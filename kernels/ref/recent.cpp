// recent.cpp: rows of the exact window in integers, as recent.h defines them.
#include "subkv/recent.h"

#include "half.h"
#include "rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace subkv::ref {

static float within(float x, float most) {
    return std::fmin(std::fmax(x, -most), most);
}

bool pack_recent(const float * x, const float * mean, int64_t d, uint8_t * row) {
    float largest = 0.0f;
    bool  finite  = true;
    for (int64_t j = 0; j < d; ++j) {
        finite  = finite && std::isfinite(x[j]);
        largest = std::fmax(largest, std::fabs(within(x[j], HALF_MAX) - (mean ? mean[j] : 0.0f)));
    }
    const uint16_t half = finite ? float_to_half(largest / (float) RECENT_MOST) : HALF_NAN;
    const float    step = half_to_float(half);
    std::memcpy(row, &half, sizeof(half));
    uint8_t * high = row + sizeof(half);
    uint8_t * low  = high + d;
    std::memset(low, 0, (size_t) (d / 4));
    for (int64_t j = 0; j < d; ++j) {
        const float   y = finite ? within(x[j], HALF_MAX) - (mean ? mean[j] : 0.0f) : 0.0f;
        const float   q = step > 0.0f ? std::nearbyint(within(y / step, (float) RECENT_MOST)) : 0.0f;
        const int32_t u = (int32_t) q + RECENT_MOST + 1;
        high[j]         = (uint8_t) (u >> 2);
        low[j % (d / 4)] |= (uint8_t) ((u & 3) << 2 * (j / (d / 4)));
    }
    return finite;
}

void unpack_recent(const uint8_t * row, const float * mean, int64_t d, uint16_t * out) {
    uint16_t half;
    std::memcpy(&half, row, sizeof(half));
    if ((half & 0x7c00) == 0x7c00) {
        std::fill(out, out + d, HALF_NAN);
        return;
    }
    const float     step = half_to_float(half);
    const uint8_t * high = row + sizeof(half);
    const uint8_t * low  = high + d;
    for (int64_t j = 0; j < d; ++j) {
        const int32_t u = high[j] << 2 | (low[j % (d / 4)] >> 2 * (j / (d / 4)) & 3);
        const float   x = (mean ? mean[j] : 0.0f) + step * (float) (u - RECENT_MOST - 1);
        out[j]          = float_to_half(within(x, HALF_MAX));
    }
}

} // namespace subkv::ref
