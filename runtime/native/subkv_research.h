// subkv_research.h: what only experiments (research/experiments, converter/trellis.py) call of libsubkv. Not installed,
// and free to change.
#pragma once

#include "subkv.h"

#ifdef __cplusplus
extern "C" {
#endif

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

#ifdef __cplusplus
}
#endif
