// subkv.h: the public C interface of libsubkv. Every function that can fail says why in one sentence through
// subkv_last_error() (thread-local, valid until the next call on the same thread).
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#    define SUBKV_API __declspec(dllexport)
#else
#    define SUBKV_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

struct llama_context;

typedef struct subkv_layout   subkv_layout;   // bases and bands of one model, immutable, shareable between contexts
typedef struct subkv_observer subkv_observer; // accumulates calibration statistics
typedef struct subkv_planter  subkv_planter;  // K/V rows computed elsewhere

SUBKV_API const char * subkv_last_error(void);
SUBKV_API const char *
subkv_kernel_name(void); // CPU kernels in use, e.g. "avx2"; NULL + last_error if none can be used

//
// format (converter/FORMAT.md)
//

// Every number that programs must agree on about rows, files and caches, as JSON: the constants of
// kernels/include/subkv/format.h in lower case; "planes": bits of a band -> bits of its planes, low ones first;
// "scales": [256] scale of a scale code, as the bits of an f32.
SUBKV_API const char * subkv_constants(void);

// Rows of one KV head: bands [n_bands][2] coefficients and bits, ratio [n_bands]; c [n][rank] f32 coefficients,
// rows [n][row_bytes]. encode: returns the number of rows that are not finite (stored as zero rows), or -1.
// The bytes are the same on every processor, and so are the coefficients that decode gives.
SUBKV_API int64_t subkv_encode_rows(const int32_t * bands, const float * ratio, int32_t n_bands, const float * c,
                                    int64_t n, uint8_t * rows);
SUBKV_API bool    subkv_decode_rows(const int32_t * bands, const float * ratio, int32_t n_bands, const uint8_t * rows,
                                    int64_t n, float * c);

//
// layout
//

// 1: the GGUF at `path` carries subkv.* keys, 0: it does not, -1: not readable as GGUF.
SUBKV_API int32_t subkv_layout_present(const char * path);

// Reads and validates every subkv.* key (converter/FORMAT.md). `path`: a converted model or a sidecar.
// NULL on any defect; the message names the key, what was expected and what was found.
SUBKV_API subkv_layout * subkv_layout_load(const char * path);
SUBKV_API void           subkv_layout_free(subkv_layout * layout);

// Everything about the layout except the matrices, as JSON; owned by the layout. FORMAT.md lists the fields.
SUBKV_API const char * subkv_layout_json(const subkv_layout * layout);

// Hex SHA-256 over codec parameters, bands, ratios and bases: what a state file is bound to. Owned by the layout.
SUBKV_API const char * subkv_layout_fingerprint(const subkv_layout * layout);

// Copies E (decode = false) or D (decode = true) of one head, [rank][d] f32, to `out`; returns rank*d, or -1.
SUBKV_API int64_t subkv_layout_basis(const subkv_layout * layout, int32_t il, int32_t head_kv, bool value, bool decode,
                                     float * out, int64_t n_out);

// c = E x - E mean of one head, what is quantized of its rows: x [n][d] f32, c [n][rank] f32. Returns the rank, or -1.
SUBKV_API int64_t subkv_layout_project(const subkv_layout * layout, int32_t il, int32_t head_kv, bool value,
                                       const float * x, int64_t n, float * c);

//
// context
//

// How bases follow a text (runtime/native/adapt.h says what each number is).
typedef struct subkv_adapt_params {
    int32_t kind;       // as of subkv_sketch_params
    int32_t rank;       // r; 0: all of the head's coefficients, half of them for Oja's rule
    int32_t rows;       // l; 0: 2r (Oja: r)
    float   decay;      // per token
    float   rate;       // eta of Oja's rule
    int32_t block;      // B, tokens
    int32_t length;     // L, tokens; 0: never
    int32_t warm;       // W, tokens
    int32_t max_chunks; // J_max
    float   tau;        // >= 1: never
    float   gain;
    int32_t reuse; // 0, 1
    int32_t merge; // 0, 1
} subkv_adapt_params;

typedef struct subkv_cache_params {
    int32_t n_sink;     // < 0: as the layout says
    int32_t n_recent;   // < 0: as the layout says
    int32_t n_rollback; // exact rows kept beyond n_recent so that a tail of that many tokens can be removed; < 0: 32
    int32_t adapt;      // whose bases follow the text: 0 none, 1 keys, 2 values, 3 both
    subkv_adapt_params adaptive; // if any do; block + n_rollback must fit n_recent
} subkv_cache_params;

