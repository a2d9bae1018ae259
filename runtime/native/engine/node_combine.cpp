// node_combine.cpp: merges the splits and adds the exact window, see nodes.cpp.
#include "nodes.h"

#include <algorithm>

namespace subkv {

//
// combine: dst F32 [d_v * n_head, n_tokens] | CombineSources
//

namespace {

// The exact keys of a run of tokens of one sequence. A key is at its position within a page, and pages are in the order
// of positions. So a token's sums do not depend on the other tokens of its batch.
struct ExactKeys {
    struct Key {
        int32_t          pos;
        int32_t          cell; // index of its mask value
        const uint16_t * row;  // of all heads; nullptr: no key
        bool             integers;
    };

    std::vector<Key> unordered;
    std::vector<Key> keys; // whole pages

    void arrange();
};

void ExactKeys::arrange() {
    std::sort(unordered.begin(), unordered.end(), [](const Key & a, const Key & b) { return a.pos < b.pos; });
    keys.clear();
    int32_t last = -1;
    for (const Key & key : unordered) {
        const size_t at = (size_t) key.pos % PAGE;
        // if a sequence ever has two keys of one position, they get different pages
        if (key.pos / PAGE != last || keys[keys.size() - PAGE + at].row) {
            keys.resize(keys.size() + PAGE, { -1, -1, nullptr, false });
            last = key.pos / PAGE;
        }
        keys[keys.size() - PAGE + at] = key;
    }
}

void gather_exact(const LayerNodes & layer, const CombineSources & in, const AttendShape & s, int64_t t0, int64_t n_tok,
                  ExactKeys & keys) {
    const TokenRow * tokens   = token_rows(in.tokens);
    const SlotRow *  slots    = slot_rows(in.slots);
    const int32_t    n_sink   = layer.window->n_sink();
    const int32_t    n_recent = layer.window->n_recent();

    keys.unordered.clear();
    int32_t lo = INT32_MAX, hi = INT32_MIN;
    for (int64_t t = t0; t < t0 + n_tok; ++t) {
        lo = std::min(lo, tokens[t].pos);
        hi = std::max(hi, tokens[t].pos);
    }
    const auto         may_see = [&](int32_t p) { return p >= 0 && (p < n_sink || (p <= hi && p > lo - n_recent)); };
    const WindowRows & rows    = layer.window_rows();
    const auto         add     = [&](int32_t p, int32_t cell, const void * row, bool integers) {
        keys.unordered.push_back({ p, cell, (const uint16_t *) row, integers });
    };
    if (layer.window->n_slots() > 0) {
        const int32_t first = tokens[t0].first_slot;
        const int64_t count = in.slots->ne[1] / std::max<int64_t>(1, layer.window->n_seq());
        for (int64_t i = first; i < first + count; ++i) {
            if (slots[i].cell >= 0 && may_see(slots[i].pos)) {
                add(slots[i].pos, slots[i].cell, (const char *) in.window->data + rows.offset(i),
                    rows.integers && !rows.is_sink(i));
            }
        }
    }
    // a fresh row may be of another sequence, at the same position
    const auto sees = [&](int64_t t, int64_t j) {
        bool open = false; // to any KV head
        for (int64_t h = 0; h < n_masks(in.mask) && !open; ++h) {
            open = mask_value(in.mask, mask_row(in.mask, h, t) + tokens[j].cell) != -INFINITY;
        }
        return open && is_exact(tokens[j].pos, tokens[t].pos, n_sink, n_recent);
    };
    const int64_t stream = t0 / s.n_tps;
    for (int64_t j = stream * s.n_tps; layer.window->n_slots() > 0 && j < (stream + 1) * s.n_tps; ++j) {
        bool visible = false;
        for (int64_t t = t0; may_see(tokens[j].pos) && !visible && t < t0 + n_tok; ++t) {
            visible = sees(t, j);
        }
        if (visible) {
            add(tokens[j].pos, tokens[j].cell, (const char *) in.fresh->data + j * (int64_t) in.fresh->nb[1], false);
        }
    }
    keys.arrange();
}

} // namespace

void combine_op(ggml_tensor * dst, int ith, int nth, const LayerNodes & layer) {
    const auto &        codec    = *layer.codec;
    const Ops &         ops      = subkv::ops();
    const auto          in       = sources_of<CombineSources>(dst);
    const ggml_tensor * q        = in.q;
    const ggml_tensor * mask     = in.mask;
    const TokenRow *    tokens   = token_rows(in.tokens);
    const ggml_tensor * sinks    = in.sinks;
    const AttendShape   s        = attend_shape(layer, q, in.cells);
    const float *       m_part   = (const float *) in.partial->data;
    const float *       z_part   = m_part + s.n_rows;
    const float *       acc_part = z_part + s.n_rows;
    const int64_t       d_k      = codec.d_k;
    const int64_t       d_v      = codec.d_v;
    const int32_t       n_sink   = layer.window->n_sink();
    const int32_t       n_recent = layer.window->n_recent();

    constexpr int64_t                                 BLOCK = 32;
    static thread_local std::vector<float>            qs_buf, bias_buf, m_buf, z_buf, out_buf, coef_buf;
    static thread_local std::vector<const uint16_t *> ptr_buf;
    static thread_local std::vector<uint16_t>         unpacked_buf;
    static thread_local ExactKeys                     keys;

    // runs of tokens of one sequence
    struct Run {
        int64_t t0, n;
    };
    std::vector<Run> runs;
    for (int64_t t = 0; t < s.n_tokens;) {
        int64_t end = t + 1;
        while (end < s.n_tokens && end - t < BLOCK && end / s.n_tps == t / s.n_tps &&
               tokens[end].first_slot == tokens[t].first_slot) {
            ++end;
        }
        runs.push_back({ t, end - t });
        t = end;
    }
    const int64_t n_units  = (int64_t) runs.size() * s.n_head_kv;
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
            z[r] = 0.0f;
            std::fill(coef, coef + head.rank, 0.0f);
            for (int64_t i = 0; i < s.n_split; ++i) {
                const int64_t row = s.row(i, h, t0) + r;
                merge_softmax(m[r], z[r], coef, m_part[row], z_part[row], acc_part + row * s.width, head.rank);
            }
            if (m[r] == -INFINITY) {
                continue;
            }
            ops.reconstruct(head.decode, head.rank, d_v, coef, out + r * d_v);
        }

