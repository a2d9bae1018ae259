// node_shift.cpp: keys whose positions move are decoded, rotated and coded again, a tile of a head at a time.
#include "cells.h"
#include "nodes.h"
#include "read_rows.h"

#include <algorithm>

namespace subkv {

namespace {

// What llama.cpp's own RoPE makes of pairs (1, 0), for every number of positions that some key moves by.
struct Rotation {
    const ggml_tensor *distances, *pairs;
    int64_t            first;
    bool               apart;

    // one head's key
    void operator()(float * key, int32_t by) const {
        const auto *  all   = (const int32_t *) distances->data;
        const int64_t which = std::lower_bound(all, all + distances->ne[0], by) - all;
        const auto *  to    = (const float *) ((const char *) pairs->data + which * (int64_t) pairs->nb[2]);
        const int64_t n     = pairs->ne[0] / 2;
        for (int64_t i = 0; i < n; ++i) {
            const int64_t a = apart ? i : 2 * i;
            const int64_t b = apart ? i + n : 2 * i + 1;
            const float   x = key[first + a];
            const float   y = key[first + b];
            key[first + a]  = x * to[a] - y * to[b];
            key[first + b]  = x * to[b] + y * to[a];
        }
    }
};

// Attention multiplies by gamma what it reads: what is coded again must not have it. x [n] of rows of head h.
void without_gamma(const LayerCodec & codec, int64_t h, int64_t n, float * x) {
    const float                   gamma = codec.gamma[(size_t) h];
    const std::vector<uint16_t> & mean  = codec.centre[(size_t) h].mean;
    for (int64_t i = 0; i < n && gamma != 1.0f; ++i) {
        const float of_mean = mean.empty() ? 0.0f : ggml_fp16_to_fp32(mean[(size_t) (i % codec.d_k)]);
        x[i]                = (x[i] - of_mean) / gamma + of_mean;
    }
}

// shift: in place on the K cache | src: k_cache, of_cells, distances, pairs, of_slots and the window's rows (both or neither)
void shift_op(ggml_tensor * dst, int ith, int nth, void * userdata) {
    auto &              layer       = *(LayerNodes *) userdata;
    const LayerCodec &  codec       = *layer.codec;
    const Ops &         ops         = subkv::ops();
    const ggml_tensor * window      = dst->src[5];
    const Rotation      rotation    = { dst->src[2], dst->src[3], layer.shift_first, layer.shift_apart };
    const int64_t       d           = codec.d_k;
    const int64_t       stride      = TILE * (int64_t) dst->nb[1];
    const int64_t       n_tiles     = dst->ne[1] * dst->ne[2] / TILE;
    const auto *        of_cells    = (const int32_t *) dst->src[1]->data;
    const int32_t       chunk[TILE] = {}; // static bases
    int64_t             cells[TILE];
    std::vector<float>  x((size_t) std::max(TILE * d, codec.n_head_kv * d));
    if (ith == 0) {
        layer.shifted = true;
    }
    for (int64_t unit = ith; unit < n_tiles * codec.n_head_kv; unit += nth) {
        const int64_t h    = unit % codec.n_head_kv;
        const int64_t tile = unit / codec.n_head_kv; // whole: no two threads may be in one
        int64_t       n    = 0;
        for (int64_t cell = tile * TILE; cell < (tile + 1) * TILE; ++cell) {
            cells[n] = cell;
            n += of_cells[cell] != 0;
        }
        if (n == 0) {
            continue;
        }
        uint8_t * tiles = (uint8_t *) dst->data + codec.tile_offset(h, false);
        if (layer.by_rows) {
            const CellTiles made(codec.head(h, false), tiles, stride, n, cells);
            read_rows(ops, codec, h, false, nullptr, chunk, made.tiles(), made.stride(), n, made.cells(), x.data());
        } else {
            read_rows(ops, codec, h, false, nullptr, chunk, tiles, stride, n, cells, x.data());
        }
        without_gamma(codec, h, n * d, x.data());
        for (int64_t i = 0; i < n; ++i) {
            rotation(x.data() + i * d, of_cells[cells[i]]);
        }
        encode_cells(layer, ops, codec.head(h, false), x.data(), d, n, cells, tiles, stride);
    }
    const WindowRows &    rows = layer.window_rows();
    std::vector<uint16_t> key((size_t) d);
    for (int64_t slot = ith; window && slot < layer.window->n_slots(); slot += nth) {
        const int32_t by  = ((const int32_t *) dst->src[4]->data)[slot];
        auto *        row = (uint8_t *) window->data + rows.offset(slot);
        for (int64_t h = 0; by != 0 && h < codec.n_head_kv; ++h) {
            const bool integers = rows.integers && !rows.is_sink(slot);
            uint8_t *  at = row + (integers ? recent_offset(codec, h, false) : h * d * (int64_t) sizeof(uint16_t));
            if (integers) {
                ops.unpack_recent(at, layer.mean(h, false), d, key.data());
            }
            ggml_fp16_to_fp32_row(integers ? key.data() : (uint16_t *) at, x.data(), d);
            rotation(x.data(), by);
            if (integers) {
                ops.pack_recent(x.data(), layer.mean(h, false), d, at);
            } else {
                to_half_saturated(ops, x.data(), (uint16_t *) at, d);
            }
        }
    }
}

} // namespace

void build_shift_node(LayerNodes & layer, const ShiftBuild & b) {
    layer.shift_first    = b.first;
    layer.shift_apart    = b.apart;
    ggml_tensor * with[] = { b.of_cells, b.distances, b.pairs, b.of_slots, layer.window_rows().tensor };
    ggml_tensor * shifted =
        ggml_custom_inplace(b.ctx, b.k_cache, with, b.of_slots ? 5 : 3, shift_op, GGML_N_TASKS_MAX, &layer);
    ggml_format_name(shifted, "subkv_shift-%d", b.il);
    ggml_build_forward_expand(b.gf, shifted);
}

} // namespace subkv
