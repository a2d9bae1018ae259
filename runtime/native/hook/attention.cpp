// attention.cpp: the complete llm_graph_context::build_attn of a coded layer: encode, attend, output projection.
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

llama_subkv::attn_input::attn_input(const llm_graph_input_attn_kv & inp) :
    mctx(inp.mctx), k_idxs(inp.get_k_idxs()), v_idxs(inp.get_v_idxs()), mask(inp.get_kq_mask()), k_rot(inp.self_k_rot),
    v_rot(inp.self_v_rot) {}

llama_subkv::attn_input::attn_input(const llm_graph_input_attn_kv_iswa & inp) :
    mctx(inp.mctx->get_base()), k_idxs(inp.get_k_idxs()), v_idxs(inp.get_v_idxs()), mask(inp.get_kq_mask()),
    k_rot(inp.self_k_rot), v_rot(inp.self_v_rot), iswa(true) {}

llama_subkv::attn_input::attn_input(const llm_graph_input_attn_k & inp) :
    mctx(inp.mctx), k_idxs(inp.get_k_idxs()), mask(inp.get_kq_mask()), latent(true) {}

llama_subkv::attn_input::attn_input(const llm_graph_input_attn_k_dsa & inp) :
    mctx(inp.mctx->get_mla()), k_idxs(inp.get_k_idxs_mla()), mask(inp.get_kq_mask_mla()), latent(true) {}

ggml_tensor * llama_subkv::attend(const llm_graph_context & g, const attn_input & in, ggml_tensor * wo,
                                  ggml_tensor * wo_b, ggml_tensor * wo_s, ggml_tensor * q, ggml_tensor * k,
                                  ggml_tensor * v, ggml_tensor * kq_b, ggml_tensor * sinks, ggml_tensor * v_mla,
                                  float scale, int il, ggml_tensor * chosen) {
    if (in.latent && in.mctx->kv->swa_type != LLAMA_SWA_TYPE_NONE) { // the sliding half beside chosen cells
        return nullptr;
    }
    observe(g, in.mctx, q, k, v, scale, il);
    if ((in.iswa && g.hparams.is_swa(il)) || !coded(in.mctx, il)) {
        return nullptr;
    }
    GGML_ASSERT(in.latent || in.iswa || !v_mla);
    GGML_ASSERT(!kq_b || !(in.latent || in.iswa));
    const auto rotated = [&](ggml_tensor * t, ggml_tensor * rot) {
        return t && rot ? llama_mul_mat_hadamard(g.ctx0, t, rot) : t;
    };
    q = rotated(q, in.k_rot);
    k = rotated(k, in.k_rot);
    v = rotated(v, in.v_rot);
    for (ggml_tensor * t : { q, v, k }) {
        if (t) {
            ggml_build_forward_expand(g.gf, t);
        }
    }
    ggml_tensor * mask = kq_b ? biased(g, in.mask, kq_b, scale) : in.mask;
    if (chosen && chosen->type != GGML_TYPE_I32) {
        mask   = ggml_reshape_4d(g.ctx0, chosen, mask->ne[0], mask->ne[1], mask->ne[2], mask->ne[3]);
        chosen = nullptr;
    }
    ggml_tensor * cur =
        build_attn(g, in.mctx, q, k, in.latent ? nullptr : v, in.k_idxs, in.v_idxs, mask, chosen, sinks, scale, il);
    if (in.latent && v_mla) { // [d_v, size of a head's output, n_head]
        cur = ggml_reshape_3d(g.ctx0, cur, v_mla->ne[0], q->ne[1], q->ne[2]);
        cur = ggml_mul_mat(g.ctx0, v_mla, ggml_permute(g.ctx0, cur, 0, 2, 1, 3));
        cur = ggml_cont(g.ctx0, ggml_permute(g.ctx0, cur, 0, 2, 1, 3));
        cur = ggml_reshape_2d(g.ctx0, cur, cur->ne[0] * cur->ne[1], cur->ne[2]);
    }
    g.cb(cur, "kqv_out", il);
    return project(g, wo, wo_b, wo_s, rotated(cur, in.v_rot));
}

bool llama_subkv::observe_layer(const llm_graph_context & g, const llama_kv_cache_context * mctx, ggml_tensor * q,
                                ggml_tensor * k, ggml_tensor * v, int il) {
    observe(g, mctx, q, k, v, 1.0f / std::sqrt((float) q->ne[0]), il);
    return coded(mctx, il);
}

ggml_tensor * llama_subkv::unused_rows(const llm_graph_context & g, const ggml_tensor * rows, int64_t n_kv,
                                       int64_t n_stream) {
    return ggml_new_tensor_4d(g.ctx0, GGML_TYPE_F16, rows->ne[0], rows->ne[1], n_kv, n_stream);
}
