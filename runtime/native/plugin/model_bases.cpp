// model_bases.cpp: the bases of the model that a graph computes, by the content of its weights.
#include "automatic.h"
#include "error.h"
#include "log_line.h"
#include "model_file.h"
#include "plugin.h"
#include "process_models.h"
#include "variables.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <mutex>
#include <optional>
#include <set>

namespace subkv::plugin {

namespace {

// What the variables ask for every model of this process.
const CacheChoice & asked_of_all() {
    static const CacheChoice choice = [] {
        CacheRequest asked;
        asked.variables = Variables::ALL;
        return choose_type(asked);
    }();
    return choice;
}

// What SUBKV and the cache folder have, read once per process.
struct Known {
    StoredBases              named{};   // none if its path is ""
    std::string              named_why; // it cannot be read
    std::vector<StoredBases> stored;
    std::string              stored_why; // the cache folder cannot be read
    std::set<std::string>    weights;

    Known() {
        if (is_off()) {
            return;
        }
        const std::string & file = asked_of_all().path;
        try {
            named = file.empty() ? StoredBases{} : bases_of_weights(file);
        } catch (const Invalid & e) {
            named_why = e.what();
        }
        try {
            stored = stored_bases();
        } catch (const Invalid & e) {
            stored_why = e.what();
        }
        add(named);
        std::for_each(stored.begin(), stored.end(), [this](auto & bases) { add(bases); });
    }

