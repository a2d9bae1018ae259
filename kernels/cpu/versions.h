// versions.h: the CPU versions that dispatch.cpp chooses from. One table per instruction set.
#pragma once

#include "subkv/ops.h"

#if defined(__x86_64__) || defined(_M_X64)
#    define SUBKV_X86 1
#endif

namespace subkv {

#if defined(SUBKV_X86)
extern const Ops ops_avx2;   // needs AVX2, FMA, F16C
extern const Ops ops_avx512; // needs those and AVX-512 F, BW, DQ, VL, VBMI, VNNI (Ice Lake, Zen 4)
#endif

} // namespace subkv
