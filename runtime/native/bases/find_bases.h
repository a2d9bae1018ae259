// find_bases.h: the only search for the bases of a model (docs/own-model.md#where-the-bases-are-found), for contexts, for
// subkv_find_bases and, by that, for Python.
#pragma once

#include "layout.h"
#include "subkv.h"

#include <memory>
#include <string>
#include <vector>

namespace subkv {

struct FoundBases {
    int32_t                       source = SUBKV_BASES_NONE;
    std::string                   path;   // of the file; "": none
    std::shared_ptr<const Layout> layout; // nullptr: none, or it cannot be used
    std::string                   words;  // as in subkv_bases
    std::string                   size;
    Error                         error = { SUBKV_ERROR_NONE }; // as in subkv_bases
};

// As subkv_find_bases; named "": none. Throws Invalid if the model cannot be read.
FoundBases find_bases(const std::string & model, const std::string & named, int32_t last, float budget,
                      const std::vector<int32_t> & sliding);

// "4.25 bits per element at 8192 tokens, predicted KLD 0.0007, q8_0's 0.00023", the prediction only if it is known
std::string size_of(const Layout & layout);
// "of FILE, 4.25 bits per element at 8192 tokens", for a file that the user names
std::string words_of_file(const std::string & path, const Layout & layout);

// A sidecar of the cache folder, or a model for which bases can be derived: the weights that identify the model (FORMAT.md
// §1.3), and the layers with bases.
struct StoredBases {
    std::string      path;
    std::string      weights;
    std::vector<int> layers;          // in the order of the file; may be empty
    bool             derived = false; // `path` is the model

    int first_layer() const { return layers.empty() ? -1 : layers.front(); }
    int last_layer() const { return layers.empty() ? -1 : layers.back(); }
};

// All that say which weights. Files that cannot be read are left out. Throws Invalid, Unavailable.
std::vector<StoredBases> stored_bases();
// The same of one file; weights "": it does not say. Throws Invalid.
StoredBases bases_of_weights(const std::string & path);
// The same of a model, whose bases derived_bases would give. Throws Invalid if it cannot have any.
StoredBases derivable_bases(const std::string & model);
// Bases from the weights of a model, in memory. Throws as derive_layout.
FoundBases derived_bases(const std::string & model, float budget, const std::vector<int32_t> & sliding);

} // namespace subkv
