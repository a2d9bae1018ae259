// subkv_test.h: the C interface for tests of libsubkv. Not installed.
#pragma once

#include "subkv_research.h"

#ifdef __cplusplus
extern "C" {
#endif

//
// kernels (shapes: kernels/include/subkv/ops.h)
//

SUBKV_API int32_t      subkv_ops_count(void); // versions for this processor, of which 0 is the reference
SUBKV_API const char * subkv_ops_name(int32_t i);
SUBKV_API const void * subkv_ops_table(int32_t i); // const subkv::Ops *
// A function of subkv/ops.h or subkv/trellis.h by its name, whose references are pointers, or NULL if it is not in the
// list.
SUBKV_API const void * subkv_ops_function(const char * name);

#ifdef __cplusplus
}
#endif
