// find_bases.h: the only search for the bases of a model (docs/own-model.md#where-the-bases-are-found), for contexts, for
// subkv_find_bases and, by that, for Python.
#pragma once

#include "layout.h"
#include "subkv.h"

#include <memory>
#include <string>

namespace subkv {

struct FoundBases {
    int32_t                       source = SUBKV_BASES_NONE;
    std::string                   path;   // of the file; "": none
    std::shared_ptr<const Layout> layout; // nullptr: none, or it cannot be used
    std::string                   words;  // as in subkv_bases
    std::string                   size;
    std::string                   reason;
    bool                          unavailable  = false;
    bool                          lacks_budget = false;
};

// As subkv_find_bases; named "": none. Throws Invalid if the model cannot be read.
FoundBases find_bases(const std::string & model, const std::string & named, int32_t last, float budget);

} // namespace subkv
