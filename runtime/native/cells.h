// cells.h: the order of a layer's cells in the cache.
//   Tiles (subkv/tiles.h); or contiguous rows, in latent layers whose cells an indexer chooses: a cell is then a few
//   lines of memory instead of a part of every line of its tile. Attention converts these rows to tiles.
//   Either way TILE cells have the same size, so whole tiles have the same addresses.
#pragma once

#include "cache.h"

namespace subkv {

// Ops::encode into cells of a layer, all in one tile; stride: bytes from one tile to the next.
int64_t encode_cells(const LayerNodes & layer, const Ops & ops, const HeadCodec & codec, const float * x, int64_t ldx,
                     int64_t n, const int64_t * cells, uint8_t * tiles, int64_t stride);

// Tiles converted from rows; cells in any order.
class CellTiles {
public:
    CellTiles(const HeadCodec & codec, const uint8_t * rows, int64_t stride, int64_t n, const int64_t * cells);

    const uint8_t * tiles() const { return tiles_.data(); }
    const int64_t * cells() const { return cells_.data(); } // their cells in tiles()
    int64_t         stride() const { return stride_; }

private:
    std::vector<uint8_t> tiles_;
    std::vector<int64_t> cells_;
    int64_t              stride_;
};

} // namespace subkv
