// cache_rows.cpp: converts cells of a layer to the rows of a state and back, and checks the numbers of a state.
//   A row has the parts of all heads, then the extra bytes of LayerBases.
#include "cells.h"
#include "error.h"

#include <algorithm>

namespace subkv {

// Visits n cells from `first` on, side by side in tiles and in rows. For each cell and head it calls use(codec, the
// head's tile, the cell's index in the tile, the head's part of the row). For the bytes behind the heads' parts it calls
// rest(byte in the tile, byte in the row). `tiles` begins with the tile of cell `first`.
template <typename Byte, typename Row, typename Use, typename Rest>
static void for_cells(const LayerCodec & layer, bool value, Byte * tiles, size_t row_bytes, int64_t first, int64_t n,
                      Row * rows, Use use, Rest rest) {
    const auto    row   = (int64_t) row_bytes;
    const int64_t coded = (int64_t) (value ? layer.v_row_bytes : layer.k_row_bytes);
    Byte *        at    = tiles;
    for (int64_t tile = first / TILE * TILE; tile < first + n; tile += TILE, at += TILE * row) {
        const int64_t begin = std::max(first, tile), end = std::min(first + n, tile + TILE);
        for (int64_t h = 0; h < layer.n_head_kv; ++h) {
            const int64_t offset = layer.tile_offset(h, value);
            for (int64_t c = begin; c < end; ++c) {
                use(layer.head(h, value), at + offset, c - tile, rows + (c - first) * row + offset / TILE);
            }
        }
        for (int64_t byte = coded; byte < row; ++byte) {
            for (int64_t c = begin; c < end; ++c) {
                rest(at[TILE * byte + c - tile], rows[(c - first) * row + byte]);
            }
        }
    }
}

void Cache::get_rows(int32_t il, bool value, const ggml_tensor * t, int64_t first, int64_t n, uint8_t * rows) const {
    encode_uncoded();
    const LayerNodes & layer = *nodes_[(size_t) il];
    const size_t       row   = t->nb[1];
    if (layer.by_rows) {
        std::copy_n((const uint8_t *) t->data + (size_t) first * row, (size_t) n * row, rows);
        return;
    }
    for_cells(
        *layer.codec, value, (const uint8_t *) host_tiles(layer, t, first, n).data(), row, first, n, rows,
        [](const HeadCodec & codec, const uint8_t * tile, int64_t cell, uint8_t * row) {
            tile_to_row(codec, tile, cell, row);
        },
        [](uint8_t of_tile, uint8_t & of_row) { of_row = of_tile; });
}

void Cache::set_rows(int32_t il, bool value, ggml_tensor * t, int64_t first, int64_t n, const uint8_t * rows) {
    const LayerNodes & layer = *nodes_[(size_t) il];
    const size_t       row   = t->nb[1];
    if (layer.by_rows) {
        std::copy_n(rows, (size_t) n * row, (uint8_t *) t->data + (size_t) first * row);
        return;
    }
    HostBytes tiles = host_tiles(layer, t, first, n);
    for_cells(
        *layer.codec, value, tiles.data(), row, first, n, rows,
        [](const HeadCodec & codec, uint8_t * tile, int64_t cell, const uint8_t * row) {
            row_to_tile(codec, row, tile, cell);
        },
        [](uint8_t & of_tile, uint8_t of_row) { of_tile = of_row; });
    tiles.store();
    if (layer.device) {
        uint64_t n_bad = 0;
        for (int64_t h = 0; h < layer.codec->n_head_kv; ++h) {
            const uint8_t * scale = rows + layer.codec->tile_offset(h, value) / TILE;
            for (int64_t c = 0; c < n; ++c, scale += row) {
                n_bad += *scale == SCALE_NAN;
            }
        }
        if (n_bad > 0) {
            layer.device->add_bad_rows(n_bad);
        }
    }
}

// Only 16-bit bands can hold other numbers, because every byte of the others is a code.
void Cache::check_rows(int32_t il, bool value, int64_t n, const uint8_t * rows) const {
    const LayerNodes & layer = *nodes_[(size_t) il];
    const auto         row   = (int64_t) row_bytes(layer, value);
    for (int64_t h = 0; h < layer.codec->n_head_kv; ++h) {
        const HeadCodec & codec = layer.codec->head(h, value);
        const uint8_t *   first = rows + layer.codec->tile_offset(h, value) / TILE;
        for (int32_t i = 0; i < codec.n_bands; ++i) {
            const Band & band = codec.bands[i];
            for (int64_t c = 0; band.bits == 16 && c < n; ++c) {
                if (!finite_halves(first + c * row + band.offset, band.n, false)) {
                    fail("state: finite numbers expected, NaN or infinity found among the %s of layer %d",
                         value ? "values" : "keys", il);
                }
            }
        }
    }
}

} // namespace subkv
