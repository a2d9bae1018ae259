// llama-subkv-attn.cpp: the complete llm_graph_context::build_attn of a coded layer: encode, attend, output projection.
#include "llama-subkv.h"

#include "llama-graph.h"
#include "llama-impl.h"
#include "llama-kv-cache-dsa.h"
#include "llama-kv-cache-iswa.h"

#include <cmath>

// GGML_PREC_F32, with this ggml version's name.
template <typename T> static auto sum_in_f32(T * t, int) -> decltype(void(ggml_prec_set_acc(t, GGML_PREC_F32))) {
    ggml_prec_set_acc(t, GGML_PREC_F32);
}

template <typename T> static void sum_in_f32(T * t, long) {
    ggml_mul_mat_set_prec(t, GGML_PREC_F32);
}

static void expand(const llm_graph_context & g, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v) {
    for (ggml_tensor * t : { q, v, k }) {
        if (t) {
            ggml_build_forward_expand(g.gf, t);
        }
    }
}

// cur [n_embd_head_v*n_head, n_tokens] -> wo·cur + wo_b, as at the end of build_attn
static ggml_tensor * project(const llm_graph_context & g, ggml_tensor * wo, ggml_tensor * wo_b, ggml_tensor * wo_s,
                             ggml_tensor * cur) {
    if (wo && (g.arch == LLM_ARCH_GLM4 || g.arch == LLM_ARCH_GLM4_MOE || g.arch == LLM_ARCH_JAIS2)) {
        cur = g.build_lora_mm(wo, cur);
        sum_in_f32(cur, 0);
        cur = wo_s ? ggml_mul(g.ctx0, cur, wo_s) : cur;
    } else if (wo) {
        cur = g.build_lora_mm(wo, cur, wo_s);
    }
    return wo_b ? ggml_add(g.ctx0, cur, wo_b) : cur;
}

// Adds a bias per head to the common mask: [n_kv, n_tokens, n_head, 1], with build_attn_mha's scaling.
static ggml_tensor * biased(const llm_graph_context & g, ggml_tensor * mask, ggml_tensor * kq_b, float scale) {
    GGML_ASSERT(mask->ne[3] == 1);
    mask = mask->type == GGML_TYPE_F32 ? mask : ggml_cast(g.ctx0, mask, GGML_TYPE_F32);
    return ggml_add(g.ctx0, scale == 1.0f ? kq_b : ggml_scale(g.ctx0, kq_b, scale), mask);
}

template <typename Input>
ggml_tensor * llama_subkv::attend_kv(const llm_graph_context & g, const Input & inp,
                                     const llama_kv_cache_context * mctx, ggml_tensor * wo, ggml_tensor * wo_b,
                                     ggml_tensor * wo_s, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v,
                                     ggml_tensor * mask, ggml_tensor * chosen, ggml_tensor * sinks, float scale,
                                     int il) {
    const auto rotated = [&](ggml_tensor * t, ggml_tensor * rot) {
        return t && rot ? llama_mul_mat_hadamard(g.ctx0, t, rot) : t;
    };
    q = rotated(q, inp.self_k_rot);
    k = rotated(k, inp.self_k_rot);
    v = rotated(v, inp.self_v_rot);
    expand(g, q, k, v);
    ggml_tensor * cur =
        build_attn(g, mctx, q, k, v, inp.get_k_idxs(), inp.get_v_idxs(), mask, chosen, sinks, scale, il);
    g.cb(cur, "kqv_out", il);
    return project(g, wo, wo_b, wo_s, rotated(cur, inp.self_v_rot));
}

ggml_tensor * llama_subkv::attend(const llm_graph_context & g, const llm_graph_input_attn_kv & inp, ggml_tensor * wo,
                                  ggml_tensor * wo_b, ggml_tensor * wo_s, ggml_tensor * q, ggml_tensor * k,
                                  ggml_tensor * v, ggml_tensor * kq_b, ggml_tensor * sinks, ggml_tensor * v_mla,
                                  float scale, int il, ggml_tensor * chosen) {
    observe(g, inp.mctx, q, k, v, scale, il);
    if (!coded(inp.mctx, il)) {
        return nullptr;
    }
    GGML_ASSERT(!v_mla);
    ggml_tensor * mask = inp.get_kq_mask();
    if (kq_b) {
        mask = biased(g, mask, kq_b, scale);
    }
    return attend_kv(g, inp, inp.mctx, wo, wo_b, wo_s, q, k, v, mask, chosen, sinks, scale, il);
}

