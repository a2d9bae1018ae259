// llama-subkv-programs.h: the functions that the patched programs of llama.cpp (common/, tools/) call. Compiled into
// libllama.
#pragma once

#include "llama.h"
#include "subkv_store.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

// Cache types besides ggml's, for llama_context_params::type_k and type_v. It suffices to set one of the two, if the
// other stays F16, the default. They have precedence over SUBKV, except over SUBKV=off. llama_init_from_model replaces
// them by F16. Their numbers are those of types that ggml has removed, so that no tensor has them, and ggml_type_name
// and ggml_is_quantized accept them.
// "subkv": a coded cache, and without bases there is no context
constexpr ggml_type LLAMA_SUBKV_TYPE      = (ggml_type) 4;
constexpr ggml_type LLAMA_SUBKV_TYPE_AUTO = (ggml_type) 5;  // "auto": a coded cache if the model has bases, else f16
constexpr ggml_type LLAMA_SUBKV_TYPE_F16  = (ggml_type) 36; // f16, also if SUBKV requests a coded cache

// More of these numbers stand for subkv:BITS, a coded cache with these bits per element. A process gives them out in the
// order in which it names budgets.
constexpr ggml_type LLAMA_SUBKV_TYPES_BITS[] = { (ggml_type) 31, (ggml_type) 32, (ggml_type) 33, (ggml_type) 37,
                                                 (ggml_type) 38 };

// The type that a user means by a name, or GGML_TYPE_COUNT for a name that is none of subkv's. Throws
// std::runtime_error for a sixth budget in one process.
LLAMA_API ggml_type llama_subkv_type(const std::string & name);

// The name of the type of keys or values, if the other side has the type `other`.
LLAMA_API std::string llama_subkv_type_name(ggml_type type, ggml_type other);

// Where evaluation resumes in a sequence whose positions before `pos` are kept. This is `pos`, or up to SUBKV_RESUME
// tokens (32 by default) before it if a coded cache has lost their exact rows. After a refused operation it is at most
// the first position that was to change. It is 0 if the cache cannot remove the positions behind. A program removes the
// cells from there on and evaluates their tokens again.
LLAMA_API int32_t llama_subkv_resume(const llama_context * ctx, int32_t seq, int32_t pos);
// Returns true if the positions of a sequence from `pos` on can be removed, as far as a coded cache is concerned.
LLAMA_API bool llama_subkv_removable(const llama_context * ctx, int32_t seq, int32_t pos);
// Tells that a removal was refused which a program takes for possible. Returns true if the cache is coded: from
// position p0 on no token of the sequence is then decoded until these positions are removed. The reason is logged.
LLAMA_API bool llama_subkv_refused(const llama_context * ctx, int32_t seq, int32_t p0);

// The minimum position that a sequence needs to continue from a checkpoint that ends at pos_max. Its current minimum is
// pos_min, which ordinary caches return, but sliding layers may still have cells that the checkpoint does not include.
// n_swa is the size of the window, or 0 if sliding layers keep all cells.
LLAMA_API int32_t llama_subkv_checkpoint_min(const llama_context * ctx, int32_t pos_min, int32_t pos_max,
                                             int32_t n_swa);

// The reason, in a sentence, why a server rejects a request with these headers, or "" if it accepts it.
// SUBKV_ALLOW_HOST lists names that are valid as Host and as Origin besides localhost and loopback addresses. All names
// are valid if it is unset or contains *.
LLAMA_API std::string llama_subkv_refusal(const std::string & host, const std::string & origin);

// Returns a signal handler that runs `handler` in a separate thread, because `handler` may wait for locks. A second
// signal ends the process. Call it once.
using llama_subkv_signal_fn = void (*)(int);
LLAMA_API llama_subkv_signal_fn llama_subkv_in_thread(llama_subkv_signal_fn handler);
// Returns true if that handler runs, or has run. Any thread may call it.
LLAMA_API bool llama_subkv_ends();

//
// size of a server's K/V cache and counters of its prompt store, for /props and /metrics
//

struct llama_subkv_usage {
    std::string type      = "none"; // "subkv", a ggml type, two of them as "K/V", or "other" for a sparse cache
    std::string kernel    = "";     // kernels for attention on coefficients
    double      bits      = 0;     // per K/V element, of coded layers if there are any, with exact window; 0 if "other"
    uint32_t    n_coded   = 0;     // layers that store coefficients
    uint32_t    n_sliding = 0;     // layers with a sliding window
    uint32_t    n_other   = 0;     // the other layers with rows
    uint32_t    n_vocab   = 0;     // tokens of the vocabulary
    uint32_t    n_swa     = 0;     // tokens of the window of sliding layers; 0 if they hold all cells
    uint64_t    bytes     = 0;     // as allocated, with bases
    uint64_t    bytes_f16 = 0;     // size in f16; 0 if "other"
    uint64_t    n_cells   = 0;     // capacity in tokens, all sequences
    uint64_t    n_bad     = 0;     // rows of a head, K or V, that were not finite and could not be coded
    bool        freed     = false; // the context is freed
};

// Sets the usage from a server's context, or notes that it is freed (nullptr). Call it on the thread that created the
// context.
LLAMA_API void llama_subkv_usage_set(llama_context * ctx);
// Updates n_bad if the usage is of this context. Rows on GPUs are not counted, which only llama_subkv_usage_set reads.
void llama_subkv_usage_bad(const llama_context * ctx, uint64_t n_bad);
// Any thread may call it.
LLAMA_API llama_subkv_usage llama_subkv_usage_get(void);
// The usage and the counters of the prompt store, in the text format of Prometheus.
LLAMA_API std::string llama_subkv_usage_metrics(void);

