// hook.cpp: connects llama.cpp's internals to hook.h. Part of libllama; the logic is in libsubkv.
#include "llama-subkv-cells.h"
#include "llama-subkv-programs.h"
#include "releases.h"

#include "llama-context.h"
#include "llama-graph.h"
#include "llama-impl.h"
#include "llama-io.h"
#include "llama-kv-cache-iswa.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-hybrid.h"
#include "llama-memory-recurrent.h"
#include "llama-model-loader.h"
#include "llama-model.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

//
// llama_kv_cache
//

// The reason why the hooked build_attn does not cover this cache's attention, or why the kernels cannot compute it.
static std::string reason_unsupported(const llama_model & model, const llama_hparams & hparams, bool shares) {
    if (shares) {
        return "its layers read the K/V cache of another model's context";
    }
    if (!hparams.causal_attn) {
        return "its attention is not causal";
    }
    for (const auto & device : model.devices) { // RPC accepts custom nodes with functions of this process
        if (std::strcmp(ggml_backend_reg_name(ggml_backend_dev_backend_reg(device.dev)), "RPC") == 0) {
            return format("its device %s belongs to another process (RPC), which lacks the functions of subkv's nodes",
                          ggml_backend_dev_name(device.dev));
        }
    }
    switch (model.arch) {
        case LLM_ARCH_T5ENCODER:
        case LLM_ARCH_LLAMA_EMBED: return "its attention does not use the K/V cache";
        case LLM_ARCH_DFLASH:
        case LLM_ARCH_DEEPSEEK4: return "its sparse attention reads the K/V cache directly";
        default: return "";
    }
}

void llama_subkv::init(llama_kv_cache & kv, ggml_type & type_k, ggml_type & type_v, bool offload, uint32_t kv_size,
                       const layer_filter & filter, const layer_reuse & reuse, bool shares) {
    const subkv::cache_new_fn cache_new = request::cache_new();
    if (!cache_new) {
        return;
    }
    const std::string unsupported = reason_unsupported(kv.model, kv.hparams, shares);
    if (is_index(kv) && unsupported.empty()) {
        type_k = request::rows_coded ? index_type(kv, type_k) : type_k;
        return;
    }
    const bool is_half = kv.swa_type != LLAMA_SWA_TYPE_NONE && request::rows_created; // created after the other half
    if (is_half && (request::rows_coded || request::sliding_f16)) {
        type_k = type_v = sliding_type(kv, type_k, offload, filter);
        return;
    }
    const auto & hparams = kv.hparams;

    const int32_t router     = router_layer(hparams, 0); // selects LoRA weights and stays ordinary
    const bool    has_router = router >= 0;

    subkv::CacheDesc desc;
    desc.arch        = llm_arch_name(kv.model.arch);
    desc.unsupported = unsupported;
    desc.unobserved  = kv.model.arch == LLM_ARCH_T5 ? "its decoder reads an encoder's output of another text" : "";
    desc.n_layer     = hparams.n_layer_all - has_router;
    desc.n_cells     = kv_size;
    desc.n_stream    = kv.n_stream;
    desc.n_seq_max   = kv.n_seq_max;
    desc.sliding     = kv.swa_type != LLAMA_SWA_TYPE_NONE;
    desc.no_alloc    = hparams.no_alloc;
    desc.is_long     = kv_size > std::max<uint32_t>(hparams.n_ctx_train, 1 << 18);
    desc.type_k      = type_k;
    desc.type_v      = type_v;
    desc.request     = request::asked(kv.model);
    for (uint32_t il = 0; il < hparams.n_layer_all; ++il) {
        if (hparams.is_recr(il)) {
            desc.recurrent.push_back((int32_t) il);
        }
        if ((filter && !filter(il)) || (int32_t) il == router) {
            continue;
        }
        if (const int32_t owner = reuse ? reuse(il) : -1; owner >= 0) {
            desc.readers.push_back({ (int32_t) il, owner, (int32_t) hparams.n_head(il) });
        }
        if (!hparams.has_kv(il)) {
            continue;
        }
        // some files with latent attention lack the size of values, which is the latent size
        const uint32_t d_v = hparams.is_mla() ? hparams.n_lora_kv : hparams.n_embd_head_v(il);
        desc.layers.push_back(
            { (int32_t) il, (int32_t) hparams.n_head(il), (int32_t) hparams.n_head_kv(il),
              (int32_t) hparams.n_embd_head_k(il), (int32_t) d_v, hparams.is_mla(), hparams.indexer_top_k > 0,
              offload ? ggml_backend_dev_buffer_type(kv.model.dev_layer(il)) : ggml_backend_cpu_buffer_type() });
    }
    kv.subkv_hook         = cache_new(desc);
    request::rows_coded   = coded(kv);
    request::rows_created = true;
}