// The next K/V cache that *this thread* creates, within llama_init_from_model, uses `layout` (retained by the context).
// `params` may be NULL. If the model cannot use it, llama_init_from_model returns NULL and subkv_last_error() says why.
// A model without a K/V cache (recurrent, encoder-only) creates none: after llama_init_from_model always cancel with
// subkv_attach(NULL, NULL), and check with subkv_get_stats that the context is what you asked for.
SUBKV_API bool subkv_attach(subkv_layout * layout, const subkv_cache_params * params);

typedef struct subkv_stats {
    uint64_t bytes_codes;     // coefficient rows as allocated, K and V
    uint64_t bytes_window;    // exact window as allocated
    uint64_t bytes_stock;     // K/V of layers that stay ordinary (sliding-window layers)
    uint64_t bytes_f16;       // what an f16 cache of the same context would allocate
    uint64_t bytes_bases;     // bases as held in memory: E, D, and what keys are coded less of
    uint64_t bytes_per_token; // coefficient-row bytes of one cell, all coded layers
    uint64_t n_zero_rows;     // rows with non-finite input that were stored as zero rows
    uint64_t bytes_adapt;     // adaptive bases and sketches as held now
    uint64_t n_chunks;        // adaptive bases alive, all heads
    uint32_t n_layer_coded;
    uint32_t n_layer_device; // of these, on a GPU
    uint32_t n_cells;        // cells per stream
    uint32_t n_stream;
    int32_t  n_sink;
    int32_t  n_recent;
    int32_t  n_rollback;
    float    bpe; // (codes + window + adaptive bases) bits per K/V element of the coded layers, as allocated
} subkv_stats;

// false: the context has no coefficient cache.
SUBKV_API bool subkv_get_stats(struct llama_context * ctx, subkv_stats * out);

// Of one head and side, summed over the streams. false: the context has no adaptive bases there.
typedef struct subkv_adapt_stats subkv_adapt_stats;
SUBKV_API bool subkv_get_adapt_stats(struct llama_context * ctx, int32_t il, int32_t head_kv, bool value,
                                     subkv_adapt_stats * out);

// What attention sees of the rows that the context holds of positions first .. first + n - 1 of a sequence: x [n][d] f32
// of one head, gamma and mean of keys included; chunk_of [n]: the row's chunk, 0: the static basis, -1: no row of that
// position is coded (yet, where bases adapt), x is zero. Inside the exact window attention does not read them. Returns
// the number of rows that are coded, or -1.
SUBKV_API int64_t subkv_read_rows(struct llama_context * ctx, int32_t il, int32_t head_kv, bool value, int32_t seq,
                                  int32_t first, int64_t n, float * x, int32_t * chunk_of);

// S of a head's Frequent Directions sketch of a sequence (as subkv_sketch_rows): s [2l][rank] f32, returns the rows in
// use; 0: the sketch is of another kind or freed, -1: the head's bases do not adapt, or n_out is too small.
SUBKV_API int64_t subkv_get_sketch_rows(struct llama_context * ctx, int32_t il, int32_t head_kv, bool value,
                                        int32_t seq, float * s, int64_t n_out);

// Fingerprint of the context's layout, NULL for an ordinary cache.
SUBKV_API const char * subkv_context_fingerprint(struct llama_context * ctx);

//
// calibration
//

// The next context that this thread creates with llama_init_from_model reports its queries, keys and values to
// `obs`: one with an ordinary f16 cache, or what subkv_attach asked for before. The observer must outlive the context.
SUBKV_API subkv_observer * subkv_observer_new(int32_t n_skip); // positions < n_skip are left out of every statistic
SUBKV_API void             subkv_observer_free(subkv_observer * obs);
SUBKV_API bool             subkv_observe(subkv_observer * obs);

// SUBKV_ACCUMULATE adds to the second moments; SUBKV_SAMPLE copies single rows instead (held-out text):
// k and v rows at the positions in key_pos, q rows and, of a coded layer, the output of attention at those in query_pos
// (lists are copied; each call starts a new sample set, appended after the earlier ones). SUBKV_PAUSE records nothing.
enum { SUBKV_PAUSE = 0, SUBKV_ACCUMULATE = 1, SUBKV_SAMPLE = 2 };
SUBKV_API bool subkv_observer_mode(subkv_observer * obs, int32_t mode, const int32_t * key_pos, int32_t n_key,
                                   const int32_t * query_pos, int32_t n_query);

// Between decodes: drops all samples and their memory; statistics stay.
SUBKV_API void subkv_observer_forget(subkv_observer * obs);

