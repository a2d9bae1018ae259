// node_attend.cpp: attention over the coded cells, see nodes.cpp.
#include "attend_chunks.h"
#include "nodes.h"

#include <algorithm>
#include <functional>

namespace subkv {

//
// attend: dst F32 [n_rows * (2 + width)] = m [n_rows], z [n_rows], acc [n_rows][width]
//         src: q, fresh, k_view, v_view, mask, cell_pos, tokens, written (edge), mask node (of few tokens)
//

namespace {

constexpr int64_t MOST_BIAS = 32768; // floats of the bias that attend fills for itself, which is to stay in the caches

// Cells per call: many, since a call begins with quantizing its queries. By shapes only, too.
int64_t span_of(int64_t n_tok) {
    return std::max<int64_t>(MOST_BIAS / n_tok / TILE * TILE, TILE);
}

// Calls use(first, last) for every run of tiles that are open.
template <typename Use> void for_open(const uint8_t * open, int64_t n_tiles, Use use) {
    for (int64_t first = 0; first < n_tiles;) {
        const int64_t last = std::find(open + first, open + n_tiles, (uint8_t) !open[first]) - open;
        if (open[first]) {
            use(first, last);
        }
        first = last;
    }
}

} // namespace

void attend_op(ggml_tensor * dst, int ith, int nth, void * userdata) {
    const auto &        layer  = *(const LayerNodes *) userdata;
    const auto &        codec  = *layer.codec;
    const Ops &         ops    = subkv::ops();
    const ggml_tensor * q      = dst->src[0];
    const ggml_tensor * k_view = dst->src[2];
    const ggml_tensor * v_view = dst->src[3];
    const AttendShape   s      = attend_shape(layer, q, k_view);

    float * m   = (float *) dst->data;
    float * z   = m + s.n_rows;
    float * acc = z + s.n_rows;

    const bool             shared  = dst->src[8] != nullptr; // the mask node
    const MaskInputs       inputs  = { dst->src[4], dst->src[5], dst->src[6] };
    const ProjectedQueries queries = projected_queries(layer, dst->src[1], s.n_tokens);
    const int64_t          span    = shared ? s.split : span_of(s.block);
    const int64_t          n_units = s.n_blocks * s.n_parts * s.n_split;

    static thread_local std::vector<float>   bias_buf;
    static thread_local std::vector<uint8_t> open_buf;
    static thread_local ChunkedAttention     chunked;
    uint8_t *                                open = scratch(open_buf, (shared ? 1 : s.block + 1) * (span / TILE));
    MaskRows                                 own; // filled for one span at a time
    own.bias        = shared ? nullptr : scratch(bias_buf, s.block * span);
    own.open        = open + span / TILE;
    own.bias_stride = span;
    own.open_stride = span / TILE;
    float slope[MAX_GROUP];

    // Whole blocks are dealt out in turn: under a causal mask the later ones have more to do.
    const bool    in_turn = s.n_split == 1;
    const int64_t first   = in_turn ? ith : n_units * ith / nth;
    const int64_t last    = in_turn ? n_units : n_units * (ith + 1) / nth;
    for (int64_t unit = first; unit < last; unit += in_turn ? nth : 1) {
        const int64_t split  = unit % s.n_split;
        const int64_t part   = unit / s.n_split % s.n_parts;
        const int64_t block  = unit / s.n_split / s.n_parts;
        const int64_t h0     = s.n_head_kv / s.n_parts * part;
        const int64_t h1     = h0 + s.n_head_kv / s.n_parts;
        const int64_t per    = s.n_blocks / s.n_stream;
        const int64_t stream = block / per;
        const int64_t t0     = stream * s.n_tps + block % per * s.block;
        const int64_t n_tok  = std::min(s.block, (stream + 1) * s.n_tps - t0);

        for (int64_t h = h0; h < h1; ++h) {
            const int64_t row = s.row(split, h, t0);
            std::fill(m + row, m + row + n_tok * s.n_group, -INFINITY);
            std::fill(z + row, z + row + n_tok * s.n_group, 0.0f);
            std::fill(acc + row * s.width, acc + (row + n_tok * s.n_group) * s.width, 0.0f);
        }
        if (layer.adaptive) {
            const auto first_stream = (int64_t) (k_view->view_offs / k_view->nb[2]);
            chunked.begin(*layer.adaptive, (uint32_t) (first_stream + stream), h0, h1);
        }
        const auto tiles_of = [&](const ggml_tensor * view, int64_t c, int64_t offset) {
            return (const uint8_t *) view->data + stream * view->nb[2] + c * view->nb[1] + offset;
        };
        const auto args_of = [&](int64_t h, int64_t c, int64_t n, const MaskRows & mask) { // mask: from cell c on
            const int64_t row = s.row(split, h, t0);
            AttendArgs    a;
            a.k           = &codec.k[(size_t) h];
            a.v           = &codec.v[(size_t) h];
            a.k_tiles     = tiles_of(k_view, c, codec.tile_offset(h, false));
            a.v_tiles     = tiles_of(v_view, c, codec.tile_offset(h, true));
            a.k_stride    = TILE * (int64_t) k_view->nb[1];
            a.v_stride    = TILE * (int64_t) v_view->nb[1];
            a.n_cells     = n;
            a.n_tok       = n_tok;
            a.n_group     = s.n_group;
            a.qt          = queries.rows(s, h) + t0 * s.n_group * a.k->rank;
            a.shift       = a.k->offset ? queries.shift + (h * s.n_tokens + t0) * s.n_group : nullptr;
            a.bias        = mask.bias;
            a.bias_stride = mask.bias_stride;
            a.slope       = slope;
            a.softcap     = layer.softcap;
            a.m           = m + row;
            a.z           = z + row;
            a.acc         = acc + row * s.width;
            a.acc_stride  = s.width;
            return a;
        };
        const int64_t c_end = std::min(s.n_kv, (split + 1) * s.split);
        for (int64_t c0 = split * s.split; c0 < c_end; c0 += span) {
            const int64_t  n    = std::min(span, c_end - c0);
            const MaskRows mask = shared ? mask_rows(dst->src[8], s.n_kv).of(t0, c0) : own;
            std::fill(open, open + n / TILE, (uint8_t) 0);
            for (int64_t t = 0; t < n_tok; ++t) {
                uint8_t * seen = mask.open + t * mask.open_stride;
                if (!shared) {
                    fill_mask_row(layer, inputs, t0 + t, c0, n, mask.bias + t * mask.bias_stride, seen);
                }
                std::transform(seen, seen + n / TILE, open, open, std::bit_or<uint8_t>());
            }
            for_open(open, n / TILE, [&](int64_t first_tile, int64_t last_tile) {
                const int64_t  c    = first_tile * TILE;
                const MaskRows rows = mask.of(0, c);
                for (int64_t h = h0; h < h1; ++h) {
                    alibi_slopes(layer, h * s.n_group, s.n_group, slope);
                    const AttendArgs a = args_of(h, c0 + c, last_tile * TILE - c, rows);
                    if (layer.adaptive) {
                        chunked.attend(ops, a, h,
                                       tiles_of(k_view, c0 + c, TILE * layer.adaptive->chunk_offset(h, false)),
                                       tiles_of(v_view, c0 + c, TILE * layer.adaptive->chunk_offset(h, true)));
                    } else {
                        ops.attend(a);
                    }
                }
            });
        }
        for (int64_t h = h0; layer.adaptive && h < h1; ++h) {
            chunked.finish(args_of(h, 0, 0, own), h);
        }
    }
}

} // namespace subkv