// Whether a layer of a model has a sliding window.
extern "C" LLAMA_API bool llama_subkv_slides(const llama_model * model, int32_t il);
// The sliding layers beside others keep f16 in the next context of this thread, whatever its cache types are. A program
// that measures the error of the other layers calls it.
extern "C" LLAMA_API void llama_subkv_keep_sliding_f16(void);

//
// The prompt store on disk, for llama-server (docs/server.md, server/prompts.cpp). Without SUBKV_STORE nothing is stored
// and libsubkv is not loaded. `draft` is the context of a draft model, or nullptr.
//

// Opens the folder of SUBKV_STORE at the first call and logs the result once. Returns false without a folder that can be
// used.
LLAMA_API bool llama_subkv_store_on(void);
// Forgets what is known of earlier contexts, and starts to compute the digests of the models in a thread. The first prompt
// that is read or stored waits for them.
LLAMA_API void llama_subkv_store_begin(const llama_context * ctx, const llama_context * draft);

// The longest tail of a restored sequence that can be removed without a checkpoint, or -1 for any.
LLAMA_API int64_t llama_subkv_store_removable(const llama_context * ctx);

// The first position whose rows were evaluated behind another text than the sequence has now, because a part of it was
// removed or moved, and the first whose origin is unknown, because the sequence was restored from a state that anybody
// may have written. They are INT32_MAX if there is none. Moved text is stored under another identity if
// SUBKV_STORE_MOVED is set, and text of unknown origin is not stored.
struct llama_subkv_text {
    int32_t moved   = INT32_MAX;
    int32_t unknown = INT32_MAX;
};

LLAMA_API llama_subkv_text llama_subkv_text_of(const llama_context * ctx, const llama_context * draft, int32_t seq);
// Call it after a sequence was restored from a state whose text is known.
LLAMA_API void llama_subkv_text_set(llama_context * ctx, llama_context * draft, int32_t seq, llama_subkv_text text);

// Returns whether sequence `seq` consists of n_tokens tokens in both contexts, and its prompt may be stored. That is so
// if no LoRA weights or control vectors are loaded and the digests of the models and the origin of the text are known.
LLAMA_API bool llama_subkv_store_accepts(const llama_context * ctx, const llama_context * draft, int32_t seq,
                                         int64_t n_tokens);
// As subkv_store_room. Returns -1 without a store.
LLAMA_API int32_t llama_subkv_store_room(uint64_t n_bytes);
// Stores the prompt of a sequence that llama_subkv_store_accepts, with its states in both contexts, and ignores
// prompt.state. Waits for space if `wait` is set. Returns false if the store drops it.
LLAMA_API bool llama_subkv_store_put(const llama_context * ctx, const llama_context * draft, int32_t seq,
                                     subkv_store_prompt prompt, std::array<std::vector<uint8_t>, 2> && states,
                                     bool wait);

// Returns the prompt of at most n_max tokens whose prefix saves the most evaluation beyond n_held tokens, or nullptr. The
// meaning of n_moved is that of subkv_store_query. The caller frees the result, and says whether the cache has accepted its
// state.
LLAMA_API subkv_store_found * llama_subkv_store_get(llama_context * ctx, llama_context * draft, const int32_t * tokens,
                                                    int64_t n_tokens, int64_t n_held, int64_t n_max, int64_t n_moved);
LLAMA_API const subkv_store_prompt * llama_subkv_store_prompt(const subkv_store_found * found);
LLAMA_API llama_subkv_text           llama_subkv_store_text(const subkv_store_found * found);
LLAMA_API void                       llama_subkv_store_free(subkv_store_found * found, bool accepted);

// Waits at most 30 seconds until all writes are complete.
LLAMA_API void llama_subkv_store_flush(void);

// Returns false without a store. Any thread may call it.
LLAMA_API bool llama_subkv_store_stats(subkv_store_stats & stats);

//
// Rows of evaluated tokens move to other positions, behind another beginning (SUBKV_STORE_MOVED).
//

// A copy of the rows of consecutive tokens.
struct llama_subkv_run;

extern "C" {

// Whether SUBKV_STORE_MOVED is set and positions of this context's cells may change. `report` logs this, or the reason why
// nothing moves.
LLAMA_API bool llama_subkv_moves(const llama_context * ctx, const llama_context * draft, bool report);

// Both copy the rows of n positions from `first` on, of a sequence or of a sequence's state. They return NULL and log the
// reason if a row is missing, if the state does not belong to this cache, or if memory is short.
LLAMA_API llama_subkv_run * llama_subkv_run_of_sequence(llama_context * ctx, int32_t seq, int32_t first, int32_t n);
LLAMA_API llama_subkv_run * llama_subkv_run_of_state(llama_context * ctx, const void * state, size_t size,
                                                     int32_t first, int32_t n);
LLAMA_API void              llama_subkv_run_free(llama_subkv_run * rows);

// Puts the rows behind position pos - 1, the last one of a sequence. Their keys rotate before the next decode, and their
// tokens have codes and no exact rows. Returns false, logs the reason and changes nothing if there is no room.
LLAMA_API bool llama_subkv_append(llama_context * ctx, int32_t seq, int32_t pos, const llama_subkv_run * rows);
}
