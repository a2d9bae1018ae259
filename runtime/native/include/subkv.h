// subkv.h: the public C interface of libsubkv for programs. Every function that can fail reports the reason in one
// sentence through subkv_last_error() (thread-local, valid until the next call on the same thread; text of files in it is
// escaped). NULL for an object or an array is such a failure, unless a comment allows it; freeing NULL does nothing.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32) && defined(SUBKV_BUILD)
#    define SUBKV_API __declspec(dllexport)
#elif defined(_WIN32)
#    define SUBKV_API __declspec(dllimport)
#else
#    define SUBKV_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

struct llama_context;
struct gguf_context;

typedef struct subkv_layout   subkv_layout;   // bases and bands of one model, immutable, shareable between contexts
typedef struct subkv_observer subkv_observer; // accumulates calibration statistics

SUBKV_API const char * subkv_last_error(void);

// What failed, for programs that react to it. The sentence is for people.
enum {
    SUBKV_ERROR_NONE        = 0,
    SUBKV_ERROR_INVALID     = 1, // an argument, a variable, a file, a state or a batch, and everything else
    SUBKV_ERROR_UNSUPPORTED = 2, // the model, or one of its layers on this device, which an ordinary cache can have
    SUBKV_ERROR_MEMORY      = 3, // of the host or of a device
    SUBKV_ERROR_UNAVAILABLE = 4, // the system (access, memory, the disk) cannot read a file, which may be sound
    SUBKV_ERROR_BUDGET      = 5  // bases have no plan for the requested bits per element, or SUBKV_BITS is invalid
};

// A sentence "KEY: REASON; REMEDY" and its kind. The key is an argument, a variable or a file. Key and remedy are "" if
// there is none.
typedef struct subkv_error {
    int32_t      kind;
    const char * key;
    const char * reason;
    const char * remedy; // another cache type, or a conversion
} subkv_error;

// The parts of subkv_last_error(), which are valid as long. It is never NULL, and without an error, kind is
// SUBKV_ERROR_NONE.
SUBKV_API const subkv_error * subkv_last_error_parts(void);
// Name of the CPU kernels in use, such as "avx2". If none can run, returns NULL and sets the last error.
SUBKV_API const char * subkv_kernel_name(void);
// Name of the GPU kernels in this build, "cuda" or "vulkan", or NULL if there are none.
SUBKV_API const char * subkv_device_kernel_name(void);

//
// format (converter/FORMAT.md)
//

// The constants of rows, files and caches as JSON: the names of kernels/include/subkv/format.h in lower case;
// "cache_types": name of an ordinary cache type -> number in ggml, bits per element; "planes": bits of a band -> bits of
// its planes, low bits first; "quantizers": bits of a band -> best step and relative distortion on a Gaussian;
// "scales": [256] scale of each scale code, as the bits of an f32.
SUBKV_API const char * subkv_constants(void);

// Bytes that this process can still allocate, including swap. They are the minimum over the machine, all enclosing
// control groups, and the process's own limits less a reserve for small blocks. Returns INT64_MAX if it is unknown, as on
// other systems than Linux. proc, cgroup: the folders to read, or NULL for /proc and /sys/fs/cgroup.
SUBKV_API int64_t subkv_available_memory(const char * proc, const char * cgroup);

// Rows of one KV head, with bands [n_bands][2] as coefficients and bits, ratio [n_bands], c [n][rank] f32 coefficients,
// and rows [n][row_bytes]. encode returns the number of non-finite rows (decode gives NaN), or -1. Every processor
// computes the same bytes and the same decoded coefficients.
SUBKV_API int64_t subkv_encode_rows(const int32_t * bands, const float * ratio, int32_t n_bands, const float * c,
                                    int64_t n, uint8_t * rows);
SUBKV_API bool    subkv_decode_rows(const int32_t * bands, const float * ratio, int32_t n_bands, const uint8_t * rows,
                                    int64_t n, float * c);

//
// layout
//

// Returns 1 if the GGUF at `path` has subkv.* keys, 0 if it has none, and -1 if the file cannot be read as GGUF.
SUBKV_API int32_t subkv_layout_present(const char * path);

// Reads and validates every subkv.* key (converter/FORMAT.md) of a converted model or a sidecar. Returns NULL on any
// defect, and the error names the key, the expected value and the actual value.
SUBKV_API subkv_layout * subkv_layout_load(const char * path);
// The same for one of the file's budgets in bits per element, or 0 for that of subkv_layout_load.
SUBKV_API subkv_layout * subkv_layout_load_budget(const char * path, float budget);
// The same for bases from the weights of the model at `path`, in memory, where a budget of 0 means derived_budget()
// bits. `sliding` tells the layers of a model with a sliding window, or is NULL if there are none. These layers stay
// ordinary and get no bases, unless no other ones are left.
SUBKV_API subkv_layout * subkv_layout_derive(const char * path, float budget, const int32_t * sliding,
                                             int32_t n_sliding);
