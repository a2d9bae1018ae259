// subkv_test.h: what only tests call of libsubkv. Not installed.
#pragma once

#include "subkv_research.h"

#ifdef __cplusplus
extern "C" {
#endif

//
// kernels (shapes: kernels/include/subkv/ops.h)
//

SUBKV_API int32_t      subkv_ops_count(void); // versions that run on this processor; 0 is the reference
SUBKV_API const char * subkv_ops_name(int32_t i);
SUBKV_API const void * subkv_ops_table(int32_t i); // const subkv::Ops *
// The functions of ops.h of these names; codec: const subkv::HeadCodec *, ops: of subkv_ops_table.
SUBKV_API void subkv_row_to_tile(const void * codec, const uint8_t * row, uint8_t * tile, int64_t cell);
SUBKV_API void subkv_tile_to_row(const void * codec, const uint8_t * tile, int64_t cell, uint8_t * row);
SUBKV_API void subkv_keys_to_values(const void * values, const uint8_t * key_tile, uint8_t * value_tile);
SUBKV_API void subkv_gather_cells(const void * codec, const uint8_t * tiles, int64_t tile_stride, const int32_t * cells,
                                  int64_t n, uint8_t * out);
SUBKV_API void subkv_rows_to_tiles(const void * codec, const uint8_t * rows, int64_t stride, const int32_t * cells,
                                   int64_t n, uint8_t * out);
SUBKV_API int64_t subkv_ops_encode_rows(const void * ops, const void * codec, const float * x, int64_t ldx, int64_t n,
                                        uint8_t * rows);
SUBKV_API void    subkv_ops_dequantize_rows(const void * ops, const void * codec, const uint8_t * rows, int64_t n,
                                            float * c);

// Paths through a trellis (subkv/trellis.h).
SUBKV_API float   subkv_trellis_path(const void * codec, const float * c, float s, uint8_t * code);
SUBKV_API int32_t subkv_trellis_level(int32_t bits, int32_t i); // 0 of no such level

//
// bases
//

// Copies E (decode = false) or D (decode = true) of one head, [rank][d] f32, to `out`; returns rank*d, or -1.
SUBKV_API int64_t subkv_layout_basis(const subkv_layout * layout, int32_t il, int32_t head_kv, bool value, bool decode,
                                     float * out, int64_t n_out);

// Step and distortion of a band's quantizer on a unit Gaussian, as the C++ side has them; 0 and 1 for unknown widths.
SUBKV_API void subkv_quantizer(int32_t bits, double * step, double * distortion);

//
// sketches
//

SUBKV_API int64_t subkv_sketch_bytes(const subkv_sketch * sketch);
SUBKV_API int64_t subkv_sketch_count(const subkv_sketch * sketch);
SUBKV_API double  subkv_sketch_energy(const subkv_sketch * sketch);
// s [2l][d] f32; returns the rows of S in use, 0 for a kind without.
SUBKV_API int64_t subkv_sketch_rows(const subkv_sketch * sketch, float * s);

// a [n][n] f64: symmetric matrix in, eigenvectors as rows out; w [n] f64: eigenvalues, largest first.
SUBKV_API bool subkv_eigen(double * a, double * w, int32_t n);

//
// adaptive bases, one head at a time (runtime/native/adapt.h says what each number is)
//

// The same a few rows at a time: subkv_adapt_replay is new, push, read, free. The layout must outlive it. NULL: last_error.
typedef struct subkv_adapt subkv_adapt;
SUBKV_API subkv_adapt *    subkv_adapt_new(const subkv_layout * layout, const subkv_adapt_params * params, int32_t il,
                                           int32_t head_kv, bool value);
SUBKV_API void             subkv_adapt_free(subkv_adapt * adapt);
SUBKV_API bool             subkv_adapt_push(subkv_adapt * adapt, const float * x, int64_t n); // x [n][d]
// Everything pushed so far; chunk_of: now. Returns n.
SUBKV_API int64_t subkv_adapt_read(subkv_adapt * adapt, float * xhat, int32_t * chunk_of, float * rho);
// Adapter::query and ::lift of a chunk in use (0: the static basis), [rank] in and out.
SUBKV_API bool subkv_adapt_query(const subkv_adapt * adapt, int32_t slot, const float * qt, float * out);
SUBKV_API bool subkv_adapt_lift(const subkv_adapt * adapt, int32_t slot, const float * e, float * out);
// State of the coder (not its rows): writes it if `n` bytes suffice, returns its size.
SUBKV_API int64_t subkv_adapt_save(const subkv_adapt * adapt, void * state, int64_t n);
SUBKV_API bool    subkv_adapt_restore(subkv_adapt * adapt, const void * state, int64_t n);

#ifdef __cplusplus
}
#endif
