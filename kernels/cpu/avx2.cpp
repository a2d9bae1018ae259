// avx2.cpp: the AVX2 table, and which of the two loops over exact keys a call takes.
#include "versions.h"

#if defined(SUBKV_X86)

#    include "attend_tiles.h"
#    include "avx2_simd.h"

namespace subkv::avx2 {

// From this many query rows on, widening a tile of keys once is cheaper than for every four rows.
constexpr int64_t MANY = 16;

static void attend_exact(const ExactArgs & a) {
    if (a.n_tok * a.n_group >= MANY) {
        attend_exact_many(a);
    } else {
        attend_exact_few(a);
    }
}

} // namespace subkv::avx2

namespace subkv {

const Ops ops_avx2 = { "avx2",       avx2::encode,       avx2::dequantize, avx2::project, avx2::reconstruct,
                       avx2::attend, avx2::attend_exact, avx2::moment,     avx2::to_half, 1.0f / cpu::LARGEST };

} // namespace subkv

#endif
