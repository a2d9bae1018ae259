// automatic.cpp: the cache of a context without an attached layout, selected by its cache types and by the environment
// (docs/programs.md).
//
//   SUBKV            off (or unset): ordinary; auto: the model's bases, if it can have any; subkv: those, or no context;
//                    any other value: a file with bases
//   SUBKV_BITS   bits per element, of those that the bases can have; a cache type subkv:BITS has precedence
//   SUBKV_SINK, SUBKV_RECENT, SUBKV_ROLLBACK   numbers of tokens, as in subkv_cache_params
//   SUBKV_ADAPT  options of adaptive bases; bases_of_environment reads it (basis_source.h)
//
// find_bases finds the model's bases. `subkv`, or a file in SUBKV, is for one model: of the first context that gets its
// cache by it; others are as with `auto`. Cache types have precedence over SUBKV. Every context logs its kind of cache in
// one line of llama.cpp's log.
#include "cache.h"
#include "error.h"
#include "find_bases.h"
#include "log_line.h"
#include "model_file.h"
#include "numbers.h"
#include "request.h"
#include "variables.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

#if defined(__GLIBC__)
#    include <malloc.h>
#endif

namespace subkv {

namespace {

const char * set_variable(const char * name) {
    const char * value = std::getenv(name);
    return value && *value ? value : nullptr;
}

std::nullptr_t ordinary(const CacheDesc & desc, const std::string & why) {
    if (!desc.no_alloc) {
        const std::string v = desc.type_v == desc.type_k ? "" : std::string("/") + ggml_type_name(desc.type_v);
        log_line("ordinary " + (ggml_type_name(desc.type_k) + v) + " K/V cache: " + why);
    }
    return nullptr;
}

bool has_coded_layer(const Layout & layout, const CacheDesc & desc) {
    return std::any_of(desc.layers.begin(), desc.layers.end(), [&](auto & layer) { return layout.layer(layer.il); });
}

// The model that a value of SUBKV belongs to: a program may load several models, and free and load the same one again, by
// another name.
class Owners {
public:
    // true: the value belongs to this model, or to none yet.
    bool may_use(const std::string & value, const std::string & model) {
        std::lock_guard<std::mutex> lock(mutex_);
        const auto                  owner = owners_.find(value);
        return owner == owners_.end() || owner->second == model || same_content(owner->second, model);
    }

    void set(const std::string & value, const std::string & model) {
        std::lock_guard<std::mutex> lock(mutex_);
        owners_.emplace(value, model);
    }

private:
    static bool same_content(const std::string & a, const std::string & b) {
        try {
            return model_content(a) == model_content(b);
        } catch (const Invalid &) { // one of them comes from a stream, or its file is gone
            return false;
        }
    }

