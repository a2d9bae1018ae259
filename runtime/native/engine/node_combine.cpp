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
        const uint16_t * row;  // of all heads, or nullptr if there is no key
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
        // If a sequence ever has two keys of one position, they get different pages.
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
    // A fresh row may be of another sequence, at the same position.
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

// A run of tokens of one sequence.
struct Run {
    int64_t t0, n;
};

std::vector<Run> runs_of(const TokenRow * tokens, const AttendShape & s) {
    constexpr int64_t MOST = 32;
    std::vector<Run>  runs;
    for (int64_t t = 0; t < s.n_tokens;) {
        int64_t end = t + 1;
        while (end < s.n_tokens && end - t < MOST && end / s.n_tps == t / s.n_tps &&
               tokens[end].first_slot == tokens[t].first_slot) {
            ++end;
        }
        runs.push_back({ t, end - t });
        t = end;
    }
    return runs;
}

// Memory that a thread keeps between nodes.
struct Scratch {
    std::vector<float>            qs, bias, m, z, out, coef;
    std::vector<const uint16_t *> rows;
    std::vector<uint16_t>         unpacked;
    ExactKeys                     keys;
};

// The stages of one KV head and a run of tokens. Their softmax states are scratch.m, .z and .out, one of each per query
// row.
class Combine {
public:
    Combine(ggml_tensor * dst, const LayerNodes & layer, Scratch & scratch) :
        dst(dst), layer(layer), codec(*layer.codec), in(sources_of<CombineSources>(dst)),
        s(attend_shape(layer, in.q, in.cells)), runs(runs_of(token_rows(in.tokens), s)), scratch_(scratch) {}

    int64_t n_units() const { return (int64_t) runs.size() * s.n_head_kv; }

    void unit(int64_t unit) {
        const int64_t i_run = unit / s.n_head_kv;
        h                   = unit % s.n_head_kv;
        run                 = runs[(size_t) i_run];
        n_rows              = run.n * s.n_group;
        merge_splits();
        if (gathered != i_run) {
            gather_exact(layer, in, s, run.t0, run.n, scratch_.keys);
        }
        n_keys = (int64_t) scratch_.keys.keys.size();
        if (gathered != i_run || n_masks(in.mask) > 1) {
            mask_exact();
        }
        gathered = i_run;
        if (n_keys > 0) {
            attend_exact();
        }
        write();
    }

private:
    // Merges the softmax states of the splits, and reconstructs their sum of coefficients.
    void merge_splits() {
        float *           m        = scratch(scratch_.m, n_rows);
        float *           z        = scratch(scratch_.z, n_rows);
        float *           out      = scratch(scratch_.out, n_rows * codec.d_v);
        float *           coef     = scratch(scratch_.coef, s.width);
        const float *     m_part   = (const float *) in.partial->data;
        const float *     z_part   = m_part + s.n_rows;
        const float *     acc_part = z_part + s.n_rows;
        const HeadCodec & head     = codec.v[(size_t) h];
        std::fill(out, out + n_rows * codec.d_v, 0.0f);
        for (int64_t r = 0; r < n_rows; ++r) {
            m[r] = -INFINITY;
            z[r] = 0.0f;
            std::fill(coef, coef + head.rank, 0.0f);
            for (int64_t i = 0; i < s.n_split; ++i) {
                const int64_t row = s.row(i, h, run.t0) + r;
                merge_softmax(m[r], z[r], coef, m_part[row], z_part[row], acc_part + row * s.width, head.rank);
            }
            if (m[r] == -INFINITY) {
                continue;
            }
            ops().reconstruct(head.decode, head.rank, codec.d_v, coef, out + r * codec.d_v);
        }
    }

    // Masks the exact keys, because those outside a token's exact window are coded cells for it.
    void mask_exact() {
        const TokenRow * tokens   = token_rows(in.tokens);
        const int32_t    n_sink   = layer.window->n_sink();
        const int32_t    n_recent = layer.window->n_recent();
        float *          bias     = scratch(scratch_.bias, std::max<int64_t>(1, run.n * n_keys));
        for (int64_t t = 0; t < run.n; ++t) {
            for (int64_t i = 0; i < n_keys; ++i) {
                const ExactKeys::Key & key   = scratch_.keys.keys[(size_t) i];
                const bool             exact = key.row && is_exact(key.pos, tokens[run.t0 + t].pos, n_sink, n_recent);
                bias[t * n_keys + i] =
                    exact ? mask_value(in.mask, mask_row(in.mask, h, run.t0 + t) + key.cell) : -INFINITY;
            }
        }
    }

