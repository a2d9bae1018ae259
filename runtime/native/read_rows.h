// read_rows.h: stored rows as attention sees them.
#pragma once

#include "layout.h"

namespace subkv {

// The bases of one head's chunks: cells that are not coded with the head's own basis, which is chunk 0.
class ChunkReader {
public:
    virtual ~ChunkReader() = default;
    // what the chunk's cells are dequantized with; nullptr: no chunk in use, the cells have the head's own basis
    virtual const HeadCodec * codec(int32_t slot) const = 0;
    // coefficients [rank] of a chunk in use, in and out in the head's own basis
    virtual void lift(int32_t slot, const float * e, float * out) const = 0;
};

// x [n][d] f32 of cells [n] of one KV head's tiles, found as Ops::dequantize finds them, gamma and mean of keys included.
//   chunks   of this head and side, nullptr: all cells have its own basis
//   slot     [n] chunk of each cell
void read_rows(const Ops & ops, const LayerCodec & layer, int64_t head, bool value, const ChunkReader * chunks,
               const int32_t * slot, const uint8_t * tiles, int64_t stride, int64_t n, const int64_t * cells,
               float * x);

} // namespace subkv