// Shapes of a layer, all zero for a layer that was never observed. Layers are 0 .. subkv_observer_n_layer()-1.
typedef struct subkv_observed {
    int32_t  n_head, n_head_kv, d_k, d_v;
    float    scale;          // softmax scale of the layer
    uint64_t n_tokens;       // tokens accumulated
    int32_t  n_key, n_query; // sampled rows so far
    uint64_t n_nonfinite;    // tokens left out because a row held NaN or Inf
    int32_t  coded;          // 1: by a coefficient cache, which also tells the next one
    int32_t  plain;          // 1: logits are scale q.k alone, without soft-capping, ALiBi and attention sinks
} subkv_observed;
SUBKV_API int32_t subkv_observer_n_layer(const subkv_observer * obs);
SUBKV_API bool    subkv_observer_layer(const subkv_observer * obs, int32_t il, subkv_observed * out);

// Means over tokens as f64. what: "q2" [n_head_kv][d_k][d_k] (mean over tokens and the group's heads), "k2"
// [n_head_kv][d_k][d_k], "v2" [n_head_kv][d_v][d_v], "q1" [n_head_kv][d_k], "k1" [n_head_kv][d_k], "v1" [n_head_kv][d_v].
// Samples: "qs" [n_query][n_head][d_k], "ks" [n_key][n_head_kv][d_k], "vs" [n_key][n_head_kv][d_v], "os"
// [n_query][n_head][d_v], empty where the cache is an ordinary one.
// Returns the number of values written, or -1 (unknown name, n_out too small).
SUBKV_API int64_t subkv_observer_get(const subkv_observer * obs, int32_t il, const char * what, double * out,
                                     int64_t n_out);

//
// planted rows: K/V rows computed elsewhere, instead of a token's own
//

// In every attention layer of a context that a planter is attached to, the post-RoPE key and value of a token at a
// position for which the layer has planted rows are replaced by these before they are stored and before anything reads
// them, observers included: the cache, its window, its codes and its states hold them as if the token had made them. Rows
// go by the token's position alone, in whichever sequence: clear when the batch that they are for is decoded. llama.cpp
// wants consecutive positions in a sequence, but an empty sequence may begin anywhere, and a key may be rotated for another
// position than its cell's. Layers without planted rows, and tokens at other positions, keep their own.

// subkv_plant: the next context that this thread creates with llama_init_from_model (a dry run without memory does not
// count) passes its rows through `planter`, with an ordinary cache or what subkv_attach asked for before or afterwards.
// Contexts may share a planter if they are of one model; freeing it clears it. NULL cancels, false: no context took it.
SUBKV_API subkv_planter * subkv_planter_new(void);
SUBKV_API void            subkv_planter_free(subkv_planter * planter);
SUBKV_API bool            subkv_plant(subkv_planter * planter);

// Shape of a layer's rows, all zero for a layer without. Layers are 0 .. subkv_planter_n_layer()-1, none before a context.
typedef struct subkv_planted {
    int32_t  n_head_kv, d_k, d_v;
    uint64_t n_planted; // tokens whose rows were replaced since the layer's latest subkv_planter_set
} subkv_planted;
SUBKV_API int32_t subkv_planter_n_layer(const subkv_planter * planter);
SUBKV_API bool    subkv_planter_layer(const subkv_planter * planter, int32_t il, subkv_planted * out);

// Between decodes. Rows of a layer (copied) instead of its earlier ones, n = 0: none. pos [n]: strictly increasing, from 0
// on; k [n][n_head_kv][d_k], v [n][n_head_kv][d_v]: finite. If false the layer keeps what it had. clear: of all layers.
SUBKV_API bool subkv_planter_set(subkv_planter * planter, int32_t il, const int32_t * pos, int32_t n, const float * k,
                                 const float * v);
SUBKV_API void subkv_planter_clear(subkv_planter * planter);

//
// kernels, for tests, benchmarks and other hosts of the reference (shapes: kernels/include/subkv/ops.h)
//

SUBKV_API int32_t      subkv_ops_count(void); // versions that run on this processor; 0 is the reference
SUBKV_API const char * subkv_ops_name(int32_t i);
SUBKV_API const void * subkv_ops_table(int32_t i); // const subkv::Ops *

//
// sketches, for tests and experiments (kernels/include/subkv/sketch.h says what each number is)
//

typedef struct subkv_sketch_params {
    int32_t kind; // 0: running covariance, 1: frequent directions, 2: Oja's rule
    int32_t d;    // row length
    int32_t rows; // l; the covariance ignores it
    float   decay;
    float   rate; // eta of Oja's rule
} subkv_sketch_params;

