// capi.h: finds the cache of a context, for the functions of the C interface.
#pragma once

#include "cache.h"
#include "calls.h"
#include "error.h"

namespace subkv {

// The functions of libllama, or nullptr if it has created no context since this library was loaded.
const LlamaCalls * llama_calls();

// The functions of the prompt store for libllama.
StoreCalls store_calls();

// A handle of the C interface, to be freed by subkv_layout_free.
subkv_layout * new_layout(std::shared_ptr<const Layout> p);

// The coefficient cache of a context, or nullptr if there is none. Sizes as in LlamaCalls::cache_of.
const Cache * cache_of(llama_context * ctx, RowSizes * sizes = nullptr);

// Throws Invalid if no kernels can run.
const Ops & usable_ops();

// The cache of a context. Throws Invalid unless it codes this head and has this sequence.
const Cache & coding(llama_context * ctx, int32_t il, int32_t head_kv, int32_t seq);

// One head of a coded layer. Throws Invalid, which begins with the function's name.
const HeadCodec & coded_head(const char * function, const subkv_layout * layout, int32_t il, int32_t head_kv,
                             bool value);

// The same for a head with its own E, which values of a latent layer do not have.
const HeadCodec & encoding_head(const char * function, const subkv_layout * layout, int32_t il, int32_t head_kv,
                                bool value);

} // namespace subkv
