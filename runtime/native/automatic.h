// automatic.h: the cache of a context without an attached layout, selected by the environment (docs/programs.md).
//
//   SUBKV            off (or unset): ordinary; auto: the model's bases, if any; any other value: a file with bases
//   SUBKV_SINK, SUBKV_RECENT, SUBKV_ROLLBACK   numbers of tokens, as in subkv_cache_params
//   another variable of chunks: chunks_of_environment (chunked.h)
//
// The model's bases are the first of: its own keys, the sidecar beside it, the calibrated sidecar in the user's cache
// folder, the sidecar derived from its weights there. Every context logs its kind of cache in one line of llama.cpp's
// log.
#pragma once

#include "hook.h"

#include <memory>

namespace subkv {

// nullptr: an ordinary cache. Throws std::runtime_error, with the error set, if SUBKV's file or the model's own bases
// cannot be used.
std::shared_ptr<CacheHook> automatic_cache(const CacheDesc & desc);

} // namespace subkv
