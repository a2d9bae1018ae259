// nodes.cpp: the graph nodes of a coded layer. Per layer and run of the graph:
//
//   encode        k, v -> rows at their cells; also rounds k, v to half precision ("fresh" rows)
//   attend        query x coded cells -> partial (m, z, sum of value coefficients) per split of the cells
//   combine       merge the splits, D_v, add the exact window (fresh rows and stored ones), attention sinks, normalise
//   store_window  fresh rows -> window slots; after combine, because it overwrites rows that combine reads
//
// Shapes follow from tensor shapes alone, so that a graph can be kept and reused (llama.cpp does).
#include "cache.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace subkv {

namespace {

// How attend cuts its work. Depends on shapes only: results are the same for any number of threads.
struct AttendShape {
    int64_t n_kv, n_stream, n_tokens, n_tps; // n_tps: tokens per stream
    int64_t n_head_kv, n_group;
    int64_t block, n_blocks; // tokens per block (within a stream), blocks of all streams
    int64_t split, n_split;  // cells per split, splits
    int64_t n_rows;          // partial rows
    int64_t width;           // floats per partial row of value coefficients

    // row of (split, head, token): n_group rows follow each other
    int64_t row(int64_t s, int64_t h, int64_t t) const { return ((s * n_head_kv + h) * n_tokens + t) * n_group; }
};

AttendShape attend_shape(const LayerNodes & layer, const ggml_tensor * q, const ggml_tensor * k_view) {
    AttendShape s;
    s.n_kv      = k_view->ne[1];
    s.n_stream  = k_view->ne[2];
    s.n_tokens  = q->ne[2];
    s.n_tps     = s.n_tokens / s.n_stream;
    s.n_head_kv = layer.codec->n_head_kv;
    s.n_group   = layer.n_head / s.n_head_kv;
    // about 128 query rows per block keep a tile of dequantized coefficients busy
    s.block     = std::min(s.n_tps, std::max<int64_t>(1, 128 / s.n_group));
    s.n_blocks  = (s.n_tps + s.block - 1) / s.block * s.n_stream;
    // decode: up to 64 splits so that every thread gets work; prefill has enough blocks
    const int64_t most = std::max<int64_t>(1, (s.n_tps == 1 ? 64 : 16) / s.n_blocks);
    const int64_t want = std::min(most, (s.n_kv + 255) / 256);
    s.split            = ((s.n_kv + want - 1) / want + 63) / 64 * 64;
    s.n_split          = (s.n_kv + s.split - 1) / s.split;
    s.n_rows           = s.n_split * s.n_head_kv * s.n_tokens * s.n_group;
    s.width            = 8;
    for (const auto & head : layer.codec->v) {
        s.width = std::max<int64_t>(s.width, head.rank);
    }
    return s;
}

const float * row_f32(const ggml_tensor * t, int64_t head, int64_t token) {
    return (const float *) ((const char *) t->data + head * t->nb[1] + token * t->nb[2]);
}

int64_t stride_f32(const ggml_tensor * t, int dim) {
    return (int64_t) (t->nb[dim] / sizeof(float));
}

// Mask values are 0, -INFINITY or, with ALiBi, a negative distance.
float mask_value(const ggml_tensor * mask, int64_t i) {
    if (mask->type == GGML_TYPE_F32) {
        return ((const float *) mask->data)[i];
    }
    const ggml_fp16_t h = ((const ggml_fp16_t *) mask->data)[i];
    return h == 0 ? 0.0f : h == 0xFC00 ? -INFINITY : ggml_fp16_to_fp32(h);
}

void alibi_slopes(const LayerNodes & layer, int64_t first_head, int64_t n, float * slope) {
    // Press et al., arXiv:2108.12409, in the form for head counts that are no power of two
    const int   n_log2 = 1 << (int) std::floor(std::log2((float) layer.n_head));
    const float m0     = std::pow(2.0f, -layer.max_alibi_bias / (float) n_log2);
    const float m1     = std::pow(2.0f, -layer.max_alibi_bias / 2.0f / (float) n_log2);
    for (int64_t i = 0; i < n; ++i) {
        const int64_t h = first_head + i;
        slope[i]        = layer.max_alibi_bias <= 0.0f ? 1.0f :
                          h < n_log2                   ? std::pow(m0, (float) (h + 1)) :
                                                         std::pow(m1, (float) (2 * (h - n_log2) + 1));
    }
}

template <typename T> T * scratch(std::vector<T> & v, int64_t n) {
    if ((int64_t) v.size() < n) {
        v.resize((size_t) n);
    }
    return v.data();
}

//
// encode: dst F16 [n_embd_k_gqa + n_embd_v_gqa, n_tokens] | src: k, v, k_cache, v_cache, k_idxs, v_idxs
//

// Half-precision copy of one head's rows; a row that is not finite becomes zero, like its codes.
void fresh_rows(const Ops & ops, const ggml_tensor * x, int64_t head, int64_t t0, int64_t n, ggml_tensor * dst, int64_t offset,
                bool any_bad) {
    const int64_t d = x->ne[0];
    for (int64_t t = t0; t < t0 + n; ++t) {
        auto *        out = (uint16_t *) ((char *) dst->data + t * dst->nb[1]) + offset;
        const float * row = row_f32(x, head, t);
        if (any_bad && !std::all_of(row, row + d, [](float f) { return std::isfinite(f); })) {
            std::memset(out, 0, (size_t) d * sizeof(uint16_t));
            continue;
        }
        ops.to_half(row, out, d);
    }
}

void encode_op(ggml_tensor * dst, int ith, int nth, void * userdata) {
    const auto &        layer   = *(const LayerNodes *) userdata;
    const auto &        codec   = *layer.codec;
    const Ops &         ops     = subkv::ops();
    const ggml_tensor * k       = dst->src[0];
    const ggml_tensor * v       = dst->src[1];
    const int64_t *     k_cells = (const int64_t *) dst->src[4]->data;
    const int64_t       n       = k->ne[2];

    constexpr int64_t BLOCK    = 32;
    const int64_t     n_blocks = (n + BLOCK - 1) / BLOCK;
    const int64_t     n_units  = n_blocks * codec.n_head_kv * 2;
    for (int64_t unit = ith; unit < n_units; unit += nth) {
        const bool    value = unit % 2;
        const int64_t h     = unit / 2 % codec.n_head_kv;
        const int64_t t0    = unit / 2 / codec.n_head_kv * BLOCK;
        const int64_t nt    = std::min(BLOCK, n - t0);

        const ggml_tensor * x      = value ? v : k;
        const ggml_tensor * cache  = dst->src[value ? 3 : 2];
        const HeadCodec &   head   = (value ? codec.v : codec.k)[(size_t) h];
        uint8_t *           rows   = (uint8_t *) cache->data + (value ? codec.v_offset : codec.k_offset)[(size_t) h];
        const int64_t       offset = value ? codec.n_head_kv * codec.d_k + h * codec.d_v : h * codec.d_k;

        const int64_t bad =
            ops.encode_rows(head, row_f32(x, h, t0), stride_f32(x, 2), nt, k_cells + t0, rows, (int64_t) cache->nb[1]);
        if (bad > 0) {
            layer.n_zero_rows->fetch_add((uint64_t) bad);
        }
        fresh_rows(ops, x, h, t0, nt, dst, offset, bad > 0);
    }
}

//
// attend: dst F32 [n_rows * (2 + width)] = m [n_rows], z [n_rows], acc [n_rows][width]
//         src: q, fresh (edge), k_view, v_view, mask, cell_pos, tokens
//

constexpr int64_t CHUNK = 256; // cells whose bias is prepared at a time; their rows stay in the caches for all heads

// bias [n_tok][CHUNK] of tokens [t0, t0 + n_tok) over cells [c0, c0 + n): exact positions are left to combine.
// false: nothing to attend to.
bool coded_bias(const LayerNodes & layer, const ggml_tensor * dst, const AttendShape & s, int64_t t0, int64_t n_tok, int64_t c0,
                int64_t n, float * bias) {
    const ggml_tensor * mask     = dst->src[4];
    const int32_t *     tokens   = (const int32_t *) dst->src[6]->data;
    const int32_t *     cell_pos = (const int32_t *) dst->src[5]->data + t0 / s.n_tps * s.n_kv + c0;
    const int32_t       n_sink   = layer.window->n_sink();
    const int32_t       n_recent = layer.window->n_recent();

    bool any = false;
    for (int64_t t = 0; t < n_tok; ++t) {
        const int32_t pos  = tokens[4 * (t0 + t)];
        const int64_t at   = (t0 + t) * s.n_kv + c0;
        float *       row  = bias + t * CHUNK;
        bool          seen = false;
        for (int64_t c = 0; c < n; ++c) {
            row[c] = is_exact(cell_pos[c], pos, n_sink, n_recent) ? -INFINITY : mask_value(mask, at + c);
            seen |= row[c] != -INFINITY;
        }
        any |= seen;
    }
    return any;
}

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

