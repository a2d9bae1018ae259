// avx512_bw.cpp: the table of AVX-512 without VNNI or VBMI. VPMADDWD multiplies the codes of even and of odd places, as
// words, by words of the integers.
#include "versions.h"

#if defined(SUBKV_X86)

#    include "avx512_attend.h"
#    include "level_tables.h"

namespace subkv::avx512 {
namespace {

struct Words {
    using Sum = __m512i;

    struct Opened {
        __m512i even, odd;
    };

    static constexpr int FROM_TILE_ROWS = 3; // More rows would decode a level, in eight or more instructions, again.

    static constexpr int octets(int) { return 4; } // 16 sums and 8 registers of codes at most

    static void split(__m512i u, void * first, void * second) { // words of places 0, 2, 4, ... and of 1, 3, 5, ...
        const __m256i apart =
            _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
        const __m256i eights = _mm256_shuffle_epi8(_mm512_cvtepi32_epi16(u), apart);
        const __m256i halves = _mm256_permute4x64_epi64(eights, _MM_SHUFFLE(3, 1, 2, 0));
        _mm_storeu_si128((__m128i *) first, _mm256_castsi256_si128(halves));
        _mm_storeu_si128((__m128i *) second, _mm256_extracti128_si256(halves, 1));
    }

    static Opened open(__m512i codes) {
        return { _mm512_and_si512(codes, _mm512_set1_epi16(0xff)), _mm512_srli_epi16(codes, 8) };
    }

    static Sum start(int32_t x) { return _mm512_set1_epi32(x); }

    static void add(Sum & sum, Opened codes, __m512i first, __m512i second) {
        sum = _mm512_add_epi32(sum, _mm512_madd_epi16(codes.even, first));
        sum = _mm512_add_epi32(sum, _mm512_madd_epi16(codes.odd, second));
    }

    static __m512i total(Sum sum) { return sum; }

    static constexpr int  CODE_BIT        = 0;
    static constexpr bool OTHER_BITS_ZERO = true;

    struct Previous {
        __m512i one, two; // The level depends on their lowest bits.
    };

    static __m512i ends(__m512i one, __m512i two) {
        const __m512i low = _mm512_and_si512(one, _mm512_set1_epi8(1));
        return _mm512_ternarylogic_epi32(low, _mm512_add_epi8(two, two), _mm512_set1_epi8(2), 0xf8); // a | (b & c)
    }

    static Previous begin(__m512i ends) { return { ends, _mm512_srli_epi16(ends, 1) }; }

    template <int BITS> static __m512i level(__m512i code, Previous & before) {
        const __m512i   u = _mm512_ternarylogic_epi32(code, before.two, _mm512_set1_epi8(1), 0x78); // a ^ (b & c)
        const __mmask64 x = _mm512_test_epi8_mask(before.one, _mm512_set1_epi8(1));
        before            = { code, before.one };
        if constexpr (BITS <= 4) {
            const auto & levels = cpu::BY_CODE<BITS>.byte;
            return _mm512_mask_shuffle_epi8(_mm512_shuffle_epi8(of(levels[0]), u), x, of(levels[1]), u);
        } else { // This computes the levels of trellis.h plus 128.
            constexpr int HALF  = 1 << BITS;
            const __m512i twice = _mm512_add_epi8(u, u);
            const __m512i y     = _mm512_add_epi8(_mm512_mask_add_epi8(twice, x, twice, _mm512_set1_epi8(1)),
                                                  _mm512_set1_epi8((char) (128 - HALF)));
            const auto    above = [&](int t) { return _mm512_subs_epu8(y, _mm512_set1_epi8((char) (128 + t))); };
            const auto    below = [&](int t) { return _mm512_subs_epu8(_mm512_set1_epi8((char) (127 - t)), y); };
            const int     far = trellis_double(BITS), more = trellis_triple(BITS);
            const __m512i higher = _mm512_add_epi8(y, _mm512_add_epi8(above(far), above(more)));
            return _mm512_sub_epi8(higher, _mm512_add_epi8(below(far), below(more)));
        }
    }

private:
    static __m512i of(const uint8_t * sixteen) {
        return _mm512_broadcast_i32x4(_mm_load_si128((const __m128i *) sixteen));
    }
};

} // namespace
} // namespace subkv::avx512

namespace subkv {

constexpr Ops ops_avx512_bw = avx512::table<avx512::Words>("avx512bw");

} // namespace subkv

#endif
