// read_rows.h: decodes stored rows, as attention reads them.
#pragma once

#include "layout.h"

namespace subkv {

// The bases of one head's chunks. Chunk 0 is the head's own (static) basis.
class ChunkReader {
public:
    virtual ~ChunkReader() = default;
    // codec that dequantizes the chunk's cells; nullptr: unused slot, the cells use the head's own basis
    virtual const HeadCodec * codec(int32_t slot) const = 0;
    // converts coefficients e [rank] of a chunk in use to coefficients out [rank] in the head's own basis
    virtual void lift(int32_t slot, const float * e, float * out) const = 0;
};

// x [n][d] f32 of cells [n] of one KV head's tiles, addressed as in Ops::dequantize, with gamma and mean of keys.
//   chunks   of this head and side; nullptr: all cells use the head's own basis
//   slot     [n] chunk of each cell
void read_rows(const Ops & ops, const LayerCodec & layer, int64_t head, bool value, const ChunkReader * chunks,
               const int32_t * slot, const uint8_t * tiles, int64_t stride, int64_t n, const int64_t * cells,
               float * x);

} // namespace subkv
