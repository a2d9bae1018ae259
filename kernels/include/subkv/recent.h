// recent.h: rows of the recent part of the exact window in integers (subkv.recent_bits = 10).
//
// A head's row x [d] minus its mean mu is stored as d integers of RECENT_BITS bits and one step:
//
//   y_j = clamp(x_j, +-65504) - mu_j,  step = half(max_j |y_j| / 511),  q_j = clamp(round(y_j / step), +-511)
//   x^_j = half(clamp(mu_j + step q_j, +-65504))
//
// Rounding is to nearest even. A step that rounds to zero gives q = 0. A row that is not finite has the step HALF_NAN
// and q = 0; every element of a row whose step is not finite is HALF_NAN. All arithmetic is f32, in which step q_j is
// exact.
// The bytes of a row are the step as an IEEE half, then u_j >> 2 in byte j, where u_j = q_j + 512, then u_j & 3 in byte
// j % (d/4) at bit 2 * (j / (d/4)).
#pragma once

#include <cstdint>

namespace subkv {

constexpr int32_t RECENT_BITS = 10;
constexpr int32_t RECENT_MOST = 511; // largest |q|

// d is a multiple of 8.
constexpr int64_t recent_bytes(int64_t d) {
    return 2 + d + d / 4;
}

} // namespace subkv
