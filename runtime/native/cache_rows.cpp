// cache_rows.cpp: cells of a layer as rows, for states, whose format does not know of tiles.
//   row: of all heads, then a byte of chunk for each where bases adapt
#include "cache.h"

#include <algorithm>

namespace subkv {

bool Cache::in_tiles(int32_t il) const {
    return row_bytes(il, false) > 0 && !nodes_[(size_t) il]->device;
}

// Calls use(codec, tile, cell of the tile, row) for the part of every head; rest(byte of the tile, of the row) beyond.
template <typename Byte, typename Row, typename Use, typename Rest>
static void for_cells(const LayerCodec & layer, bool value, Byte * tiles, size_t row_bytes, int64_t first, int64_t n,
                      Row * rows, Use use, Rest rest) {
    const auto    row   = (int64_t) row_bytes;
    const int64_t coded = (int64_t) (value ? layer.v_row_bytes : layer.k_row_bytes);
    for (int64_t tile = first / TILE * TILE; tile < first + n; tile += TILE) {
        const int64_t begin = std::max(first, tile), end = std::min(first + n, tile + TILE);
        Byte *        at = tiles + tile * row;
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
    for_cells(
        *nodes_[(size_t) il]->codec, value, (const uint8_t *) t->data, t->nb[1], first, n, rows,
        [](const HeadCodec & codec, const uint8_t * tile, int64_t cell, uint8_t * row) {
            tile_to_row(codec, tile, cell, row);
        },
        [](uint8_t of_tile, uint8_t & of_row) { of_row = of_tile; });
}

void Cache::set_rows(int32_t il, bool value, ggml_tensor * t, int64_t first, int64_t n, const uint8_t * rows) {
    for_cells(
        *nodes_[(size_t) il]->codec, value, (uint8_t *) t->data, t->nb[1], first, n, rows,
        [](const HeadCodec & codec, uint8_t * tile, int64_t cell, const uint8_t * row) {
            row_to_tile(codec, row, tile, cell);
        },
        [](uint8_t & of_tile, uint8_t of_row) { of_tile = of_row; });
}

} // namespace subkv
