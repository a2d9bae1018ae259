// cache_desc.h: what libllama tells libsubkv about a K/V cache before it allocates memory.
#pragma once

#include "cache_request.h"
#include "ggml-backend.h"
#include "ggml.h"

#include <cstdint>
#include <string>
#include <vector>

namespace subkv {

struct LayerDesc {
    int32_t                    il;
    int32_t                    n_head;
    int32_t                    n_head_kv;
    int32_t                    d_k; // head sizes
    int32_t                    d_v;
    bool                       latent;   // values are the first d_v elements of keys, so one row stores both
    bool                       selected; // an indexer chooses the cells that a token reads
    ggml_backend_buffer_type_t buft;
};

// Elements of a token's K and V rows of all heads. Layer is a LayerDesc or its codec.
template <typename Layer> int64_t row_elements(const Layer & layer) {
    return (int64_t) layer.n_head_kv * (layer.d_k + (layer.latent ? 0 : layer.d_v));
}

// A layer without own K and V rows, which attends to the rows and the exact window of another layer.
struct ReaderDesc {
    int32_t il;
    int32_t owner; // the layer that stores the rows
    int32_t n_head;
};

// Description of a K/V cache before its constructor allocates memory.
struct CacheDesc {
    std::string arch;
    std::string unsupported; // why this cache cannot store coefficients, or empty if it can
    std::string unobserved;  // why an observer cannot read its rows, or empty if it can
    std::string no_cache;    // why there is no K/V cache (other fields are then unset), or empty if there is one
    int32_t     n_layer;
    uint32_t    n_cells; // per stream
    uint32_t    n_stream;
    uint32_t    n_seq_max;
    bool        sliding;  // the sliding-window half of an iswa cache
    bool        no_alloc; // a dry run, which asks for sizes only
    bool
        is_long; // longer than the model was trained for, so the user has requested the length, and nothing shortens it
    CacheRequest            request; // of the context's parameters, with the model's file
    ggml_type               type_k;  // of an ordinary cache
    ggml_type               type_v;
    std::vector<LayerDesc>  layers;
    std::vector<ReaderDesc> readers;
    std::vector<int32_t>    recurrent; // layers with a recurrent state, with or without rows
};

} // namespace subkv
