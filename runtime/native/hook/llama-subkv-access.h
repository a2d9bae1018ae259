// llama-subkv-access.h: the private members of llama.cpp's classes that coded cells need, by llama.cpp's names. The
// patches declare this struct a friend, because a namespace cannot be one; it has no logic. Part of libllama.
#pragma once

#include "llama-context.h"
#include "llama-kv-cache.h"

#include <memory>
#include <utility>

struct llama_subkv_access {
    // llama_kv_cache
    // nullptr if it is ordinary
    static subkv::CacheHook * hook(const llama_kv_cache & kv) { return kv.subkv_hook.get(); }
    static void               set_hook(llama_kv_cache & kv, std::shared_ptr<subkv::CacheHook> hook) {
        kv.subkv_hook = std::move(hook);
    }

    static const llama_model &    model(const llama_kv_cache & kv) { return kv.model; }
    static const llama_hparams &  hparams(const llama_kv_cache & kv) { return kv.hparams; }
    static bool                   v_trans(const llama_kv_cache & kv) { return kv.v_trans; }
    static uint32_t               n_seq_max(const llama_kv_cache & kv) { return kv.n_seq_max; }
    static uint32_t               n_stream(const llama_kv_cache & kv) { return kv.n_stream; }
    static uint32_t               n_swa(const llama_kv_cache & kv) { return kv.n_swa; }
    static llama_swa_type         swa_type(const llama_kv_cache & kv) { return kv.swa_type; }
    static const llama_kv_cache * other(const llama_kv_cache & kv) { return kv.other; }
    static llama_kv_cells_vec &   v_cells(const llama_kv_cache & kv) { return kv.v_cells; }
    static const auto &           seq_to_stream(const llama_kv_cache & kv) { return kv.seq_to_stream; }
    static const auto &           layers(const llama_kv_cache & kv) { return kv.layers; }
    static const auto & layer(const llama_kv_cache & kv, int32_t il) { return kv.layers[kv.map_layer_ids.at(il)]; }

    template <typename... Args> static ggml_tensor * build_rope_shift(const llama_kv_cache & kv, Args &&... args) {
        return kv.build_rope_shift(std::forward<Args>(args)...);
    }

    template <typename... Args> static void state_read_sinfo(llama_kv_cache & kv, Args &&... args) {
        kv.state_read_sinfo(std::forward<Args>(args)...);
    }

    // of llama_kv_cache_context
    static llama_kv_cache & kv(const llama_kv_cache_context & mctx) { return *mctx.kv; }
    static uint32_t         n_kv(const llama_kv_cache_context & mctx) { return (uint32_t) mctx.n_kv; }
    static const auto &     sinfo(const llama_kv_cache_context & mctx) { return mctx.sinfos[mctx.i_cur]; }
    static const auto &     sinfos(const llama_kv_cache_context & mctx) { return mctx.sinfos; }
    static const auto &     ubatches(const llama_kv_cache_context & mctx) { return mctx.ubatches; }

    // of llama_context
    static llama_memory_ptr & memory(llama_context & ctx) { return ctx.memory; }
    static llama_cparams &    cparams(llama_context & ctx) { return ctx.cparams; }
    static const auto &       cvec(const llama_context & ctx) { return ctx.cvec; }

    // The callback that can stop a graph, and its data.
    static std::pair<ggml_abort_callback, void *> abort_callback(const llama_context & ctx) {
        return { ctx.abort_callback, ctx.abort_callback_data };
    }
};