    // One unit is a block of tokens, a split of cells, and all heads (their rows share cache lines) unless that
    // leaves threads without work.
    const bool    per_head = s.n_blocks * s.n_split < 8;
    const int64_t n_parts  = per_head ? s.n_head_kv : 1;
    const int64_t n_units  = s.n_blocks * s.n_split * n_parts;

    static thread_local std::vector<float> qt_buf, bias_buf;
    const int64_t                          rank_max = MAX_HEAD_SIZE;
    float * bias = scratch(bias_buf, s.block * CHUNK);
    float * qt   = scratch(qt_buf, s.n_head_kv * s.block * s.n_group * rank_max);
    float   slope[MAX_GROUP];
    int64_t projected = -1; // block whose queries qt holds

    // neighbouring units of a thread share a block, so that its queries are projected once
    const int64_t first = n_units * ith / nth;
    const int64_t last  = n_units * (ith + 1) / nth;
    for (int64_t unit = first; unit < last; ++unit) {
        const int64_t part   = unit % n_parts;
        const int64_t split  = unit / n_parts % s.n_split;
        const int64_t block  = unit / n_parts / s.n_split;
        const int64_t h0     = per_head ? part : 0;
        const int64_t h1     = per_head ? part + 1 : s.n_head_kv;
        const int64_t per    = s.n_blocks / s.n_stream;
        const int64_t stream = block / per;
        const int64_t t0     = stream * s.n_tps + block % per * s.block;
        const int64_t n_tok  = std::min(s.block, (stream + 1) * s.n_tps - t0);

        if (projected != block || per_head) {
            for (int64_t h = h0; h < h1; ++h) {
                const HeadCodec & head = codec.k[(size_t) h];
                float *           out  = qt + h * s.block * s.n_group * rank_max;
                for (int64_t g = 0; g < s.n_group; ++g) {
                    ops.project(head.decode, head.rank, codec.d_k, row_f32(q, h * s.n_group + g, t0), stride_f32(q, 2), n_tok,
                                layer.scale * codec.gamma[(size_t) h], out + g * head.rank, s.n_group * head.rank);
                }
            }
            projected = block;
        }
        for (int64_t h = h0; h < h1; ++h) {
            const int64_t row = s.row(split, h, t0);
            std::fill(m + row, m + row + n_tok * s.n_group, -INFINITY);
            std::fill(z + row, z + row + n_tok * s.n_group, 0.0f);
            std::fill(acc + row * s.width, acc + (row + n_tok * s.n_group) * s.width, 0.0f);
        }
        const int64_t c_end = std::min(s.n_kv, (split + 1) * s.split);
        for (int64_t c0 = split * s.split; c0 < c_end; c0 += CHUNK) {
            const int64_t n = std::min(CHUNK, c_end - c0);
            if (!coded_bias(layer, dst, s, t0, n_tok, c0, n, bias)) {
                continue;
            }
            for (int64_t h = h0; h < h1; ++h) {
                const int64_t row = s.row(split, h, t0);
                alibi_slopes(layer, h * s.n_group, s.n_group, slope);
                AttendArgs a;
                a.k           = &codec.k[(size_t) h];
                a.v           = &codec.v[(size_t) h];
                a.k_rows      = (const uint8_t *) k_view->data + stream * k_view->nb[2] + c0 * k_view->nb[1] + codec.k_offset[(size_t) h];
                a.v_rows      = (const uint8_t *) v_view->data + stream * v_view->nb[2] + c0 * v_view->nb[1] + codec.v_offset[(size_t) h];
                a.k_stride    = (int64_t) k_view->nb[1];
                a.v_stride    = (int64_t) v_view->nb[1];
                a.n_cells     = n;
                a.n_tok       = n_tok;
                a.n_group     = s.n_group;
                a.qt          = qt + h * s.block * s.n_group * rank_max;
                a.bias        = bias;
                a.bias_stride = CHUNK;
                a.slope       = slope;
                a.softcap     = layer.softcap;
                a.m           = m + row;
                a.z           = z + row;
                a.acc         = acc + row * s.width;
                a.acc_stride  = s.width;
                ops.attend(a);
            }
        }
    }
}

