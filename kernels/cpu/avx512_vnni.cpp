// avx512_vnni.cpp: the table of AVX-512 with VNNI but without VBMI.
#include "versions.h"

#if defined(SUBKV_X86)

#    include "avx512_dwords.h"
#    include "avx512_vnni.h"

namespace subkv {

constexpr Ops ops_avx512_vnni = avx512::table<avx512::PermutedDwords, avx512::Bytes>("avx512vnni");

} // namespace subkv

#endif
