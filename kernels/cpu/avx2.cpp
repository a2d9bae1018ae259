// avx2.cpp: the AVX2 table.
#include "versions.h"

#if defined(SUBKV_X86)

#    include "attend_tiles.h"
#    include "avx2_simd.h"

namespace subkv {

const Ops ops_avx2 = { "avx2",
                       avx2::encode,
                       avx2::dequantize,
                       avx2::project,
                       avx2::reconstruct,
                       avx2::attend,
                       avx2::attend_exact,
                       avx2::moment,
                       avx2::to_half,
                       avx2::pack_recent,
                       avx2::unpack_recent,
                       1.0f / cpu::LARGEST };

} // namespace subkv

#endif
