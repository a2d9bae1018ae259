// sliding.cpp: the type of sliding layers beside coded ones. Part of libllama.
#include "llama-subkv-memory.h"
#include "llama-subkv-programs.h"
#include "releases.h"

#include "ggml-cpp.h"
#include "llama-context.h"
#include "llama-impl.h"
#include "llama-model.h"

#include <cstdlib>
#include <stdexcept>

namespace {

constexpr ggml_type SMALL = GGML_TYPE_Q8_0;
// the size of llama.cpp's smallest Hadamard matrix; it rotates a quantized row by one or several
constexpr int MATRIX = 64;

// Does the device of a layer have flash attention over rows of type SMALL?
bool has_flash_attention(const llama_model & model, uint32_t il, bool offload) {
    constexpr int64_t N_CELLS = 256;
    const auto &      hparams = model.hparams;
    ggml_context_ptr  ctx{ ggml_init({ 16 * ggml_tensor_overhead(), nullptr, /*.no_alloc =*/true }) };
    const int64_t     d_k = hparams.n_embd_head_k(il), d_v = hparams.n_embd_head_v(il);
    const int64_t     n_head = hparams.n_head(il), n_head_kv = hparams.n_head_kv(il);

    ggml_tensor * q    = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, d_k, 1, n_head);
    ggml_tensor * k    = ggml_new_tensor_3d(ctx.get(), SMALL, d_k, N_CELLS, n_head_kv);
    ggml_tensor * v    = ggml_new_tensor_3d(ctx.get(), SMALL, d_v, N_CELLS, n_head_kv);
    ggml_tensor * mask = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F16, N_CELLS, 1);
    const float   cap  = hparams.attn_soft_cap ? hparams.f_attn_logit_softcapping : 0.0f;
    ggml_tensor * op   = ggml_flash_attn_ext(ctx.get(), q, k, v, mask, 1.0f, hparams.f_max_alibi_bias, cap);
    if (model.layers[il].attn_sinks) {
        ggml_flash_attn_ext_add_sinks(op, ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, n_head));
    }
    auto * device = offload ? model.dev_layer(il) : ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    return ggml_backend_dev_supports_op(device, op);
}

// Why the sliding layers must keep f16, or "" if they need not.
std::string reason_for_f16(const llama_model & model, bool offload, const llama_subkv::layer_filter & filter) {
    const auto & hparams = model.hparams;
    uint32_t     d_k     = 0;
    for (uint32_t il = 0; il < hparams.n_layer_all; ++il) {
        if (!hparams.has_kv(il) || (filter && !filter(il))) {
            continue;
        }
        const uint32_t own = hparams.n_embd_head_k(il), of_values = hparams.n_embd_head_v(il);
        d_k = d_k == 0 ? own : d_k;
        // llama.cpp shifts quantized keys correctly only if it has rotated them by such a matrix, and RoPE rotates
        // whole heads
        if (own != d_k || own % MATRIX != 0 || of_values % ggml_blck_size(SMALL) != 0) {
            return format("heads of one size, a multiple of %d, expected, %u and %u found", MATRIX, d_k,
                          own % MATRIX != 0 || own != d_k ? own : of_values);
        }
        if (has_rope(hparams, il, 0) && n_rot_of(hparams, il, 0) != own) {
            return format("RoPE of all %u elements of a key expected, of %u found", own, n_rot_of(hparams, il, 0));
        }
        if (!has_flash_attention(model, il, offload)) {
            return format("the device of layer %u has no flash attention over rows of %s", il, ggml_type_name(SMALL));
        }
    }
    return "";
}

} // namespace

ggml_type llama_subkv::sliding_type(const llama_kv_cache & kv, ggml_type type, bool offload,
                                    const layer_filter & filter) {
    if (request::sliding_f16) {
        return GGML_TYPE_F16;
    }
    const char *      value = std::getenv("SUBKV_SLIDING");
    const std::string name  = value ? value : "";
    if (!name.empty() && name != "f16" && name != "q8_0") {
        throw std::runtime_error(format("SUBKV_SLIDING: f16 or q8_0 expected, '%.60s' found", name.c_str()));
    }
    if (name == "f16" || access::hparams(kv).is_mla()) {
        return type;
    }
    const char * off    = std::getenv("LLAMA_ATTN_ROT_DISABLE");
    const auto   reason = off && std::atoi(off) != 0 ? std::string("LLAMA_ATTN_ROT_DISABLE is set") :
                          access::v_trans(kv)        ? "flash attention is off" :
                                                       reason_for_f16(access::model(kv), offload, filter);
    if (reason.empty()) {
        return SMALL;
    }
    if (name == "q8_0") {
        throw std::runtime_error(
            format("SUBKV_SLIDING=q8_0: %s; SUBKV_SLIDING=f16 keeps sliding layers in f16", reason.c_str()));
    }
    if (!access::hparams(kv).no_alloc) {
        LLAMA_LOG_WARN("subkv: sliding layers stay in f16: %s\n", reason.c_str());
    }
    return type;
}

bool llama_subkv_slides(const llama_model * model, int32_t il) {
    return il >= 0 && il < (int32_t) model->hparams.n_layer_all && model->hparams.is_swa(il);
}

void llama_subkv::require_flash_attention(llama_context & ctx, const llama_memory_i & memory) {
    const auto * swa = caches_of(&memory).swa;
    for (size_t i = 0; swa && i < access::layers(*swa).size(); ++i) {
        if (coded(&memory) && access::layers(*swa)[i].v && ggml_is_quantized(access::layers(*swa)[i].v->type)) {
            access::cparams(ctx).auto_fa = false;
        }
    }
}
