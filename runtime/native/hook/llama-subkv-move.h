// llama-subkv-move.h: moves the rows of evaluated tokens to other positions, behind another beginning
// (SUBKV_STORE_MOVED). Compiled into libllama.
#pragma once

#include "llama.h"

#include <cstddef>
#include <cstdint>

// The rows of a run of tokens, outside a cache.
struct llama_subkv_run;

extern "C" {

// true: SUBKV_STORE_MOVED is set, and positions of this context's cells may change. draft: of the draft model, or NULL.
// report: logs it, or the reason why nothing moves.
LLAMA_API bool llama_subkv_moves(const llama_context * ctx, const llama_context * draft, bool report);

// Copies the rows of n positions from `first` on: of a sequence, or of a sequence's state. NULL: they are not all
// there, the state does not belong to this cache, or memory is short; the reason is logged.
LLAMA_API llama_subkv_run * llama_subkv_run_of_sequence(llama_context * ctx, int32_t seq, int32_t first, int32_t n);
LLAMA_API llama_subkv_run * llama_subkv_run_of_state(llama_context * ctx, const void * state, size_t size,
                                                     int32_t first, int32_t n);
LLAMA_API void              llama_subkv_run_free(llama_subkv_run * rows);

// Puts the rows behind position pos - 1, the last one of a sequence. Their keys rotate before the next decode; their
// tokens have codes and no exact rows. false: there is no room; the sequence stays as it is, and the reason is logged.
LLAMA_API bool llama_subkv_append(llama_context * ctx, int32_t seq, int32_t pos, const llama_subkv_run * rows);
}
