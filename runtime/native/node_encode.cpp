// node_encode.cpp: what is done with new tokens' k, v and q before any attention, see nodes.cpp.
#include "cells.h"
#include "nodes.h"

#include <algorithm>

namespace subkv {

//
// encode: dst F16 [fresh_width, n_tokens + query_rows]: rows of n_embd_k_gqa + n_embd_v_gqa halves, of a latent layer
//         without the latter; behind them what the window's ring is to hold, where that is integers
//         src: k, v, k_cache, v_cache, k_idxs, v_idxs, q, tokens, mask node (of few tokens); of a latent layer k's for v's
//

int64_t fresh_width(const LayerNodes & layer) {
    const WindowRows & rows = layer.window_rows();
    return row_elements(*layer.codec) + (rows.integers ? (int64_t) (rows.recent / sizeof(uint16_t)) : 0);
}

namespace {

int64_t query_width(const LayerNodes & layer) {
    int64_t width = 0;
    for (const auto & head : layer.codec->k) {
        width = std::max<int64_t>(width, head.rank);
    }
    return width;
}

} // namespace

int64_t query_rows(const LayerNodes & layer, int64_t n_tokens) {
    const int64_t halves = n_tokens * layer.n_head * (query_width(layer) + 1) * 2; // of floats, shift among them
    return (halves + fresh_width(layer) - 1) / fresh_width(layer);
}

ProjectedQueries projected_queries(const LayerNodes & layer, const ggml_tensor * node, int64_t n_tokens) {
    ProjectedQueries q;
    q.width = query_width(layer);
    q.qt    = (float *) ((char *) node->data + (node->ne[1] - query_rows(layer, n_tokens)) * (int64_t) node->nb[1]);
    q.shift = q.qt + n_tokens * layer.n_head * q.width;
    return q;
}

namespace {

// Rows of one head that hold a value which is not finite.
int64_t count_bad(const ggml_tensor * x, int64_t head, int64_t t0, int64_t n) {
    int64_t bad = 0;
    for (int64_t t = t0; t < t0 + n; ++t) {
        const float * row = row_f32(x, head, t);
        bad += !std::all_of(row, row + x->ne[0], [](float f) { return std::isfinite(f); });
    }
    return bad;
}

// One head's rows as whoever sees them exactly sees them. One that is not finite becomes what its zero codes stand for:
// the mean, or zero.
struct FreshRows {
    const LayerNodes &  layer;
    const Ops &         ops;
    const ggml_tensor * x;
    const int32_t *     tokens; // as in Inputs
    int64_t             head;
    bool                value;

