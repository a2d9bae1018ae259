// trellis.h: trellis-coded rows with fixed levels. A definition with tests; no file, state or cache holds such rows yet.
//
// A band of b = 2..6 bits takes its levels from an alphabet of 2^(b+1), twice as many as a code of b bits can name. Bits of
// the codes before it decide which half of the alphabet a code chooses from, so the code of least error is a path through a
// trellis of four states (trellis-coded quantization; Marcellin and Fischer 1990, with levels for fixed-length codes).
//
//   path    the coefficients of all bands of 2..6 bits, lane by lane: those with index % 8 = 0 in ascending order, then
//           those with index % 8 = 1, and so on. In a tile (tiles.h) a lane runs along the registers.
//   index   code u_t of place t:  x_t = u_t & 1,  i_t = 2 u_t ^ 2 x_{t-2} ^ x_{t-1}   (0 <= i_t < 2^(b+1))
//           Before place 0 come the last two places: the path is a circle, and no code is spent on where it begins.
//   value   c = s * ratio * (level(b, i) + 1/2), level(b, i) of trellis_level: -103 .. 102
//
// Rows of fewer than TRELLIS_LEAST such coefficients, and bands of 8 and 16 bits, are coded as ops.h says.
// State w = x_{t-1} + 2 x_{t-2}. It depends on two codes: a decoder may begin anywhere.
#pragma once

#include "subkv/ops.h"

#include <cstdint>

namespace subkv {

constexpr int32_t TRELLIS_BITS   = 6;  // bands of more have no trellis
constexpr int32_t TRELLIS_LEAST  = 24; // coefficients of a row
constexpr int32_t TRELLIS_STATES = 4;
constexpr int32_t TRELLIS_AROUND = 3; // scale codes tried on both sides of the one that is best without a trellis

// Magnitudes from which levels are twice and three times as far apart, by bits.
constexpr int32_t TRELLIS_DOUBLE[TRELLIS_BITS + 1] = { 0, 0, 2, 5, 9, 19, 37 };
constexpr int32_t TRELLIS_TRIPLE[TRELLIS_BITS + 1] = { 0, 0, 4, 6, 12, 25, 50 };

// Best step of a unit Gaussian, and that of a uniform quantizer of as many bits divided by it, by bits.
constexpr float TRELLIS_STEP[TRELLIS_BITS + 1]    = { 0, 0, 0.4098f, 0.2361f, 0.1200f, 0.0665f, 0.0343f };
constexpr float TRELLIS_UNIFORM[TRELLIS_BITS + 1] = { 0, 0, 2.430f, 2.482f, 2.792f, 2.829f, 3.036f };

// Level i of the alphabet of 2^(bits+1), ascending; its value is half a step above: levels are odd about 0.
SUBKV_EVERYWHERE int32_t trellis_level(int32_t bits, int32_t i) {
    const int32_t half = 1 << bits;
    const int32_t k    = i < half ? half - 1 - i : i - half; // magnitude k + 1/2
    const int32_t far  = k > TRELLIS_DOUBLE[bits] ? k - TRELLIS_DOUBLE[bits] : 0;
    const int32_t more = k > TRELLIS_TRIPLE[bits] ? k - TRELLIS_TRIPLE[bits] : 0;
    const int32_t m    = k + far + more;
    return i < half ? -1 - m : m;
}

// Definitions in kernels/ref/trellis.cpp.

// Number of coefficients on the row's path; 0: it has none, and is coded without (ops.h).
int32_t trellis_length(const HeadCodec & codec);

// Indices of the levels of a row's codes [rank]; those outside the path stay.
void trellis_indices(const HeadCodec & codec, const uint8_t * code, uint8_t * index);

// The path of least squared error at scale s: its codes [rank], others stay. Returns the error of its coefficients.
float trellis_path(const HeadCodec & codec, const float * c, float s, uint8_t * code);

// c [n][rank] to rows [n][row_bytes], as Ops::encode with E = 1, and back. Returns the number of rows not finite.
int64_t trellis_encode_rows(const HeadCodec & codec, const float * c, int64_t n, uint8_t * rows);
void    trellis_decode_rows(const HeadCodec & codec, const uint8_t * rows, int64_t n, float * c);

} // namespace subkv
