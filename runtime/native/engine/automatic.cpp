// automatic.cpp: the cache of a context without an attached layout. resolve.cpp decides by the cache types and the
// variables (docs/programs.md#variables) which one is asked; here is what depends on the context and on others of the
// process. `subkv`, or a file in SUBKV, is for one model: of the first context that gets its cache by it; others are as
// with `auto`. Every context logs its kind of cache in one line of llama.cpp's log.
#include "automatic.h"

#include "cache.h"
#include "error.h"
#include "log_line.h"
#include "model_file.h"
#include "numbers.h"

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

// What libllama's users call the fields of a request. The subject of the sentence names the others.
std::string name_of(const std::string & field) {
    const bool variable = field.compare(0, 5, "SUBKV") == 0;
    return variable                               ? field :
           field == "bits"                        ? "bits per element" :
           field == "type_k" || field == "type_v" ? "cache types" :
                                                    "";
}

CacheChoice named_choice(CacheChoice (*decide)(const CacheRequest &), const CacheRequest & asked) {
    try {
        return decide(asked);
    } catch (const Invalid & e) {
        Error error = e.error;
        error.key   = name_of(error.key);
        throw Invalid(error);
    }
}

// setting: of SUBKV; "": unset.
std::shared_ptr<CacheHook> requested_cache(const CacheDesc & desc, const CacheRequest & asked,
                                           const std::string & setting) {
    const CacheChoice type = named_choice(choose_type, asked);
    if (!type.coded() && (setting.empty() || setting == "off")) {
        return nullptr;
    }
    if (!desc.no_cache.empty()) {
        const std::string why = "no K/V cache: " + desc.no_cache;
        if (type.coded() && !type.automatic) {
            throw Invalid(why);
        }
        if (!desc.no_alloc) {
            log_line(why);
        }
        return nullptr;
    }
    if (!type.coded()) {
        return ordinary(desc, "its type was requested");
    }
    const CacheChoice choice = resolve_for_program(asked);
    if (!choice.layout) {
        return ordinary(desc, choice.words);
    }
    const auto &        layout = choice.layout;
    const std::string & file   = choice.path;
    note_version(*layout, desc, file);
    if (choice.automatic) {
        if (!desc.unsupported.empty()) {
            return ordinary(desc, "coefficients are not supported because " + desc.unsupported);
        }
        if (!has_coded_layer(*layout, desc)) {
            return ordinary(desc, "this context holds none of the layers of " + (file.empty() ? "the bases" : file));
        }
    }
    auto cache = std::make_shared<Cache>(desc, choice, nullptr);
    if (asked.variables == Variables::ALL && setting != "auto" && !setting.empty()) {
        owners.set(setting, asked.model);
    }
    if (!desc.no_alloc) {
        cache->announce(choice.words);
    }
    return cache;
}

} // namespace

CacheChoice resolve_for_program(const CacheRequest & asked) {
    return named_choice(resolve, asked);
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
    const char *      value   = std::getenv("SUBKV");
    const std::string setting = value ? value : "";
    CacheRequest      asked   = desc.request;
    asked.variables           = owners.may_use(setting, asked.model) ? Variables::ALL : Variables::OF_ANOTHER;
    try {
        return requested_cache(desc, asked, setting);
    } catch (const std::exception & e) {
        const auto * invalid = dynamic_cast<const Invalid *>(&e);
        const bool   full    = dynamic_cast<const std::bad_alloc *>(&e) != nullptr;
        if (invalid && invalid->error.kind == SUBKV_ERROR_MEMORY) { // an ordinary cache would need more
            throw;
        }
        const auto kind = (int32_t) (invalid ? invalid->error.kind : full ? SUBKV_ERROR_MEMORY : SUBKV_ERROR_INVALID);
        if (asked.type_k.empty() && asked.type_v.empty()) {
            fail({ kind, "SUBKV=" + setting, e.what(), "SUBKV=off runs with an ordinary cache" });
        }
        const bool automatic = asked.type_k == "auto" || asked.type_v == "auto";
        fail({ kind, automatic ? "cache type auto" : "cache type subkv", e.what(),
               "cache type f16 runs with an ordinary cache" });
    }
}

} // namespace subkv
