// trellis.h: rows whose codes are paths through a trellis, with the constants of the format (converter/FORMAT.md §3).
//
// A band of b = 2..6 bits has an alphabet of 2^(b+1) levels, twice as many as a code of b bits can select. Bits of the
// earlier codes determine which half of the alphabet a code selects from, so the codes of least error are a path
// through a trellis of four states (trellis-coded quantization; Marcellin and Fischer 1990, with levels for
// fixed-length codes).
//
//   path    the coefficients of all bands of 2..6 bits, lane by lane: those with index % 8 = 0 in ascending order, then
//           those with index % 8 = 1, and so on. In a tile (tiles.h) a lane runs along the octets.
//   index   code u_t of place t:  x_t = u_t & 1,  i_t = 2 u_t ^ 2 x_{t-2} ^ x_{t-1}   (0 <= i_t < 2^(b+1))
//           On a PATH_CIRCLE the last two places precede place 0, so the start of the path needs no extra bits. On
//           PATH_LANES two zeros precede every lane, for latent layers, which also read a prefix of a row alone.
//   value   c = s * level_step * (level(b, i) + 1/2), level_step = ratio * trellis_share(b)
//
// Rows of fewer than TRELLIS_LEAST such coefficients have PATH_NONE. ops.h defines their codes, and those of bands of 8
// and 16 bits in all rows. The state w = x_{t-1} + 2 x_{t-2} depends on two codes, so a decoder may start anywhere.
#pragma once

#include "subkv/ops.h"

#include <cstdint>

namespace subkv {

// Level i of the alphabet of 2^(bits+1), ascending, -103 .. 102. Its value is level + 1/2, so values are symmetric
// about 0.
SUBKV_EVERYWHERE int32_t trellis_level(int32_t bits, int32_t i) {
    const int32_t half = 1 << bits;
    const int32_t k    = i < half ? half - 1 - i : i - half; // magnitude k + 1/2
    const int32_t far  = k > trellis_double(bits) ? k - trellis_double(bits) : 0;
    const int32_t more = k > trellis_triple(bits) ? k - trellis_triple(bits) : 0;
    const int32_t m    = k + far + more;
    return i < half ? -1 - m : m;
}

SUBKV_EVERYWHERE bool on_path(const HeadCodec & codec, const Band & band) {
    return codec.path != PATH_NONE && band.bits <= TRELLIS_BITS;
}

// The distance of two adjacent codes' values, relative to the row's scale. On a path it is the distance of two adjacent
// levels near 0.
SUBKV_EVERYWHERE float level_step(const HeadCodec & codec, const Band & band) {
    return on_path(codec, band) ? band.ratio * trellis_share(band.bits) : band.ratio;
}

//
// the encoder's search (kernels/ref/trellis.cpp)
//

// The search tries TRELLIS_TRIED scale codes. The first is TRELLIS_BELOW below the best code without a trellis.
constexpr int32_t TRELLIS_BELOW = 2;
constexpr int32_t TRELLIS_TRIED = 4;

constexpr int32_t N_LINES = 5;

// The line a |y| + b. The minimum over all lines maps |y|, where y = c / step, to a place among the levels, counted
// from the middle, such that rounding the place finds the nearest level of each subset.
struct TrellisLine {
    float a, b;
};

SUBKV_EVERYWHERE TrellisLine trellis_line(int32_t bits, int32_t n) {
    const float t = (float) trellis_double(bits) + 0.5f, u = (float) trellis_triple(bits) + 0.5f;
    const float second = t + 2.0f < u - 2.0f ? t + 2.0f : u - 2.0f; // one .. four are half sums of ascending bends.
    const float third  = t + 2.0f < u - 2.0f ? u - 2.0f : t + 2.0f;
    const float one = 0.5f * (t - 2.0f), two = one + 0.5f * second, three = two + 0.5f * third;
    const float four = three + 0.5f * (u + 2.0f);
    return n == 0 ? TrellisLine{ 1.0f, 0.0f } :
           n == 1 ? TrellisLine{ 0.666666687f, one * 0.666666687f } :
           n == 2 ? TrellisLine{ 0.5f, two * 0.5f } :
           n == 3 ? TrellisLine{ 0.4f, three * 0.4f } :
                    TrellisLine{ 0.333333343f, four * 0.333333343f };
}

namespace ref {

// Finds the path of least cost for coefficients c [rank] at scale s, writes its codes to code [rank] (entries outside
// the path stay unchanged) and returns the cost.
float find_path(const HeadCodec & codec, const float * c, float s, uint8_t * code);

} // namespace ref

} // namespace subkv
