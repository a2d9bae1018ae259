// node_shift.cpp: decodes, rotates and encodes the keys whose positions change, a tile of a head at a time. The CPU
// does this for a cache on a GPU too, because a shift is rare, and a GPU kernel would serve nothing else.
#include "cells.h"
#include "nodes.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <vector>

namespace subkv {

namespace {

// The pairs (1, 0) after llama.cpp's own RoPE, for every number of positions by which some key moves.
struct Rotation {
    const ggml_tensor *distances, *pairs;
    int64_t            first;
    bool               apart;

    // Rotates one head's key.
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

// Backends do not promise that several threads may copy at once.
std::mutex & transfers() {
    static std::mutex one;
    return one;
}

// One thread's work. It changes copies of a part's bytes, and stores them once nothing can fail.
class Shift {
public:
    Shift(LayerNodes & layer, const Rotation & rotation) :
        layer_(layer), rotation_(rotation), x_((size_t) (layer.codec->d_k * TILE)), key_((size_t) layer.codec->d_k) {}

    // Rotates the keys of cells [n] of a tile, either those of heads [h0, h1), or those of all heads if the host reads
    // whole tiles.
    void cells(int64_t tile, int64_t h0, int64_t h1, const int64_t * cells, int64_t n, const int32_t * by) {
        const LayerCodec & codec  = *layer_.codec;
        ggml_tensor *      keys   = layer_.shift_keys;
        const int64_t      stride = TILE * (int64_t) keys->nb[1];
        const bool         whole  = h1 - h0 == codec.n_head_kv;
        const int64_t      first  = whole ? 0 : codec.tile_offset(h0, false);
        const int64_t      size   = whole ? stride : TILE * codec.head(h0, false).row_bytes;
        load(keys, tile * stride + first, size);
        for (int64_t h = h0; h < h1; ++h) {
            uint8_t * of_head = bytes_.data() + codec.tile_offset(h, false) - first;
            read_cells(layer_, ops_, h, false, of_head, stride, n, cells, x_.data());
            without_gamma(codec, h, n * codec.d_k, x_.data());
            for (int64_t i = 0; i < n; ++i) {
                rotation_(x_.data() + i * codec.d_k, by[i]);
            }
            encode_cells(layer_, ops_, codec.head(h, false), x_.data(), codec.d_k, n, cells, of_head, stride);
        }
        store(keys, tile * stride + first, size);
    }

    // The keys of a window's row.
    void slot(int64_t slot, int32_t by) {
        const LayerCodec & codec    = *layer_.codec;
        const WindowRows & rows     = layer_.window_rows();
        const bool         integers = rows.integers && !rows.is_sink(slot);
        const int64_t      d        = codec.d_k;
        load(rows.tensor, (int64_t) rows.offset(slot), (int64_t) rows.bytes(slot));
        for (int64_t h = 0; h < codec.n_head_kv; ++h) {
            uint8_t * at =
                bytes_.data() + (integers ? recent_offset(codec, h, false) : h * d * (int64_t) sizeof(uint16_t));
            if (integers) {
                ops_.unpack_recent(at, layer_.mean(h, false), d, key_.data());
            }
            ggml_fp16_to_fp32_row(integers ? key_.data() : (uint16_t *) at, x_.data(), d);
            rotation_(x_.data(), by);
            if (integers) {
                ops_.pack_recent(x_.data(), layer_.mean(h, false), d, at);
            } else {
                exact_row(ops_, x_.data(), (uint16_t *) at, d, true);
            }
        }
        store(rows.tensor, (int64_t) rows.offset(slot), (int64_t) rows.bytes(slot));
    }

private:
    void load(const ggml_tensor * t, int64_t at, int64_t size) {
        bytes_.resize((size_t) size);
        if (layer_.device) {
            const std::lock_guard<std::mutex> one(transfers());
            ggml_backend_tensor_get(t, bytes_.data(), (size_t) at, (size_t) size);
        } else {
            std::memcpy(bytes_.data(), (const uint8_t *) t->data + at, (size_t) size);
        }
    }

