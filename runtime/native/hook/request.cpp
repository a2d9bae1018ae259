// request.cpp: the cache that the parameters of a new context request. Part of libllama.
#include "llama-subkv-library.h"
#include "llama-subkv-programs.h"
#include "llama-subkv.h"

#include "llama-impl.h"
#include "variables.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <stdexcept>
#include <string>

namespace {

// The budgets of LLAMA_SUBKV_TYPES_BITS.
class type_bits {
public:
    ggml_type type_of(float budget) {
        std::lock_guard<std::mutex> lock(mutex);
        float *                     place = std::find(std::begin(budgets), std::end(budgets), budget);
        place = place != std::end(budgets) ? place : std::find(std::begin(budgets), std::end(budgets), 0.0f);
        if (place == std::end(budgets)) {
            throw std::runtime_error(format("cache types: at most %zu budgets (subkv:BITS) in one process expected, "
                                            "more found",
                                            std::size(budgets)));
        }
        *place = budget;
        return LLAMA_SUBKV_TYPES_BITS[place - budgets];
    }

    // Returns 0 for another type
    float budget_of(ggml_type type) {
        std::lock_guard<std::mutex> lock(mutex);
        const auto * place = std::find(std::begin(LLAMA_SUBKV_TYPES_BITS), std::end(LLAMA_SUBKV_TYPES_BITS), type);
        return place == std::end(LLAMA_SUBKV_TYPES_BITS) ? 0.0f : budgets[place - LLAMA_SUBKV_TYPES_BITS];
    }

private:
    std::mutex mutex;
    float      budgets[std::size(LLAMA_SUBKV_TYPES_BITS)] = {};
} t_bits;

bool is_coded(ggml_type type) {
    return type == LLAMA_SUBKV_TYPE || t_bits.budget_of(type) > 0.0f;
}

struct types {
    ggml_type k      = GGML_TYPE_F16; // as the parameters have them
    ggml_type v      = GGML_TYPE_F16;
    bool      drafts = false;
};

// A context is created by one thread in one call.
thread_local types t_types;

ggml_type stock(ggml_type type) {
    const bool ours = is_coded(type) || type == LLAMA_SUBKV_TYPE_AUTO || type == LLAMA_SUBKV_TYPE_F16;
    return ours ? GGML_TYPE_F16 : type;
}

// The type of a parameter as a request has it, without loss of bits. f16 is the default of both sides, which asks nothing.
std::string asked_type(ggml_type type) {
    if (const float budget = t_bits.budget_of(type); budget > 0.0f) {
        constexpr int EXACT = 9;
        return "subkv:" + subkv::number(budget, EXACT);
    }
    return type == GGML_TYPE_F16 ? "" : llama_subkv_type_name(type, type);
}

} // namespace

ggml_type llama_subkv_type(const std::string & name) {
    if (name.rfind("subkv:", 0) == 0) {
        const float budget = subkv::parse_budget(name.substr(6));
        if (budget > 0.0f) {
            return t_bits.type_of(budget);
        }
        // Programs refuse it, too. Their log does not write before options are read.
        std::fprintf(stderr, "cache type: expected subkv:BITS with bits per element, such as subkv:4.25, found %.60s\n",
                     name.c_str());
        return GGML_TYPE_COUNT;
    }
    return name == "subkv" ? LLAMA_SUBKV_TYPE :
           name == "auto"  ? LLAMA_SUBKV_TYPE_AUTO :
           name == "f16"   ? LLAMA_SUBKV_TYPE_F16 :
                             GGML_TYPE_COUNT;
}

std::string llama_subkv_type_name(ggml_type type, ggml_type other) {
    const ggml_type both = type == GGML_TYPE_F16 ? other : type; // a coded cache has no ordinary side
    if (const float budget = t_bits.budget_of(both); budget > 0.0f) {
        return "subkv:" + subkv::number(budget); // 3 or 4.25
    }
    return both == LLAMA_SUBKV_TYPE      ? "subkv" :
           both == LLAMA_SUBKV_TYPE_AUTO ? "auto" :
           type == LLAMA_SUBKV_TYPE_F16  ? "f16" :
                                           ggml_type_name(type);
}

thread_local bool llama_subkv::request::rows_coded   = false;
thread_local bool llama_subkv::request::rows_created = false;
thread_local bool llama_subkv::request::sliding_f16  = false;

void llama_subkv_keep_sliding_f16(void) {
    llama_subkv::request::sliding_f16 = true;
}

llama_subkv::request::request(llama_context_params & params) {
    t_types       = { params.type_k, params.type_v, params.ctx_type == LLAMA_CONTEXT_TYPE_MTP };
    params.type_k = stock(params.type_k);
    params.type_v = stock(params.type_v);
    rows_coded = rows_created = false;
}

llama_subkv::request::~request() {
    t_types     = {};
    sliding_f16 = false;
    std::string why;
    if (const auto * library = llama_subkv_library(false, why)) { // requests of its C interface are of one call
        library->created();
    }
}

subkv::CacheRequest llama_subkv::request::asked(const llama_model & model) {
    subkv::CacheRequest asked;
    asked.model  = source_of(model).path;
    asked.slides = [&model](int32_t il) { return llama_subkv_slides(&model, il); };
    asked.type_k = asked_type(t_types.k);
    asked.type_v = asked_type(t_types.v);
    asked.drafts = t_types.drafts;
    return asked;
}

subkv::cache_new_fn llama_subkv::request::cache_new() {
    const auto ours    = [](ggml_type type) { return is_coded(type) || type == LLAMA_SUBKV_TYPE_AUTO; };
    const bool by_type = ours(t_types.k) || ours(t_types.v);

    const std::string setting = subkv::cache_setting();
    const bool        needed  = by_type || subkv::asks_coded(setting);
    std::string       why;
    const auto *      library = llama_subkv_library(needed, why);
    if (!library && needed) {
        const std::string subject = setting.empty() ? "cache type subkv" : "SUBKV=" + setting;
        throw std::runtime_error(
            format("%s: libsubkv beside libllama expected, found none that loads: %s", subject.c_str(), why.c_str()));
    }
    return library ? library->cache_new : nullptr;
}