//
// combine: dst F32 [d_v * n_head, n_tokens]
//          src: partial, q, fresh, window rows, mask, tokens, slots, k_view (shape), sinks (optional)
//

// The exact keys of a run of tokens of one sequence: rows and where their mask value sits.
struct ExactKeys {
    std::vector<int32_t>          pos, cell;
    std::vector<const uint16_t *> row; // the whole row; heads are offsets into it
};

void gather_exact(const LayerNodes & layer, const ggml_tensor * dst, const AttendShape & s, int64_t t0, int64_t n_tok,
                  ExactKeys & keys) {
    const ggml_tensor * fresh    = dst->src[2];
    const ggml_tensor * window   = dst->src[3];
    const int32_t *     tokens   = (const int32_t *) dst->src[5]->data;
    const int32_t *     slots    = (const int32_t *) dst->src[6]->data;
    const int64_t       n_slots  = dst->src[6]->ne[0];
    const int32_t       n_sink   = layer.window->n_sink();
    const int32_t       n_recent = layer.window->n_recent();

    keys.pos.clear();
    keys.cell.clear();
    keys.row.clear();
    int32_t lo = INT32_MAX, hi = INT32_MIN;
    for (int64_t t = t0; t < t0 + n_tok; ++t) {
        lo = std::min(lo, tokens[4 * t]);
        hi = std::max(hi, tokens[4 * t]);
    }
    const auto may_see = [&](int32_t p) { return p >= 0 && (p < n_sink || (p <= hi && p > lo - n_recent)); };
    const auto add     = [&](int32_t p, int32_t cell, const ggml_tensor * rows, int64_t i) {
        keys.pos.push_back(p);
        keys.cell.push_back(cell);
        keys.row.push_back((const uint16_t *) ((const char *) rows->data + i * rows->nb[1]));
    };
    if (layer.window->n_slots() > 0) {
        const int32_t first = tokens[4 * t0 + 3];
        const int64_t count = n_slots / std::max<int64_t>(1, layer.window->n_seq());
        for (int64_t i = first; i < first + count; ++i) {
            if (slots[n_slots + i] >= 0 && may_see(slots[i])) {
                add(slots[i], slots[n_slots + i], window, i);
            }
        }
    }
    const int64_t stream = t0 / s.n_tps;
    for (int64_t j = stream * s.n_tps; j < (stream + 1) * s.n_tps; ++j) {
        if (may_see(tokens[4 * j])) {
            add(tokens[4 * j], tokens[4 * j + 2], fresh, j);
        }
    }
}