    void store(ggml_tensor * t, int64_t at, int64_t size) {
        if (layer_.device) {
            const std::lock_guard<std::mutex> one(transfers());
            ggml_backend_tensor_set(t, bytes_.data(), (size_t) at, (size_t) size);
        } else {
            std::memcpy((uint8_t *) t->data + at, bytes_.data(), (size_t) size);
        }
    }

    LayerNodes &          layer_;
    const Rotation        rotation_;
    const Ops &           ops_ = subkv::ops();
    std::vector<float>    x_;
    std::vector<uint16_t> key_;
    std::vector<uint8_t>  bytes_;
};

// The parts of a layer that are rotated one by one, first the cells and then the window's slots. A part of the cells is
// one head's tile, because two threads must not write the same tile, but on a GPU, and if cells are rows, it is a tile
// of all heads.
struct Parts {
    int64_t n_heads; // of a part
    int64_t n_cells; // parts with cells
    int64_t n_slots;

    Parts(const LayerNodes & layer, int64_t n_cells_of_layer) :
        n_heads(layer.device || layer.by_rows ? layer.codec->n_head_kv : 1),
        n_cells(n_cells_of_layer / TILE * (layer.codec->n_head_kv / n_heads)),
        n_slots(layer.window_rows().tensor ? layer.window->n_slots() : 0) {}

    explicit Parts(const LayerNodes & layer) : Parts(layer, layer.shift_keys->ne[1] * layer.shift_keys->ne[2]) {}

    size_t size() const { return (size_t) (n_cells + n_slots); }
};

// shift: changes the K cache and the window's rows | ShiftSources. If it lacks memory or is stopped, only some parts
// are rotated, and the next node of this layer rotates the others.
void shift_op(ggml_tensor * dst, int ith, int nth, LayerNodes & layer) {
    const LayerCodec & codec    = *layer.codec;
    const auto         in       = sources_of<ShiftSources>(dst);
    const auto *       of_cells = (const int32_t *) in.of_cells->data;
    const auto *       of_slots = in.of_slots ? (const int32_t *) in.of_slots->data : nullptr;
    const Parts        parts(layer);
    const int64_t      per_tile = codec.n_head_kv / parts.n_heads;
    if (ith == 0) {
        layer.shifted = true;
    }
    if (layer.device) {
        const std::lock_guard<std::mutex> one(transfers());
        layer.device->wait();
    }
    Shift   shift(layer, { in.distances, in.pairs, layer.shift_first, layer.shift_apart });
    int64_t cells[TILE];
    int32_t by[TILE];
    for (int64_t part = ith; part < (int64_t) parts.size(); part += nth) {
        if (layer.rotated[(size_t) part]) {
            continue;
        }
        if (part >= parts.n_cells) {
            const int64_t slot = part - parts.n_cells;
            if (of_slots[slot] != 0) {
                shift.slot(slot, of_slots[slot]);
            }
        } else {
            const int64_t tile = part / per_tile, h = part % per_tile * parts.n_heads;
            int64_t       n = 0;
            for (int64_t c = 0; c < TILE; ++c) {
                cells[n] = c;
                by[n]    = of_cells[tile * TILE + c];
                n += by[n] != 0;
            }
            if (n > 0) {
                shift.cells(tile, h, h + parts.n_heads, cells, n, by);
            }
        }
        layer.rotated[(size_t) part] = 1;
    }
}

} // namespace

void reserve_shift(LayerNodes & layer, int64_t n_cells) {
    layer.rotated.reserve(Parts(layer, n_cells).size());
}

void build_shift_node(LayerNodes & layer, const ShiftBuild & b) {
    layer.shift_first = b.first;
    layer.shift_apart = b.apart;
    layer.shift_keys  = b.k_cache;

    layer.rotated.resize(Parts(layer).size()); // the parts that a stopped shift has rotated stay marked

    ggml_tensor * of_slots = layer.window_rows().tensor ? b.of_slots : nullptr;
    ggml_tensor * node =
        new_node(b.ctx, GGML_TYPE_F32, { 1, 1, 1, 1 }, ShiftSources{ b.of_cells, b.distances, b.pairs, of_slots },
                 NodeWork::on_cpu<shift_op>(layer));
    ggml_format_name(node, "subkv_shift-%d", b.il);
    ggml_build_forward_expand(b.gf, node);
}

} // namespace subkv
