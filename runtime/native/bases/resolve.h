// resolve.h: the one decision about the K/V cache of a context: its type, its bases and their budget, and the window.
// libllama's contexts and the plug-in ask here, and so do Python and its programs by subkv_resolve.
#pragma once

#include "cache_request.h"
#include "find_bases.h"
#include "layout.h"
#include "subkv.h"

#include <memory>
#include <string>

namespace subkv {

// As subkv_cache_choice (subkv.h).
struct CacheChoice {
    std::string                   type_k, type_v; // "subkv" for both, or types of ggml
    bool                          automatic = false;
    int32_t                       source    = SUBKV_BASES_NONE;
    std::string                   path;
    std::shared_ptr<const Layout> layout; // nullptr for an ordinary cache
    float                         bits = 0.0f, bits_default = 0.0f;
    int32_t                       n_sink = 0, n_recent = 0, n_rollback = 0;
    std::string                   adapt;
    const char *                  adapt_key = "adapt"; // who has chosen `adapt`, for errors
    std::string                   words;               // about the bases, or why there are none
    std::string                   gain;

    bool coded() const { return type_k == "subkv"; }
};

// Checks the request, and chooses only the type, before any search. `bits` are those that are asked, and `path` is a
// file that is named. Throws as resolve().
CacheChoice choose_type(const CacheRequest & asked);

// Throws Invalid, whose key is the field of the request that the error is about, or a variable. Two more keys tell
// apart what a program advises: "sidecar" is a file that was found and cannot be used, "derive" a model without bases.
CacheChoice resolve(const CacheRequest & asked);

// A coded cache with these bases and the window that is asked. Throws as resolve().
CacheChoice with_bases(const std::shared_ptr<const Layout> & layout, const CacheRequest & asked);

} // namespace subkv