void combine_op(ggml_tensor * dst, int ith, int nth, void * userdata) {
    const auto &        layer    = *(const LayerNodes *) userdata;
    const auto &        codec    = *layer.codec;
    const Ops &         ops      = subkv::ops();
    const ggml_tensor * q        = dst->src[1];
    const ggml_tensor * mask     = dst->src[4];
    const int32_t *     tokens   = (const int32_t *) dst->src[5]->data;
    const ggml_tensor * sinks    = dst->src[8];
    const AttendShape   s        = attend_shape(layer, q, dst->src[7]);
    const float *       m_part   = (const float *) dst->src[0]->data;
    const float *       z_part   = m_part + s.n_rows;
    const float *       acc_part = z_part + s.n_rows;
    const int64_t       d_k      = codec.d_k;
    const int64_t       d_v      = codec.d_v;
    const int32_t       n_sink   = layer.window->n_sink();
    const int32_t       n_recent = layer.window->n_recent();

    constexpr int64_t BLOCK = 32;
    static thread_local std::vector<float>            qs_buf, bias_buf, m_buf, z_buf, out_buf, coef_buf;
    static thread_local std::vector<const uint16_t *> ptr_buf;
    static thread_local ExactKeys                     keys;

    // runs of tokens of one sequence
    struct Run {
        int64_t t0, n;
    };
    std::vector<Run> runs;
    for (int64_t t = 0; t < s.n_tokens;) {
        int64_t end = t + 1;
        while (end < s.n_tokens && end - t < BLOCK && end / s.n_tps == t / s.n_tps && tokens[4 * end + 3] == tokens[4 * t + 3]) {
            ++end;
        }
        runs.push_back({ t, end - t });
        t = end;
    }
    const int64_t n_units = (int64_t) runs.size() * s.n_head_kv;
    int64_t       gathered = -1;
    for (int64_t unit = n_units * ith / nth; unit < n_units * (ith + 1) / nth; ++unit) {
        const int64_t i_run  = unit / s.n_head_kv;
        const int64_t h      = unit % s.n_head_kv;
        const int64_t t0     = runs[(size_t) i_run].t0;
        const int64_t n_tok  = runs[(size_t) i_run].n;
        const int64_t n_rows = n_tok * s.n_group;

        float *           m    = scratch(m_buf, n_rows);
        float *           z    = scratch(z_buf, n_rows);
        float *           out  = scratch(out_buf, n_rows * d_v);
        float *           coef = scratch(coef_buf, s.width);
        const HeadCodec & head = codec.v[(size_t) h];
        std::fill(out, out + n_rows * d_v, 0.0f);
        for (int64_t r = 0; r < n_rows; ++r) {
            m[r] = -INFINITY;
            for (int64_t i = 0; i < s.n_split; ++i) {
                m[r] = std::max(m[r], m_part[s.row(i, h, t0) + r]);
            }
            z[r] = 0.0f;
            if (m[r] == -INFINITY) {
                continue;
            }
            std::fill(coef, coef + head.rank, 0.0f);
            for (int64_t i = 0; i < s.n_split; ++i) {
                const int64_t row = s.row(i, h, t0) + r;
                if (m_part[row] == -INFINITY) {
                    continue;
                }
                const float w = std::exp(m_part[row] - m[r]);
                z[r] += w * z_part[row];
                for (int64_t c = 0; c < head.rank; ++c) {
                    coef[c] += w * acc_part[row * s.width + c];
                }
            }
            ops.reconstruct(head.decode, head.rank, d_v, coef, out + r * d_v);
        }

        if (gathered != i_run) {
            gather_exact(layer, dst, s, t0, n_tok, keys);
            gathered = i_run;
            const int64_t n_keys = (int64_t) keys.pos.size();
            float *       bias   = scratch(bias_buf, std::max<int64_t>(1, n_tok * n_keys));
            for (int64_t t = 0; t < n_tok; ++t) {
                for (int64_t i = 0; i < n_keys; ++i) {
                    const bool exact = is_exact(keys.pos[(size_t) i], tokens[4 * (t0 + t)], n_sink, n_recent);
                    bias[t * n_keys + i] = exact ? mask_value(mask, (t0 + t) * s.n_kv + keys.cell[(size_t) i]) : -INFINITY;
                }
            }
        }
        const int64_t n_keys = (int64_t) keys.pos.size();
        float         slope[MAX_GROUP];
        alibi_slopes(layer, h * s.n_group, s.n_group, slope);
        if (n_keys > 0) {
            const uint16_t ** k_rows = scratch(ptr_buf, 2 * n_keys);
            const uint16_t ** v_rows = k_rows + n_keys;
            for (int64_t i = 0; i < n_keys; ++i) {
                k_rows[i] = keys.row[(size_t) i] + h * d_k;
                v_rows[i] = keys.row[(size_t) i] + s.n_head_kv * d_k + h * d_v;
            }
            float * qs = scratch(qs_buf, n_rows * d_k);
            for (int64_t t = 0; t < n_tok; ++t) {
                for (int64_t g = 0; g < s.n_group; ++g) {
                    const float * x = row_f32(q, h * s.n_group + g, t0 + t);
                    float *       y = qs + (t * s.n_group + g) * d_k;
                    for (int64_t j = 0; j < d_k; ++j) {
                        y[j] = layer.scale * x[j];
                    }
                }
            }
            ExactArgs a;
            a.d_k         = d_k;
            a.d_v         = d_v;
            a.n_keys      = n_keys;
            a.k           = k_rows;
            a.v           = v_rows;
            a.n_tok       = n_tok;
            a.n_group     = s.n_group;
            a.q           = qs;
            a.bias        = bias_buf.data();
            a.bias_stride = n_keys;
            a.slope       = slope;
            a.softcap     = layer.softcap;
            a.m           = m;
            a.z           = z;
            a.acc         = out;
            a.acc_stride  = d_v;
            ops.attend_exact(a);
        }
        for (int64_t t = 0; t < n_tok; ++t) {
            for (int64_t g = 0; g < s.n_group; ++g) {
                const int64_t r   = t * s.n_group + g;
                const int64_t hq  = h * s.n_group + g;
                float *       y   = (float *) ((char *) dst->data + (t0 + t) * dst->nb[1]) + hq * d_v;
                float         w   = 1.0f;
                float         sum = z[r];
                if (sinks) { // a logit without a value: Xiao et al., arXiv:2309.17453, as in gpt-oss
                    const float sink = ((const float *) sinks->data)[hq];
                    const float top  = std::max(m[r], sink);
                    w                = std::exp(m[r] - top);
                    sum              = sum * w + std::exp(sink - top);
                }
                w = sum > 0.0f ? w / sum : 0.0f; // a token that may see nothing gets zeros
                for (int64_t j = 0; j < d_v; ++j) {
                    y[j] = w * out[r * d_v + j];
                }
            }
        }
    }
}

