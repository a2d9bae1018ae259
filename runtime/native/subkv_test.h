// subkv_test.h: the C interface for tests of libsubkv. Not installed.
#pragma once

#include "subkv_research.h"

#ifdef __cplusplus
extern "C" {
#endif

//
// kernels (shapes: kernels/include/subkv/ops.h)
//

SUBKV_API int32_t      subkv_ops_count(void); // versions for this processor; 0 is the reference
SUBKV_API const char * subkv_ops_name(int32_t i);
SUBKV_API const void * subkv_ops_table(int32_t i); // const subkv::Ops *
// The functions of ops.h with these names; codec: const subkv::HeadCodec *, ops: from subkv_ops_table.
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
SUBKV_API int32_t subkv_trellis_level(int32_t bits, int32_t i); // 0 for an invalid bits or i

//
// bases
//

// Copies E (decode = false) or D (decode = true) of one head, [rank][d] f32, to `out`; returns rank*d, or -1.
SUBKV_API int64_t subkv_layout_basis(const subkv_layout * layout, int32_t il, int32_t head_kv, bool value, bool decode,
                                     float * out, int64_t n_out);

#ifdef __cplusplus
}
#endif
