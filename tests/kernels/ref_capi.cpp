// ref_capi.cpp: the reference as the only version of the kernels, for runtime/native/capi/capi_ops.cpp.
#include "subkv/ops.h"

const subkv::Ops * const * subkv::ops_available() {
    static const Ops * const only[] = { &ops_ref(), nullptr };
    return only;
}
