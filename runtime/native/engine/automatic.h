// automatic.h: the cache of a context without an attached layout.
#pragma once

#include "cache_hook.h"
#include "resolve.h"

#include <memory>
#include <string>

namespace subkv {

class Cache;
struct RowSizes;

// "coded K/V cache, ...; bases: ", to which words about the bases are added. n_windows is the number of sequences with
// a window in this size, and the line adds the size of each further one.
std::string cache_line(const Cache & cache, const RowSizes & rows, int32_t n_windows);

// resolve(), with errors in the words of llama.cpp's programs, which do not know the fields of a request. Throws Invalid.
CacheChoice resolve_for_program(const CacheRequest & asked);

// The variables that count for a model, which is its file, or in the plug-in the digest of its weights. The value of
// SUBKV belongs to the first model that calls own_setting(), which returns whether it is this one.
Variables variables_for(const std::string & model);
bool      own_setting(const std::string & model);

// The cache that the context's types or the environment request, or nullptr for an ordinary cache. Throws Invalid, with
// the error set, if SUBKV's file or the model's own bases cannot be used.
std::shared_ptr<CacheHook> automatic_cache(const CacheDesc & desc);

} // namespace subkv
