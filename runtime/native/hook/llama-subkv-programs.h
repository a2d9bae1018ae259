// llama-subkv-programs.h: the functions that the patched programs of llama.cpp (common/, tools/) call. Compiled into
// libllama.
#pragma once

#include "llama.h"

#include <cstdint>
#include <string>

// Cache types besides ggml's, for llama_context_params::type_k and type_v. One of the two suffices: the other stays F16,
// the default. They have precedence over SUBKV, except over SUBKV=off. llama_init_from_model replaces them by F16. Their
// numbers are those of types that ggml has removed: no tensor has them, and ggml_type_name and ggml_is_quantized accept
// them.
constexpr ggml_type LLAMA_SUBKV_TYPE      = (ggml_type) 4;  // subkv: a coded cache; without bases there is no context
constexpr ggml_type LLAMA_SUBKV_TYPE_AUTO = (ggml_type) 5;  // auto: a coded cache if the model has bases, else f16
constexpr ggml_type LLAMA_SUBKV_TYPE_F16  = (ggml_type) 36; // f16, also if SUBKV requests a coded cache

// The type that a user means by a name; GGML_TYPE_COUNT: ggml's type of this name, if there is one.
inline ggml_type llama_subkv_type(const std::string & name) {
    return name == "subkv" ? LLAMA_SUBKV_TYPE :
           name == "auto"  ? LLAMA_SUBKV_TYPE_AUTO :
           name == "f16"   ? LLAMA_SUBKV_TYPE_F16 :
                             GGML_TYPE_COUNT;
}

// The name of the type of keys or values; `other`: the type of the other side.
inline const char * llama_subkv_type_name(ggml_type type, ggml_type other) {
    const ggml_type both = type == GGML_TYPE_F16 ? other : type; // a coded cache has no ordinary side
    return both == LLAMA_SUBKV_TYPE      ? "subkv" :
           both == LLAMA_SUBKV_TYPE_AUTO ? "auto" :
           type == LLAMA_SUBKV_TYPE_F16  ? "f16" :
                                           ggml_type_name(type);
}

// Where evaluation resumes in a sequence of which positions before `pos` are kept: at `pos`, or up to SUBKV_RESUME
// tokens (32 by default) before it if a coded cache has lost their exact rows. A program removes the cells from there on
// and evaluates their tokens again.
LLAMA_API int32_t llama_subkv_resume(const llama_context * ctx, int32_t seq, int32_t pos);

// The minimum position that a sequence needs to continue from a checkpoint that ends at pos_max. pos_min: the
// sequence's current minimum; its sliding layers may still have cells that the checkpoint does not include. n_swa: size
// of the window; 0: sliding layers keep all cells. Ordinary caches: pos_min.
LLAMA_API int32_t llama_subkv_checkpoint_min(const llama_context * ctx, int32_t pos_min, int32_t pos_max,
                                             int32_t n_swa);

// Reason, in a sentence, why a server rejects a request with these headers; "": it accepts it. SUBKV_ALLOW_HOST lists
// names that are valid as Host and as Origin besides localhost and loopback addresses; unset, or with *: all names.
LLAMA_API std::string llama_subkv_refusal(const std::string & host, const std::string & origin);

// Returns a signal handler that runs `handler` in a separate thread, because `handler` may wait for locks; a second
// signal ends the process. Call it once.
using llama_subkv_signal_fn = void (*)(int);
LLAMA_API llama_subkv_signal_fn llama_subkv_in_thread(llama_subkv_signal_fn handler);
