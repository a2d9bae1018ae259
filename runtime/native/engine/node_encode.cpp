// node_encode.cpp: codes of new tokens, their exact rows and projected queries, see nodes.cpp.
#include "cells.h"
#include "nodes.h"

#include <algorithm>

namespace subkv {

//
// encode: dst on a GPU: fresh rows F16 [fresh_width, n_tokens]; on a CPU: EncodeResult | EncodeSources
//
// A fresh row has n_embd_k_gqa + n_embd_v_gqa halves, of a latent layer without the latter. If the window's ring holds
// integers, those for the ring follow.
//

int64_t fresh_width(const LayerNodes & layer) {
    const WindowRows & rows = layer.window_rows();
    return row_elements(*layer.codec) + (rows.integers ? (int64_t) (rows.recent / sizeof(uint16_t)) : 0);
}

int64_t query_width(const LayerNodes & layer) {
    int64_t width = 0;
    for (const auto & head : layer.codec->k) {
        width = std::max<int64_t>(width, head.rank);
    }
    return width + 1;
}

EncodeResult::EncodeResult(const LayerNodes & layer, int64_t n_tokens) :
    fresh_stride((size_t) fresh_width(layer) * sizeof(uint16_t)),
    queries_at(GGML_PAD(fresh_stride * (size_t) n_tokens, (size_t) LINE)),
    bytes(queries_at + (size_t) (query_width(layer) * layer.n_head * n_tokens) * sizeof(float)) {}

ProjectedQueries::ProjectedQueries(const LayerNodes & layer, void * data, int64_t n_tokens) :
    qt((float *) data), width(query_width(layer) - 1) {
    shift = qt + n_tokens * layer.n_head * width;
}

namespace {

// Rows of one head that hold a value which is not finite.
int64_t count_bad(const ggml_tensor * x, int64_t head, int64_t t0, int64_t n) {
    int64_t bad = 0;
    for (int64_t t = t0; t < t0 + n; ++t) {
        bad += !is_finite_row(row_f32(x, head, t), x->ne[0]);
    }
    return bad;
}

// One head's exact rows.
struct FreshRows {
    const LayerNodes &  layer;
    const Ops &         ops;
    const ggml_tensor * x;
    const TokenRow *    tokens;
    int64_t             head;
    bool                value;