typedef struct subkv_sketch subkv_sketch;
SUBKV_API subkv_sketch *    subkv_sketch_new(const subkv_sketch_params * params); // NULL: last_error says why
SUBKV_API void              subkv_sketch_free(subkv_sketch * sketch);
SUBKV_API int64_t           subkv_sketch_bytes(const subkv_sketch * sketch);
SUBKV_API int64_t           subkv_sketch_count(const subkv_sketch * sketch);
SUBKV_API double            subkv_sketch_energy(const subkv_sketch * sketch);
// x [n][d] f32; returns the number of rows left out, not finite.
SUBKV_API int64_t subkv_sketch_absorb(subkv_sketch * sketch, const float * x, int64_t n);
// rows [r][d] f64, energy [r] f64; r at most d, and at most l where the kind has one.
SUBKV_API bool subkv_sketch_top(const subkv_sketch * sketch, int32_t r, double * rows, double * energy);
// s [2l][d] f32; returns the rows of S in use, 0 for a kind without.
SUBKV_API int64_t subkv_sketch_rows(const subkv_sketch * sketch, float * s);

// a [n][n] f64: symmetric matrix in, eigenvectors as rows out; w [n] f64: eigenvalues, largest first.
SUBKV_API bool subkv_eigen(double * a, double * w, int32_t n);

//
// adaptive bases, one head at a time, for tests and experiments (runtime/native/adapt.h says what each number is)
//

struct subkv_adapt_stats {
    int64_t n_blocks;
    int64_t n_chunks; // adaptive chunks alive
    int64_t n_opened;
    int64_t n_refused;
    int64_t n_merged;
    int64_t n_recoded;
    int64_t n_nonfinite;
    int64_t bytes_bases; // of the chunks alive
    int64_t bytes_sketch;
    double  residual; // relative, of the latest block as stored
};

// Codes the keys (value = false) or values of one KV head as a cache would that drops nothing: positions 0, 1, .., the
// layout's n_sink first ones with the static basis and unseen by the sketch. The layout must outlive it. NULL: last_error.
typedef struct subkv_adapt subkv_adapt;
SUBKV_API subkv_adapt *    subkv_adapt_new(const subkv_layout * layout, const subkv_adapt_params * params, int32_t il,
                                           int32_t head_kv, bool value);
SUBKV_API void             subkv_adapt_free(subkv_adapt * adapt);
SUBKV_API bool             subkv_adapt_push(subkv_adapt * adapt, const float * x, int64_t n); // x [n][d]
// Everything pushed so far: xhat [n][d] as attention sees it, mean and gamma of keys included; chunk_of [n]: slot of the
// row's chunk now; rho [n]: relative residual of the row's block when it was coded. Rows of a block that is not complete
// come in the basis in use, rho 0; so do the sinks, in the static one. Any may be NULL. Returns n.
SUBKV_API int64_t subkv_adapt_read(subkv_adapt * adapt, float * xhat, int32_t * chunk_of, float * rho);
SUBKV_API void    subkv_adapt_get_stats(const subkv_adapt * adapt, subkv_adapt_stats * out);
// Adapter::query and ::lift of a chunk in use (0: the static basis), [rank] in and out.
SUBKV_API bool subkv_adapt_query(const subkv_adapt * adapt, int32_t slot, const float * qt, float * out);
SUBKV_API bool subkv_adapt_lift(const subkv_adapt * adapt, int32_t slot, const float * e, float * out);
// State of the coder (not its rows): writes it if `n` bytes suffice, returns its size.
SUBKV_API int64_t subkv_adapt_save(const subkv_adapt * adapt, void * state, int64_t n);
SUBKV_API bool    subkv_adapt_restore(subkv_adapt * adapt, const void * state, int64_t n);

// All of it at once: new, push n rows, read, free. stats may be NULL, too.
SUBKV_API bool subkv_adapt_replay(const subkv_layout * layout, const subkv_adapt_params * params, int32_t il,
                                  int32_t head_kv, bool value, const float * x, int64_t n, float * xhat,
                                  int32_t * chunk_of, float * rho, subkv_adapt_stats * stats);

// Step and distortion of a band's quantizer on a unit Gaussian, as the C++ side has them; 0 and 1 for unknown widths.
SUBKV_API void subkv_quantizer(int32_t bits, double * step, double * distortion);

#ifdef __cplusplus
}
#endif
