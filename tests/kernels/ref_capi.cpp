// ref_capi.cpp: exports the reference kernels under the names that ops.py loads.
#include "subkv/ops.h"

extern "C" {

int32_t subkv_ops_count() {
    return 1;
}

const char * subkv_ops_name(int32_t) {
    return subkv::ops_ref().name;
}

const subkv::Ops * subkv_ops_table(int32_t) {
    return &subkv::ops_ref();
}
}
