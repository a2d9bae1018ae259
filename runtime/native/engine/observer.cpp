#include "observer.h"

#include "error.h"
#include "nodes.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <type_traits>

namespace subkv {

// Adds the rows of one head, in runs of selected tokens. Returns the number of skipped non-finite rows.
static uint64_t accumulate(Moments & m, const ggml_tensor * t, int64_t head, const TokenRow * tokens, int32_t n_skip) {
    const int64_t d   = t->ne[0];
    const int64_t n   = t->ne[2];
    uint64_t      bad = 0;
    if (m.second.empty()) { // samples need no moments
        std::vector<double> first((size_t) d);
        m.second.resize((size_t) (d * d)); // both or neither have memory
        m.first.swap(first);
    }
    const auto use = [&](int64_t i) {
        if (tokens[i].pos < n_skip) {
            return false;
        }
        const bool ok = is_finite_row(row_f32(t, head, i), d);
        bad += !ok;
        return ok;
    };
    for (int64_t i = 0; i < n;) {
        if (!use(i)) {
            ++i;
            continue;
        }
        int64_t end = i + 1;
        while (end < n && use(end)) {
            ++end;
        }
        ops().moment(row_f32(t, head, i), stride_f32(t, 2), end - i, d, m.second.data(), m.first.data());
        m.n += (uint64_t) (end - i);
        i = end + 1; // token `end` is not usable
    }
    return bad;
}

static bool listed(const std::vector<int32_t> & positions, int32_t pos) {
    return std::binary_search(positions.begin(), positions.end(), pos);
}

// Reserves the memory of a sample set of n rows at once, so that no rows are copied later. A set that finds no memory adds
// no row.
template <typename T> static void reserve_rows(std::vector<T> & dst, const ggml_tensor * t, size_t n) {
    const auto row = (size_t) (t->ne[0] * t->ne[1]);
    if (dst.capacity() < dst.size() + row) {
        dst.reserve(std::max(n * row, 2 * dst.size() + row));
    }
}

template <typename T> static void sample_row(std::vector<T> & dst, const ggml_tensor * t, int64_t token) {
    for (int64_t h = 0; h < t->ne[1]; ++h) {
        const float * x = row_f32(t, h, token);
        if constexpr (std::is_same_v<T, float>) {
            dst.insert(dst.end(), x, x + t->ne[0]);
        } else {
            dst.resize(dst.size() + (size_t) t->ne[0]);
            ggml_fp32_to_fp16_row(x, dst.data() + dst.size() - t->ne[0], t->ne[0]);
        }
    }
}

static void sample(ObservedLayer & layer, const ggml_tensor * q, const ggml_tensor * k, const ggml_tensor * v,
                   const TokenRow * tokens) {
    const auto & keys    = layer.owner->key_pos;
    const auto & queries = layer.owner->query_pos;
    for (int64_t i = 0; i < q->ne[2]; ++i) {
        const int32_t pos = tokens[i].pos;
        if (listed(keys, pos)) {
            reserve_rows(layer.k_rows, k, keys.size());
            reserve_rows(layer.v_rows, v, keys.size());
            sample_row(layer.k_rows, k, i);
            sample_row(layer.v_rows, v, i);
            layer.shape.n_key++;
        }
        if (listed(queries, pos)) {
            reserve_rows(layer.q_rows, q, queries.size());
            sample_row(layer.q_rows, q, i);
            layer.shape.n_query++;
        }
    }
}

// dst F32 [1] (unused) | ObserveSources, with q, k, v as in AttnBuild. It is parallel over KV heads x {q, k, v}.
// Without k and v, q are queries of a layer that reads this one's rows, and they enter the moments, since an error in a
// key affects all of them. Samples are those of the layer itself.
static void observe_op(ggml_tensor * dst, int ith, int nth, ObserveData & data) {
    auto &           layer   = *data.layer;
    const auto &     obs     = *layer.owner;
    const auto       in      = sources_of<ObserveSources>(dst);
    const TokenRow * tokens  = token_rows(in.tokens);
    const int32_t    n_kv    = layer.shape.n_head_kv;
    const int32_t    group   = (int32_t) in.q->ne[1] / n_kv;
    const int32_t    n_sides = in.k ? 3 : 1;

    if (obs.mode == SUBKV_SAMPLE && ith == 0 && in.k) {
        sample(layer, in.q, in.k, in.v, tokens);
    }
    if (obs.mode != SUBKV_ACCUMULATE) {
        return;
    }
    uint64_t bad = 0;
    for (int32_t unit = ith; unit < n_sides * n_kv; unit += nth) {
        const int32_t h = unit / n_sides;
        switch (unit % n_sides) {
            case 0:
                for (int32_t g = 0; g < group; ++g) {
                    bad += accumulate(layer.q[(size_t) h], in.q, h * group + g, tokens, obs.n_skip);
                }
                break;
            case 1: bad += accumulate(layer.k[(size_t) h], in.k, h, tokens, obs.n_skip); break;
            case 2: bad += accumulate(layer.v[(size_t) h], in.v, h, tokens, obs.n_skip); break;
        }
    }
    uint64_t counted = 0;
    for (int64_t i = 0; ith == 0 && in.k && i < in.q->ne[2]; ++i) {
        counted += tokens[i].pos >= obs.n_skip;
    }
    std::lock_guard<std::mutex> lock(layer.mutex);
    layer.shape.n_nonfinite += bad;
    layer.shape.n_tokens += counted;
}

// dst F32 [1] (unused) | ObserveOutputSources, where `out` is the output of attention [d_v, n_head, n_tokens].
static void observe_output_op(ggml_tensor * dst, int ith, int /*nth*/, ObserveData & data) {
    auto &           layer  = *data.layer;
    const auto       in     = sources_of<ObserveOutputSources>(dst);
    const TokenRow * tokens = token_rows(in.tokens);
    for (int64_t i = 0; ith == 0 && layer.owner->mode == SUBKV_SAMPLE && i < in.out->ne[2]; ++i) {
        if (listed(layer.owner->query_pos, tokens[i].pos)) {
            reserve_rows(layer.o_rows, in.out, layer.owner->query_pos.size());
            sample_row(layer.o_rows, in.out, i);
        }
    }
}

void build_observe_output_node(ObserveData & data, const AttnBuild & b, ggml_tensor * out) {
    ObservedLayer & layer = *data.layer;
    layer.shape.coded     = 1;
    layer.shape.plain     = b.softcap == 0.0f && b.max_alibi_bias == 0.0f && b.sinks == nullptr ? 1 : 0;
    const auto &  s       = layer.shape;
    ggml_tensor * heads   = ggml_view_3d(b.ctx, out, s.d_v, s.n_head, out->ne[1], s.d_v * out->nb[0], out->nb[1], 0);
    ggml_tensor * node = new_node(b.ctx, GGML_TYPE_F32, { 1, 1, 1, 1 }, ObserveOutputSources{ heads, b.inputs->tokens },
                                  NodeWork::on_cpu<observe_output_op>(data));
    ggml_format_name(node, "subkv_observe_output-%d", b.il);
    ggml_build_forward_expand(b.gf, node);
}

void build_observe_node(subkv_observer & obs, ObserveData & data, ggml_context * ctx, ggml_cgraph * gf, int32_t il,
                        ggml_tensor * q, ggml_tensor * k, ggml_tensor * v, const Inputs & in, float scale) {
    if ((size_t) il >= obs.layers.size()) {
        obs.layers.resize((size_t) il + 1);
    }
    auto & slot = obs.layers[(size_t) il];
    GGML_ASSERT(k || (slot && q->ne[0] == slot->shape.d_k && q->ne[1] % slot->shape.n_head_kv == 0));
    if (!slot) {
        slot                  = std::make_unique<ObservedLayer>();
        slot->owner           = &obs;
        slot->shape.n_head    = (int32_t) q->ne[1];
        slot->shape.n_head_kv = (int32_t) k->ne[1];
        slot->shape.d_k       = (int32_t) k->ne[0];
        slot->shape.d_v       = (int32_t) v->ne[0];
        slot->shape.scale     = scale;
        for (auto * moments : { &slot->q, &slot->k, &slot->v }) {
            moments->resize((size_t) slot->shape.n_head_kv);
        }
    }
    data.layer         = slot.get();
    const auto & shape = slot->shape;
    if (k &&
        (shape.n_head != q->ne[1] || shape.n_head_kv != k->ne[1] || shape.d_k != k->ne[0] || shape.d_v != v->ne[0])) {
        fail("observer: layer %d of one model expected, another shape than before found", il);
    }
    const ObserveSources sources = { as_f32(ctx, q), in.tokens, k ? as_f32(ctx, k) : nullptr,
                                     k ? as_f32(ctx, v) : nullptr };
    ggml_tensor * node = new_node(ctx, GGML_TYPE_F32, { 1, 1, 1, 1 }, sources, NodeWork::on_cpu<observe_op>(data));
    ggml_format_name(node, "subkv_observe-%d", il);
    ggml_build_forward_expand(gf, node);
}

} // namespace subkv

