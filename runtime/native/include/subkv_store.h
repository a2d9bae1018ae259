// subkv_store.h: the C interface of libsubkv's prompt store: a folder of evaluated prompts that persists across
// processes and that several processes may share (docs/server.md). subkv_last_error() of subkv.h has the reason of a
// failure.
//
// A store does not depend on models: its states are bytes of llama_state_seq_get_data. An identity stands for everything
// that affects these bytes, and a state is valid for its identity only. Any thread may call a store.
#pragma once

#include "subkv.h"

#ifdef __cplusplus
extern "C" {
#endif

#define SUBKV_STORE_IDENTITY     32 // bytes
#define SUBKV_STORE_LEAST_TOKENS 32 // minimum tokens of a stored prompt, and minimum gain of a read

struct llama_context;

typedef struct subkv_store       subkv_store;
typedef struct subkv_store_found subkv_store_found;

typedef struct subkv_store_bytes {
    const void * data;
    size_t       size;
} subkv_store_bytes;

// A checkpoint of the prompt: a sequence can return to this length.
typedef struct subkv_store_point {
    int64_t           n_tokens; // evaluated tokens at the checkpoint
    int32_t           pos_min;
    int32_t           pos_max;
    subkv_store_bytes data[3]; // partial states: of the model, of a draft model, of its speculative decoding
} subkv_store_point;

typedef struct subkv_store_prompt {
    const int32_t *           tokens;
    int64_t                   n_tokens;
    subkv_store_bytes         state[2]; // of the sequence: in the model, in a draft model
    const subkv_store_point * points;
    int64_t                   n_points;
    int64_t                   n_removable; // longest tail that the cache can remove without a checkpoint, or -1 for any
} subkv_store_prompt;

typedef struct subkv_store_query {
    const int32_t * tokens; // of a prompt before its evaluation
    int64_t         n_tokens;
    int64_t         n_held;            // leading tokens that the sequence already has
    int64_t         n_max;             // maximum tokens of a sequence
    int64_t         n_removable;       // as above
    double          seconds_per_token; // evaluation time, or 0 if it is unknown
    double          seconds;           // timeout of this query
    // -1 if the prompt is restored, for its prefix. Else its rows move (docs/server.md), and the runs of tokens that it has
    // behind another beginning must save more tokens than this.
    int64_t n_moved;
} subkv_store_query;

typedef struct subkv_store_stats {
    uint64_t n_entries, n_bytes;    // prompts of the folder and bytes of its files, at the last scan
    uint64_t n_hits, n_restored;    // prompts read, and their tokens that needed no evaluation
    uint64_t n_written, n_dropped;  // prompts; n_dropped: because the queue was full, or larger than the limit
    uint64_t n_damaged, n_failures; // prompts with wrong checksums; failed disk operations
} subkv_store_stats;

// Creates the folder if it is missing, with access for this user only. max_bytes limits the total size of the files: the
// store removes the least useful prompts beyond this limit. NULL + last_error if the folder cannot be used.
SUBKV_API subkv_store * subkv_store_open(const char * folder, uint64_t max_bytes);
// Waits at most 30 seconds for pending writes.
SUBKV_API void subkv_store_close(subkv_store * store);

// What the bytes of a context's states depend on, in named parts (docs/format.md). LoRA weights and control vectors are
// not among them: the caller stores nothing while they are loaded, or adds them. Both functions wait up to a minute for
// subkv_model_digest, and fail with last_error if it is unknown.
typedef struct subkv_identity_part {
    const char * name;
    const char * value;
} subkv_identity_part;

// The n_parts parts of states of the whole context, in the order in which differences are reported; NULL: failed. Valid
// until the thread's next call.
SUBKV_API const subkv_identity_part * subkv_state_identity(const struct llama_context * ctx, int32_t * n_parts);
// The digest of the parts of one sequence's states, SUBKV_STORE_IDENTITY bytes: llama-server's, so that both may share a
// folder.
SUBKV_API bool subkv_store_identity(const struct llama_context * ctx, uint8_t * identity);
// The part "model": the digest of all bytes of the model's files as they were loaded, 64
// lower-case hex digits. The first call for a model starts to compute it in a thread, which reads the files once; it is
// stored in subkv_sidecar_folder() until a file changes. Waits up to `seconds`. false + last_error: not yet computed; the
// files were replaced or changed after they were loaded, or cannot be read.
SUBKV_API bool subkv_model_digest(const struct llama_context * ctx, double seconds, char out[65]);
// n_removable of a context's states.
SUBKV_API int64_t subkv_store_removable(const struct llama_context * ctx);

// Whether a prompt whose states and checkpoints have n_bytes bytes fits: 1 now, 0 after pending writes, -1 never.
SUBKV_API int32_t subkv_store_room(const subkv_store * store, uint64_t n_bytes);
// Copies a prompt and writes it in the background; `wait` blocks until it fits. Returns false if the store drops the prompt
// because it is too short or too large, because pending writes fill the queue, or because the folder is not writable.
SUBKV_API bool subkv_store_put(subkv_store * store, const uint8_t * identity, const subkv_store_prompt * prompt,
                               bool wait);
// Waits until all writes are complete. Returns false if they are not after these seconds.
SUBKV_API bool subkv_store_flush(subkv_store * store, double seconds);

// Returns the prompt whose prefix saves the most evaluation, at least SUBKV_STORE_LEAST_TOKENS, or NULL.
SUBKV_API subkv_store_found *        subkv_store_get(subkv_store * store, const uint8_t * identity,
                                                     const subkv_store_query * query);
SUBKV_API const subkv_store_prompt * subkv_store_found_prompt(const subkv_store_found * found); // owned by `found`
// Tokens without evaluation, n_held included.
SUBKV_API int64_t subkv_store_found_reach(const subkv_store_found * found);
// `refused` says that the cache rejected the state: this store does not return the prompt until it is stored again.
SUBKV_API void subkv_store_found_free(subkv_store * store, subkv_store_found * found, bool refused);

// The longest common prefix of these tokens with any stored prompt.
SUBKV_API int64_t subkv_store_common(subkv_store * store, const uint8_t * identity, const int32_t * tokens,
                                     int64_t n_tokens);

// A sentence about the first failed read or write, once each, or "" if there was none since the last call. Valid until the
// thread's next call.
SUBKV_API const char * subkv_store_failure(subkv_store * store);

SUBKV_API void subkv_store_get_stats(const subkv_store * store, subkv_store_stats * stats);

#ifdef __cplusplus
}
#endif
