// props.cpp: the cache in /props. Part of libsubkv-server.
#include "llama-subkv-server.h"

#include "cache_request.h"

namespace llama_subkv_server {

json kv_cache() {
    const auto usage = llama_subkv_usage_get();
    const auto times = [&](double bits) { // how many times smaller than a cache of a type with these bits per element
        const double n_bytes = (double) usage.bytes_f16 * bits / 16.0;
        return usage.bytes > 0 && n_bytes > 0 ? json(n_bytes / (double) usage.bytes) : json(nullptr);
    };
    return json{
        { "type", usage.type },
        { "bits", usage.bits },
        { "bytes", usage.bytes },
        { "bytes_f16", usage.bytes_f16 },
        { "times_smaller", { { "f16", times(16.0) }, { "q8_0", times(subkv::element_bits(GGML_TYPE_Q8_0)) } } },
        { "layers", { { "coded", usage.n_coded }, { "sliding", usage.n_sliding }, { "other", usage.n_other } } },
        { "sliding_window", usage.n_swa > 0 ? json(usage.n_swa) : json(nullptr) },
        { "n_cells", usage.n_cells },
        { "n_zero_rows", usage.n_bad },
        { "kernel", usage.kernel.empty() ? json(nullptr) : json(usage.kernel) },
    };
}

} // namespace llama_subkv_server
