// cells.h: how the cells of a layer lie in the cache.
//   Tiles (subkv/tiles.h), or rows one after the other where values are part of keys and an indexer chooses the cells that a
//   token reads: a cell is then a few lines of memory, not one in every line of its tile. What attends makes tiles of rows.
//   Either way TILE cells are TILE rows of bytes; so addresses of whole tiles are the same.
#pragma once

#include "cache.h"

namespace subkv {

// Ops::encode into a layer's cells, all of one tile; stride: of a tile.
int64_t encode_cells(const LayerNodes & layer, const Ops & ops, const HeadCodec & codec, const float * x, int64_t ldx,
                     int64_t n, const int64_t * cells, uint8_t * tiles, int64_t stride);

// Tiles of cells in any order, made of rows.
class CellTiles {
public:
    CellTiles(const HeadCodec & codec, const uint8_t * rows, int64_t stride, int64_t n, const int64_t * cells);

    const uint8_t * tiles() const { return tiles_.data(); }
    const int64_t * cells() const { return cells_.data(); } // where they are in tiles
    int64_t         stride() const { return stride_; }

private:
    std::vector<uint8_t> tiles_;
    std::vector<int64_t> cells_;
    int64_t              stride_;
};

} // namespace subkv