// A matrix or vector in memory, in rows without gaps. A file of the model has each n_order of these rows in the order
// `order` (indices of rows), or, with NULL, as they are.
typedef struct subkv_matrix {
    const char *    name; // as in a file, such as blk.0.attn_k.weight
    const void *    data; // [n_rows][n]
    int64_t         n_rows, n;
    const int32_t * order;
    int32_t         n_order;
    int32_t         type; // enum ggml_type
} subkv_matrix;

// As subkv_layout_derive, for a model in memory. `metadata` has its keys as in a file. Of its matrices, only the
// weights and biases of queries and keys and the norms before and in attention are used.
SUBKV_API subkv_layout * subkv_layout_derive_matrices(const struct gguf_context * metadata,
                                                      const subkv_matrix * matrices, int32_t n_matrices, float budget,
                                                      int32_t n_sink, int32_t n_recent);
SUBKV_API void           subkv_layout_free(subkv_layout * layout);

// Copies E (decode = false) or D (decode = true) of one head, [rank][d] f32, to `out`. Returns rank*d, or -1.
SUBKV_API int64_t subkv_layout_basis(const subkv_layout * layout, int32_t il, int32_t head_kv, bool value, bool decode,
                                     float * out, int64_t n_out);
// The same for the mean of one head's keys, [d_k], which is zeros if there is none.
SUBKV_API int64_t subkv_layout_mean(const subkv_layout * layout, int32_t il, int32_t head_kv, float * out,
                                    int64_t n_out);

// The layout without the matrices, as one UTF-8 JSON object; owned by the layout. Floats have 9 significant digits.
//   version, block_count, n_sink, n_recent, recent_bits, bpe_context (int), codec, arch, gamma, basis_k, basis_v,
//   generator, adapt (string): the keys of FORMAT.md §1; adapt is "" if the key is absent
//   base_sha256 (string), calibration: { sha256, text (string), tokens (int) }: the same
//   bits_per_element, bits_per_element_rows (float): the keys of §1, or those of the plan
//   budget (float): bits per element by which a user selects this layout
//   plans: the file's (§3.3): { budget, bits_per_element, predicted (0: unknown) }
//   fingerprint (string): 64 hex digits (§5)
//   bytes_per_token (int): coefficient rows of one cell, K and V, all coded layers
//   bytes_bases (int): E and D of all heads in memory on CPUs (§5)
//   layers: the coded ones, ascending: il, n_head_kv, d_k, d_v (§2), k_row_bytes, v_row_bytes (int): bytes of one cell's
//     row, all heads; k, v: an object per head, v of a latent layer is empty:
//       gamma (float), centred (bool: the mean is not zero): K only
//       rank, row_bytes (bytes of the head's row), offset (byte where it starts in the cell's row) (int)
//       bands: { n, bits (§2), first (index of the first coefficient), offset (byte of its codes in the head's row),
//         ratio }
SUBKV_API const char * subkv_layout_json(const subkv_layout * layout);

//
// bases of a model
//

// The content hash of a model, which names its sidecars (converter/FORMAT.md §1.1), as 64 digits and a zero. `path` is
// the first file of a split model.
SUBKV_API bool subkv_model_content(const char * path, char out[65]);
// The digest of FORMAT.md §1.3 for bases with these first and last coded layers, or "" if the model has none of the
// weights.
SUBKV_API bool subkv_model_weights(const char * path, int32_t first_layer, int32_t last_layer, char out[65]);

// Where bases come from, in the order of the search. These are a file that the user names, the model's own keys, the
// sidecar beside the model (by the model's name, else by its content), and the user's cache folder, by the model's
// content. If none has bases, they are derived from the weights, in memory.
enum {
    SUBKV_BASES_NONE     = 0,
    SUBKV_BASES_NAMED    = 1,
    SUBKV_BASES_EMBEDDED = 2,
    SUBKV_BASES_BESIDE   = 3,
    SUBKV_BASES_STORED   = 4,
    SUBKV_BASES_WEIGHTS  = 5
};

// What is asked of a K/V cache. NULL, "", a number of tokens below 0 and 0 bits are not asked.
typedef struct subkv_cache_request {
    const char * model; // first file; NULL: only the request is checked, and no bases are searched
    const char * type; // of keys and values: "auto", "subkv", "subkv:BITS", "subkv:FILE" (with bases) or a type of ggml
    // The type of one side. A side that is not asked has `type`, or f16. "auto" or a coded type is for both sides.
    const char * type_k;
    const char * type_v;
    const char * bases;   // a file with bases, which alone counts
    float        bits;    // per element, of those that the bases can have; if not asked, SUBKV_BITS or their default
    bool         memory;  // the caller will choose the bits by their size, so the cache must be coded
    bool         sidecar; // use BESIDE and STORED
    bool         derive;  // use WEIGHTS for "auto", too
    // Whether a layer has a sliding window, for models with some, or NULL if none has. Such layers get no bases from the
    // weights, unless all layers slide.
    bool (*slides)(int32_t il);
    int32_t      n_sink, n_recent, n_rollback; // as in subkv_cache_params, like the next one
    const char * adapt;
} subkv_cache_request;

