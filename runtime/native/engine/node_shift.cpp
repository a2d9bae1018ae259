// node_shift.cpp: decodes, rotates and encodes the keys whose positions move, a tile of a head at a time. The CPU does
// this for a cache on a GPU, too, with copies of its tiles: a shift is rare, and a GPU kernel would serve only for it.
#include "cells.h"
#include "nodes.h"

#include <algorithm>
#include <mutex>

namespace subkv {

namespace {

// The pairs (1, 0) after llama.cpp's own RoPE, for every number of positions by which some key moves.
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

// Bytes of a tensor that one thread changes. Those on a GPU are copied, and the destructor stores the copy.
class Bytes {
public:
    Bytes(const LayerNodes & layer, ggml_tensor * t, size_t at, size_t size) : t_(layer.device ? t : nullptr), at_(at) {
        if (!t_) {
            data_ = (uint8_t *) t->data + at;
            return;
        }
        copied_.resize(size);
        data_ = copied_.data();
        const std::lock_guard<std::mutex> one(transfers());
        ggml_backend_tensor_get(t, data_, at, size);
    }

    ~Bytes() {
        if (t_) {
            const std::lock_guard<std::mutex> one(transfers());
            ggml_backend_tensor_set(t_, data_, at_, copied_.size());
        }
    }

    Bytes(const Bytes &)             = delete;
    Bytes & operator=(const Bytes &) = delete;

    uint8_t * data() const { return data_; }

    // Backends do not promise that several threads may copy at once.
    static std::mutex & transfers() {
        static std::mutex one;
        return one;
    }

private:
    ggml_tensor *        t_;
    size_t               at_;
    uint8_t *            data_;
    std::vector<uint8_t> copied_;
};

// One thread's work.
class Shift {
public:
    Shift(LayerNodes & layer, const Rotation & rotation) :
        layer_(layer), rotation_(rotation), x_((size_t) (layer.codec->d_k * std::max(TILE, layer.codec->n_head_kv))) {}

    // Cells of a tile [n] of head h; tiles: of the layer.
    void cells(int64_t h, const int64_t * cells, int64_t n, const int32_t * of_cells, uint8_t * tiles, int64_t stride) {
        const LayerCodec & codec   = *layer_.codec;
        const HeadCodec &  head    = codec.head(h, false);
        uint8_t *          of_head = tiles + codec.tile_offset(h, false);
        read_cells(layer_, ops_, h, false, of_head, stride, n, cells, x_.data());
        without_gamma(codec, h, n * codec.d_k, x_.data());
        for (int64_t i = 0; i < n; ++i) {
            rotation_(x_.data() + i * codec.d_k, of_cells[i]);
        }
        encode_cells(layer_, ops_, head, x_.data(), codec.d_k, n, cells, of_head, stride);
    }

    // The keys of a window's row.
    void slot(int32_t by, bool integers, uint8_t * row) {
        const LayerCodec &    codec = *layer_.codec;
        const int64_t         d     = codec.d_k;
        std::vector<uint16_t> key((size_t) d);
        for (int64_t h = 0; h < codec.n_head_kv; ++h) {
            uint8_t * at = row + (integers ? recent_offset(codec, h, false) : h * d * (int64_t) sizeof(uint16_t));
            if (integers) {
                ops_.unpack_recent(at, layer_.mean(h, false), d, key.data());
            }
            ggml_fp16_to_fp32_row(integers ? key.data() : (uint16_t *) at, x_.data(), d);
            rotation_(x_.data(), by);
            if (integers) {
                ops_.pack_recent(x_.data(), layer_.mean(h, false), d, at);
            } else {
                exact_row(ops_, x_.data(), (uint16_t *) at, d, true);
            }
        }
    }

private:
    LayerNodes &       layer_;
    const Rotation     rotation_;
    const Ops &        ops_ = subkv::ops();
    std::vector<float> x_;
};

// shift: changes the K cache and the window's rows | ShiftSources
void shift_op(ggml_tensor * dst, int ith, int nth, void * userdata) {
    auto &             layer    = *(LayerNodes *) userdata;
    const LayerCodec & codec    = *layer.codec;
    ggml_tensor *      k_cache  = layer.shift_keys;
    const auto         in       = sources_of<ShiftSources>(dst);
    const auto *       of_cells = (const int32_t *) in.of_cells->data;
    const int64_t      stride   = TILE * (int64_t) k_cache->nb[1];
    const int64_t      n_tiles  = k_cache->ne[1] * k_cache->ne[2] / TILE;
    // whole tiles, since two threads must not write a head's tile; a copy has all heads
    const int64_t n_heads = layer.device ? codec.n_head_kv : 1;
    const int64_t n_parts = codec.n_head_kv / n_heads;
    Shift         shift(layer, { in.distances, in.pairs, layer.shift_first, layer.shift_apart });
    if (ith == 0) {
        layer.shifted = true;
    }
    if (layer.device) {
        const std::lock_guard<std::mutex> one(Bytes::transfers());
        layer.device->wait();
    }
    int64_t cells[TILE];
    int32_t by[TILE];
    for (int64_t unit = ith; unit < n_tiles * n_parts; unit += nth) {
        const int64_t tile = unit / n_parts;
        int64_t       n    = 0;
        for (int64_t c = 0; c < TILE; ++c) {
            cells[n] = c;
            by[n]    = of_cells[tile * TILE + c];
            n += by[n] != 0;
        }
        if (n == 0) {
            continue;
        }
        const Bytes bytes(layer, k_cache, (size_t) (tile * stride), (size_t) stride);
        for (int64_t h = unit % n_parts * n_heads, end = h + n_heads; h < end; ++h) {
            shift.cells(h, cells, n, by, bytes.data(), stride);
        }
    }
    const WindowRows & rows = layer.window_rows();
    for (int64_t slot = ith; rows.tensor && slot < layer.window->n_slots(); slot += nth) {
        const int32_t slot_by = ((const int32_t *) in.of_slots->data)[slot];
        if (slot_by != 0) {
            const Bytes bytes(layer, rows.tensor, (size_t) rows.offset(slot), (size_t) rows.bytes(slot));
            shift.slot(slot_by, rows.integers && !rows.is_sink(slot), bytes.data());
        }
    }
}

} // namespace

void build_shift_node(LayerNodes & layer, const ShiftBuild & b) {
    layer.shift_first = b.first;
    layer.shift_apart = b.apart;
    layer.shift_keys  = b.k_cache;

    ggml_tensor * of_slots = layer.window_rows().tensor ? b.of_slots : nullptr;
    ggml_tensor * node     = new_node(b.ctx, GGML_TYPE_F32, { 1, 1, 1, 1 },
                                      ShiftSources{ b.of_cells, b.distances, b.pairs, of_slots }, shift_op, &layer);
    ggml_format_name(node, "subkv_shift-%d", b.il);
    ggml_build_forward_expand(b.gf, node);
}

} // namespace subkv