    std::mutex                         mutex_;
    std::map<std::string, std::string> owners_; // by value
};

Owners owners;

// Logs once per process that nothing protects the bases of an old file.
void note_version(const Layout & layout, const CacheDesc & desc, const std::string & file) {
    static std::atomic<bool> noted{ false };
    if (layout.version == FORMAT_WITHOUT_DIGEST && !desc.no_alloc && !noted.exchange(true)) {
        log_line(file + ": format version " + std::to_string(layout.version) +
                 " has no checksum; `subkv convert` writes version " + std::to_string(FORMAT_VERSION));
    }
}

std::shared_ptr<CacheHook> requested_cache(const CacheDesc & desc, const std::string & setting) {
    const bool owned    = setting != "auto" && owners.may_use(setting, desc.model_path);
    const bool default_ = desc.requested == Requested::NOTHING;
    const bool required = desc.requested == Requested::CODED || (owned && default_ && !desc.drafts);
    if (!desc.no_cache.empty()) {
        const std::string why = "no K/V cache: " + desc.no_cache;
        if (required) {
            throw Invalid(why);
        }
        if (!desc.no_alloc) {
            log_line(why);
        }
        return nullptr;
    }
    if (desc.requested == Requested::ORDINARY) {
        return ordinary(desc, "its type was requested");
    }
    const bool       named = owned && setting != "subkv";
    const FoundBases found =
        find_bases(desc.model_path, named ? setting : "", SUBKV_BASES_WEIGHTS, desc.budget, desc.slides);
    if (!found.layout) {
        const auto kind = found.error.kind;
        const bool none =
            found.source == SUBKV_BASES_NONE && (kind == SUBKV_ERROR_INVALID || kind == SUBKV_ERROR_UNSUPPORTED);
        if (required || !none) {
            throw Invalid(found.error);
        }
        return ordinary(desc, found.error.sentence());
    }
    const auto &        layout = found.layout;
    const std::string & file   = found.path;
    note_version(*layout, desc, file);
    if (!required) {
        if (!desc.unsupported.empty()) {
            return ordinary(desc, "coefficients are not supported because " + desc.unsupported);
        }
        if (!has_coded_layer(*layout, desc)) {
            return ordinary(desc, "this context holds none of the layers of " + (file.empty() ? "the bases" : file));
        }
    }
    auto cache = std::make_shared<Cache>(desc, request_of_environment(layout), nullptr);
    if (owned) {
        owners.set(setting, desc.model_path);
    }
    if (!desc.no_alloc) {
        cache->announce(found.words);
    }
    return cache;
}

} // namespace

CacheRequest request_of_environment(const std::shared_ptr<const Layout> & layout) {
    const auto   n_sink     = (int32_t) number_of("SUBKV_SINK", 0, MAX_SINK, -1);
    const auto   n_recent   = (int32_t) number_of("SUBKV_RECENT", 0, MAX_RECENT, -1);
    const auto   n_rollback = (int32_t) number_of("SUBKV_ROLLBACK", 0, MAX_RECENT, -1);
    CacheRequest request(layout, { n_sink, n_recent, n_rollback, nullptr });
    request.make_bases = bases_of_environment(*layout);
    return request;
}

std::string cache_line(const Cache & cache, const RowSizes & rows, int32_t n_windows) {
    subkv_stats stats;
    cache.stats(rows, stats);
    const double     window    = (double) stats.bytes_window / cache.n_seq();
    const double     coded     = (double) stats.bytes_codes + n_windows * window;
    const double     size      = coded + (double) (stats.bytes_stock + stats.bytes_bases);
    const double     f16       = (double) stats.bytes_f16;
    constexpr double Q8_0      = 8.5 / 16.0; // of f16
    const double     than_q8_0 = Q8_0 * f16 / size;
    const auto       mib       = [](double bytes) { return decimals(bytes / (1 << 20), 1); };
    const bool       further   = n_windows < cache.n_seq() && window > 0.0;
    const uint32_t   ordinary  = stats.n_layer_sliding + stats.n_layer_other;
    const uint32_t   n_layer   = stats.n_layer_coded + ordinary;
    const double     all       = (double) (stats.bytes_codes + stats.bytes_window);
    const bool       slides    = stats.n_layer_sliding > 0 && stats.n_swa > 0;
    std::string      layers    = std::to_string(n_layer) + " layers";
    if (slides) {
        layers = std::to_string(n_layer - stats.n_layer_sliding) + " of " + layers + " grow with the context, " +
                 std::to_string(stats.n_layer_sliding) + " slide over " + std::to_string(stats.n_swa) + " tokens";
    } else if (ordinary > 0) {
        layers = std::to_string(stats.n_layer_coded) + " of " + layers + " are coded";
    }
    return "coded K/V cache, " + decimals((double) stats.bpe * coded / all, 2) + " bits per element" +
           (ordinary > 0 ? " of coded layers" : "") + ", " + mib(size) + " MiB (f16: " + mib(f16) +
           "): " + decimals(f16 / size, 1) + "x smaller than f16, " +
           (than_q8_0 >= 1.05 ? decimals(than_q8_0, 1) + "x than q8_0" : "not smaller than q8_0") +
           (further ? ", " + mib(window) + " MiB for each further sequence" : "") + ", " + layers + "; bases: ";
}

void Cache::created(const RowSizes & rows) {
#if defined(__GLIBC__)
    malloc_trim(0); // what reading the bases has left
#endif
    if (announced_) {
        log_line(cache_line(*this, rows, n_seq()) + *announced_);
    }
}

std::shared_ptr<CacheHook> automatic_cache(const CacheDesc & desc) {
    const char *      value   = set_variable("SUBKV");
    const bool        by_type = desc.requested == Requested::CODED || desc.requested == Requested::AUTO;
    const std::string setting = value ? value : by_type ? "auto" : "off";
    if (setting == "off") {
        return nullptr;
    }
    try {
        return requested_cache(desc, setting);
    } catch (const std::exception & e) {
        const auto * invalid = dynamic_cast<const Invalid *>(&e);
        const bool   full    = dynamic_cast<const std::bad_alloc *>(&e) != nullptr;
        if (invalid && invalid->error.kind == SUBKV_ERROR_MEMORY) { // an ordinary cache would need more
            throw;
        }
        const auto kind = (int32_t) (invalid ? invalid->error.kind : full ? SUBKV_ERROR_MEMORY : SUBKV_ERROR_INVALID);
        if (by_type) {
            fail({ kind, desc.requested == Requested::CODED ? "cache type subkv" : "cache type auto", e.what(),
                   "cache type f16 runs with an ordinary cache" });
        }
        fail({ kind, "SUBKV=" + setting, e.what(), "SUBKV=off runs with an ordinary cache" });
    }
}

} // namespace subkv
