// avx2_vnni.cpp: the table of AVX2 with AVX-VNNI (Alder Lake and later without AVX-512). VPDPBUSD multiplies codes by
// the high bytes and by the low bytes of the integers.
#include "versions.h"

#if defined(SUBKV_X86)

#    include "avx2_attend.h"

namespace subkv::avx2 {
namespace {

struct Bytes {
    using Opened = __m256i;

    struct Sum {
        __m256i high, low;
    };

    static constexpr int VALUE_ROWS = 3; // 12 sums, 2 registers of codes, 2 of weights

    static constexpr int key_regs(int rows) { return rows == 1 ? 4 : 2; }

    static constexpr int octets(int) { return 1; }

    static void split(__m256i u, int8_t * first, int8_t * second) { // signed bytes with u = 256 * high + low
        const __m256i high  = _mm256_srai_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(128)), 8);
        const __m256i bytes = _mm256_set1_epi32(0x0c080400);
        const __m256i both  = _mm256_unpacklo_epi32(_mm256_shuffle_epi8(high, bytes), _mm256_shuffle_epi8(u, bytes));
        const __m128i parts = _mm_unpacklo_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
        _mm_storel_epi64((__m128i *) first, parts);
        _mm_storeh_pd((double *) second, _mm_castsi128_pd(parts));
    }

    static Opened open(__m256i codes) { return codes; }

    static Sum start(int32_t x) { return { _mm256_setzero_si256(), _mm256_set1_epi32(x) }; }

    static void add(Sum & sum, Opened codes, __m256i first, __m256i second) {
        add_products(sum.high, codes, first);
        add_products(sum.low, codes, second);
    }

    static __m256i total(Sum sum) { return _mm256_add_epi32(_mm256_slli_epi32(sum.high, 8), sum.low); }

private:
    static void add_products(__m256i & sum, __m256i codes, __m256i bytes) {
#    if defined(SUBKV_EVEX_VNNI) // the form of AVX-512, for tests on processors that have no other form
        sum = pin(_mm256_dpbusd_epi32(sum, codes, bytes));
#    else
        sum = pin(_mm256_dpbusd_avx_epi32(sum, codes, bytes));
#    endif
    }
};

void attend_bytes(const AttendArgs & a) {
    cpu::attend<Isa<Bytes>>(a);
}

} // namespace
} // namespace subkv::avx2

namespace subkv {

const Ops ops_avx2_vnni = { "avx2vnni",        avx2::encode,       avx2::dequantize,    avx2::project,
                            avx2::reconstruct, avx2::attend_bytes, avx2::attend_exact,  avx2::moment,
                            avx2::to_half,     avx2::pack_recent,  avx2::unpack_recent, 1.0f / cpu::LARGEST };

} // namespace subkv

#endif
