// llama-subkv-store.h: the prompt store on disk (docs/programs.md), for the patches of llama-server. Compiled into
// libllama; without SUBKV_STORE it stores nothing and does not load libsubkv.
#pragma once

#include "llama-subkv-programs.h"
#include "subkv_store.h"

#include <cstdint>
#include <string>

// Opens the folder of SUBKV_STORE at the first call and logs the result once. false: no folder, or it cannot be used.
LLAMA_API bool llama_subkv_store_on(void);
// Forgets what is known of the models and sequences of earlier contexts. A model's file may have changed since then.
LLAMA_API void llama_subkv_store_forget(void);

// The longest tail of a restored sequence that can be removed without a checkpoint; -1: any.
LLAMA_API int64_t llama_subkv_store_removable(const llama_context * ctx);

// Stores the prompt of sequence `seq` in a context and in the draft model's context (or nullptr). prompt.state: its
// states; empty: read them from the contexts. Stores nothing if the sequence does not consist of these tokens, if LoRA
// weights or control vectors are loaded, or if the same sequence was stored before. at_end: stores it even then, and
// waits for space.
LLAMA_API void llama_subkv_store_put(llama_context * ctx, llama_context * draft, int32_t seq, subkv_store_prompt prompt,
                                     bool at_end);

// Seconds until an idle sequence should be stored, so that a killed server loses little; 0: now; negative: nothing new
// to store. A copy of the states blocks requests. The copy is due at once if it takes less than a tenth of the
// evaluation time since the last copy; else after an idle time (`idle`, seconds) of ten times its duration.
LLAMA_API double llama_subkv_store_wait(llama_context * ctx, llama_context * draft, int32_t seq, const int32_t * tokens,
                                        int64_t n_tokens, double idle);
// wake: sets the time until an idle server stores a prompt (negative: never). due: true after this time.
LLAMA_API void llama_subkv_store_wake(const llama_context * ctx, double seconds);
LLAMA_API bool llama_subkv_store_due(void);

// Returns the prompt of at most n_max tokens whose prefix saves evaluation beyond n_held tokens; nullptr: none. n_moved:
// as in subkv_store_query. `free` follows. restored: sequence `seq` (-1: none) has the prompt; else the cache rejected
// its state.
LLAMA_API subkv_store_found * llama_subkv_store_get(llama_context * ctx, llama_context * draft, const int32_t * tokens,
                                                    int64_t n_tokens, int64_t n_held, int64_t n_max, int64_t n_moved);
LLAMA_API const subkv_store_prompt * llama_subkv_store_prompt(const subkv_store_found * found);
LLAMA_API void                       llama_subkv_store_free(subkv_store_found * found, int32_t seq, bool restored);

// Waits at most 30 seconds until all writes are complete.
LLAMA_API void llama_subkv_store_flush(void);

// Any thread may call it. false: there is no store.
LLAMA_API bool llama_subkv_store_stats(subkv_store_stats & stats);