    // Points k and v to the head's exact rows, after unpacking rows of integers.
    void exact_rows(const uint16_t ** k, const uint16_t ** v) {
        const int64_t d_k = codec.d_k, d_v = codec.d_v;
        uint16_t *    unpacked = scratch(scratch_.unpacked, n_keys * (d_k + d_v));
        for (int64_t i = 0; i < n_keys; ++i) {
            const uint16_t * row = scratch_.keys.keys[(size_t) i].row;
            if (!scratch_.keys.keys[(size_t) i].integers) {
                k[i] = row ? row + h * d_k : nullptr;
                v[i] = codec.latent ? k[i] : row ? row + s.n_head_kv * d_k + h * d_v : nullptr;
                continue;
            }
            uint16_t * to = unpacked + i * (d_k + d_v);
            ops().unpack_recent((const uint8_t *) row + recent_offset(codec, h, false), layer.mean(h, false), d_k, to);
            if (!codec.latent) {
                ops().unpack_recent((const uint8_t *) row + recent_offset(codec, h, true), nullptr, d_v, to + d_k);
            }
            k[i] = to;
            v[i] = codec.latent ? to : to + d_k;
        }
    }

    const float * scaled_queries() {
        float * qs = scratch(scratch_.qs, n_rows * codec.d_k);
        for (int64_t r = 0; r < n_rows; ++r) {
            const float * x = row_f32(in.q, h * s.n_group + r % s.n_group, run.t0 + r / s.n_group);
            std::transform(x, x + codec.d_k, qs + r * codec.d_k, [&](float value) { return layer.scale * value; });
        }
        return qs;
    }

    // Adds the exact window to the states.
    void attend_exact() {
        const uint16_t ** rows = scratch(scratch_.rows, 2 * n_keys);
        exact_rows(rows, rows + n_keys);
        float slope[MAX_GROUP];
        alibi_slopes(layer, h * s.n_group, s.n_group, slope);
        ExactArgs a;
        a.d_k         = codec.d_k;
        a.d_v         = codec.d_v;
        a.n_keys      = n_keys;
        a.k           = rows;
        a.v           = rows + n_keys;
        a.n_tok       = run.n;
        a.n_group     = s.n_group;
        a.q           = scaled_queries();
        a.bias        = scratch_.bias.data();
        a.bias_stride = n_keys;
        a.slope       = slope;
        a.softcap     = layer.softcap;
        a.m           = scratch_.m.data();
        a.z           = scratch_.z.data();
        a.acc         = scratch_.out.data();
        a.acc_stride  = codec.d_v;
        ops().attend_exact(a);
    }

    // Normalizes the states. Attention sinks are logits without a value (Xiao et al., arXiv:2309.17453), as in gpt-oss.
    void write() const {
        const int64_t d_v = codec.d_v;
        for (int64_t r = 0; r < n_rows; ++r) {
            const int64_t hq  = h * s.n_group + r % s.n_group;
            float *       y   = (float *) ((char *) dst->data + (run.t0 + r / s.n_group) * dst->nb[1]) + hq * d_v;
            float         w   = 1.0f;
            float         sum = scratch_.z[(size_t) r];
            if (in.sinks) {
                const float sink = ((const float *) in.sinks->data)[hq];
                const float top  = std::max(scratch_.m[(size_t) r], sink);
                w                = std::exp(scratch_.m[(size_t) r] - top);
                sum              = sum * w + std::exp(sink - top);
            }
            w               = sum == 0.0f ? 0.0f : w / sum; // a token that sees no key gets zeros, a lost row NaN
            const float * x = scratch_.out.data() + r * d_v;
            std::transform(x, x + d_v, y, [w](float value) { return w * value; });
        }
    }

    ggml_tensor * const    dst;
    const LayerNodes &     layer;
    const LayerCodec &     codec;
    const CombineSources   in;
    const AttendShape      s;
    const std::vector<Run> runs;
    Scratch &              scratch_;

    // the unit
    Run     run{ 0, 0 };
    int64_t h        = 0;
    int64_t n_rows   = 0;
    int64_t n_keys   = 0;
    int64_t gathered = -1; // the run of scratch_.keys
};

} // namespace

void combine_op(ggml_tensor * dst, int ith, int nth, const LayerNodes & layer) {
    static thread_local Scratch scratch;
    Combine                     combine(dst, layer, scratch);
    const int64_t               n = combine.n_units();
    for (int64_t unit = n * ith / nth; unit < n * (ith + 1) / nth; ++unit) {
        combine.unit(unit);
    }
}

} // namespace subkv