    void operator()(int64_t t0, int64_t n, ggml_tensor * dst, bool any_bad) const {
        const LayerCodec & codec    = *layer.codec;
        const float *      mean     = layer.mean(head, value);
        const int64_t      d        = x->ne[0];
        const bool         integers = layer.window_rows().integers;
        const int64_t      first    = value ? codec.n_head_kv * codec.d_k + head * codec.d_v : head * codec.d_k;
        for (int64_t t = t0; t < t0 + n; ++t) {
            auto *        out = (uint16_t *) ((char *) dst->data + t * dst->nb[1]);
            const float * row = row_f32(x, head, t);
            if (integers && tokens[4 * t] >= layer.window->n_sink()) {
                uint8_t * packed = (uint8_t *) (out + row_elements(codec)) + recent_offset(codec, head, value);
                ops.pack_recent(row, mean, d, packed);
                ops.unpack_recent(packed, mean, d, out + first);
            } else if (any_bad && !std::all_of(row, row + d, [](float f) { return std::isfinite(f); })) {
                for (int64_t j = 0; j < d; ++j) {
                    out[first + j] = mean ? ggml_fp32_to_fp16(mean[j]) : 0;
                }
            } else {
                to_half_saturated(ops, row, out + first, d);
            }
        }
    }
};

int64_t query_runs(int64_t n_tokens) {
    return (n_tokens + TILE - 1) / TILE;
}

// Does any of these tokens see a coded cell of KV head h? In short texts all are exact.
bool any_sees(const ggml_tensor * mask, int64_t h, int64_t t0, int64_t t1) {
    const int64_t  n_kv  = mask->src[1]->ne[0];
    const MaskRows rows  = mask_rows(mask, n_kv);
    const int64_t  first = mask_of(mask->src[0], h) * mask->src[2]->ne[1];
    for (int64_t t = first + t0; t < first + t1; ++t) {
        const uint8_t * open = rows.open + t * rows.open_stride;
        if (std::find(open, open + n_kv / TILE, (uint8_t) 1) != open + n_kv / TILE) {
            return true;
        }
    }
    return false;
}

// A unit of projecting queries: up to TILE tokens of one query head. mask: the node, nullptr: every token is asked for.
void project_queries(const LayerNodes & layer, const ggml_tensor * dst, const ggml_tensor * q, const ggml_tensor * mask,
                     int64_t unit) {
    const int64_t n_runs = query_runs(q->ne[2]);
    const int64_t head   = unit / n_runs;
    const int64_t t0     = unit % n_runs * TILE;
    const int64_t n      = std::min<int64_t>(TILE, q->ne[2] - t0);

    const auto &  codec   = *layer.codec;
    const int64_t n_group = layer.n_head / codec.n_head_kv;
    const int64_t h       = head / n_group;
    if (mask && !any_sees(mask, h, t0, t0 + n)) {
        return;
    }
    const Ops &            ops   = subkv::ops();
    const HeadCodec &      key   = codec.k[(size_t) h];
    const ProjectedQueries out   = projected_queries(layer, dst, q->ne[2]);
    const int64_t          first = t0 * n_group + head % n_group; // row of KV head h
    const int64_t          row   = h * q->ne[2] * n_group;        // its first of all heads
    ops.project(key.decode, key.rank, codec.d_k, row_f32(q, head, t0), stride_f32(q, 2), n,
                layer.scale * codec.gamma[(size_t) h], out.qt + row * out.width + first * key.rank, n_group * key.rank);
    if (key.offset) { // not times gamma: the mean is added back as it is
        ops.project({ codec.centre[(size_t) h].mean.data() }, 1, codec.d_k, row_f32(q, head, t0), stride_f32(q, 2), n,
                    layer.scale, out.shift + row + first, n_group);
    }
}

} // namespace

void encode_op(ggml_tensor * dst, int ith, int nth, void * userdata) {
    const auto &        layer = *(const LayerNodes *) userdata;
    const auto &        codec = *layer.codec;
    const Ops &         ops   = subkv::ops();
    const ggml_tensor * k     = dst->src[0];
    const ggml_tensor * v     = dst->src[1];
    const int64_t *     cells = (const int64_t *) dst->src[4]->data; // v_idxs are the same
    const int64_t       n     = k->ne[2];

    // A unit is a head, a side and every n_parts-th tile, since no two threads may be in one tile. Consecutive cells fill
    // at most n_parts tiles; a run of tokens within one is coded at once.
    const int64_t n_parts = (n + TILE - 2) / TILE + 1;
    const int64_t n_sides = codec.latent ? 1 : 2;
    const int64_t n_coded = n_parts * codec.n_head_kv * n_sides;
    for (int64_t unit = ith; unit < n_coded + query_runs(n) * layer.n_head; unit += nth) {
        if (unit >= n_coded) {
            project_queries(layer, dst, dst->src[6], dst->src[8], unit - n_coded);
            continue;
        }
        const bool    value = unit % n_sides;
        const int64_t h     = unit / n_sides % codec.n_head_kv;
        const int64_t part  = unit / n_sides / codec.n_head_kv;

        const ggml_tensor * x     = value ? v : k;
        const ggml_tensor * cache = dst->src[value ? 3 : 2];
        const HeadCodec &   head  = codec.head(h, value);
        uint8_t *           tiles = (uint8_t *) cache->data + codec.tile_offset(h, value);
        const FreshRows     fresh = { layer, ops, x, (const int32_t *) dst->src[7]->data, h, value };
        const bool          later = layer.chunked && layer.chunked->covers(value);
        for (int64_t t = 0, end = 0; t < n; t = end) {
            const int64_t tile = cells[t] / TILE;
            for (end = t + 1; end < n && cells[end] / TILE == tile; ++end) {
            }
            if (tile % n_parts != part) {
                continue;
            }
            const int64_t bad = later ? count_bad(x, h, t, end - t) :
                                        encode_cells(layer, ops, head, row_f32(x, h, t), stride_f32(x, 2), end - t,
                                                     cells + t, tiles, TILE * (int64_t) cache->nb[1]);
            if (bad > 0) {
                layer.n_zero_rows->fetch_add((uint64_t) bad);
            }
            fresh(t, end - t, dst, bad > 0);
        }
    }
}

//
// project: dst F16 [n_embd_k_gqa + n_embd_v_gqa, query_rows] | src: q, mask node (of few tokens)
//

void project_op(ggml_tensor * dst, int ith, int nth, void * userdata) {
    const auto &        layer = *(const LayerNodes *) userdata;
    const ggml_tensor * q     = dst->src[0];
    for (int64_t unit = ith; unit < query_runs(q->ne[2]) * layer.n_head; unit += nth) {
        project_queries(layer, dst, q, dst->src[1], unit);
    }
}

} // namespace subkv
