// find_bases.h: the search for the bases of a model (docs/own-model.md#where-the-bases-are-found). resolve.cpp decides what
// is searched for, and what follows from the result.
#pragma once

#include "derive.h"
#include "layout.h"
#include "subkv.h"

#include <memory>
#include <string>
#include <vector>

namespace subkv {

// The places in which bases are searched, in the order of SUBKV_BASES_NAMED and so on.
struct BasesSearch {
    std::string model;  // "" if it is unknown
    std::string named;  // the user's file, which alone counts, or "" if there is none
    float       budget; // bits per element, or 0 for the file's default, or derived_budget()
    bool        sidecar;
    bool        derive;
    Slides      slides;
};

struct FoundBases {
    int32_t                       source = SUBKV_BASES_NONE;
    std::string                   path;   // of the file, or "" if there is none
    std::shared_ptr<const Layout> layout; // nullptr if there is none, or it cannot be used
    float                         budget_default = 0.0f;
    std::string                   words;                        // source and size of usable bases, for the user
    Error                         error = { SUBKV_ERROR_NONE }; // why there are none, or those found cannot be used
};

// Nothing is known of the bases of a model that cannot be read.
struct ModelError : Invalid {
    using Invalid::Invalid;
};

// The first place that has bases, usable or not, because no later place may replace a damaged file or one of another
// model. Throws ModelError.
FoundBases find_bases(const BasesSearch & search);

// Quotes one word of a command for a shell.
std::string shell_word(const std::string & word);

// "4.25 bits per element at 8192 tokens, predicted KLD 0.0007, q8_0's 0.00023", the prediction only if it is known
std::string size_of(const Layout & layout);
// "of FILE, 4.25 bits per element at 8192 tokens", for a file that the user names
std::string words_of_file(const std::string & path, const Layout & layout);

// A sidecar of the cache folder, or a model for which bases can be derived. It has the weights that identify the model
// (FORMAT.md §1.3), and the layers with bases.
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
// The same of one file, where the weights are "" if it does not name them. Throws Invalid.
StoredBases bases_of_weights(const std::string & path);
// The same of a model, for bases from its weights. Throws Invalid if it cannot have any.
StoredBases derivable_bases(const std::string & model);

} // namespace subkv
