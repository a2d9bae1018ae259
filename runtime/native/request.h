// request.h: a coefficient cache that somebody asks for, checked as far as that needs no model.
#pragma once

#include "chunked.h"
#include "layout.h"
#include "subkv.h"

#include <memory>

namespace subkv {

struct CacheRequest {
    std::shared_ptr<const Layout> layout;          // nullptr: an ordinary cache
    int32_t                       n_sink     = -1; // as of subkv_cache_params
    int32_t                       n_recent   = -1;
    int32_t                       n_rollback = -1;
    ChunkRequest                  chunks;

    CacheRequest() = default;
    // Throws std::runtime_error, with the error set, for limits that `params` or the bases break, and for kernels that
    // cannot be used.
    CacheRequest(std::shared_ptr<const Layout> layout, const subkv_cache_params & params);
};

} // namespace subkv
