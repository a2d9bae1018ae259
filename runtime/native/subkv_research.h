// subkv_research.h: what only experiments (research/experiments, converter/adaptive.py, converter/trellis.py) and warm
// starts (research/warmstart) call of libsubkv. Not installed, and free to change.
#pragma once

#include "subkv.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct subkv_planter subkv_planter; // K/V rows computed elsewhere

//
// rows and sketches of a context
//

// What attention sees of the rows that the context holds of positions first .. first + n - 1 of a sequence: x [n][d] f32
// of one head, gamma and mean of keys included; chunk_of [n]: the row's chunk, 0: the static basis, -1: no row of that
// position is coded (yet, where bases adapt), x is zero. Inside the exact window attention does not read them. Returns
// the number of rows that are coded, or -1.
SUBKV_API int64_t subkv_read_rows(struct llama_context * ctx, int32_t il, int32_t head_kv, bool value, int32_t seq,
                                  int32_t first, int64_t n, float * x, int32_t * chunk_of);

// S of a head's Frequent Directions sketch of a sequence: s [2l][rank] f32, returns the rows of it in use; 0: the sketch is of another kind or freed, -1: the head's bases do not adapt, or n_out is too small.
SUBKV_API int64_t subkv_get_sketch_rows(struct llama_context * ctx, int32_t il, int32_t head_kv, bool value,
                                        int32_t seq, float * s, int64_t n_out);

//
// coding text apart from a context
//

// c = E x - E mean of one head, what is quantized of its rows: x [n][d] f32, c [n][rank] f32. Returns the rank, or -1.
SUBKV_API int64_t subkv_layout_project(const subkv_layout * layout, int32_t il, int32_t head_kv, bool value,
                                       const float * x, int64_t n, float * c);

// Codes n rows x [n][d] of one KV head, keys (value = false) or values, as a cache would that drops nothing: positions 0,
// 1, .., the layout's n_sink first ones with the static basis and unseen by the sketch. xhat [n][d]: as attention sees
// them, mean and gamma of keys included; chunk_of [n]: slot of the row's chunk in the end; rho [n]: relative residual of
// the row's block when it was coded. Rows of a block that is not complete come in the basis in use, rho 0; so do the
// sinks, in the static one. Any of these and stats may be NULL.
SUBKV_API bool subkv_adapt_replay(const subkv_layout * layout, const subkv_adapt_params * params, int32_t il,
                                  int32_t head_kv, bool value, const float * x, int64_t n, float * xhat,
                                  int32_t * chunk_of, float * rho, subkv_adapt_stats * stats);

//
// sketches (kernels/include/subkv/sketch.h says what each number is)
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
// x [n][d] f32; returns the number of rows left out, not finite.
SUBKV_API int64_t subkv_sketch_absorb(subkv_sketch * sketch, const float * x, int64_t n);
// rows [r][d] f64, energy [r] f64; r at most d, and at most l where the kind has one.
SUBKV_API bool subkv_sketch_top(const subkv_sketch * sketch, int32_t r, double * rows, double * energy);

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

#ifdef __cplusplus
}
#endif