// Throws if the model uses the cells of another context that are coded.
static void check_other(const llama_context & ctx) {
    const llama_context * other = ctx.get_cparams().ctx_other;
    switch (ctx.get_model().arch) {
        case LLM_ARCH_EAGLE3:
        case LLM_ARCH_DFLASH: return; // only its embeddings and its output matrix
        default:
            if (other && llama_subkv::coded(other->get_memory())) {
                throw std::runtime_error(
                    "this model reads the K/V cache of another context, which holds coefficients; create that one "
                    "with an ordinary cache type (-ctk f16)");
            }
    }
}

std::unique_ptr<llama_memory_i> llama_subkv::create_memory(llama_context & ctx, const llama_memory_params & params) {
    check_other(ctx);
    const auto &                    model = ctx.get_model();
    llama_context * const           other = ctx.get_cparams().ctx_other;
    std::unique_ptr<llama_memory_i> memory;
    {
        const undecorated   plain(other);
        llama_memory_params of_other = params;
        of_other.mem_other           = llama_get_memory(other);
        memory.reset(model.create_memory(of_other, ctx.get_cparams()));
    }
    const bool recurrent = dynamic_cast<const llama_memory_recurrent *>(memory.get()) != nullptr;
    if (memory && !recurrent) {
        require_flash_attention(ctx, *memory);
        for (auto * hook : caches_of(memory.get()).hooks()) {
            hook->created(row_sizes(memory.get()));
        }
        return decorate(std::move(memory), ctx);
    }
    if (const subkv::cache_new_fn cache_new = request::cache_new()) {
        subkv::CacheDesc desc = {};
        desc.arch             = llm_arch_name(model.arch);
        desc.no_alloc         = model.hparams.no_alloc;
        desc.no_cache =
            recurrent ? "its layers keep a recurrent state instead" : "its tokens attend to their batch only";
        desc.request = request::asked(model);
        cache_new(desc);
    }
    return memory ? decorate(std::move(memory), ctx) : nullptr;
}

size_t llama_subkv::row_bytes(const llama_kv_cache & kv, uint32_t il, bool value) {
    return kv.subkv_hook ? kv.subkv_hook->facts().row_bytes((int32_t) il, value) : 0;
}

const char * llama_subkv::type_name(const llama_kv_cache & kv, ggml_type type) {
    return coded(kv) ? "subkv" : ggml_type_name(type);
}

std::pair<ggml_type, ggml_type> llama_subkv::types(const llama_kv_cache & kv, uint32_t il, ggml_type type_k,
                                                   ggml_type type_v) {
    return { row_bytes(kv, il, false) ? GGML_TYPE_I8 : type_k, row_bytes(kv, il, true) ? GGML_TYPE_I8 : type_v };
}

// Sources by the address of their model. Every model is loaded by one function, which replaces the entry of an earlier
// model at the address.
static std::mutex                                               sources_mutex;
static std::map<const llama_model *, llama_subkv::model_source> sources;