//
// C interface
//

using namespace subkv;

extern "C" subkv_observer * subkv_observer_new(int32_t n_skip) {
    return guarded<subkv_observer *>("observer", nullptr, [&] {
        if (n_skip < 0) {
            fail("n_skip: a number of positions >= 0 expected, %d found", n_skip);
        }
        auto * obs  = new subkv_observer;
        obs->n_skip = n_skip;
        return obs;
    });
}

extern "C" void subkv_observer_free(subkv_observer * obs) {
    delete obs;
}

extern "C" bool subkv_observer_mode(subkv_observer * obs, int32_t mode, const int32_t * key_pos, int32_t n_key,
                                    const int32_t * query_pos, int32_t n_query) {
    return guarded("observer", [&] {
        not_null(obs, "subkv_observer_mode: obs");
        if (mode < SUBKV_PAUSE || mode > SUBKV_SAMPLE || n_key < 0 || n_query < 0) {
            fail("observer mode: one of 0, 1, 2 and counts >= 0 expected, mode %d, n_key %d, n_query %d found", mode,
                 n_key, n_query);
        }
        check_array(key_pos, n_key, "subkv_observer_mode: key_pos");
        check_array(query_pos, n_query, "subkv_observer_mode: query_pos");
        const auto sorted = [](const int32_t * p, int32_t n) {
            std::vector<int32_t> v(p, p + n);
            std::sort(v.begin(), v.end());
            return v;
        };
        auto keys    = sorted(key_pos, n_key);
        auto queries = sorted(query_pos, n_query);
        obs->key_pos.swap(keys);
        obs->query_pos.swap(queries);
        obs->mode = mode;
    });
}

