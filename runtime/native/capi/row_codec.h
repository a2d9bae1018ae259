// row_codec.h: the bands of one head, as arguments of a C function.
#pragma once

#include "layout.h"

namespace subkv {

// A codec of coefficients, without E and D, where d is their number. bands: [n_bands][2] coefficients and bits; ratio:
// [n_bands]. Throws Invalid, which begins with the function's name.
HeadCodec row_codec(const char * function, const int32_t * bands, const float * ratio, int32_t n_bands);

} // namespace subkv
