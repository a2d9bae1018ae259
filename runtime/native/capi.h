// capi.h: the caches behind contexts, for the functions of the C interface.
#pragma once

#include "cache.h"

struct llama_context;

namespace subkv {

// The coefficient cache of a context; nullptr: it has none. The sizes are those of llama_subkv_of.
const Cache * cache_of(llama_context * ctx, size_t * bytes_stock = nullptr, size_t * bytes_coded = nullptr);

// The cache of a context that codes this head for this sequence; nullptr: error set.
const Cache * coding(llama_context * ctx, int32_t il, int32_t head_kv, int32_t seq);

} // namespace subkv
