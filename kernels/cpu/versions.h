// versions.h: the CPU versions that dispatch.cpp chooses from, one table for each instruction set.
#pragma once

#include "subkv/ops.h"

#if defined(__x86_64__) || defined(_M_X64)
#    define SUBKV_X86 1
#endif

#if defined(__aarch64__) || defined(_M_ARM64)
#    define SUBKV_ARM64 1
#endif

namespace subkv {

#if defined(SUBKV_X86)
extern const Ops ops_avx2;      // needs AVX2, FMA, F16C
extern const Ops ops_avx2_vnni; // also needs AVX-VNNI
extern const Ops ops_avx512_bw; // needs AVX2, FMA, F16C and AVX-512 F, BW, DQ, VL (Skylake-X, Cascade Lake)
extern const Ops ops_avx512;    // also needs AVX-512 VNNI and VBMI (Ice Lake, Zen 4)
#endif

#if defined(SUBKV_ARM64)
extern const Ops ops_neon; // needs the dot products of Armv8.2 (Cortex-A55/A75 and later, all of Apple's)
#endif

} // namespace subkv
