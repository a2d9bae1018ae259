// subkv_store.h: the C interface of libsubkv's store of evaluated prompts: a folder that outlives the process and that
// several processes may share (docs/programs.md). Reasons of failures: subkv_last_error() of subkv.h.
//
// A store knows nothing of models: states are bytes of llama_state_seq_get_data, bound to an identity that its caller
// makes of everything that decides which bytes a token leaves there. Calls on one store may come from any thread.
#pragma once

#include "subkv.h"

#ifdef __cplusplus
extern "C" {
#endif

#define SUBKV_STORE_IDENTITY 32 // bytes

typedef struct subkv_store       subkv_store;
typedef struct subkv_store_found subkv_store_found;

typedef struct subkv_store_bytes {
    const void * data;
    size_t       size;
} subkv_store_bytes;

// A moment of the prompt that a sequence can go back to.
typedef struct subkv_store_point {
    int64_t           n_tokens; // that were evaluated then
    int32_t           pos_min;
    int32_t           pos_max;
    subkv_store_bytes data[3]; // partial states: of the model, of a draft model, of its speculation
} subkv_store_point;

typedef struct subkv_store_prompt {
    const int32_t *           tokens;
    int64_t                   n_tokens;
    subkv_store_bytes         state[2]; // of the sequence: of the model, of a draft model
    const subkv_store_point * points;
    int64_t                   n_points;
    int64_t                   n_removable; // the longest tail that the cache can remove without a point; -1: any
} subkv_store_prompt;

typedef struct subkv_store_query {
    const int32_t * tokens; // of a prompt that is about to be evaluated
    int64_t         n_tokens;
    int64_t         n_held;            // of them need no evaluation anyway
    int64_t         n_max;             // tokens that a sequence can hold
    int64_t         n_removable;       // as above
    double          seconds_per_token; // of an evaluation; 0: not known
    double          seconds;           // that the answer is waited for
} subkv_store_query;

typedef struct subkv_store_stats {
    uint64_t n_entries, n_bytes;                       // of the folder, as last seen
    uint64_t n_hits, n_restored, n_written, n_dropped; // prompts, but n_restored: tokens
    uint64_t n_damaged, n_failures;                    // prompts that were not what they say; failures of the disk
} subkv_store_stats;

// Makes the folder, for this user alone, when it is missing. max_bytes: of all its files; beyond, the least useful go.
// NULL + last_error when it cannot be used.
SUBKV_API subkv_store * subkv_store_open(const char * folder, uint64_t max_bytes);
// Waits, at most for half a minute, for what is still to be written.
SUBKV_API void subkv_store_close(subkv_store * store);

// Is there room for a prompt whose states and points have so many bytes? 1: yes; 0: when others have been written; -1: never.
SUBKV_API int32_t subkv_store_room(const subkv_store * store, uint64_t n_bytes);
// Copies a prompt, which is written in the background. wait: until there is room for it. false: it was dropped, as too
// short, too large, too fast, or because the folder cannot be written.
SUBKV_API bool subkv_store_put(subkv_store * store, const uint8_t * identity, const subkv_store_prompt * prompt,
                               bool wait);
// Waits until everything is written. false: not within these seconds.
SUBKV_API bool subkv_store_flush(subkv_store * store, double seconds);

// The prompt whose beginning saves most of an evaluation, at least 32 tokens; NULL: none.
SUBKV_API subkv_store_found *        subkv_store_get(subkv_store * store, const uint8_t * identity,
                                                     const subkv_store_query * query);
SUBKV_API const subkv_store_prompt * subkv_store_found_prompt(const subkv_store_found * found); // owned by `found`
SUBKV_API int64_t subkv_store_found_reach(const subkv_store_found * found); // tokens it spares, with n_held
// refused: the cache does not take it, so that it is removed.
SUBKV_API void subkv_store_found_free(subkv_store * store, subkv_store_found * found, bool refused);

SUBKV_API void subkv_store_get_stats(const subkv_store * store, subkv_store_stats * stats);

#ifdef __cplusplus
}
#endif
