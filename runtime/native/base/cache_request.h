// cache_request.h: what is asked of a K/V cache; resolve.h decides what is given.
#pragma once

#include "ggml.h"

#include <cstdint>
#include <functional>
#include <string>

namespace subkv {

// llama.cpp's types of K and V rows.
constexpr ggml_type ORDINARY_TYPES[] = { GGML_TYPE_F32,  GGML_TYPE_F16,  GGML_TYPE_BF16,
                                         GGML_TYPE_Q8_0, GGML_TYPE_Q5_1, GGML_TYPE_Q5_0,
                                         GGML_TYPE_Q4_1, GGML_TYPE_Q4_0, GGML_TYPE_IQ4_NL };

inline double element_bits(ggml_type type) {
    return 8.0 * (double) ggml_type_size(type) / (double) ggml_blck_size(type);
}

// The variables of the environment that stand for what is not asked.
enum class Variables {
    BITS,       // SUBKV_BITS alone
    ALL,        // also SUBKV, SUBKV_SINK, SUBKV_RECENT, SUBKV_ROLLBACK and SUBKV_ADAPT
    OF_ANOTHER, // all of them, but the value of SUBKV counts as `auto` because it belongs to another model
};

// As subkv_cache_request (subkv.h), whose comments explain the fields. "" and numbers below 0 are not asked.
struct CacheRequest {
    std::string                     model;
    std::string                     type, type_k, type_v;
    std::string                     bases;
    float                           bits    = 0.0f; // 0 if it is not asked
    bool                            memory  = false;
    bool                            sidecar = true;
    bool                            derive  = true;
    std::function<bool(int32_t il)> slides;
    int32_t                         n_sink = -1, n_recent = -1, n_rollback = -1;
    std::string                     adapt;
    Variables                       variables = Variables::BITS;
    bool                            drafts = false; // SUBKV does not require a coded cache, as drafts may have no bases
};

} // namespace subkv
