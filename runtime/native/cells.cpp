#include "cells.h"

#include <numeric>

namespace subkv {

int64_t encode_cells(const LayerNodes & layer, const Ops & ops, const HeadCodec & codec, const float * x, int64_t ldx,
                     int64_t n, const int64_t * cells, uint8_t * tiles, int64_t stride) {
    if (!layer.by_rows) {
        return ops.encode(codec, x, ldx, n, cells, tiles, stride);
    }
    std::vector<uint8_t> tile((size_t) (TILE * codec.row_bytes));
    int64_t              places[TILE];
    std::iota(places, places + n, (int64_t) 0);
    const int64_t n_bad = ops.encode(codec, x, ldx, n, places, tile.data(), TILE * codec.row_bytes);
    for (int64_t t = 0; t < n; ++t) {
        tile_to_row(codec, tile.data(), t, tiles + cells[t] * (stride / TILE));
    }
    return n_bad;
}

CellTiles::CellTiles(const HeadCodec & codec, const uint8_t * rows, int64_t stride, int64_t n, const int64_t * cells) :
    tiles_((size_t) ((n + TILE - 1) / TILE * TILE * codec.row_bytes)), cells_((size_t) n),
    stride_(TILE * codec.row_bytes) {
    const std::vector<int32_t> list(cells, cells + n);
    rows_to_tiles(codec, rows, stride / TILE, list.data(), n, tiles_.data());
    std::iota(cells_.begin(), cells_.end(), (int64_t) 0);
}

} // namespace subkv
