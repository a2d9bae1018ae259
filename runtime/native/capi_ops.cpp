// capi_ops.cpp: kernels for tests (subkv_test.h).
#include "subkv/ops.h"
#include "subkv/trellis.h"
#include "subkv_test.h"

#include <cstring>

using namespace subkv;

extern "C" {

int32_t subkv_ops_count(void) {
    int32_t n = 0;
    while (ops_available()[n]) {
        ++n;
    }
    return n;
}

const char * subkv_ops_name(int32_t i) {
    return i >= 0 && i < subkv_ops_count() ? ops_available()[i]->name : nullptr;
}

const void * subkv_ops_table(int32_t i) {
    return i >= 0 && i < subkv_ops_count() ? ops_available()[i] : nullptr;
}

const void * subkv_ops_function(const char * name) {
    static const struct {
        const char * name;
        const void * function;
    } functions[] = {
        { "row_to_tile", (const void *) row_to_tile },         { "tile_to_row", (const void *) tile_to_row },
        { "keys_to_values", (const void *) keys_to_values },   { "gather_cells", (const void *) gather_cells },
        { "rows_to_tiles", (const void *) rows_to_tiles },     { "encode_rows", (const void *) encode_rows },
        { "dequantize_rows", (const void *) dequantize_rows }, { "find_path", (const void *) ref::find_path },
        { "trellis_level", (const void *) trellis_level },
    };
    for (const auto & entry : functions) {
        if (std::strcmp(entry.name, name) == 0) {
            return entry.function;
        }
    }
    return nullptr;
}
}
