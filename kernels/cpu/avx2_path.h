// avx2_path.h: the encoder's search for paths through a trellis. Definition: ref/trellis.cpp, which it follows operation by
// operation: the same coefficients give the same bytes.
#pragma once

#include "avx2_simd.h"

namespace subkv::avx2 {

constexpr int PATH_ROWS = 2; // searched at once

// Squared error of coefficients c [rank] in bands of more than `beyond` bits, but not of 16, at scale s (avx2_encode.cpp).
float squared_error(const HeadCodec & codec, const float * c, float s, int32_t beyond);

// Scale codes of n <= PATH_ROWS rows c[row] [rank] of one head. In: `scale` has the best codes without a path.
void choose_path_scales(const HeadCodec & codec, const float * const * c, int n, uint8_t * scale);

// Codes [rank] of the coefficients on the path of least cost at scale s; others stay.
void find_path(const HeadCodec & codec, const float * c, float s, uint8_t * code);

} // namespace subkv::avx2
