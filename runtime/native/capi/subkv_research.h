// subkv_research.h: the C interface for experiments (research/experiments, converter/trellis.py) and `subkv bench`. Not
// installed; it may change without notice.
#pragma once

#include "subkv.h"

#ifdef __cplusplus
extern "C" {
#endif

//
// rows and sketches of a context
//

// Decodes the stored rows of positions first .. first + n - 1 of a sequence, as attention reads them, to x [n][d] f32
// of one head, with gamma and mean of keys. version_of [n] tells which of the bases over time codes the row, where 0
// means the file's. It is -1, and x is zero, if this position has no coded row (bases may code a row later). Inside the
// exact window attention does not read coded rows. Returns the number of coded rows, or -1.
SUBKV_API int64_t subkv_read_rows(struct llama_context * ctx, int32_t il, int32_t head_kv, bool value, int32_t seq,
                                  int32_t first, int64_t n, float * x, int32_t * version_of);

//
// coding without a context
//

// Computes the coefficients c = E x - E mean of one head before quantization, from x [n][d] f32 to c [n][rank] f32.
// Returns the rank, or -1.
SUBKV_API int64_t subkv_layout_project(const subkv_layout * layout, int32_t il, int32_t head_kv, bool value,
                                       const float * x, int64_t n, float * c);

//
// speed of this machine
//

// How much of a core the calling thread gets (kernels/include/subkv/core_speed.h), measured for `seconds` of at most
// 10.
SUBKV_API bool subkv_core_speed(double seconds, double * clock_ghz, double * additions_per_cycle);

#ifdef __cplusplus
}
#endif
