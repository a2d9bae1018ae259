// avx512.cpp: the table of AVX-512 with VBMI and VNNI.
#include "versions.h"

#if defined(SUBKV_X86)

#    include "avx512_codes.h"
#    include "avx512_vnni.h"

namespace subkv {

constexpr Ops ops_avx512 = avx512::table<avx512::PermutedBytes, avx512::Bytes>("avx512");

} // namespace subkv

#endif