extern "C" void subkv_observer_forget(subkv_observer * obs) {
    guarded("observer", [&] {
        for (const auto & layer : not_null(obs, "subkv_observer_forget: obs").layers) {
            if (layer) {
                for (auto * rows : { &layer->k_rows, &layer->v_rows, &layer->o_rows }) {
                    std::vector<float>().swap(*rows);
                }
                std::vector<uint16_t>().swap(layer->q_rows);
                layer->shape.n_key   = 0;
                layer->shape.n_query = 0;
            }
        }
    });
}

extern "C" int32_t subkv_observer_n_layer(const subkv_observer * obs) {
    return guarded<int32_t>("observer", -1,
                            [&] { return (int32_t) not_null(obs, "subkv_observer_n_layer: obs").layers.size(); });
}

extern "C" bool subkv_observer_layer(const subkv_observer * obs, int32_t il, subkv_observed * out) {
    return guarded("observer", [&] {
        const auto & layers = not_null(obs, "subkv_observer_layer: obs").layers;
        if (il < 0 || (size_t) il >= layers.size()) {
            fail("layer: 0 to %zu expected, %d found", layers.size(), il);
        }
        not_null(out, "subkv_observer_layer: out") =
            layers[(size_t) il] ? layers[(size_t) il]->shape : subkv_observed{};
    });
}

static std::vector<double> statistics_of(const ObservedLayer & layer, const std::string & what) {
    const char kind = what[0], form = what[1];
    if (!std::strchr("qkvo", kind) || !std::strchr(kind == 'o' ? "s" : "12s", form)) {
        fail("observer: one of q2 k2 v2 q1 k1 v1 qs ks vs os expected, %s found", what.c_str());
    }
    std::vector<double> res;
    if (form == 's' && kind == 'q') {
        std::transform(layer.q_rows.begin(), layer.q_rows.end(), std::back_inserter(res), ggml_fp16_to_fp32);
    } else if (form == 's') {
        const auto & rows = kind == 'k' ? layer.k_rows : kind == 'v' ? layer.v_rows : layer.o_rows;
        res.assign(rows.begin(), rows.end());
    } else {
        const auto d = (size_t) (kind == 'v' ? layer.shape.d_v : layer.shape.d_k);
        for (const auto & m : kind == 'q' ? layer.q : kind == 'k' ? layer.k : layer.v) {
            const double n = m.n > 0 ? (double) m.n : 1.0;
            for (double x : form == '2' ? m.second : m.first) {
                res.push_back(x / n);
            }
            if (m.second.empty()) {
                res.resize(res.size() + (form == '2' ? d * d : d));
            }
        }
    }
    return res;
}

extern "C" int64_t subkv_observer_get(const subkv_observer * obs, int32_t il, const char * what, double * out,
                                      int64_t n_out) {
    return guarded<int64_t>("observer", -1, [&] {
        not_null(obs, "subkv_observer_get: obs");
        not_null(what, "subkv_observer_get: what");
        if (il < 0 || (size_t) il >= obs->layers.size() || !obs->layers[(size_t) il] || std::strlen(what) != 2) {
            fail("observer: an observed layer and one of q2 k2 v2 q1 k1 v1 qs ks vs os expected, layer %d, %s found",
                 il, what);
        }
        const auto res = statistics_of(*obs->layers[(size_t) il], what);
        if ((int64_t) res.size() > n_out) {
            fail("observer: room for %zu values expected, %lld found", res.size(), (long long) n_out);
        }
        check_array(out, (int64_t) res.size(), "subkv_observer_get: out");
        std::copy(res.begin(), res.end(), out);
        return (int64_t) res.size();
    });
}
