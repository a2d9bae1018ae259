// subkv_adapt.h: the C interface of adaptation: parser of options, statistics of a context, and the coder without a
// context. Programs only need `adapt` of subkv_cache_params in subkv.h. Not installed; it may change without notice.
#pragma once

#include "subkv.h"

#ifdef __cplusplus
extern "C" {
#endif

//
// options
//

typedef struct subkv_adapt_params {
    int32_t kind;       // 0: running covariance, 1: frequent directions, 2: Oja's rule
    int32_t rank;       // r: directions from the sketch, the rest completes the basis; 0: n, half of it for Oja's rule
    int32_t rows;       // l >= r (Oja: = r); 0: 2r (Oja: r)
    float   decay;      // as of SketchParams
    float   rate;       // as of SketchParams
    int32_t block;      // B: consecutive positions coded together; block + n_rollback must fit n_recent
    int32_t length;     // L: tokens of a chunk that trigger a trial of a new basis; 0: never
    int32_t warm;       // W: tokens in the sketch before the first chunk opens
    int32_t max_chunks; // J_max: maximum adaptive chunks; 1: the basis is rotated in place (SubSpace-A)
    float   tau;        // relative residual that triggers a trial; >= 1: never
    float   gain;       // > 0: a new basis must reduce the block's residual to this fraction; large: always accepted
    int32_t reuse;      // 1: every block uses the best of all bases, the static one included; 0: the latest
    int32_t merge;      // 1: at J_max the two oldest chunks become one; 0: no more chunks open, the sketch is freed
    int32_t window;     // every trial's sketch starts empty and sees this many latest rows; 0: all rows, by decay
    int32_t lookahead;  // rows after a block that its decision may use; block + lookahead + n_rollback fit n_recent
} subkv_adapt_params;

// Parses the text of subkv_cache_params::adapt. sides: adapted sides, 0 none, 1 keys, 2 values, 3 both.
SUBKV_API bool subkv_adapt_parse(const char * text, int32_t * sides, subkv_adapt_params * params);

//
// bases of a context
//

typedef struct subkv_adapt_stats {
    int64_t n_blocks;
    int64_t n_chunks; // adaptive chunks in use
    int64_t n_opened;
    int64_t n_refused;
    int64_t n_merged;
    int64_t n_recoded;
    int64_t n_nonfinite;
    int64_t bytes_bases; // of the chunks in use
    int64_t bytes_sketch;
    double  residual; // relative, of the latest block as stored
} subkv_adapt_stats;

// Statistics of one head and side, summed over the streams. false: this side does not adapt.
SUBKV_API bool subkv_get_adapt_stats(struct llama_context * ctx, int32_t il, int32_t head_kv, bool value,
                                     subkv_adapt_stats * out);

// Copies S of a head's Frequent Directions sketch in a sequence to s [2l][rank] f32 and returns its rows in use; 0: the
// sketch is of another kind or freed, -1: the head does not adapt, or n_out is too small.
SUBKV_API int64_t subkv_get_sketch_rows(struct llama_context * ctx, int32_t il, int32_t head_kv, bool value,
                                        int32_t seq, float * s, int64_t n_out);

//
// the coder, one head at a time
//

// Codes n rows x [n][d] of one KV head, keys (value = false) or values, like a cache that drops nothing: positions 0,
// 1, ..; the layout's n_sink first positions use the static basis and do not enter the sketch. xhat [n][d]: rows as
// attention reads them, with mean and gamma of keys; chunk_of [n]: final slot of the row's chunk; rho [n]: relative
// residual of the row's block when it was coded. Rows of a block that is incomplete, or lacks its look-ahead, use the
// current basis, sinks the static one, both with rho 0. Any of these outputs and stats may be NULL.
SUBKV_API bool subkv_adapt_replay(const subkv_layout * layout, const subkv_adapt_params * params, int32_t il,
                                  int32_t head_kv, bool value, const float * x, int64_t n, float * xhat,
                                  int32_t * chunk_of, float * rho, subkv_adapt_stats * stats);

//
// sketches (kernels/include/subkv/sketch.h documents the fields)
//

typedef struct subkv_sketch_params {
    int32_t kind; // 0: running covariance, 1: frequent directions, 2: Oja's rule
    int32_t d;    // row length
    int32_t rows; // l; the covariance ignores it
    float   decay;
    float   rate; // eta of Oja's rule
} subkv_sketch_params;

typedef struct subkv_sketch subkv_sketch;
SUBKV_API subkv_sketch *    subkv_sketch_new(const subkv_sketch_params * params); // NULL: last_error has the reason
SUBKV_API void              subkv_sketch_free(subkv_sketch * sketch);
// x [n][d] f32; returns the number of skipped (non-finite) rows, or -1.
SUBKV_API int64_t subkv_sketch_absorb(subkv_sketch * sketch, const float * x, int64_t n);
// rows [r][d] f64, energy [r] f64; r at most d, and at most l for kinds with l.
SUBKV_API bool subkv_sketch_top(const subkv_sketch * sketch, int32_t r, double * rows, double * energy);

#ifdef __cplusplus
}
#endif
