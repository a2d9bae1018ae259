// automatic.cpp: the cache of a context without an attached layout, selected by the environment (docs/programs.md).
//
//   SUBKV            off (or unset): ordinary; auto: the model's bases, if any; any other value: a file with bases
//   SUBKV_SINK, SUBKV_RECENT, SUBKV_ROLLBACK   numbers of tokens, as in subkv_cache_params
//   another variable of chunks: chunks_of_environment (chunked.h)
//
// The model's bases are the first of: its own keys, the sidecar beside it, the calibrated sidecar in the user's cache
// folder, the sidecar derived from its weights there. Every context logs its kind of cache in one line of llama.cpp's
// log.
#include "cache.h"
#include "error.h"
#include "layout_keys.h"
#include "model_file.h"
#include "request.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <stdexcept>
#include <string>

namespace subkv {

namespace {

const char * set_variable(const char * name) {
    const char * value = std::getenv(name);
    return value && *value ? value : nullptr;
}

int32_t number_of(const char * name, int32_t most) {
    const char * text = set_variable(name);
    if (!text) {
        return -1;
    }
    char * end        = nullptr;
    errno             = 0;
    const long number = std::strtol(text, &end, 10);
    if (*end || errno != 0 || number < 0 || number > most) {
        refuse(name, "a number from 0 to " + std::to_string(most), "'" + shortened(text) + "'");
    }
    return (int32_t) number;
}

// The request for a cache with these bases, from the other variables.
CacheRequest request_of(const std::shared_ptr<const Layout> & layout) {
    const int32_t n_sink     = number_of("SUBKV_SINK", MAX_SINK);
    const int32_t n_recent   = number_of("SUBKV_RECENT", MAX_RECENT);
    const int32_t n_rollback = number_of("SUBKV_ROLLBACK", MAX_RECENT);
    CacheRequest  request(layout, { n_sink, n_recent, n_rollback, nullptr });
    request.chunks = chunks_of_environment(*layout);
    return request;
}

// The file with a model's bases; "": none.
std::string file_of_bases(const std::string & model) {
    if (model.empty()) { // loaded from a stream or from memory
        return "";
    }
    if (layout_present(model.c_str())) {
        return model;
    }
    const std::string beside = sidecar_beside(model);
    const bool        near   = file_exists(beside);
    const std::string store  = sidecar_store();
    if (!near && (store.empty() || !file_exists(store))) {
        return "";
    }
    const std::string content = model_content(model);
    std::string       sidecar = near ? beside : stored_sidecar(content, CALIBRATED);
    if (sidecar.empty()) {
        sidecar = stored_sidecar(content, FROM_WEIGHTS);
    }
    if (!sidecar.empty()) {
        check_sidecar(sidecar, content);
    }
    return sidecar;
}

std::nullptr_t ordinary(const CacheDesc & desc, const std::string & why) {
    if (!desc.no_alloc) {
        llama_subkv_log("ordinary " + std::string(ggml_type_name(desc.type_k)) + " K/V cache: " + why);
    }
    return nullptr;
}

bool has_coded_layer(const Layout & layout, const CacheDesc & desc) {
    return std::any_of(desc.layers.begin(), desc.layers.end(), [&](auto & layer) { return layout.layer(layer.il); });
}

// A program may load several models. SUBKV's file, and a required coefficient cache, apply to the first one; other
// models may get an ordinary cache.
std::atomic<bool> cache_made{ false };

void report(const CacheDesc & desc, const Cache & cache, const std::string & file) {
    size_t rows = 0;
    for (const auto & layer : desc.layers) {
        rows += cache.facts().row_bytes(layer.il, false) + cache.facts().row_bytes(layer.il, true);
    }
    subkv_stats stats;
    cache.stats(rows * desc.n_cells * desc.n_stream, 0, stats);
    char line[160];
    std::snprintf(line, sizeof(line),
                  "coded K/V cache, %.2f bits per element, %.1f MiB (f16: %.1f), %u layers: ", (double) stats.bpe,
                  (double) (stats.bytes_codes + stats.bytes_window) / (1 << 20), (double) stats.bytes_f16 / (1 << 20),
                  stats.n_layer_coded);
    llama_subkv_log(line + file);
}

std::shared_ptr<CacheHook> requested_cache(const CacheDesc & desc, const std::string & setting) {
    const bool by_name  = setting != "auto";
    const bool required = desc.required && !cache_made;
    const bool second   = by_name && (cache_made || desc.no_alloc);
    if (!desc.none.empty()) {
        const std::string why = "no K/V cache: " + desc.none;
        if (required || (by_name && !second)) {
            throw Invalid(why);
        }
        if (!desc.no_alloc) {
            llama_subkv_log(why);
        }
        return nullptr;
    }
    const std::string file = by_name ? setting : file_of_bases(desc.model_path);
    if (file.empty()) {
        const std::string model = desc.model_path.empty() ? "MODEL" : desc.model_path;
        const std::string why   = "no bases for this model; `subkv convert " + model + "` derives them";
        if (required) {
            throw Invalid(why);
        }
        return ordinary(desc, why);
    }
    const auto layout = load_layout(file.c_str());
    // A wrong file for the first model is an error of the user; a later model with other shapes is just a second model.
    const std::string misfit = Cache::misfit(*layout, desc);
    if (!misfit.empty() && second) {
        return ordinary(desc, file + " belongs to another model");
    }
    if ((!by_name || second) && !required) {
        if (!desc.unsupported.empty()) {
            return ordinary(desc, "coefficients are not supported because " + desc.unsupported);
        }
        if (!has_coded_layer(*layout, desc)) {
            return ordinary(desc, "this context holds none of the layers of " + file);
        }
    }
    if (!by_name && !required && (desc.type_k != GGML_TYPE_F16 || desc.type_v != GGML_TYPE_F16)) {
        return ordinary(desc, "its type was requested; SUBKV=auto replaces f16");
    }
    const CacheRequest request = request_of(layout);
    auto               cache   = std::make_shared<Cache>(desc, request, nullptr);
    if (!desc.no_alloc) {
        cache_made = true;
        report(desc, *cache, file);
    }
    return cache;
}

} // namespace

std::shared_ptr<CacheHook> automatic_cache(const CacheDesc & desc) {
    const char * value   = set_variable("SUBKV");
    const char * setting = value ? value : desc.required ? "auto" : "off";
    if (std::strcmp(setting, "off") == 0) {
        return nullptr;
    }
    try {
        return requested_cache(desc, setting);
    } catch (const std::exception & e) {
        if (!value) {
            fail("-ctk subkv: %s; -ctk f16 runs with an ordinary cache", e.what());
        }
        fail("SUBKV=%s: %s; SUBKV=off runs with an ordinary cache", setting, e.what());
    }
}

} // namespace subkv
