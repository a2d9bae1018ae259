// request.cpp: the cache that the parameters of a new context request. Part of libllama.
#include "llama-subkv-library.h"
#include "llama-subkv-programs.h"
#include "llama-subkv.h"

#include "llama-impl.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace {

struct types {
    ggml_type k      = GGML_TYPE_F16; // as the parameters have them
    ggml_type v      = GGML_TYPE_F16;
    bool      drafts = false;

    bool has(ggml_type type) const { return k == type || v == type; }

    bool mixed() const { // one side is coded (or auto), the other one has another type
        const bool coded = has(LLAMA_SUBKV_TYPE) || has(LLAMA_SUBKV_TYPE_AUTO);
        return coded && k != v && !has(GGML_TYPE_F16);
    }

    subkv::Requested requested() const {
        return has(LLAMA_SUBKV_TYPE)                    ? subkv::Requested::CODED :
               has(LLAMA_SUBKV_TYPE_AUTO)               ? subkv::Requested::AUTO :
               k == GGML_TYPE_F16 && v == GGML_TYPE_F16 ? subkv::Requested::NOTHING :
                                                          subkv::Requested::ORDINARY;
    }
};

// A context is created by one thread in one call.
thread_local types t_types;

ggml_type stock(ggml_type type) {
    const bool ours = type == LLAMA_SUBKV_TYPE || type == LLAMA_SUBKV_TYPE_AUTO || type == LLAMA_SUBKV_TYPE_F16;
    return ours ? GGML_TYPE_F16 : type;
}

} // namespace

thread_local bool llama_subkv::request::rows_coded = false;

llama_subkv::request::request(llama_context_params & params) {
    t_types       = { params.type_k, params.type_v, params.ctx_type == LLAMA_CONTEXT_TYPE_MTP };
    params.type_k = stock(params.type_k);
    params.type_v = stock(params.type_v);
    rows_coded    = false;
}

llama_subkv::request::~request() {
    t_types = {};
}

void llama_subkv::request::describe(subkv::CacheDesc & desc) {
    desc.requested = t_types.requested();
    desc.drafts    = t_types.drafts;
}

subkv::cache_new_fn llama_subkv::request::cache_new() {
    if (t_types.mixed()) {
        throw std::runtime_error(format("cache types: the same for keys and values with subkv and auto expected, "
                                        "%s and %s found",
                                        llama_subkv_type_name(t_types.k, t_types.v),
                                        llama_subkv_type_name(t_types.v, t_types.k)));
    }
    const char *           value     = std::getenv("SUBKV");
    const std::string      setting   = value ? value : "";
    const subkv::Requested requested = t_types.requested();
    if (setting == "off" && requested == subkv::Requested::CODED) {
        throw std::runtime_error("cache type subkv: SUBKV=auto, a file, or no SUBKV expected, SUBKV=off found");
    }
    const bool   by_type = requested == subkv::Requested::CODED || requested == subkv::Requested::AUTO;
    const bool   needed  = setting != "off" && (!setting.empty() || by_type);
    std::string  why;
    const auto * library = llama_subkv_library(needed, why);
    if (!library && needed) {
        const std::string subject = setting.empty() ? "cache type subkv" : "SUBKV=" + setting;
        throw std::runtime_error(
            format("%s: libsubkv beside libllama expected, found none that loads: %s", subject.c_str(), why.c_str()));
    }
    return library ? library->cache_new : nullptr;
}
