// llama-subkv-programs.h: the functions that the patched programs of llama.cpp (common/, tools/) call. Compiled into
// libllama.
#pragma once

#include "llama.h"

#include <cstdint>
#include <string>

// -ctk subkv: the first context of this process after this call gets a coded cache, as with SUBKV=auto; without bases
// its creation fails. A value of SUBKV has precedence.
LLAMA_API void llama_subkv_require(void);

// Where evaluation resumes in a sequence of which positions before `pos` are kept: at `pos`, or up to SUBKV_RESUME
// tokens (32 by default) before it if a coded cache has lost their exact rows. A program removes the cells from there on
// and evaluates their tokens again.
LLAMA_API int32_t llama_subkv_resume(const llama_context * ctx, int32_t seq, int32_t pos);

// The minimum position that a sequence needs to continue from a checkpoint that ends at pos_max. pos_min: the
// sequence's current minimum; its sliding layers may still have cells that the checkpoint does not include. n_swa: size
// of the window; 0: sliding layers keep all cells. Ordinary caches: pos_min.
LLAMA_API int32_t llama_subkv_checkpoint_min(const llama_context * ctx, int32_t pos_min, int32_t pos_max,
                                             int32_t n_swa);

// Reason, in a sentence, why a server rejects a request with these headers; "": it accepts it. SUBKV_ALLOW_HOST lists
// names that are valid as Host and as Origin besides localhost and loopback addresses; unset, or with *: all names.
LLAMA_API std::string llama_subkv_refusal(const std::string & host, const std::string & origin);

// Returns a signal handler that runs `handler` in a separate thread, because `handler` may wait for locks; a second
// signal ends the process. Call it once.
using llama_subkv_signal_fn = void (*)(int);
LLAMA_API llama_subkv_signal_fn llama_subkv_in_thread(llama_subkv_signal_fn handler);
