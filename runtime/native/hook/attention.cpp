// attention.cpp: the complete llm_graph_context::build_attn of a coded layer: encode, attend, output projection. Part
// of libllama.
#include "llama-subkv-cells.h"
#include "llama-subkv-graph.h"
#include "llama-subkv-programs.h"

#include "llama-context.h"
#include "llama-graph.h"
#include "llama-impl.h"
#include "llama-kv-cache-dsa.h"
#include "llama-kv-cache-iswa.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <vector>

namespace llama_subkv {

// The input tensors that the coded and observed layers of a graph share.
class graph_input : public llm_graph_input_i {
public:
    explicit graph_input(const llama_kv_cache_context * mctx) : mctx(mctx) {}

    void set_input(const llama_ubatch * ubatch) override {
        const auto & kv    = access::kv(*mctx);
        const auto & sinfo = access::sinfo(*mctx);

        tokens.clear();
        add_tokens(*ubatch, tokens);
        std::map<int32_t, subkv::CacheHook::Snapshots> snapshots;
        for (const auto & token : tokens) {
            for (int32_t i = 0; i < token.n_seq; ++i) {
                auto & of_sequence = snapshots[token.seq[i]];
                of_sequence.n++;
                of_sequence.last = std::max(of_sequence.last, token.pos);
            }
        }
        for (const auto & token : tokens) { // llama.cpp indexes snapshots by distance in positions
            for (int32_t i = 0; token.in_picture && i < token.n_seq; ++i) {
                snapshots[token.seq[i]].n = 0;
            }
        }
        access::hook(kv)->note_snapshots(std::move(snapshots));
        for (uint32_t s = 0; s < sinfo.n_stream(); ++s) {
            for (uint32_t i = 0; i < sinfo.size(); ++i) {
                auto & token = tokens[s * sinfo.size() + i];
                token.stream = (int32_t) (sinfo.strm[s] - sinfo.s0);
                token.cell   = (int32_t) sinfo.idxs[s][i];
            }
        }
        access::hook(kv)->set_inputs(tensors, tokens, (uint32_t) sinfo.s0, reader(kv));
    }

    bool can_reuse(const llm_graph_params & params) override {
        mctx               = caches_of(params.mctx).base;
        const auto & sinfo = access::sinfo(*mctx);
        return tensors.tokens->ne[1] == params.ubatch.n_tokens && tensors.cell_pos->ne[0] == access::n_kv(*mctx) &&
               tensors.cell_pos->ne[1] == (int64_t) (sinfo.s1 - sinfo.s0 + 1) && s0 == sinfo.s0;
    }

    subkv::Inputs                  tensors;
    const llama_kv_cache_context * mctx;
    int64_t                        s0 = 0;

private:
    std::vector<subkv::TokenDesc> tokens;
};

static graph_input * inputs(const llm_graph_context & g, const llama_kv_cache_context * mctx) {
    for (auto & input : g.res->inputs) {
        if (auto * existing = dynamic_cast<graph_input *>(input.get())) {
            return existing;
        }
    }
    auto         input = std::make_unique<graph_input>(mctx);
    const auto & sinfo = access::sinfo(*mctx);
    input->s0          = sinfo.s0;
    input->tensors =
        access::hook(access::kv(*mctx))->build_inputs(g.ctx0, access::n_kv(*mctx), sinfo.s1 - sinfo.s0 + 1, g.n_tokens);
    return static_cast<graph_input *>(g.res->add_input(std::move(input)));
}

} // namespace llama_subkv

// The factor on logits before soft-capping, which Grok stores elsewhere.
static float logit_scale(const llm_graph_context & g, float scale) {
    return g.arch == LLM_ARCH_GROK ? scale * g.hparams.f_attn_out_scale : scale;
}

static float softcap(const llm_graph_context & g) {
    return g.hparams.attn_soft_cap || g.arch == LLM_ARCH_GROK ? g.hparams.f_attn_logit_softcapping : 0.0f;
}

