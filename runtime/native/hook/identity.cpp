// identity.cpp: what the bytes of a context's states depend on (state_identity.h). Part of libllama.
#include "llama-subkv-access.h"
#include "llama-subkv.h"
#include "numbers.h"
#include "releases.h"

#include "llama-adapter.h"
#include "llama-context.h"
#include "llama-model.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

// States of another version are not read. Raise it if the meaning of a state changes without a change of another part.
static constexpr int STATE_VERSION = 2;

static std::string exactly(float x) {
    return subkv::number(x, 9);
}

// Writes layers in ascending order as ranges, such as "0-4,6".
static std::string ranges(const std::vector<uint32_t> & layers) {
    std::string text;
    for (size_t first = 0, last = 0; first < layers.size(); first = last + 1) {
        for (last = first; last + 1 < layers.size() && layers[last + 1] == layers[last] + 1; ++last) {
        }
        text += (first > 0 ? "," : "") + std::to_string(layers[first]);
        text += last > first ? "-" + std::to_string(layers[last]) : "";
    }
    return text;
}

// What the rows of a cache depend on, which is the types and widths of K and V by layer, the streams, and which cells
// it keeps. The layout's fingerprint covers the widths of coded layers.
std::string llama_subkv::rows_of(const llama_kv_cache & kv, bool has_all_cells) {
    const auto type_of  = [](const ggml_tensor * t) { return std::string(t ? ggml_type_name(t->type) : "none"); };
    const auto width_of = [](const ggml_tensor * t) { return std::to_string(t ? t->ne[0] : 0); };

    std::map<std::string, std::vector<uint32_t>> layers; // by type and width
    for (const auto & layer : access::layers(kv)) {
        const bool is_coded = row_bytes(kv, layer.il, false) > 0;
        layers[is_coded ? "subkv" :
                          type_of(layer.k) + "/" + type_of(layer.v) + " " + width_of(layer.k) + "/" + width_of(layer.v)]
            .push_back(layer.il);
    }
    std::string text;
    for (const auto & [rows, of] : layers) {
        text += rows + " in layers " + ranges(of) + "; ";
    }
    text += std::to_string(access::n_stream(kv)) + (access::n_stream(kv) == 1 ? " stream" : " streams");
    text += has_all_cells ? "" : "; window of type " + std::to_string((int) access::swa_type(kv)) + " only";
    text += access::v_trans(kv) ? "; values by element" : "";
    return text;
}

subkv::StateIdentity llama_subkv::state_identity(const llama_context & ctx, const std::string & model, bool whole) {
    const auto &         loaded  = ctx.get_model();
    const auto &         cparams = ctx.get_cparams();
    const auto &         source  = source_of(loaded);
    const auto           caches  = caches_of(ctx.get_memory());
    subkv::StateIdentity identity;
    identity.add("model", model);
    identity.add("kv_overrides", source.overrides.empty() ? "none" : source.overrides);
    identity.add("versions", "states " + std::to_string(STATE_VERSION) + " and " +
                                 std::to_string(LLAMA_STATE_SEQ_VERSION) + ", llama.cpp " + SUBKV_LLAMA_COMMIT);
    const bool has_long_factors =
        std::any_of(loaded.layers.begin(), loaded.layers.end(), [](const auto & layer) { return layer.rope_long; });
    const bool is_long = has_long_factors && cparams.n_ctx_seq > loaded.hparams.n_ctx_orig_yarn;
    identity.add("long_rope", is_long ? "on" : "off");
    identity.add("rope_scaling_type", std::to_string(rope_scaling_of(cparams)));
    identity.add("rope_freq_base", exactly(cparams.rope_freq_base));
    identity.add("rope_freq_scale", exactly(cparams.rope_freq_scale));
    identity.add("yarn_orig_ctx", std::to_string(cparams.n_ctx_orig_yarn));
    identity.add("yarn_ext_factor", exactly(cparams.yarn_ext_factor));
    identity.add("yarn_attn_factor", exactly(cparams.yarn_attn_factor));
    identity.add("yarn_beta_fast", exactly(cparams.yarn_beta_fast));
    identity.add("yarn_beta_slow", exactly(cparams.yarn_beta_slow));
    identity.add("attention_type", cparams.causal_attn ? "causal" : "not causal");
    identity.add("context", "type " + std::to_string((int) cparams.ctx_type) + ", " + std::to_string(cparams.n_rs_seq) +
                                " snapshots of recurrent state");
    if (whole) {
        identity.add("n_seq_max", std::to_string(cparams.n_seq_max));
    }
    for (const auto & [name, kv] :
         { std::pair{ "cells", caches.base }, { "sliding", caches.swa }, { "indexer", caches.index } }) {
        if (kv) {
            identity.add(name, rows_of(*kv, kv->get_size() >= caches.base->get_size()));
        }
    }
    if (const auto * hook = hook_of(ctx.get_memory())) {
        identity.add(hook->facts().identity);
    }
    return identity;
}

bool llama_subkv::storable(const llama_context & ctx) {
    const auto & model  = ctx.get_model();
    const auto   caches = caches_of(ctx.get_memory());
    if (source_of(model).path.empty() || !model.loras.empty() || !ctx.get_memory()) {
        return false;
    }
    for (const auto * kv : caches.all()) { // an observer sees every token
        if (kv && access::hook(*kv) && !coded(*kv)) {
            return false;
        }
    }
    for (int il = 0; access::cvec(ctx) && il < (int) model.hparams.n_layer_all; ++il) {
        if (access::cvec(ctx)->tensor_for(il)) {
            return false;
        }
    }
    return true;
}

int64_t llama_subkv::n_removable(const llama_context & ctx) {
    const auto * memory = ctx.get_memory();
    const auto   caches = caches_of(memory);
    if (caches.swa && caches.swa->get_size() < caches.base->get_size()) {
        return 0; // the state lacks cells that re-enter the window after a removal
    }
    if (!caches.base || caches.recurrent) { // a restored state has no snapshots
        return 0;
    }
    const auto * hook = hook_of(memory);
    return hook && hook->facts().coded ? hook->facts().n_rollback : -1;
}
