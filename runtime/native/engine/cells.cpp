#include "cells.h"

#include <numeric>

namespace subkv {

HostBytes::HostBytes(const LayerNodes & layer, const ggml_tensor * t, size_t at, size_t size) :
    t_((ggml_tensor *) t), at_(at), copied_(layer.device != nullptr), copy_(copied_ ? size : 0) {
    if (copied_) {
        ggml_backend_tensor_get(t, copy_.data(), at, size);
    }
}

void HostBytes::store() {
    if (copied_) {
        ggml_backend_tensor_set(t_, copy_.data(), at_, copy_.size());
    }
}

HostBytes host_tiles(const LayerNodes & layer, const ggml_tensor * t, int64_t first, int64_t n) {
    const size_t at = (size_t) (first / TILE * TILE) * t->nb[1];
    return { layer, t, at, (size_t) ((first + n + TILE - 1) / TILE * TILE) * t->nb[1] - at };
}

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

void read_cells(const LayerNodes & layer, const Ops & ops, int64_t head, bool value, const uint8_t * tiles,
                int64_t stride, int64_t n, const int64_t * cells, float * x) {
    if (!layer.by_rows) {
        read_rows(ops, *layer.codec, head, value, tiles, stride, n, cells, x);
        return;
    }
    const HeadCodec &          keys = layer.codec->head(head, false); // a latent layer's keys include the values
    const int64_t              size = TILE * keys.row_bytes;
    const std::vector<int32_t> from(cells, cells + n);
    std::vector<int64_t>       places((size_t) n);
    std::vector<uint8_t>       converted((size_t) ((n + TILE - 1) / TILE * size));
    std::iota(places.begin(), places.end(), (int64_t) 0);
    rows_to_tiles(keys, tiles, stride / TILE, from.data(), n, converted.data());
    read_rows(ops, *layer.codec, head, value, converted.data(), size, n, places.data(), x);
}

} // namespace subkv