//
// store_window: in place on the window rows | src: window rows, fresh, slots, combine (edge)
//

void store_window_op(ggml_tensor * dst, int ith, int nth, void *) {
    const ggml_tensor * fresh   = dst->src[1];
    const int64_t       n_slots = dst->src[2]->ne[0];
    const int32_t *     token   = (const int32_t *) dst->src[2]->data + 2 * n_slots;
    for (int64_t i = ith; i < n_slots; i += nth) {
        if (token[i] >= 0) {
            std::memcpy((char *) dst->data + i * dst->nb[1], (const char *) fresh->data + token[i] * fresh->nb[1], dst->nb[1]);
        }
    }
}

} // namespace

ggml_tensor * build_attn_nodes(LayerNodes & layer, const AttnBuild & b) {
    layer.scale          = b.scale;
    layer.softcap        = b.softcap;
    layer.max_alibi_bias = b.max_alibi_bias;

    ggml_context * ctx = b.ctx;
    const auto     f32 = [&](ggml_tensor * t) {
        return t->type == GGML_TYPE_F32 && t->nb[0] == sizeof(float) ? t : ggml_cont(ctx, ggml_cast(ctx, t, GGML_TYPE_F32));
    };
    const auto custom = [&](ggml_type type, int64_t ne0, int64_t ne1, std::vector<ggml_tensor *> args, ggml_custom_op_t fun,
                            const char * name) {
        ggml_tensor * t =
            ggml_custom_4d(ctx, type, ne0, ne1, 1, 1, args.data(), (int) args.size(), fun, GGML_N_TASKS_MAX, &layer);
        ggml_format_name(t, "subkv_%s-%d", name, b.il);
        return t;
    };
    ggml_tensor *     q     = f32(b.q);
    ggml_tensor *     k     = f32(b.k);
    ggml_tensor *     v     = f32(b.v);
    const auto &      codec = *layer.codec;
    const AttendShape s     = attend_shape(layer, q, b.k_view);
    const int64_t     width = (int64_t) codec.n_head_kv * (codec.d_k + codec.d_v);

    ggml_tensor * fresh   = custom(GGML_TYPE_F16, width, s.n_tokens, { k, v, b.k_cache, b.v_cache, b.k_idxs, b.v_idxs }, encode_op,
                                   "encode");
    ggml_tensor * partial = custom(GGML_TYPE_F32, s.n_rows * (2 + s.width), 1,
                                   { q, fresh, b.k_view, b.v_view, b.mask, b.inputs->cell_pos, b.inputs->tokens }, attend_op, "attend");

    ggml_tensor *              window = layer.window->rows(b.il);
    std::vector<ggml_tensor *> args   = { partial, q, fresh, window ? window : fresh, b.mask, b.inputs->tokens, b.inputs->slots, b.k_view };
    if (b.sinks) {
        args.push_back(b.sinks);
    }
    ggml_tensor * out = custom(GGML_TYPE_F32, (int64_t) layer.n_head * codec.d_v, s.n_tokens, args, combine_op, "combine");
    ggml_build_forward_expand(b.gf, out);

    if (window) {
        ggml_tensor * edge[] = { fresh, b.inputs->slots, out };
        ggml_tensor * store  = ggml_custom_inplace(ctx, window, edge, 3, store_window_op, GGML_N_TASKS_MAX, &layer);
        ggml_format_name(store, "subkv_store_window-%d", b.il);
        ggml_build_forward_expand(b.gf, store);
    }
    return out;
}

} // namespace subkv
