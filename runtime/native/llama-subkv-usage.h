// llama-subkv-usage.h: what a server's K/V cache takes and what its stored prompts did, for /props and /metrics. Compiled
// into libllama.
#pragma once

#include "llama-subkv-programs.h"

#include <cstdint>
#include <string>

struct llama_context;

struct llama_subkv_usage {
    std::string type   = "none"; // "subkv"; of ggml's, two with "/" between them where K's is not V's; "other": sparse
    std::string kernel = "";     // that computes attention on coefficients
    double      bits   = 0;    // per K/V element, of coded layers where there are any, exact window counted; 0: "other"
    uint64_t    bytes  = 0;    // as allocated
    uint64_t    bytes_f16 = 0; // that f16 would take; 0: "other"
    uint64_t    n_cells   = 0; // tokens that it holds, of all sequences
    bool        freed     = false; // the context is gone
};

// Of a server's context; nullptr: it has been freed. Called by the thread that made it.
SUBKV_PROGRAMS_API void llama_subkv_usage_set(llama_context * ctx);
// By any thread.
SUBKV_PROGRAMS_API llama_subkv_usage llama_subkv_usage_get(void);
// The same, and what the store of SUBKV_STORE did, as Prometheus reads it.
SUBKV_PROGRAMS_API std::string llama_subkv_usage_metrics(void);
