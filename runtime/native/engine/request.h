// request.h: requests for coefficient caches, with the checks that need no model.
#pragma once

#include "basis_source.h"
#include "layout.h"
#include "subkv.h"

#include <memory>
#include <string>

namespace subkv {

class Cache;
class CacheHook;
struct RowSizes;

struct CacheRequest {
    std::shared_ptr<const Layout> layout;          // nullptr: an ordinary cache
    int32_t                       n_sink     = -1; // as in subkv_cache_params
    int32_t                       n_recent   = -1;
    int32_t                       n_rollback = -1;
    MakeBases                     make_bases;

    CacheRequest() = default;
    // Throws Invalid if `params` or the bases exceed a limit, or if no kernels can run.
    CacheRequest(std::shared_ptr<const Layout> layout, const subkv_cache_params & params);
};

// The request for a cache with these bases, from the variables of automatic.cpp. Throws Invalid.
CacheRequest request_of_environment(const std::shared_ptr<const Layout> & layout);

// "coded K/V cache, ...; bases: ", to which words about the bases are added. n_windows: sequences with a window in this
// size; the line adds the size of each further one.
std::string cache_line(const Cache & cache, const RowSizes & rows, int32_t n_windows);

// SUBKV_RESUME: how many tokens before the end of a shortened sequence need exact rows, so that a program evaluates
// those without one again. Throws Invalid.
int32_t resume_of_environment();

// SUBKV_DEFER: 0: a GPU makes the codes of a decoded token with it, 1: those of many tokens later. Throws Invalid.
bool defer_of_environment();

// The cache that the environment requests (automatic.cpp); nullptr: an ordinary cache. Throws Invalid, with the error
// set, if SUBKV's file or the model's own bases cannot be used.
std::shared_ptr<CacheHook> automatic_cache(const CacheDesc & desc);

} // namespace subkv
