// capi.h: finds the cache of a context, for the functions of the C interface.
#pragma once

#include "cache.h"

struct llama_context;

namespace subkv {

// The coefficient cache of a context; nullptr: none. Sizes as in llama_subkv_of.
const Cache * cache_of(llama_context * ctx, size_t * bytes_stock = nullptr, size_t * bytes_coded = nullptr);

// The cache of a context, if it codes this head and has this sequence; nullptr: error set.
const Cache * coding(llama_context * ctx, int32_t il, int32_t head_kv, int32_t seq);

} // namespace subkv
