// node_attend.cpp: attention over the coded cells, see nodes.cpp.
#include "attend_chunks.h"
#include "nodes.h"

#include <algorithm>

namespace subkv {

//
// attend: dst F32 [n_rows * (2 + width)] = m [n_rows], z [n_rows], acc [n_rows][width]
//         src: q, fresh (edge), k_view, v_view, mask, cell_pos, tokens
//

namespace {

constexpr int64_t MOST_CELLS = 1024;  // of one call
constexpr int64_t MOST_BIAS  = 32768; // and floats of their bias, which is to stay in the caches

// Cells per call: many, since a call begins with quantizing its queries. By shapes only, too.
int64_t span_of(int64_t n_tok) {
    return std::clamp<int64_t>(MOST_BIAS / n_tok / TILE * TILE, TILE, MOST_CELLS);
}

// Written for the compiler to vectorize: every layer of every token passes all its cells through here.
// Bias of one token over a tile: mask values, -INFINITY at exact positions, which are left to combine. Returns whether
// any is open.
bool bias_of_halves(const ggml_fp16_t * mask, const int32_t * cell_pos, int32_t pos, int32_t n_sink, int32_t n_recent,
                    float * bias) {
    int32_t open  = 0;
    int32_t other = 0; // values besides 0 and -INFINITY: ALiBi
    for (int64_t c = 0; c < TILE; ++c) {
        const int32_t exact  = is_exact(cell_pos[c], pos, n_sink, n_recent);
        const int32_t hidden = mask[c];
        other |= (hidden != 0) & (hidden != 0xFC00);
        bias[c] = ((hidden != 0) | exact) != 0 ? -INFINITY : 0.0f;
        open |= (hidden == 0) & (exact == 0);
    }
    for (int64_t c = 0; other != 0 && c < TILE; ++c) {
        bias[c] = is_exact(cell_pos[c], pos, n_sink, n_recent) ? -INFINITY : ggml_fp16_to_fp32(mask[c]);
        open |= bias[c] != -INFINITY;
    }
    return open != 0;
}

bool bias_of_floats(const float * mask, const int32_t * cell_pos, int32_t pos, int32_t n_sink, int32_t n_recent,
                    float * bias) {
    int32_t open = 0;
    for (int64_t c = 0; c < TILE; ++c) {
        bias[c] = is_exact(cell_pos[c], pos, n_sink, n_recent) ? -INFINITY : mask[c];
        open |= bias[c] != -INFINITY;
    }
    return open != 0;
}

// bias [n_tok][n] of tokens [t0, t0 + n_tok) over cells [c0, c0 + n); open [n / TILE]: does a token see any of the tile?
void coded_bias(const LayerNodes & layer, const ggml_tensor * dst, const AttendShape & s, int64_t t0, int64_t n_tok,
                int64_t c0, int64_t n, float * bias, bool * open) {
    const ggml_tensor * mask     = dst->src[4];
    const int32_t *     tokens   = (const int32_t *) dst->src[6]->data;
    const int32_t *     cell_pos = (const int32_t *) dst->src[5]->data + t0 / s.n_tps * s.n_kv + c0;
    const int32_t       n_sink   = layer.window->n_sink();
    const int32_t       n_recent = layer.window->n_recent();

    std::fill(open, open + n / TILE, false);
    for (int64_t t = 0; t < n_tok; ++t) {
        const int32_t pos = tokens[4 * (t0 + t)];
        for (int64_t c = 0; c < n; c += TILE) {
            const int64_t at  = (t0 + t) * s.n_kv + c0 + c;
            float *       row = bias + t * n + c;
            open[c / TILE] |=
                mask->type == GGML_TYPE_F32 ?
                    bias_of_floats((const float *) mask->data + at, cell_pos + c, pos, n_sink, n_recent, row) :
                    bias_of_halves((const ggml_fp16_t *) mask->data + at, cell_pos + c, pos, n_sink, n_recent, row);
        }
    }
}

// Calls use(first, last) for every run of tiles that are open.
template <typename Use> void for_open(const bool * open, int64_t n_tiles, Use use) {
    for (int64_t first = 0; first < n_tiles;) {
        const int64_t last = std::find(open + first, open + n_tiles, !open[first]) - open;
        if (open[first]) {
            use(first, last);
        }
        first = last;
    }
}

// Queries of tokens [t0, t0 + n_tok) for KV heads [h0, h1). Per head, s.block * s.n_group rows apart: qt
// [n_tok * n_group][rank] of MAX_HEAD_SIZE at most, shift [n_tok * n_group] where keys are coded less their mean.
void project_queries(const LayerNodes & layer, const ggml_tensor * q, const AttendShape & s, int64_t t0, int64_t n_tok,
                     int64_t h0, int64_t h1, float * qt, float * shift) {
    const auto & codec = *layer.codec;
    const Ops &  ops   = subkv::ops();
    for (int64_t h = h0; h < h1; ++h) {
        const HeadCodec & head = codec.k[(size_t) h];
        float *           out  = qt + h * s.block * s.n_group * MAX_HEAD_SIZE;
        for (int64_t g = 0; g < s.n_group; ++g) {
            const float * rows = row_f32(q, h * s.n_group + g, t0);
            ops.project(head.decode, head.rank, codec.d_k, rows, stride_f32(q, 2), n_tok,
                        layer.scale * codec.gamma[(size_t) h], out + g * head.rank, s.n_group * head.rank);
            if (head.offset) { // not times gamma: the mean is added back as it is
                ops.project(codec.centre[(size_t) h].mean.data(), 1, codec.d_k, rows, stride_f32(q, 2), n_tok,
                            layer.scale, shift + h * s.block * s.n_group + g, s.n_group);
            }
        }
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

    const int64_t span    = span_of(s.block);
    const int64_t n_units = s.n_blocks * s.n_parts * s.n_split;

    static thread_local std::vector<float> qt_buf, shift_buf, bias_buf;
    static thread_local ChunkedAttention   chunked;
    float *                                bias  = scratch(bias_buf, s.block * span);
    float *                                qt    = scratch(qt_buf, s.n_head_kv * s.block * s.n_group * MAX_HEAD_SIZE);
    float *                                shift = scratch(shift_buf, s.n_head_kv * s.block * s.n_group);
    bool                                   open[MOST_CELLS / TILE];
    float                                  slope[MAX_GROUP];
    int64_t                                projected = -1; // whose queries qt and shift hold

    // Splits of one block and part go to one thread as far as possible, so that its queries are projected once. Whole
    // blocks are dealt out in turn: under a causal mask the later ones have more to do.
    const bool    in_turn = s.n_split == 1;
    const int64_t first   = in_turn ? ith : n_units * ith / nth;
    const int64_t last    = in_turn ? n_units : n_units * (ith + 1) / nth;
    for (int64_t unit = first; unit < last; unit += in_turn ? nth : 1) {
        const int64_t split   = unit % s.n_split;
        const int64_t queries = unit / s.n_split;
        const int64_t part    = queries % s.n_parts;
        const int64_t block   = queries / s.n_parts;
        const int64_t h0      = s.n_head_kv / s.n_parts * part;
        const int64_t h1      = h0 + s.n_head_kv / s.n_parts;
        const int64_t per     = s.n_blocks / s.n_stream;
        const int64_t stream  = block / per;
        const int64_t t0      = stream * s.n_tps + block % per * s.block;
        const int64_t n_tok   = std::min(s.block, (stream + 1) * s.n_tps - t0);

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
        // of the cells from c0 + c on, whose bias begins at bias + c
        const auto args_of = [&](int64_t h, int64_t c0, int64_t c, int64_t n, int64_t bias_stride) {
            const int64_t row = s.row(split, h, t0);
            AttendArgs    a;
            a.k           = &codec.k[(size_t) h];
            a.v           = &codec.v[(size_t) h];
            a.k_tiles     = tiles_of(k_view, c0 + c, codec.tile_offset(h, false));
            a.v_tiles     = tiles_of(v_view, c0 + c, codec.tile_offset(h, true));
            a.k_stride    = TILE * (int64_t) k_view->nb[1];
            a.v_stride    = TILE * (int64_t) v_view->nb[1];
            a.n_cells     = n;
            a.n_tok       = n_tok;
            a.n_group     = s.n_group;
            a.qt          = qt + h * s.block * s.n_group * MAX_HEAD_SIZE;
            a.shift       = a.k->offset ? shift + h * s.block * s.n_group : nullptr;
            a.bias        = bias + c;
            a.bias_stride = bias_stride;
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
            const int64_t n = std::min(span, c_end - c0);
            coded_bias(layer, dst, s, t0, n_tok, c0, n, bias, open);
            for_open(open, n / TILE, [&](int64_t first_tile, int64_t last_tile) {
                if (projected != queries) { // not before a cell is seen: in short texts all are exact
                    project_queries(layer, q, s, t0, n_tok, h0, h1, qt, shift);
                    projected = queries;
                }
                for (int64_t h = h0; h < h1; ++h) {
                    alibi_slopes(layer, h * s.n_group, s.n_group, slope);
                    const int64_t    c = first_tile * TILE;
                    const AttendArgs a = args_of(h, c0, c, last_tile * TILE - c, n);
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
            chunked.finish(args_of(h, 0, 0, 0, 0), h);
        }
    }
}

} // namespace subkv
