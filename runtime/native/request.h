// request.h: a coefficient cache that somebody asks for, checked as far as that needs no model.
#pragma once

#include "adaptive.h"
#include "layout.h"
#include "subkv.h"

#include <memory>

namespace subkv {

struct CacheRequest {
    std::shared_ptr<const Layout> layout; // nullptr: an ordinary cache
    subkv_cache_params            params = { -1, -1, -1, 0, {} };
    AdaptRequest                  adapt;

    CacheRequest() = default;
    // Throws std::runtime_error, with the error set, for limits that `params` or the bases break, and for kernels that
    // cannot be used.
    CacheRequest(std::shared_ptr<const Layout> layout, const subkv_cache_params & params);
};

} // namespace subkv