    static const Known & get() {
        static const Known known;
        return known;
    }

private:
    void add(const StoredBases & bases) {
        const auto names = WeightsDigest::names(bases.first_layer(), bases.last_layer());
        weights.insert(names.begin(), names.end());
    }
};

// As model_weights, but returns "" if some weight cannot be read.
std::string digest_of(const GraphWeights & weights, const StoredBases & bases) {
    WeightsDigest digest;
    for (const auto & name : WeightsDigest::names(bases.first_layer(), bases.last_layer())) {
        const ggml_tensor * t = weights.find(name);
        if (!t) {
            continue;
        }
        if (!t->data || !t->buffer || (!ggml_backend_buffer_is_host(t->buffer) && !t->buffer->iface.get_tensor)) {
            return "";
        }
        digest.add(name, (int) t->type, t->ne, ggml_nbytes(t), [&](uint64_t start, uint64_t size, void * to) {
            if (ggml_backend_buffer_is_host(t->buffer)) {
                std::memcpy(to, (const char *) t->data + start, (size_t) size);
            } else {
                ggml_backend_tensor_get(t, to, (size_t) start, (size_t) size);
            }
        });
    }
    return digest.hex();
}

// Do other caches have layers between those of this one? So it is with the halves of a cache with sliding windows.
bool has_gaps(const std::function<bool(int32_t il)> & has_layer) {
    bool some = false, gap = false;
    for (int32_t il = 0; il < MAX_LAYERS; ++il) {
        if (has_layer(il)) {
            if (gap) {
                return true;
            }
            some = true;
        } else {
            gap = some;
        }
    }
    return false;
}

CacheChoice no_bases(std::string why) {
    CacheChoice none;
    none.automatic = true;
    none.words     = std::move(why);
    return none;
}

// The cache with the bases of a file, or with those from the weights of one.
CacheChoice loaded(const StoredBases & bases, bool required, const std::function<bool(int32_t il)> & has_layer) {
    CacheRequest asked;
    asked.type                                  = "subkv";
    asked.variables                             = Variables::OF_ANOTHER; // the caller has asked choose_type()
    (bases.derived ? asked.model : asked.bases) = bases.path;
    asked.sidecar                               = false;
    asked.slides       = std::not_fn(has_layer); // the other half of a cache with sliding windows
    CacheChoice choice = resolve_for_program(asked);
    choice.automatic   = !required;
    return choice;
}

bool is_identified_by(const StoredBases & bases, const char * weight) {
    const auto names = WeightsDigest::names(bases.first_layer(), bases.last_layer());
    return std::find(names.begin(), names.end(), weight) != names.end();
}

} // namespace

bool is_off() {
    return !asked_of_all().coded();
}

bool identifies_model(const char * weight) {
    if (is_off() || std::strncmp(weight, "blk.", 4) != 0 || !std::strstr(weight, ".attn_")) {
        return false;
    }
    if (Known::get().weights.count(weight) != 0) {
        return true;
    }
    const auto models = process_models();
    return std::any_of(models.begin(), models.end(), [&](auto & bases) { return is_identified_by(bases, weight); });
}

void GraphWeights::add(const ggml_tensor * node) {
    std::vector<const ggml_tensor *> next{ node };
    while (!next.empty()) {
        const ggml_tensor * t = next.back();
        next.pop_back();
        if (!t || !seen_.insert(t).second) {
            continue;
        }
        if (t->op == GGML_OP_NONE && identifies_model(t->name)) {
            found_[t->name] = t;
        }
        next.insert(next.end(), t->src, t->src + GGML_MAX_SRC);
        next.push_back(t->view_src);
    }
}

const ggml_tensor * GraphWeights::find(const std::string & name) const {
    const auto it = found_.find(name);
    return it == found_.end() ? nullptr : it->second;
}

std::optional<CacheChoice> find_model_bases(const GraphWeights & weights, Seen seen,
                                            const std::function<bool(int32_t il)> & has_layer) {
    const CacheChoice & asked = asked_of_all();
    const Known &       known = Known::get();

    // A model's derivable layers, and those of some files, include the sliding ones, which stay f16.
    const auto fits = [&](const StoredBases & bases) {
        const auto & all = bases.layers;
        return !all.empty() && (seen == Seen::ALL ? std::any_of(all.begin(), all.end(), has_layer) :
                                                    std::all_of(all.begin(), all.end(), has_layer));
    };
    const bool waits = seen == Seen::PART && has_gaps(has_layer);
    const auto part  = [&](const std::string & path) -> std::optional<CacheChoice> {
        if (waits) {
            return std::nullopt;
        }
        const bool slides = seen == Seen::ALL_OF_SLIDING;
        return no_bases((slides ? "it is of the sliding layers of " : "it does not have all layers of ") + path);
    };

    static std::mutex                 mutex; // the first model owns SUBKV
    const std::lock_guard<std::mutex> lock(mutex);
    if (!known.named_why.empty()) {
        throw Invalid(known.named_why);
    }
    if (!asked.path.empty()) {
        if (!fits(known.named)) {
            return part(asked.path);
        }
        const std::string digest = digest_of(weights, known.named);
        if (variables_for(digest) == Variables::ALL) {
            const CacheChoice found   = loaded(known.named, true, has_layer);
            const bool        unknown = known.named.weights.empty() || digest.empty();
            if (!unknown && digest != known.named.weights) {
                refuse(asked.path, "bases of this model", "those of another model (" + std::string(WEIGHTS_KEY) + ")");
            }
            if (own_setting(digest.empty() ? "?" : digest) && unknown) {
                log_line(asked.path +
                         (digest.empty() ? ": this model's weights cannot be compared" :
                                           ": it does not say which weights its model has") +
                         "; the bases must be of this model");
            }
            return found;
        }
    }
    std::string partly; // bases of this model, whose layers several caches have
    bool        later   = false;
    auto        usable  = known.stored;
    const auto  derived = process_models();
    usable.insert(usable.end(), derived.begin(), derived.end());
    for (const StoredBases & bases : usable) {
        const std::string digest = digest_of(weights, bases);
        const bool        same   = !digest.empty() && digest == bases.weights;
        if (same && fits(bases)) {
            const bool required = !asked.automatic && variables_for(digest) == Variables::ALL;
            if (required) {
                own_setting(digest);
            }
            return loaded(bases, required, has_layer);
        }
        partly = same && partly.empty() ? bases.path : partly;
        later  = later || (waits && !fits(bases));
    }
    if (!partly.empty()) {
        return part(partly);
    }
    if (later) {
        return std::nullopt;
    }
    std::string why = known.stored_why;
    if (why.empty()) {
        why = "no bases for this model in " + std::string(subkv_sidecar_folder()) +
              ", and none of the files that this process has open is its model";
    }
    if (!asked.automatic && variables_for("") == Variables::ALL) { // no model has got its cache
        throw Invalid("SUBKV=" + cache_setting() + ": " + why);
    }
    return no_bases(why);
}

} // namespace subkv::plugin
