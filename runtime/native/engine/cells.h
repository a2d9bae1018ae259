// cells.h: the order of a layer's cells in the cache: tiles (subkv/tiles.h), or contiguous rows.
//   Latent layers whose cells an indexer selects store rows, because attention then reads a few lines of memory per
//   cell, not a part of every line of its tile. It converts these rows to tiles. TILE cells have the same size either
//   way, so whole tiles have the same addresses.
#pragma once

#include "cache.h"
#include "read_rows.h"

#include <cstdint>
#include <vector>

namespace subkv {

// Bytes [at, at + size) of a layer's tensor. For a tensor on a GPU they are a copy, which store() writes back.
class HostBytes {
public:
    HostBytes(const LayerNodes & layer, const ggml_tensor * t, size_t at, size_t size);

    uint8_t * data() { return copied_ ? copy_.data() : (uint8_t *) t_->data + at_; }
    void      store();

private:
    ggml_tensor *        t_;
    size_t               at_;
    bool                 copied_;
    std::vector<uint8_t> copy_;
};

// The bytes of the tiles that cells [first, first + n) are in.
HostBytes host_tiles(const LayerNodes & layer, const ggml_tensor * t, int64_t first, int64_t n);

// Ops::encode into cells of a layer, which are all in one tile. `stride` is the number of bytes from one tile to the
// next.
int64_t encode_cells(const LayerNodes & layer, const Ops & ops, const HeadCodec & codec, const float * x, int64_t ldx,
                     int64_t n, const int64_t * cells, uint8_t * tiles, int64_t stride);

// read_rows from cells of a layer.
void read_cells(const LayerNodes & layer, const Ops & ops, int64_t head, bool value, const uint8_t * tiles,
                int64_t stride, int64_t n, const int64_t * cells, float * x);

} // namespace subkv
