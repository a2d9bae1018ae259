// cache_cells.cpp: cells as rows of halves, for a driver whose states have such rows (runtime/native/plugin).
#include "cells.h"
#include "nodes.h"

#include <algorithm>
#include <numeric>
#include <vector>

namespace subkv {

int32_t Cache::width(int32_t il, bool value) const {
    const LayerCodec & codec = *nodes_[(size_t) il]->codec;
    return codec.n_head_kv * (value ? codec.d_v : codec.d_k);
}

void Cache::decode_cells(int32_t il, bool value, const ggml_tensor * t, int64_t first, int64_t n,
                         uint16_t * rows) const {
    encode_uncoded();
    const LayerNodes &   layer = *nodes_[(size_t) il];
    const LayerCodec &   codec = *layer.codec;
    const int64_t        d     = value ? codec.d_v : codec.d_k;
    std::vector<int64_t> cells((size_t) n);
    std::vector<float>   x((size_t) (n * d));
    std::iota(cells.begin(), cells.end(), first % TILE);
    HostBytes tiles = host_tiles(layer, t, first, n);
    for (int64_t h = 0; h < codec.n_head_kv; ++h) {
        read_cells(layer, ops(), h, value, tiles.data() + codec.tile_offset(h, value), TILE * (int64_t) t->nb[1], n,
                   cells.data(), x.data());
        if (!value) {
            without_gamma(codec, h, n, x.data());
        }
        for (int64_t i = 0; i < n; ++i) {
            ops().to_half(x.data() + i * d, rows + (i * codec.n_head_kv + h) * d, d);
        }
    }
}

void Cache::encode_rows(int32_t il, bool value, ggml_tensor * t, int64_t first, int64_t n, const uint16_t * rows) {
    const LayerNodes & layer = *nodes_[(size_t) il];
    const LayerCodec & codec = *layer.codec;
    const int64_t      d     = value ? codec.d_v : codec.d_k;
    const int64_t      width = codec.n_head_kv * d;
    std::vector<float> x((size_t) (TILE * width));
    int64_t            cells[TILE];
    encode_uncoded();
    HostBytes     tiles    = host_tiles(layer, t, first, n);
    const int64_t of_tiles = first / TILE * TILE;
    for (int64_t c = first, m = 0; c < first + n; c += m) { // cells of one tile
        m = std::min(TILE - c % TILE, first + n - c);
        std::iota(cells, cells + m, c - of_tiles);
        ggml_fp16_to_fp32_row((const ggml_fp16_t *) rows + (c - first) * width, x.data(), m * width);
        for (int64_t h = 0; h < codec.n_head_kv; ++h) {
            encode_cells(layer, ops(), codec.head(h, value), x.data() + h * d, width, m, cells,
                         tiles.data() + codec.tile_offset(h, value), TILE * (int64_t) t->nb[1]);
        }
    }
    tiles.store();
}

bool Cache::exact_row(int32_t il, bool value, int32_t seq, int32_t pos, uint16_t * row) const {
    const LayerNodes & layer = *nodes_[(size_t) il];
    const LayerCodec & codec = *layer.codec;
    const WindowRows & rows  = layer.window_rows();
    if (seq < 0 || !rows.tensor || !window_.holds(seq, pos)) {
        return false;
    }
    const int64_t   slot = window_.slot(seq, pos);
    HostBytes       bytes(layer, rows.tensor, rows.offset(slot), rows.bytes(slot));
    const uint8_t * at = bytes.data();
    const int64_t   d  = value ? codec.d_v : codec.d_k;
    if (!rows.integers || rows.is_sink(slot)) {
        const int64_t first = value ? codec.n_head_kv * codec.d_k : 0;
        std::copy_n((const uint16_t *) at + first, codec.n_head_kv * d, row);
        return true;
    }
    for (int64_t h = 0; h < codec.n_head_kv; ++h) {
        ops().unpack_recent(at + recent_offset(codec, h, value), layer.mean(h, value), d, row + h * d);
    }
    return true;
}

void Cache::set_exact_row(int32_t il, bool value, int32_t seq, int32_t pos, const uint16_t * row) {
    const LayerNodes & layer = *nodes_[(size_t) il];
    const LayerCodec & codec = *layer.codec;
    const WindowRows & rows  = layer.window_rows();
    const int64_t      slot  = rows.tensor ? window_.enter(seq, pos) : -1;
    if (slot < 0) {
        return;
    }
    HostBytes          bytes(layer, rows.tensor, rows.offset(slot), rows.bytes(slot));
    uint8_t *          at = bytes.data();
    const int64_t      d  = value ? codec.d_v : codec.d_k;
    std::vector<float> x((size_t) d);
    for (int64_t h = 0; h < codec.n_head_kv; ++h) {
        ggml_fp16_to_fp32_row((const ggml_fp16_t *) row + h * d, x.data(), d);
        if (rows.integers && !rows.is_sink(slot)) {
            ops().pack_recent(x.data(), layer.mean(h, value), d, at + recent_offset(codec, h, value));
        } else {
            const int64_t first = (value ? codec.n_head_kv * codec.d_k : 0) + h * d;
            subkv::exact_row(ops(), x.data(), (uint16_t *) at + first, d, true);
        }
    }
    bytes.store();
}

} // namespace subkv
