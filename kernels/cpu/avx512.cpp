// avx512.cpp: the table of AVX-512 with VNNI. Products are VPDPBUSD's: codes times high bytes, codes times low bytes.
#include "versions.h"

#if defined(SUBKV_X86)

#    include "avx512_attend.h"

namespace subkv::avx512 {
namespace {

struct Bytes {
    using Opened = __m512i;

    struct Sum {
        __m512i high, low;
    };

    static constexpr int octets(int rows) { return rows <= 3 ? 4 : 2; } // two sums each, 32 registers

    static void split(__m512i u, void * first, void * second) { // signed bytes: u = 256 * high + low
        const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(128)), 8);
        _mm_storeu_si128((__m128i *) first, _mm512_cvtepi32_epi8(high));
        _mm_storeu_si128((__m128i *) second, _mm512_cvtepi32_epi8(u));
    }

    static Opened open(__m512i codes) { return codes; }

    static Sum start(int32_t x) { return { _mm512_setzero_si512(), _mm512_set1_epi32(x) }; }

    static void add(Sum & sum, Opened codes, __m512i first, __m512i second) {
        add_products(sum.high, codes, first);
        add_products(sum.low, codes, second);
    }

    static __m512i total(Sum sum) { return _mm512_add_epi32(_mm512_slli_epi32(sum.high, 8), sum.low); }

private:
    // GCC copies the sums of a loop from register to register when it may choose.
    static void add_products(__m512i & sum, __m512i codes, __m512i bytes) {
#    if defined(__GNUC__)
        __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(bytes));
#    else
        sum = _mm512_dpbusd_epi32(sum, codes, bytes);
#    endif
    }
};

} // namespace
} // namespace subkv::avx512

namespace subkv {

constexpr Ops ops_avx512 = avx512::table<avx512::Bytes>("avx512");

} // namespace subkv

#endif
