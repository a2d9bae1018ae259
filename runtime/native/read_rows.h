// read_rows.h: stored rows as attention sees them.
#pragma once

#include "adapt.h"
#include "layout.h"

namespace subkv {

// x [n][d] f32 of cells [n] of one KV head's tiles, found as Ops::dequantize finds them, gamma and mean of keys included.
//   adapter  of this head and side, nullptr: its basis is static
//   slot     [n] chunk of each cell, of the adapter's or 0
void read_rows(const Ops & ops, const LayerCodec & layer, int64_t head, bool value, const Adapter * adapter,
               const int32_t * slot, const uint8_t * tiles, int64_t stride, int64_t n, const int64_t * cells,
               float * x);

} // namespace subkv
