// llama-subkv-programs.h: the functions that the patched programs of llama.cpp (common/, tools/) call. Compiled into
// libllama.
#pragma once

#include "llama.h"

#include <cstdint>
#include <string>

// -ctk subkv: the first context of this process after this call gets a coded cache, as with SUBKV=auto; without bases
// its creation fails. A value of SUBKV has precedence.
LLAMA_API void llama_subkv_require(void);

// true: a server should create a checkpoint of a prompt with n_left tokens left to evaluate. A coded cache cannot
// return to an earlier position without a checkpoint. Checkpoints are 4 + n * n_ubatch tokens before the end, n = 1, 2,
// 3, 4, 8, 16, …: an edit in the last 4 n_ubatch tokens evaluates at most n_ubatch tokens again, an earlier edit at
// most as many tokens as follow it, and a prompt of n tokens has log2(n / n_ubatch) + 3 checkpoints. Always false for
// ordinary caches.
LLAMA_API bool llama_subkv_checkpoint(const llama_context * ctx, int32_t n_left, int32_t n_ubatch);

// true: the context stores coefficients, and so needs a checkpoint to return to an earlier position.
LLAMA_API bool llama_subkv_is_coded(const llama_context * ctx);

// The minimum position that a sequence needs to continue from a checkpoint that ends at pos_max. pos_min: the
// sequence's current minimum; its sliding layers may still have cells that the checkpoint does not include. n_swa: size
// of the window; 0: sliding layers keep all cells. Ordinary caches: pos_min.
LLAMA_API int32_t llama_subkv_checkpoint_min(const llama_context * ctx, int32_t pos_min, int32_t pos_max,
                                             int32_t n_swa);

// Number of first tokens that a context shift keeps if the user requests `n_keep`: a coded cache also keeps its sinks,
// because later tokens cannot replace them.
LLAMA_API int32_t llama_subkv_n_keep(const llama_context * ctx, int32_t n_keep);

// Reason, in a sentence, why a server rejects a request with these headers; "": it accepts it. SUBKV_ALLOW_HOST lists
// names that are valid as Host and as Origin besides localhost and loopback addresses; unset, or with *: all names.
LLAMA_API std::string llama_subkv_refusal(const std::string & host, const std::string & origin);

// Returns a signal handler that runs `handler` in a separate thread, because `handler` may wait for locks; a second
// signal ends the process. Call it once.
using llama_subkv_signal_fn = void (*)(int);
LLAMA_API llama_subkv_signal_fn llama_subkv_in_thread(llama_subkv_signal_fn handler);
