// llama-subkv-usage.h: size of a server's K/V cache and counters of its prompt store, for /props and /metrics. Compiled
// into libllama.
#pragma once

#include "llama-subkv-programs.h"

#include <cstdint>
#include <string>

struct llama_subkv_usage {
    std::string type      = "none"; // "subkv"; a ggml type, "K/V" if the two differ; "other": sparse
    std::string kernel    = "";     // kernels for attention on coefficients
    double      bits      = 0;      // per K/V element, of coded layers if there are any, with exact window; 0: "other"
    uint64_t    bytes     = 0;      // as allocated
    uint64_t    bytes_f16 = 0;      // size in f16; 0: "other"
    uint64_t    n_cells   = 0;      // capacity in tokens, all sequences
    uint64_t    n_bad     = 0;      // rows of a head, K or V, that were not finite and could not be coded
    bool        freed     = false;  // the context is freed
};

// Sets the usage from a server's context; nullptr: it is freed. Call it on the thread that created the context.
LLAMA_API void llama_subkv_usage_set(llama_context * ctx);
// Updates n_bad, if the usage is of this context. Does not consider rows on GPUs, which only llama_subkv_usage_set reads.
void llama_subkv_usage_bad(const llama_context * ctx, uint64_t n_bad);
// Any thread may call it.
LLAMA_API llama_subkv_usage llama_subkv_usage_get(void);
// The same and the counters of the prompt store, in the text format of Prometheus.
LLAMA_API std::string llama_subkv_usage_metrics(void);