void llama_subkv::record_source(const llama_model & model, const std::string & path,
                                const llama_model_loader & loader) {
    std::map<std::string, std::string> sorted;
    for (const auto & [key, value] : loader.kv_overrides) {
        const bool text = value.tag == LLAMA_KV_OVERRIDE_TYPE_STR;
        sorted[key] =
            std::to_string((int) value.tag) + " " +
            (text ? std::string(value.val_str, strnlen(value.val_str, sizeof(value.val_str))) :
                    std::to_string(value.tag == LLAMA_KV_OVERRIDE_TYPE_BOOL ? value.val_bool : value.val_i64));
    }
    model_source source = { path, "", {} };
    for (const auto & file : loader.files) {
        subkv::FileStamp stamp;
        if (!subkv::stamp_of(file->file_id(), stamp)) {
            source.files.clear();
            break;
        }
        source.files.push_back(stamp);
    }
    for (const auto & [key, value] : sorted) {
        source.overrides += key + " " + value + "\n";
    }
    const std::lock_guard lock(sources_mutex);
    sources.insert_or_assign(&model, std::move(source));
}

const llama_subkv::model_source & llama_subkv::source_of(const llama_model & model) {
    static const model_source none;
    const std::lock_guard     lock(sources_mutex);
    const auto                found = sources.find(&model);
    return found == sources.end() ? none : found->second;
}

// true: not every tail can be removed (BasisSource::codes_later)
static bool keeps_tails(const subkv::CacheHook * hook) {
    return hook && hook->facts().n_rollback >= 0;
}

llama_pos llama_subkv::pos_min(const llama_memory_i & memory, llama_seq_id seq) {
    const llama_pos first = memory.seq_pos_min(seq);
    const auto *    hook  = hook_of(&memory);
    if (first < 0 || !keeps_tails(hook)) {
        return first;
    }
    const struct caches caches = caches_of(&memory);
    llama_pos           last   = hook->rollback_target(seq, reader(*caches.base)) - 1;
    // Callers that know of a truncated sliding window subtract its size from the position that they return to.
    if (caches.swa && caches.swa->get_size() < caches.base->get_size()) {
        last -= (llama_pos) caches.base->hparams.n_swa;
    }
    return std::max(first, last);
}

uint32_t llama_subkv::n_rs_seq(const llama_context & ctx) {
    const uint32_t snapshots = ctx.get_cparams().n_rs_seq;
    const auto *   hook      = hook_of(ctx.get_memory());
    if (!keeps_tails(hook)) {
        return snapshots;
    }
    const auto n_rollback = (uint32_t) std::max(1, hook->facts().n_rollback);
    return caches_of(ctx.get_memory()).recurrent ? std::min(snapshots, n_rollback) : n_rollback;
}

llama_pos llama_subkv::resume(llama_memory_i * memory, llama_seq_id seq, llama_pos pos) {
    const struct caches caches = caches_of(memory);
    if (!coded(memory) || caches.recurrent || seq < 0 || seq >= (llama_seq_id) caches.base->n_seq_max) {
        return pos;
    }
    const auto & base = *caches.base;
    const auto   to   = base.subkv_hook->resume(seq, pos, reader(base));
    // in the sliding half, the window of an earlier token may be gone, even that of the next one
    const auto ready = [&](llama_pos at) { return missing_swa_pos(base, *caches.swa, { { seq, 0, at } }, at) < 0; };
    return !caches.swa || ready(to) ? to : ready(pos) ? pos : 0;
}

int32_t llama_subkv_resume(const llama_context * ctx, llama_seq_id seq, int32_t pos) {
    return llama_subkv::resume(*ctx, seq, pos);
}

bool llama_subkv_removable(const llama_context * ctx, llama_seq_id seq, int32_t pos) {
    return llama_subkv::removable(*ctx, seq, pos);
}

bool llama_subkv_refused(const llama_context * ctx, llama_seq_id seq, int32_t p0) {
    return llama_subkv::note_refused(*ctx, seq, p0);
}

static void add_tokens(const llama_ubatch & ubatch, std::vector<subkv::TokenDesc> & out) {
    for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
        const llama_pos * pos = ubatch.pos + i; // first all positions in time, then in height, then in width
        const bool        in_picture =
            ubatch.is_pos_2d() && is_in_picture(*pos, pos[2 * ubatch.n_tokens], pos[ubatch.n_tokens]);
        out.push_back({ *pos, ubatch.n_seq_id[i], ubatch.seq_id[i], 0, -1, in_picture });
    }
}

