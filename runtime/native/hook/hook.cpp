// hook.cpp: asks libsubkv for the cache of a context, and finds it again. Part of libllama; the logic is in libsubkv.
#include "llama-subkv-cells.h"
#include "llama-subkv-model.h"
#include "llama-subkv-programs.h"
#include "llama-subkv-sequences.h"
#include "releases.h"

#include "llama-context.h"
#include "llama-impl.h"
#include "llama-memory-recurrent.h"
#include "llama-model.h"

#include <algorithm>
#include <cstring>
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
        const ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(device.dev);
        if (!reg) {
            return "-sm tensor splits its tensors over several devices, and subkv's nodes need them whole (-sm layer)";
        }
        if (std::strcmp(ggml_backend_reg_name(reg), "RPC") == 0) {
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
    const std::string unsupported = reason_unsupported(access::model(kv), access::hparams(kv), shares);
    if (is_index(kv) && unsupported.empty()) {
        type_k = request::rows_coded ? index_type(kv, type_k) : type_k;
        return;
    }
    const bool is_half =
        access::swa_type(kv) != LLAMA_SWA_TYPE_NONE && request::rows_created; // created after the other half
    if (is_half && (request::rows_coded || request::sliding_f16)) {
        type_k = type_v = sliding_type(kv, type_k, offload, filter);
        return;
    }
    const auto & hparams = access::hparams(kv);

    const int32_t router     = router_layer(hparams, 0); // selects LoRA weights and stays ordinary
    const bool    has_router = router >= 0;

    subkv::CacheDesc desc;
    desc.arch        = llm_arch_name(access::model(kv).arch);
    desc.unsupported = unsupported;
    desc.unobserved =
        access::model(kv).arch == LLM_ARCH_T5 ? "its decoder reads an encoder's output of another text" : "";
    desc.n_layer   = hparams.n_layer_all - has_router;
    desc.n_cells   = kv_size;
    desc.n_stream  = access::n_stream(kv);
    desc.n_seq_max = access::n_seq_max(kv);
    desc.sliding   = access::swa_type(kv) != LLAMA_SWA_TYPE_NONE;
    desc.no_alloc  = hparams.no_alloc;
    desc.is_long   = kv_size > std::max<uint32_t>(hparams.n_ctx_train, 1 << 18);
    desc.type_k    = type_k;
    desc.type_v    = type_v;
    desc.request   = request::asked(access::model(kv));
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
        // Some files with latent attention lack the size of values, which is the latent size.
        const uint32_t d_v = hparams.is_mla() ? hparams.n_lora_kv : hparams.n_embd_head_v(il);
        desc.layers.push_back({ (int32_t) il, (int32_t) hparams.n_head(il), (int32_t) hparams.n_head_kv(il),
                                (int32_t) hparams.n_embd_head_k(il), (int32_t) d_v, hparams.is_mla(),
                                hparams.indexer_top_k > 0,
                                offload ? ggml_backend_dev_buffer_type(access::model(kv).dev_layer(il)) :
                                          ggml_backend_cpu_buffer_type() });
    }
    access::set_hook(kv, cache_new(desc));
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
    return access::hook(kv) ? access::hook(kv)->facts().row_bytes((int32_t) il, value) : 0;
}

const char * llama_subkv::type_name(const llama_kv_cache & kv, ggml_type type) {
    return coded(kv) ? "subkv" : ggml_type_name(type);
}

std::pair<ggml_type, ggml_type> llama_subkv::types(const llama_kv_cache & kv, uint32_t il, ggml_type type_k,
                                                   ggml_type type_v) {
    return { row_bytes(kv, il, false) ? GGML_TYPE_I8 : type_k, row_bytes(kv, il, true) ? GGML_TYPE_I8 : type_v };
}

bool llama_subkv::coded(const llama_memory_i * memory) {
    const auto * hook = hook_of(memory);
    return hook && hook->facts().coded;
}

bool llama_subkv::coded(const llama_kv_cache & kv) {
    return access::hook(kv) && access::hook(kv)->facts().coded;
}

subkv::CacheHook * llama_subkv::hook_of(const llama_memory_i * memory) {
    const auto * kv = caches_of(memory).base;
    return kv ? access::hook(*kv) : nullptr;
}

subkv::RowSizes llama_subkv::row_sizes(const llama_memory_i * memory) {
    subkv::RowSizes     sizes;
    const struct caches caches = caches_of(memory);
    for (const auto * kv : caches.all()) {
        for (size_t i = 0; kv && i < access::layers(*kv).size(); ++i) {
            const auto & layer = access::layers(*kv)[i];
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
        sizes.n_swa = access::n_swa(*caches.swa);
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
    const auto & layer = access::layer(*kv, il);
    use(reader(*kv), layer.k, layer.v);
    return true;
}
