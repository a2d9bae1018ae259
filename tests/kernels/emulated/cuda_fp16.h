// cuda_fp16.h: halves as bits.
#pragma once

#include "../../../kernels/ref/half.h"

struct __half {
    uint16_t bits;
};

inline __half __ushort_as_half(uint16_t bits) {
    return { bits };
}

inline uint16_t __half_as_ushort(__half h) {
    return h.bits;
}

inline float __half2float(__half h) {
    return subkv::ref::half_to_float(h.bits);
}

inline __half __float2half_rn(float x) {
    return { subkv::ref::float_to_half(x) };
}