ggml_tensor * llama_subkv::attend(const llm_graph_context & g, const llm_graph_input_attn_kv_iswa & inp,
                                  ggml_tensor * wo, ggml_tensor * wo_b, ggml_tensor * wo_s, ggml_tensor * q,
                                  ggml_tensor * k, ggml_tensor * v, ggml_tensor * kq_b, ggml_tensor * sinks,
                                  ggml_tensor * /*v_mla*/, float scale, int il) {
    const auto * mctx = inp.mctx->get_base();
    observe(g, mctx, q, k, v, scale, il);
    if (g.hparams.is_swa(il) || !coded(mctx, il)) {
        return nullptr;
    }
    GGML_ASSERT(!kq_b);
    return attend_kv(g, inp, mctx, wo, wo_b, wo_s, q, k, v, inp.get_kq_mask(), nullptr, sinks, scale, il);
}

ggml_tensor * llama_subkv::attend(const llm_graph_context & g, const llm_graph_input_attn_k & inp, ggml_tensor * wo,
                                  ggml_tensor * wo_b, ggml_tensor * wo_s, ggml_tensor * q, ggml_tensor * k,
                                  ggml_tensor * v, ggml_tensor * kq_b, ggml_tensor * sinks, ggml_tensor * v_mla,
                                  float scale, int il, ggml_tensor * chosen) {
    if (inp.mctx->kv->swa_type != LLAMA_SWA_TYPE_NONE) { // the sliding half beside chosen cells
        return nullptr;
    }
    observe(g, inp.mctx, q, k, v, scale, il);
    if (!coded(inp.mctx, il)) {
        return nullptr;
    }
    GGML_ASSERT(!kq_b);
    expand(g, q, k, v);
    ggml_tensor * mask = inp.get_kq_mask();
    if (chosen && chosen->type != GGML_TYPE_I32) {
        mask   = ggml_reshape_4d(g.ctx0, chosen, mask->ne[0], mask->ne[1], mask->ne[2], mask->ne[3]);
        chosen = nullptr;
    }
    ggml_tensor * cur = build_attn_latent(g, inp.mctx, q, k, inp.get_k_idxs(), mask, chosen, sinks, v_mla, scale, il);
    g.cb(cur, "kqv_out", il);
    return project(g, wo, wo_b, wo_s, cur);
}

ggml_tensor * llama_subkv::attend(const llm_graph_context & g, const llm_graph_input_attn_k_dsa & inp, ggml_tensor * wo,
                                  ggml_tensor * wo_b, ggml_tensor * wo_s, ggml_tensor * q, ggml_tensor * k,
                                  ggml_tensor * v, ggml_tensor * kq_b, ggml_tensor * sinks, ggml_tensor * v_mla,
                                  ggml_tensor * top_k, float scale, int il) {
    const auto * mctx = inp.mctx->get_mla();
    observe(g, mctx, q, k, v, scale, il);
    if (!coded(mctx, il)) {
        return nullptr;
    }
    GGML_ASSERT(!kq_b);
    expand(g, q, k, v);
    ggml_tensor * cur =
        build_attn_latent(g, mctx, q, k, inp.get_k_idxs_mla(), inp.get_kq_mask_mla(), top_k, sinks, v_mla, scale, il);
    g.cb(cur, "kqv_out", il);
    return project(g, wo, wo_b, wo_s, cur);
}

bool llama_subkv::sees(const llm_graph_context & g, const llama_kv_cache_context * mctx, ggml_tensor * q,
                       ggml_tensor * k, ggml_tensor * v, int il) {
    observe(g, mctx, q, k, v, 1.0f / std::sqrt((float) q->ne[0]), il);
    return coded(mctx, il);
}

ggml_tensor * llama_subkv::unread(const llm_graph_context & g, const ggml_tensor * rows, int64_t n_kv,
                                  int64_t n_stream) {
    return ggml_new_tensor_4d(g.ctx0, GGML_TYPE_F16, rows->ne[0], rows->ne[1], n_kv, n_stream);
}