        if (gathered != i_run || n_masks(mask) > 1) {
            if (gathered != i_run) {
                gather_exact(layer, in, s, t0, n_tok, keys);
            }
            gathered             = i_run;
            const int64_t n_keys = (int64_t) keys.keys.size();
            float *       bias   = scratch(bias_buf, std::max<int64_t>(1, n_tok * n_keys));
            for (int64_t t = 0; t < n_tok; ++t) {
                for (int64_t i = 0; i < n_keys; ++i) {
                    const ExactKeys::Key & key   = keys.keys[(size_t) i];
                    const bool             exact = key.row && is_exact(key.pos, tokens[t0 + t].pos, n_sink, n_recent);
                    bias[t * n_keys + i] = exact ? mask_value(mask, mask_row(mask, h, t0 + t) + key.cell) : -INFINITY;
                }
            }
        }
        const int64_t n_keys = (int64_t) keys.keys.size();
        float         slope[MAX_GROUP];
        alibi_slopes(layer, h * s.n_group, s.n_group, slope);
        if (n_keys > 0) {
            const uint16_t ** k_rows   = scratch(ptr_buf, 2 * n_keys);
            const uint16_t ** v_rows   = k_rows + n_keys;
            uint16_t *        unpacked = scratch(unpacked_buf, n_keys * (d_k + d_v));
            for (int64_t i = 0; i < n_keys; ++i) {
                const uint16_t * row = keys.keys[(size_t) i].row;
                if (keys.keys[(size_t) i].integers) {
                    uint16_t * to = unpacked + i * (d_k + d_v);
                    ops.unpack_recent((const uint8_t *) row + recent_offset(codec, h, false), layer.mean(h, false), d_k,
                                      to);
                    if (!codec.latent) {
                        ops.unpack_recent((const uint8_t *) row + recent_offset(codec, h, true), nullptr, d_v,
                                          to + d_k);
                    }
                    k_rows[i] = to;
                    v_rows[i] = codec.latent ? to : to + d_k;
                    continue;
                }
                k_rows[i] = row ? row + h * d_k : nullptr;
                v_rows[i] = codec.latent ? k_rows[i] : row ? row + s.n_head_kv * d_k + h * d_v : nullptr;
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
                if (sinks) { // a logit without a value (Xiao et al., arXiv:2309.17453), as in gpt-oss
                    const float sink = ((const float *) sinks->data)[hq];
                    const float top  = std::max(m[r], sink);
                    w                = std::exp(m[r] - top);
                    sum              = sum * w + std::exp(sink - top);
                }
                w = sum == 0.0f ? 0.0f : w / sum; // a token that sees no key gets zeros, a lost row NaN
                for (int64_t j = 0; j < d_v; ++j) {
                    y[j] = w * out[r * d_v + j];
                }
            }
        }
    }
}

} // namespace subkv
