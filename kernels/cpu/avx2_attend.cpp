// avx2_attend.cpp: attention over tiles with AVX2. VPMADDWD multiplies the codes of even and of odd places, as words,
// by words of the integers.
#include "versions.h"

#if defined(SUBKV_X86)

#    include "avx2_attend.h"

namespace subkv::avx2 {
namespace {

struct Words {
    using Sum = __m256i;

    struct Opened {
        __m256i even, odd;
    };

    static constexpr int VALUE_ROWS = 4;

    static constexpr int key_regs(int rows) { return rows == 1 ? 4 : 2; } // 6 sums, 4 registers of codes, 2 of queries

    static constexpr int octets(int) { return 1; } // 8 sums, 4 registers of codes, 2 of weights

    static void split(__m256i u, int8_t * first, int8_t * second) { // words of places 0, 2, 4, 6 and of 1, 3, 5, 7
        const __m128i apart = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
        const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(u), _mm256_extracti128_si256(u, 1));
        const __m128i both  = _mm_shuffle_epi8(words, apart);
        _mm_storel_epi64((__m128i *) first, both);
        _mm_storeh_pd((double *) second, _mm_castsi128_pd(both));
    }

    static Opened open(__m256i codes) {
        return { _mm256_and_si256(codes, _mm256_set1_epi16(0xff)), _mm256_srli_epi16(codes, 8) };
    }

    static Sum start(int32_t x) { return _mm256_set1_epi32(x); }

    static void add(Sum & sum, Opened codes, __m256i first, __m256i second) {
        sum = pin(_mm256_add_epi32(
            sum, _mm256_add_epi32(_mm256_madd_epi16(codes.even, first), _mm256_madd_epi16(codes.odd, second))));
    }

    static __m256i total(Sum sum) { return sum; }
};

} // namespace

void attend(const AttendArgs & a) {
    cpu::attend<Isa<Words>>(a);
}

} // namespace subkv::avx2

#endif
