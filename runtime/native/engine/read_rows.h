// read_rows.h: decodes stored rows, as attention reads them.
#pragma once

#include "layout.h"

namespace subkv {

// Reads cells [n] of one KV head's tiles to x [n][d] f32, with gamma and mean of keys. The tiles are addressed as in
// Ops::dequantize.
void read_rows(const Ops & ops, const LayerCodec & layer, int64_t head, bool value, const uint8_t * tiles,
               int64_t stride, int64_t n, const int64_t * cells, float * x);

// The same from dequantized coefficients c [n][rank].
void reconstruct_rows(const Ops & ops, const LayerCodec & layer, int64_t head, bool value, const float * c, int64_t n,
                      float * x);

// Reading multiplies keys by gamma, so keys are divided by it before they are coded again. x [n] of rows of head h.
void without_gamma(const LayerCodec & codec, int64_t h, int64_t n, float * x);

} // namespace subkv
