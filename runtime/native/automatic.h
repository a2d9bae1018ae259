// automatic.h: caches of contexts to which nobody attached anything, as the environment asks (docs/programs.md).
//
//   SUBKV            off (or unset): ordinary; auto: the bases that the model has, if any; else a file with bases
//   SUBKV_SINK, SUBKV_RECENT, SUBKV_ROLLBACK   numbers of tokens, as subkv_cache_params
//   SUBKV_ADAPT      as --adapt; unset: as the file says
//
// The bases that a model has, the first there is: its own keys, the sidecar beside it, the calibrated sidecar in the
// user's cache folder, the sidecar derived from its weights there. Every context reports in one line of llama.cpp's log
// which cache it got, or that it has none.
#pragma once

#include "hook.h"

#include <memory>

namespace subkv {

// nullptr: an ordinary cache. Throws std::runtime_error, with the error set, when the file that SUBKV names, or one that
// belongs to this model, cannot be used.
std::shared_ptr<CacheHook> automatic_cache(const CacheDesc & desc);

} // namespace subkv
