// calls.h: the functions that libllama and libsubkv call of each other. libllama loads libsubkv when a context or the
// prompt store needs it, and both exchange these tables; neither links the other.
#pragma once

#include "cache_hook.h"
#include "file_stamp.h"
#include "subkv_store.h"

#include <array>
#include <cstdint>
#include <string>
#include <vector>

struct llama_context;

namespace subkv {

// Functions of libllama.
struct LlamaCalls {
    // Writes a line to llama.cpp's log.
    void (*log)(const std::string & line);
    // The hook of a context's cache (in an iswa cache, of the full-attention half), or nullptr if there is none.
    // `sizes` is set to those of its rows, unless it is nullptr.
    CacheHook * (*cache_of)(llama_context * ctx, RowSizes * sizes);
    // Calls `use` with one layer of that cache after all pending work of the context. Returns false if there is no
    // coefficient cache.
    bool (*rows)(llama_context * ctx, int32_t il, const rows_fn & use);
    int32_t (*resume)(const llama_context * ctx, int32_t seq, int32_t pos); // subkv_resume
    LoadedModel (*loaded_model)(const llama_context * ctx);
    bool (*take_refusal)(const llama_context & ctx, int32_t seq); // subkv_take_refusal
    // What the bytes of a context's states depend on, except LoRA weights and control vectors. `model` is the model's
    // digest, and `whole` means states of the whole context instead of one sequence.
    StateIdentity (*state_identity)(const llama_context & ctx, const std::string & model, bool whole);
    int64_t (*n_removable)(const llama_context & ctx); // subkv_store_removable
};

using StoreStates   = std::array<std::vector<uint8_t>, 2>; // of the model, of a draft model
using StoreIdentity = std::array<uint8_t, SUBKV_STORE_IDENTITY>;

// Functions of libsubkv's prompt store.
struct StoreCalls {
    decltype(&subkv_store_open)         open;
    decltype(&subkv_store_room)         room;
    decltype(&subkv_store_flush)        flush;
    decltype(&subkv_store_get)          get;
    decltype(&subkv_store_found_prompt) found_prompt;
    decltype(&subkv_store_found_reach)  found_reach;
    decltype(&subkv_store_found_free)   found_free;
    decltype(&subkv_store_get_stats)    stats;

    // As subkv_store_put, but without a copy of the states. It ignores prompt.state.
    bool (*put_states)(subkv_store * store, const uint8_t * identity, const subkv_store_prompt * prompt,
                       StoreStates && states, bool wait);
    // Calls model_digest (store/model_digest.h), but throws nothing. It returns "" and sets last_error if the digest is
    // unknown, and sets is_final if it stays unknown.
    std::string (*content)(const LoadedModel & model, double seconds, bool & is_final);
    StoreIdentity (*digest)(const StateIdentity & identity); // SHA-256
};

// Functions of libsubkv.
struct SubkvCalls {
    cache_new_fn cache_new;
    void (*created)(); // after each llama_init_from_model, whether it has created a context or not
    decltype(&subkv_last_error)         last_error;
    decltype(&subkv_get_stats)          stats;
    decltype(&subkv_kernel_name)        kernel_name;
    decltype(&subkv_device_kernel_name) device_kernel_name;
    StoreCalls                          store;
};

using connect_fn = const SubkvCalls * (*)(const LlamaCalls * llama);

} // namespace subkv

// The function of libsubkv that exchanges the tables, a subkv::connect_fn.
constexpr const char * SUBKV_CONNECT = "subkv_connect";
