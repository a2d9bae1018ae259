// subkv_research.h: what only experiments (research/experiments, converter/trellis.py) and warm starts
// (research/warmstart) call of libsubkv. Not installed, and free to change.
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
// position is coded (yet, where bases follow the text), x is zero. Inside the exact window attention does not read them. Returns
// the number of rows that are coded, or -1.
SUBKV_API int64_t subkv_read_rows(struct llama_context * ctx, int32_t il, int32_t head_kv, bool value, int32_t seq,
                                  int32_t first, int64_t n, float * x, int32_t * chunk_of);

//
// coding text apart from a context
//

// c = E x - E mean of one head, what is quantized of its rows: x [n][d] f32, c [n][rank] f32. Returns the rank, or -1.
SUBKV_API int64_t subkv_layout_project(const subkv_layout * layout, int32_t il, int32_t head_kv, bool value,
                                       const float * x, int64_t n, float * c);

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