    void operator()(int64_t t0, int64_t n, char * to, size_t stride, bool any_bad) const {
        const LayerCodec & codec    = *layer.codec;
        const float *      mean     = layer.mean(head, value);
        const int64_t      d        = x->ne[0];
        const bool         integers = layer.window_rows().integers;
        const int64_t      first    = value ? codec.n_head_kv * codec.d_k + head * codec.d_v : head * codec.d_k;
        for (int64_t t = t0; t < t0 + n; ++t) {
            auto *        out = (uint16_t *) (to + (size_t) t * stride);
            const float * row = row_f32(x, head, t);
            if (integers && tokens[t].pos >= layer.window->n_sink()) {
                uint8_t * packed = (uint8_t *) (out + row_elements(codec)) + recent_offset(codec, head, value);
                ops.pack_recent(row, mean, d, packed);
                ops.unpack_recent(packed, mean, d, out + first);
            } else {
                exact_row(ops, row, out + first, d, any_bad);
            }
        }
    }
};

int64_t query_runs(int64_t n_tokens) {
    return (n_tokens + TILE - 1) / TILE;
}

// Does any of these tokens see a coded cell of KV head h? In short texts all cells are exact.
bool any_sees(const ggml_tensor * mask_node, int64_t h, int64_t t0, int64_t t1) {
    const auto     in    = sources_of<MaskSources>(mask_node);
    const int64_t  n_kv  = in.cell_pos->ne[0];
    const MaskRows rows  = mask_rows(mask_node, n_kv);
    const int64_t  first = mask_of(in.mask, h) * in.tokens->ne[1];
    for (int64_t t = first + t0; t < first + t1; ++t) {
        const uint8_t * open = rows.open + t * rows.open_stride;
        if (std::find(open, open + n_kv / TILE, (uint8_t) 1) != open + n_kv / TILE) {
            return true;
        }
    }
    return false;
}

// A unit of projecting queries, which is up to TILE tokens of one query head. If mask_node is nullptr, the queries of
// all tokens are needed.
void project_queries(const LayerNodes & layer, const ggml_tensor * q, const ggml_tensor * mask_node, int64_t unit,
                     const ProjectedQueries & out) {
    const int64_t n_runs = query_runs(q->ne[2]);
    const int64_t head   = unit / n_runs;
    const int64_t t0     = unit % n_runs * TILE;
    const int64_t n      = std::min<int64_t>(TILE, q->ne[2] - t0);

    const auto &  codec   = *layer.codec;
    const int64_t n_group = layer.n_head / codec.n_head_kv;
    const int64_t h       = head / n_group;
    if (mask_node && !any_sees(mask_node, h, t0, t0 + n)) {
        return;
    }
    const Ops &       ops   = subkv::ops();
    const HeadCodec & key   = codec.k[(size_t) h];
    const int64_t     first = t0 * n_group + head % n_group; // row of KV head h
    const int64_t     row   = h * q->ne[2] * n_group;        // its first of all heads
    ops.project(key.decode, key.rank, codec.d_k, row_f32(q, head, t0), stride_f32(q, 2), n,
                layer.scale * codec.gamma[(size_t) h], out.qt + row * out.width + first * key.rank, n_group * key.rank);
    if (key.offset) { // not times gamma, since the mean is added back unscaled
        ops.project({ codec.centre[(size_t) h].mean.data() }, 1, codec.d_k, row_f32(q, head, t0), stride_f32(q, 2), n,
                    layer.scale, out.shift + row + first, n_group);
    }
}

} // namespace

void encode_op(ggml_tensor * dst, int ith, int nth, const LayerNodes & layer) {
    const auto &    codec = *layer.codec;
    const Ops &     ops   = subkv::ops();
    const auto      in    = sources_of<EncodeSources>(dst);
    const int64_t * cells = (const int64_t *) in.k_idxs->data;
    const int64_t   n     = in.k->ne[2];

    const EncodeResult     result(layer, n);
    const ProjectedQueries queries(layer, (char *) dst->data + result.queries_at, n);

    // A unit is a head, a side and every n_parts-th tile, because two threads must not write one tile. Consecutive
    // cells fill at most n_parts tiles. A run of tokens within a tile is coded in one call.
    const int64_t n_parts = (n + TILE - 2) / TILE + 1;
    const int64_t n_sides = codec.latent ? 1 : 2;
    const int64_t n_coded = n_parts * codec.n_head_kv * n_sides;
    for (int64_t unit = ith; unit < n_coded + query_runs(n) * layer.n_head; unit += nth) {
        if (unit >= n_coded) {
            project_queries(layer, in.q, in.mask_node, unit - n_coded, queries);
            continue;
        }
        const bool    value = unit % n_sides;
        const int64_t h     = unit / n_sides % codec.n_head_kv;
        const int64_t part  = unit / n_sides / codec.n_head_kv;

        const ggml_tensor * x     = value ? in.v : in.k;
        const ggml_tensor * cache = value ? in.v_cache : in.k_cache;
        const HeadCodec &   head  = codec.head(h, value);
        uint8_t *           tiles = (uint8_t *) cache->data + codec.tile_offset(h, value);
        const FreshRows     fresh = { layer, ops, x, token_rows(in.tokens), h, value };
        const bool          later = layer.bases->codes_later(value);
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
            for (int64_t i = t; bad > 0 && i < end; ++i) {
                if (i == end - 1 || !is_finite_row(row_f32(x, h, i), x->ne[0])) {
                    layer.reports->bad_rows(codec.il, value, token_rows(in.tokens)[i].pos, bad);
                    break;
                }
            }
            fresh(t, end - t, (char *) dst->data, result.fresh_stride, bad > 0);
        }
    }
}

//
// project: dst F32 [query_width, n_head * n_tokens] | ProjectSources
//

void project_op(ggml_tensor * dst, int ith, int nth, const LayerNodes & layer) {
    const auto in = sources_of<ProjectSources>(dst);

    const ProjectedQueries queries(layer, dst->data, in.q->ne[2]);
    for (int64_t unit = ith; unit < query_runs(in.q->ne[2]) * layer.n_head; unit += nth) {
        project_queries(layer, in.q, in.mask_node, unit, queries);
    }
}

} // namespace subkv
