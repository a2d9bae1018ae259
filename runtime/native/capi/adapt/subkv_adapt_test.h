// subkv_adapt_test.h: the C interface for tests of the coder and its sketches. Not installed.
#pragma once

#include "subkv_adapt.h"

#ifdef __cplusplus
extern "C" {
#endif

// subkv_adapt_replay in steps: new, push, read, free. The layout must outlive it. Returns NULL on an error.
typedef struct subkv_adapt subkv_adapt;
SUBKV_API subkv_adapt *    subkv_adapt_new(const subkv_layout * layout, const subkv_adapt_params * params, int32_t il,
                                           int32_t head_kv, bool value);
SUBKV_API void             subkv_adapt_free(subkv_adapt * adapt);
SUBKV_API bool             subkv_adapt_push(subkv_adapt * adapt, const float * x, int64_t n); // x [n][d]
// Reads all rows so far, and the current slots in chunk_of. Returns n.
SUBKV_API int64_t subkv_adapt_read(subkv_adapt * adapt, float * xhat, int32_t * chunk_of, float * rho);
// Adapter::query and ::lift of a chunk in use (0 for the static basis), [rank] in and out.
SUBKV_API bool subkv_adapt_query(const subkv_adapt * adapt, int32_t slot, const float * qt, float * out);
SUBKV_API bool subkv_adapt_lift(const subkv_adapt * adapt, int32_t slot, const float * e, float * out);
// The state of the coder (not its rows), which is written if `n` bytes suffice. Returns its size.
SUBKV_API int64_t subkv_adapt_save(const subkv_adapt * adapt, void * state, int64_t n);
SUBKV_API bool    subkv_adapt_restore(subkv_adapt * adapt, const void * state, int64_t n);

SUBKV_API int64_t subkv_sketch_bytes(const subkv_sketch * sketch);
SUBKV_API int64_t subkv_sketch_count(const subkv_sketch * sketch);
SUBKV_API double  subkv_sketch_energy(const subkv_sketch * sketch);
// Reads s [2l][d] f32. Returns the rows of S in use, or 0 for a kind without.
SUBKV_API int64_t subkv_sketch_rows(const subkv_sketch * sketch, float * s);

// a [n][n] f64 is a symmetric matrix, and receives the eigenvectors as rows. w [n] f64 receives the eigenvalues,
// largest first.
SUBKV_API bool subkv_eigen(double * a, double * w, int32_t n);

#ifdef __cplusplus
}
#endif