// The cache that is given. The texts are valid until the next call on the same thread.
typedef struct subkv_cache_choice {
    const char *   type_k; // "subkv" for both, or types of ggml
    const char *   type_v;
    int32_t        ggml_type_k; // enum ggml_type, for llama_context_params
    int32_t        ggml_type_v;
    bool           automatic; // whether f16 replaces a coded cache that the engine does not support
    int32_t        source;    // of the bases
    const char *   path;      // of their file, or "" if there is none, or they are derived
    subkv_layout * layout;    // to be freed by the caller, or NULL for an ordinary cache
    float          bits;      // of the layout, per element, and those of the same bases by default
    float          bits_default;
    int32_t        n_sink, n_recent, n_rollback;
    const char *   adapt;
    const char *   words; // source and size of the bases, or why there are none, or "" if an ordinary type was asked
    const char *   gain;  // how the user gets better bases
} subkv_cache_choice;

// Decides which cache a context gets. Bases are those of the first place that has some, because no later place may
// replace a damaged file or one of another model. If this returns false, the key of subkv_last_error_parts() is the
// field of the request that the error is about, or SUBKV_BITS, or one of two words: "sidecar" if a file that was found
// cannot be used, and "derive" if the model can have no bases.
SUBKV_API bool subkv_resolve(const subkv_cache_request * request, subkv_cache_choice * out);

// The file that the search finds or would find for a model at BESIDE or STORED. It may not exist. `content` is that of
// subkv_model_content, or NULL for BESIDE. The text is valid until the next call on the same thread.
SUBKV_API const char * subkv_sidecar_path(const char * model, const char * content, int32_t source);
// The folder of STORED, in the user's cache folder, which may not exist. Returns NULL if there is no home folder.
SUBKV_API const char * subkv_sidecar_folder(void);

//
// context
//

typedef struct subkv_cache_params {
    int32_t n_sink;   // < 0: the layout's value
    int32_t n_recent; // < 0: the layout's value
    // exact rows kept beyond n_recent, so that removing n_rollback last tokens costs none; < 0 for 16
    int32_t      n_rollback;
    const char * adapt; // options of adaptation, as --adapt: "none", "v", "kv,length=512,gain=0.9", or NULL for none
} subkv_cache_params;

// The next call of llama_init_from_model by *this thread* creates its K/V cache with `layout` (retained by the
// context). `params` may be NULL. The request ends with that call, whether it creates a context or not, or earlier with
// subkv_attach(NULL, NULL). If the model cannot use the layout, llama_init_from_model returns NULL and
// subkv_last_error() has the reason. A model without a K/V cache (recurrent, encoder-only) creates none, so check with
// subkv_get_stats that the context has a coefficient cache.
SUBKV_API bool subkv_attach(subkv_layout * layout, const subkv_cache_params * params);

// The variable SUBKV selects the cache of a context without an attached layout (docs/programs.md). With this call the
// next llama_init_from_model by this thread ignores SUBKV and creates ordinary caches.
SUBKV_API void subkv_attach_ordinary(void);

typedef struct subkv_stats {
    uint64_t bytes_codes;     // coefficient rows as allocated, K and V
    uint64_t bytes_window;    // exact window as allocated
    uint64_t bytes_stock;     // K/V of layers that stay ordinary (sliding-window layers), an indexer's keys
    uint64_t bytes_kv;        // all memory of the cache, which is codes, window, adapted bases and ordinary layers
    uint64_t bytes_f16;       // size of an f16 cache of the same context, all layers
    uint64_t bytes_bases;     // bases in memory, which are E, D, and the means of keys
    uint64_t bytes_per_token; // coefficient-row bytes of one cell, all coded layers
    uint64_t n_zero_rows;     // rows of a head, K or V, that are not finite, so that attention to them is NaN
    uint64_t bytes_chunks;    // adapted bases and their sketches, current size
    uint64_t n_chunks;        // adapted bases in use, all heads
    uint32_t n_layer_coded;
    uint32_t n_layer_device;  // of these, on a GPU
    uint32_t n_layer_sliding; // ordinary layers with a sliding window
    uint32_t n_layer_other;   // ordinary for other reasons
    uint32_t n_swa;           // tokens of the window of sliding layers, or 0 if they hold all cells (swa_full)
    uint32_t n_cells;         // cells per stream
    uint32_t n_stream;
    int32_t  n_sink;
    int32_t  n_recent;
    int32_t  n_rollback;
    float    bpe; // bits per K/V element of the coded layers, as allocated
} subkv_stats;

