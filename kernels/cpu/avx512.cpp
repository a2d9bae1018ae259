// avx512.cpp: the table of AVX-512 with VNNI and VBMI. VPDPBUSD multiplies codes by the high bytes and by the low bytes
// of the integers. VPERMB looks levels up by a window of a code and the low bits of the two before it.
#include "versions.h"

#if defined(SUBKV_X86)

#    include "avx512_attend.h"
#    include "level_tables.h"

namespace subkv::avx512 {
namespace {

struct Bytes {
    using Opened = __m512i;

    struct Sum {
        __m512i high, low;
    };

    static constexpr int FROM_TILE_ROWS = 12;

    static constexpr int octets(int rows) { return rows <= 3 ? 4 : 2; } // two sums per octet and row, in 32 registers

    static void split(__m512i u, void * first, void * second) { // signed bytes with u = 256 * high + low
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

    static constexpr int  CODE_BIT        = 2;
    static constexpr bool OTHER_BITS_ZERO = false;

    struct Previous {
        __m512i window;
    };

    static __m512i ends(__m512i one, __m512i two) { return bits_of(0x02, _mm512_srli_epi16(two, 1), one); }

    static Previous begin(__m512i ends) { return { ends }; }

    template <int BITS> static __m512i level(__m512i code, Previous & before) {
        const __m512i w    = bits_of(0x03, _mm512_srli_epi16(before.window, 1), code);
        before.window      = w;
        const auto &tables = cpu::BY_WINDOW < BITS < 6 ? BITS : 2, BITS == 5 ? 128 : 64 >.byte;
        if constexpr (BITS <= 4) {
            return _mm512_permutexvar_epi8(w, _mm512_load_si512(tables));
        } else if constexpr (BITS == 5) {
            return _mm512_permutex2var_epi8(_mm512_load_si512(tables), w, _mm512_load_si512(tables + 64));
        } else {
            const auto &  levels = cpu::BY_INDEX<BITS, 128>.byte;
            const __m512i index  = _mm512_ternarylogic_epi32(_mm512_srli_epi16(w, 1), _mm512_add_epi8(w, w),
                                                             _mm512_set1_epi8(2), 0x78); // a ^ (b & c)
            return _mm512_permutex2var_epi8(_mm512_load_si512(levels), index, _mm512_load_si512(levels + 64));
        }
    }

private:
    // Takes the bits `byte` of every byte from x, and the others from y.
    static __m512i bits_of(int byte, __m512i x, __m512i y) {
        return _mm512_ternarylogic_epi32(_mm512_set1_epi8((char) byte), x, y, 0xca);
    }

    // The assembler statement stops GCC from copying the sums of a loop from register to register.
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
