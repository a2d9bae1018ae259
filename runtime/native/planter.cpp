#include "planter.h"

#include "error.h"
#include "nodes.h"
#include "subkv_research.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

namespace subkv {

namespace {

// dst F32 [d, n_head_kv, n_tokens] | src: k or v, tokens as in Inputs
template <bool value> void plant_op(ggml_tensor * dst, int ith, int nth, void * userdata) {
    const auto &        layer  = *(const PlantedLayer *) userdata;
    const auto          rows   = std::atomic_load(&layer.rows);
    const ggml_tensor * x      = dst->src[0];
    const int32_t *     tokens = (const int32_t *) dst->src[1]->data;
    const int64_t       n_row  = dst->ne[0] * dst->ne[1];
    uint64_t            n      = 0;
    for (int64_t t = ith; t < dst->ne[2]; t += nth) {
        float * out = (float *) ((char *) dst->data + t * dst->nb[2]);
        if (rows) {
            const auto & pos = rows->pos;
            const auto   at  = std::lower_bound(pos.begin(), pos.end(), tokens[4 * t]);
            if (at != pos.end() && *at == tokens[4 * t]) {
                const float * row = (value ? rows->v : rows->k).data() + (at - pos.begin()) * n_row;
                std::copy(row, row + n_row, out);
                n++;
                continue;
            }
        }
        for (int64_t h = 0; h < dst->ne[1]; ++h) {
            std::memcpy(out + h * dst->ne[0], row_f32(x, h, t), dst->nb[1]);
        }
    }
    if (!value && n > 0) {
        rows->n_planted += n;
    }
}

// Not in place: others may read what x was made of, or x lives on another backend.
ggml_tensor * plant(ggml_context * ctx, PlantedLayer & layer, int32_t il, ggml_tensor * x, ggml_tensor * tokens,
                    bool value) {
    ggml_tensor * args[] = { as_f32(ctx, x), tokens };
    ggml_tensor * out    = ggml_custom_4d(ctx, GGML_TYPE_F32, x->ne[0], x->ne[1], x->ne[2], 1, args, 2,
                                          value ? plant_op<true> : plant_op<false>, GGML_N_TASKS_MAX, &layer);
    ggml_format_name(out, "subkv_plant_%c-%d", value ? 'v' : 'k', il);
    return out;
}

bool finite(const float * x, int64_t n) {
    return std::all_of(x, x + n, [](float f) { return std::isfinite(f); });
}

} // namespace

void Planter::build(ggml_context * ctx, int32_t il, ggml_tensor *& k, ggml_tensor *& v, ggml_tensor * tokens) {
    if ((size_t) il >= layers_.size()) {
        layers_.resize((size_t) il + 1);
    }
    auto & slot = layers_[(size_t) il];
    if (!slot) {
        slot.reset(new PlantedLayer{ (int32_t) k->ne[1], (int32_t) k->ne[0], (int32_t) v->ne[0], nullptr });
    }
    if (slot->n_head_kv != k->ne[1] || slot->d_k != k->ne[0] || slot->d_v != v->ne[0]) {
        set_error("planter: layer %d of one model expected, another shape than before found", il);
        throw std::runtime_error("planter: used with two models");
    }
    k = plant(ctx, *slot, il, k, tokens, false);
    v = plant(ctx, *slot, il, v, tokens, true);
}

const PlantedLayer * Planter::layer(int32_t il) const {
    return il >= 0 && (size_t) il < layers_.size() ? layers_[(size_t) il].get() : nullptr;
}

void Planter::set(int32_t il, std::shared_ptr<const PlantedRows> rows) {
    std::atomic_store(&layers_[(size_t) il]->rows, std::move(rows));
}

void Planter::clear() {
    for (const auto & layer : layers_) {
        if (layer) {
            std::atomic_store(&layer->rows, std::shared_ptr<const PlantedRows>());
        }
    }
}

} // namespace subkv

//
// C interface
//

using subkv::set_error;

extern "C" subkv_planter * subkv_planter_new(void) {
    return new subkv_planter{ std::make_shared<subkv::Planter>() };
}

extern "C" void subkv_planter_free(subkv_planter * planter) {
    if (planter) {
        planter->p->clear(); // contexts keep what their graphs point to, not the rows
    }
    delete planter;
}

extern "C" int32_t subkv_planter_n_layer(const subkv_planter * planter) {
    return planter->p->n_layer();
}

extern "C" bool subkv_planter_layer(const subkv_planter * planter, int32_t il, subkv_planted * out) {
    if (il < 0 || il >= planter->p->n_layer()) {
        set_error("layer: 0 to %d expected, %d found", planter->p->n_layer() - 1, il);
        return false;
    }
    *out = {};
    if (const auto * layer = planter->p->layer(il)) {
        const auto rows = std::atomic_load(&layer->rows);
        *out            = { layer->n_head_kv, layer->d_k, layer->d_v, rows ? rows->n_planted.load() : 0 };
    }
    return true;
}

extern "C" bool subkv_planter_set(subkv_planter * planter, int32_t il, const int32_t * pos, int32_t n, const float * k,
                                  const float * v) {
    if (planter->p->n_layer() == 0) {
        set_error("planter: a context created after subkv_plant expected, none found");
        return false;
    }
    const auto * layer = planter->p->layer(il);
    if (!layer) {
        set_error("layer: one with K/V rows among 0 to %d expected, %d found", planter->p->n_layer() - 1, il);
        return false;
    }
    if (n < 0 || (n > 0 && (!pos || !k || !v))) {
        set_error("planter: positions, keys and values of 0 or more tokens expected, %d%s found", n,
                  n < 0 ? "" : " and a null pointer");
        return false;
    }
    for (int32_t i = 0; i < n; ++i) {
        if (pos[i] < 0 || (i > 0 && pos[i] <= pos[i - 1])) {
            set_error("pos: strictly increasing positions from 0 on expected, %d found after %d", pos[i],
                      i > 0 ? pos[i - 1] : -1);
            return false;
        }
    }
    const int64_t n_k  = (int64_t) layer->n_head_kv * layer->d_k;
    const int64_t n_v  = (int64_t) layer->n_head_kv * layer->d_v;
    auto          rows = std::make_shared<subkv::PlantedRows>();
    for (int32_t i = 0; i < n; ++i) {
        const bool keys = subkv::finite(k + i * n_k, n_k);
        if (!keys || !subkv::finite(v + i * n_v, n_v)) {
            set_error("%s: finite numbers expected, NaN or Inf found in layer %d at position %d", keys ? "v" : "k", il,
                      pos[i]);
            return false;
        }
    }
    if (n > 0) {
        rows->pos.assign(pos, pos + n);
        rows->k.assign(k, k + n * n_k);
        rows->v.assign(v, v + n * n_v);
    }
    planter->p->set(il, n > 0 ? std::move(rows) : nullptr);
    return true;
}

extern "C" void subkv_planter_clear(subkv_planter * planter) {
    planter->p->clear();
}