// Returns false if the context has no coefficient cache.
SUBKV_API bool subkv_get_stats(struct llama_context * ctx, subkv_stats * out);

// Fingerprint of the context's layout, or NULL for an ordinary cache, which is no error.
SUBKV_API const char * subkv_context_fingerprint(struct llama_context * ctx);
// GPUs that store the coded layers, with llama.cpp's names and descriptions, separated by ", ", or NULL for an ordinary
// cache.
SUBKV_API const char * subkv_context_devices(struct llama_context * ctx);

// Where evaluation resumes in a sequence whose positions before `pos` are kept. This is `pos`, or at most SUBKV_RESUME
// tokens (32 by default) before it if a coefficient cache has lost exact rows of the last ones, as after removed tails
// and moved parts. A program removes the cells from there on and evaluates their tokens again.
SUBKV_API int32_t subkv_resume(struct llama_context * ctx, int32_t seq, int32_t pos);

// llama_memory_seq_add, _div and _cp return nothing, but a coefficient cache may refuse them. It then changes nothing,
// and logs the reason. Because the caller believes otherwise, the sequence (of a copy, the destination) decodes no
// token and has no state until the positions that were to change are removed. Returns true if the last such operation
// on a sequence was refused. The caller then knows, and the sequence can be used as it was before.
SUBKV_API bool subkv_take_refusal(struct llama_context * ctx, int32_t seq);

//
// calibration
//

// The next context that this thread creates with llama_init_from_model reports its queries, keys and values to `obs`.
// The context has an ordinary f16 cache, or the cache of an earlier subkv_attach, and both requests end with that call.
// The observer must outlive the context.
SUBKV_API subkv_observer * subkv_observer_new(int32_t n_skip); // statistics exclude positions < n_skip
SUBKV_API void             subkv_observer_free(subkv_observer * obs);
SUBKV_API bool             subkv_observe(subkv_observer * obs);

// SUBKV_ACCUMULATE adds to the second moments. SUBKV_SAMPLE copies single rows of held-out text instead, which are k
// and v rows at the positions in key_pos, and q rows and, in a coded layer, attention outputs at the positions in
// query_pos. The function copies both lists, and each call appends a new sample set to the earlier ones. SUBKV_PAUSE
// records nothing.
enum { SUBKV_PAUSE = 0, SUBKV_ACCUMULATE = 1, SUBKV_SAMPLE = 2 };
SUBKV_API bool subkv_observer_mode(subkv_observer * obs, int32_t mode, const int32_t * key_pos, int32_t n_key,
                                   const int32_t * query_pos, int32_t n_query);

// Drops all samples and their memory and keeps the statistics. Call it between decodes.
SUBKV_API void subkv_observer_forget(subkv_observer * obs);

// Shapes and counts of a layer, all zero for a layer never observed. Layers are 0 .. subkv_observer_n_layer()-1.
typedef struct subkv_observed {
    int32_t  n_head, n_head_kv, d_k, d_v;
    float    scale;          // softmax scale of the layer
    uint64_t n_tokens;       // tokens accumulated
    int32_t  n_key, n_query; // sampled rows so far
    uint64_t n_nonfinite;    // tokens skipped because a row has NaN or Inf
    int32_t  coded;          // 1 if observed in a coefficient cache, which also sets `plain`
    int32_t  plain;          // 1 if logits are scale q.k, without soft-capping, ALiBi and attention sinks
} subkv_observed;
SUBKV_API int32_t subkv_observer_n_layer(const subkv_observer * obs); // -1: NULL
SUBKV_API bool    subkv_observer_layer(const subkv_observer * obs, int32_t il, subkv_observed * out);

// Means over tokens as f64, by name: "q2" [n_head_kv][d_k][d_k] (mean over tokens and the group's heads), "k2"
// [n_head_kv][d_k][d_k], "v2" [n_head_kv][d_v][d_v], "q1" [n_head_kv][d_k], "k1" [n_head_kv][d_k], "v1" [n_head_kv][d_v].
// Sampled rows: "qs" [n_query][n_head][d_k], "ks" [n_key][n_head_kv][d_k], "vs" [n_key][n_head_kv][d_v], "os"
// [n_query][n_head][d_v], empty for an ordinary cache. "qs" values are rounded to half precision.
// Returns the number of values written, or -1 (unknown name, n_out too small).
SUBKV_API int64_t subkv_observer_get(const subkv_observer * obs, int32_t il, const char * what, double * out,
                                     int64_t n_out);

#ifdef __cplusplus
}
#endif
