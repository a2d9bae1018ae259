// trellis.h: rows whose codes are paths through a trellis, with the numbers of the format (converter/FORMAT.md §3).
//
// A band of b = 2..6 bits takes its levels from an alphabet of 2^(b+1), twice as many as a code of b bits can name. Bits of
// the codes before it decide which half of the alphabet a code chooses from, so the code of least error is a path through a
// trellis of four states (trellis-coded quantization; Marcellin and Fischer 1990, with levels for fixed-length codes).
//
//   path    the coefficients of all bands of 2..6 bits, lane by lane: those with index % 8 = 0 in ascending order, then
//           those with index % 8 = 1, and so on. In a tile (tiles.h) a lane runs along the octets.
//   index   code u_t of place t:  x_t = u_t & 1,  i_t = 2 u_t ^ 2 x_{t-2} ^ x_{t-1}   (0 <= i_t < 2^(b+1))
//           PATH_CIRCLE: before place 0 come the last two places; no code is spent on where the path begins.
//           PATH_LANES: before every lane come two zeros. Of latent layers, where the beginning of a row is read alone.
//   value   c = s * level_step * (level(b, i) + 1/2), level_step = ratio * trellis_share(b)
//
// PATH_NONE: rows of fewer than TRELLIS_LEAST such coefficients, which are coded as ops.h says. So are bands of 8 and 16
// bits in all rows. State w = x_{t-1} + 2 x_{t-2}: it depends on two codes, so a decoder may begin anywhere.
#pragma once

#include "subkv/ops.h"

#include <cstdint>

namespace subkv {

// Magnitudes from which levels are twice and three times as far apart.
SUBKV_EVERYWHERE int32_t trellis_double(int32_t bits) {
    return bits == 2 ? 2 : bits == 3 ? 5 : bits == 4 ? 9 : bits == 5 ? 19 : 37;
}

SUBKV_EVERYWHERE int32_t trellis_triple(int32_t bits) {
    return bits == 2 ? 4 : bits == 3 ? 6 : bits == 4 ? 12 : bits == 5 ? 25 : 50;
}

// Best step of a unit Gaussian divided by that of a uniform quantizer of as many bits: ratios are the latter's.
SUBKV_EVERYWHERE float trellis_share(int32_t bits) {
    return bits == 2 ? 0.411522634f :
           bits == 3 ? 0.40290088f :
           bits == 4 ? 0.358166188f :
           bits == 5 ? 0.353481798f :
                       0.329380765f;
}

// Level i of the alphabet of 2^(bits+1), ascending; its value is half a step above: levels are odd about 0. -103 .. 102
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

// Distance of two codes' values, relative to the row's scale; on a path of two levels' where they are nearest.
SUBKV_EVERYWHERE float level_step(const HeadCodec & codec, const Band & band) {
    return on_path(codec, band) ? band.ratio * trellis_share(band.bits) : band.ratio;
}

//
// the encoder's search (kernels/ref/trellis.cpp)
//

// Scale codes tried: from TRELLIS_BELOW less than the one that is best without a trellis on, this many.
constexpr int32_t TRELLIS_BELOW = 2;
constexpr int32_t TRELLIS_TRIED = 4;

constexpr int32_t N_LINES = 5;

// Factor and constant of line n of those whose least value at |y| is the place among the levels, in levels from the
// middle, at which a value y = c / step changes from one level of a subset to the next.
struct TrellisLine {
    float a, b;
};

SUBKV_EVERYWHERE TrellisLine trellis_line(int32_t bits, int32_t n) {
    const float t = (float) trellis_double(bits) + 0.5f, u = (float) trellis_triple(bits) + 0.5f;
    const float second = t + 2.0f < u - 2.0f ? t + 2.0f : u - 2.0f; // half the bends up to line n, ascending
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

// The path of least cost of coefficients c [rank] at scale s: its codes in code [rank], others stay. Returns the cost.
float find_path(const HeadCodec & codec, const float * c, float s, uint8_t * code);

} // namespace ref

} // namespace subkv