bool llama_subkv::coded(const llama_kv_cache_context * mctx) {
    return coded(access::kv(*mctx));
}

bool llama_subkv::coded(const llama_kv_cache_context * mctx, int il) {
    return access::hook(access::kv(*mctx)) && access::hook(access::kv(*mctx))->facts().row_bytes(il, false) > 0;
}

void llama_subkv::observe(const llm_graph_context & g, const llama_kv_cache_context * mctx, ggml_tensor * q,
                          ggml_tensor * k, ggml_tensor * v, float scale, int il) {
    const auto & hook = access::hook(access::kv(*mctx));
    if (!hook || !hook->facts().layer(il).observed) {
        return;
    }
    hook->build_observe(g.ctx0, g.gf, il, q, k, v, inputs(g, mctx)->tensors, logit_scale(g, scale));
}

ggml_tensor * llama_subkv::build_attn(const llm_graph_context & g, const llama_kv_cache_context * mctx, ggml_tensor * q,
                                      ggml_tensor * k, ggml_tensor * v, ggml_tensor * k_idxs, ggml_tensor * v_idxs,
                                      ggml_tensor * mask, ggml_tensor * selected, ggml_tensor * sinks, float scale,
                                      int il) {
    const auto & kv    = access::kv(*mctx);
    const auto & layer = access::layer(kv, il);
    const auto & sinfo = access::sinfo(*mctx);

    const int64_t n_stream = sinfo.s1 - sinfo.s0 + 1;
    const auto    view     = [&](ggml_tensor * t) {
        return !t ? nullptr :
                    ggml_view_3d(g.ctx0, t, t->ne[0], access::n_kv(*mctx), n_stream, t->nb[1], t->nb[2],
                                 t->nb[2] * sinfo.s0);
    };

    subkv::AttnBuild b;
    b.ctx            = g.ctx0;
    b.gf             = g.gf;
    b.il             = il;
    b.q              = q;
    b.k              = k;
    b.v              = v;
    b.k_cache        = layer.k;
    b.v_cache        = layer.v;
    b.k_view         = view(layer.k);
    b.v_view         = view(layer.v);
    b.k_idxs         = k_idxs;
    b.v_idxs         = v_idxs;
    b.mask           = mask;
    b.selected       = selected;
    b.sinks          = sinks;
    b.inputs         = &inputs(g, mctx)->tensors;
    b.scale          = logit_scale(g, scale);
    b.softcap        = softcap(g);
    b.max_alibi_bias = g.hparams.use_alibi ? g.hparams.f_max_alibi_bias : 0.0f;
    b.pictures       = g.hparams.n_pos_per_embd() > 1;
    return access::hook(kv)->build_attn(b);
}

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
                                  float scale, int il, ggml_tensor * selected) {
    if (in.latent &&
        access::swa_type(access::kv(*in.mctx)) != LLAMA_SWA_TYPE_NONE) { // the sliding half beside selected cells
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
    if (selected && selected->type != GGML_TYPE_I32) {
        mask     = ggml_reshape_4d(g.ctx0, selected, mask->ne[0], mask->ne[1], mask->ne[2], mask->ne[3]);
        selected = nullptr;
    }
    ggml_tensor * cur =
        build_attn(g, in.mctx, q, k, in.latent ? nullptr : v, in.k_idxs, in.v_idxs, mask, selected, sinks, scale, il);
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

ggml_status llama_subkv::computed(llama_context & ctx, ggml_status status) {
    auto * hook = hook_of(ctx.get_memory());
    if (!hook) {
        return status;
    }
    const bool done = hook->computed();
    if (hook->facts().coded) {
        llama_subkv_usage_bad(&ctx, hook->n_bad_rows());
    }
    return done || status != GGML_STATUS_SUCCESS ? status : GGML_STATUS_ALLOC_FAILED;
}
