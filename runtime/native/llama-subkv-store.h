// llama-subkv-store.h: evaluated prompts that outlive a server (docs/programs.md), for the hunks in llama-server. Compiled
// into libllama; with SUBKV_STORE unset nothing is stored, and libsubkv is not loaded for it.
#pragma once

#include "llama-subkv-programs.h"
#include "subkv_store.h"

#include <cstdint>

struct llama_context;

// The folder of SUBKV_STORE, opened at the first call; reports once in the log. false: there is none, or it cannot be used.
SUBKV_PROGRAMS_API bool llama_subkv_store_on(void);

// How long a tail of a sequence that was just restored can be removed without a checkpoint; -1: any.
SUBKV_PROGRAMS_API int64_t llama_subkv_store_removable(const llama_context * ctx);

// Stores what sequence `seq` of a context, and of the draft model's (or nullptr), holds: prompt.state are its states, or
// nothing: they are taken from the contexts. Nothing is stored where the sequence does not hold these tokens, while LoRA weights
// or control vectors are loaded, and of what the same sequence had before. at_end: whatever it had, and the call waits until
// there is room for it.
SUBKV_PROGRAMS_API void llama_subkv_store_put(llama_context * ctx, llama_context * draft, int32_t seq,
                                              subkv_store_prompt prompt, bool at_end);

// When to do that with a sequence that nothing is at work on, so that a server that is killed has lost little: in how many
// seconds, 0: now; negative: there is nothing new to store. A copy of its states holds up requests. It is made at once where
// it takes less than a tenth of the evaluations since the last one, else when nothing was at work (idle, in seconds) for ten
// times as long as it takes.
SUBKV_PROGRAMS_API double llama_subkv_store_wait(llama_context * ctx, llama_context * draft, int32_t seq,
                                                 const int32_t * tokens, int64_t n_tokens, double idle);
// In so many seconds an idle server has something to store (negative: nothing). Is it time?
SUBKV_PROGRAMS_API void llama_subkv_store_wake(const llama_context * ctx, double seconds);
SUBKV_PROGRAMS_API bool llama_subkv_store_due(void);

// A prompt whose beginning spares evaluations, beyond n_held tokens; nullptr: none. Then restored, or refused by the cache.
SUBKV_PROGRAMS_API subkv_store_found * llama_subkv_store_get(llama_context * ctx, llama_context * draft, int32_t seq,
                                                             const int32_t * tokens, int64_t n_tokens, int64_t n_held);
SUBKV_PROGRAMS_API const subkv_store_prompt * llama_subkv_store_prompt(const subkv_store_found * found);
SUBKV_PROGRAMS_API void llama_subkv_store_free(subkv_store_found * found, int32_t seq, bool refused);

// Waits, at most for half a minute, until everything is written.
SUBKV_PROGRAMS_API void llama_subkv_store_flush(void);

// By any thread. false: there is no store.
SUBKV_PROGRAMS_API bool llama_subkv_store_stats(subkv_store_stats & stats);