bool llama_subkv::ready(const llama_kv_cache & kv, const std::vector<llama_ubatch> & ubatches) {
    if (rotation_pending(kv)) {
        return false;
    }
    std::vector<subkv::TokenDesc> tokens;
    for (const auto & ubatch : ubatches) {
        add_tokens(ubatch, tokens);
    }
    return kv.subkv_hook->ready(tokens, reader(kv));
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

//
// graph
//

class llama_subkv::graph_input : public llm_graph_input_i {
public:
    explicit graph_input(const llama_kv_cache_context * mctx) : mctx(mctx) {}

    void set_input(const llama_ubatch * ubatch) override {
        const auto & kv    = *mctx->kv;
        const auto & sinfo = mctx->sinfos[mctx->i_cur];

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
        kv.subkv_hook->note_snapshots(std::move(snapshots));
        for (uint32_t s = 0; s < sinfo.n_stream(); ++s) {
            for (uint32_t i = 0; i < sinfo.size(); ++i) {
                auto & token = tokens[s * sinfo.size() + i];
                token.stream = (int32_t) (sinfo.strm[s] - sinfo.s0);
                token.cell   = (int32_t) sinfo.idxs[s][i];
            }
        }
        kv.subkv_hook->set_inputs(tensors, tokens, (uint32_t) sinfo.s0, reader(kv));
    }

    bool can_reuse(const llm_graph_params & params) override {
        mctx               = caches_of(params.mctx).base;
        const auto & sinfo = mctx->sinfos[mctx->i_cur];
        return tensors.tokens->ne[1] == params.ubatch.n_tokens && tensors.cell_pos->ne[0] == mctx->n_kv &&
               tensors.cell_pos->ne[1] == (int64_t) (sinfo.s1 - sinfo.s0 + 1) && s0 == sinfo.s0;
    }

    subkv::Inputs                  tensors;
    const llama_kv_cache_context * mctx;
    int64_t                        s0 = 0;

private:
    std::vector<subkv::TokenDesc> tokens;
};

llama_subkv::graph_input * llama_subkv::inputs(const llm_graph_context & g, const llama_kv_cache_context * mctx) {
    for (auto & input : g.res->inputs) {
        if (auto * existing = dynamic_cast<graph_input *>(input.get())) {
            return existing;
        }
    }
    auto         input = std::make_unique<graph_input>(mctx);
    const auto & sinfo = mctx->sinfos[mctx->i_cur];
    input->s0          = sinfo.s0;
    input->tensors     = mctx->kv->subkv_hook->build_inputs(g.ctx0, mctx->n_kv, sinfo.s1 - sinfo.s0 + 1, g.n_tokens);
    return static_cast<graph_input *>(g.res->add_input(std::move(input)));
}

// The factor on logits before soft-capping; Grok stores it elsewhere.
static float logit_scale(const llm_graph_context & g, float scale) {
    return g.arch == LLM_ARCH_GROK ? scale * g.hparams.f_attn_out_scale : scale;
}

static float softcap(const llm_graph_context & g) {
    return g.hparams.attn_soft_cap || g.arch == LLM_ARCH_GROK ? g.hparams.f_attn_logit_softcapping : 0.0f;
}

bool llama_subkv::coded(const llama_memory_i * memory) {
    const auto * hook = hook_of(memory);
    return hook && hook->facts().coded;
}

bool llama_subkv::coded(const llama_kv_cache & kv) {
    return kv.subkv_hook && kv.subkv_hook->facts().coded;
}

bool llama_subkv::coded(const llama_kv_cache_context * mctx) {
    return coded(*mctx->kv);
}

bool llama_subkv::coded(const llama_kv_cache_context * mctx, int il) {
    return mctx->kv->subkv_hook && mctx->kv->subkv_hook->facts().row_bytes(il, false) > 0;
}

void llama_subkv::observe(const llm_graph_context & g, const llama_kv_cache_context * mctx, ggml_tensor * q,
                          ggml_tensor * k, ggml_tensor * v, float scale, int il) {
    const auto & hook = mctx->kv->subkv_hook;
    if (!hook || !hook->facts().layer(il).observed) {
        return;
    }
    hook->build_observe(g.ctx0, g.gf, il, q, k, v, inputs(g, mctx)->tensors, logit_scale(g, scale));
}

ggml_tensor * llama_subkv::build_attn(const llm_graph_context & g, const llama_kv_cache_context * mctx, ggml_tensor * q,
                                      ggml_tensor * k, ggml_tensor * v, ggml_tensor * k_idxs, ggml_tensor * v_idxs,
                                      ggml_tensor * mask, ggml_tensor * chosen, ggml_tensor * sinks, float scale,
                                      int il) {
    const auto & kv    = *mctx->kv;
    const auto & layer = kv.layers[kv.map_layer_ids.at(il)];
    const auto & sinfo = mctx->sinfos[mctx->i_cur];

    const int64_t n_stream = sinfo.s1 - sinfo.s0 + 1;
    const auto    view     = [&](ggml_tensor * t) {
        return !t ? nullptr :
                    ggml_view_3d(g.ctx0, t, t->ne[0], mctx->n_kv, n_stream, t->nb[1], t->nb[2], t->nb[2] * sinfo.s0);
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
    b.chosen         = chosen;
    b.sinks          = sinks;
    b.inputs         = &inputs(g, mctx)->tensors;
    b.scale          = logit_scale(g, scale);
    b.softcap        = softcap(g);
    b.max_alibi_bias = g.hparams.use_alibi ? g.hparams.f_max_alibi_bias : 0.0f;
    b.pictures       = g.hparams.n_pos_per_embd() > 1;
    return kv.subkv_hook->build_attn(b);
}

subkv::CacheHook * llama_subkv::hook_of(const llama_memory_i * memory) {
    const auto * kv = caches_of(memory).base;
    return kv ? kv->subkv_hook.get() : nullptr;
}

subkv::RowSizes llama_subkv::row_sizes(const llama_memory_i * memory) {
    subkv::RowSizes     sizes;
    const struct caches caches = caches_of(memory);
    for (const auto * kv : caches.all()) {
        for (size_t i = 0; kv && i < kv->layers.size(); ++i) {
            const auto & layer = kv->layers[i];
            const bool   own   = row_bytes(*kv, layer.il, false) > 0;
            for (const ggml_tensor * rows : { layer.k, layer.v }) {
                if (rows) {
                    (own ? sizes.coded : sizes.ordinary) += ggml_nbytes(rows);
                    sizes.ordinary_f16 += own ? 0 : ggml_nelements(rows) * ggml_type_size(GGML_TYPE_F16);
                }
            }
            if (kv != caches.index) {
                (own ? sizes.n_coded : kv == caches.swa ? sizes.n_sliding : sizes.n_other)++;
            }
        }
    }
    if (caches.swa && caches.swa->get_size() < caches.base->get_size()) {
        sizes.n_swa = caches.swa->n_swa;
    }
    return sizes;
}

void llama_subkv::apply_deferred(llama_context & ctx) {
    if (coded(ctx.get_memory())) {
        ctx.memory_update(false);
        if (rotation_pending(*caches_of(ctx.get_memory()).base)) {
            throw std::runtime_error("a pending shift of positions failed");
        }
    }
}

subkv::CacheHook * llama_subkv::cache_of(llama_context * ctx, subkv::RowSizes * sizes) {
    if (sizes) {
        *sizes = row_sizes(ctx->get_memory());
    }
    return hook_of(ctx->get_memory());
}

bool llama_subkv::rows(llama_context * ctx, int32_t il, const subkv::rows_fn & use) {
    llama_synchronize(ctx);
    try {
        apply_deferred(*ctx);
    } catch (const std::exception &) { // reported, or out of memory
        return false;
    }
    const auto * kv = caches_of(ctx->get_memory()).base;
    if (!kv || il < 0 || row_bytes(*kv, (uint32_t) il, false) == 0) {
        return false;
    }
    const auto & layer = kv->layers[kv->map_layer_ids.at(il)];
    use(reader(*kv), layer.k, layer.v);
    return true;
}
