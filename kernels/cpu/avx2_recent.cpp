// avx2_recent.cpp: rows of the exact window in integers, as ref/recent.cpp defines them, for heads of 32, 64, 96, …
// elements. Other heads use the loops of recent_rows.h.
#include "versions.h"

#if defined(SUBKV_X86)

#    include "avx2_simd.h"
#    include "recent_rows.h"

namespace subkv::avx2 {
namespace {

__m256 clamped(__m256 x, __m256 most) {
    return _mm256_max_ps(_mm256_min_ps(x, most), _mm256_sub_ps(_mm256_setzero_ps(), most));
}

__m256i size_of(__m256 x) { // the bits of |x|, integers that are ordered like |x|
    return _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7fffffff));
}

int32_t largest(__m256i x) {
    __m128i y = _mm_max_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    y         = _mm_max_epi32(y, _mm_shuffle_epi32(y, 0x4e));
    y         = _mm_max_epi32(y, _mm_shuffle_epi32(y, 0xb1));
    return _mm_cvtsi128_si32(y);
}

// Converts eight dwords below 256 to bytes.
__m128i narrow(__m256i x) {
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    return _mm_packus_epi16(words, words);
}

__m256i widen_bytes(const uint8_t * at) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *) at));
}

} // namespace

bool pack_recent(const float * x, const float * mean, int64_t d, uint8_t * row) {
    if (d % 32 != 0) {
        return cpu::pack_recent<to_half>(x, mean, d, row);
    }
    alignas(32) float y[MAX_HEAD_SIZE];
    const __m256      half_max = _mm256_set1_ps(HALF_MAX);
    __m256i           most = _mm256_setzero_si256(), most_centred = _mm256_setzero_si256();
    mean = mean ? mean : cpu::NO_MEAN;
    for (int64_t j = 0; j < d; j += 8) {
        const __m256 value   = _mm256_loadu_ps(x + j);
        const __m256 centred = _mm256_sub_ps(clamped(value, half_max), _mm256_loadu_ps(mean + j));
        most                 = _mm256_max_epi32(most, size_of(value));
        most_centred         = _mm256_max_epi32(most_centred, size_of(centred));
        _mm256_store_ps(y + j, centred);
    }
    const bool   finite = largest(most) < 0x7f800000;
    const __m128 step_4 =
        _mm_div_ss(_mm_castsi128_ps(_mm_cvtsi32_si128(largest(most_centred))), _mm_set_ss((float) RECENT_MOST));
    const __m128i half_4 = finite ? _mm_cvtps_ph(step_4, _MM_FROUND_TO_NEAREST_INT) : _mm_cvtsi32_si128(HALF_NAN);
    const auto    half   = (uint16_t) _mm_extract_epi16(half_4, 0);
    const bool    coded  = finite && half != 0;
    const __m256  step   = _mm256_broadcastss_ps(_mm_cvtph_ps(half_4));
    memcpy(row, &half, sizeof(half));
    uint8_t *     high  = row + sizeof(half);
    uint8_t *     low   = high + d;
    const int64_t m     = d / 4;
    const __m256  limit = _mm256_set1_ps((float) RECENT_MOST);
    for (int64_t j = 0; j < m; j += 8) {
        __m256i parts = _mm256_setzero_si256();
        for (int32_t part = 3; part >= 0; --part) {
            const int64_t at = part * m + j;
            const __m256  q  = clamped(_mm256_div_ps(_mm256_load_ps(y + at), step), limit);
            __m256i       u  = _mm256_setzero_si256();
            if (coded) {
                u = _mm256_cvtps_epi32(q);
            }
            u     = _mm256_add_epi32(u, _mm256_set1_epi32(RECENT_MOST + 1));
            parts = _mm256_or_si256(_mm256_slli_epi32(parts, 2), _mm256_and_si256(u, _mm256_set1_epi32(3)));
            _mm_storel_epi64((__m128i *) (high + at), narrow(_mm256_srli_epi32(u, 2)));
        }
        _mm_storel_epi64((__m128i *) (low + j), narrow(parts));
    }
    return finite;
}

void unpack_recent(const uint8_t * row, const float * mean, int64_t d, uint16_t * out) {
    if (d % 32 != 0) {
        cpu::unpack_recent<to_half>(row, mean, d, out);
        return;
    }
    uint16_t half;
    memcpy(&half, row, sizeof(half));
    if (cpu::fill_unless_finite(half, d, out)) {
        return;
    }
    const __m256    step     = _mm256_broadcastss_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(half)));
    const __m256    half_max = _mm256_set1_ps(HALF_MAX);
    const __m256i   zero     = _mm256_set1_epi32(RECENT_MOST + 1);
    const __m256i   three    = _mm256_set1_epi32(3);
    const uint8_t * high     = row + sizeof(half);
    const uint8_t * low      = high + d;
    const int64_t   m        = d / 4;
    mean                     = mean ? mean : cpu::NO_MEAN;
    for (int64_t j = 0; j < m; j += 8) {
        __m256i parts = widen_bytes(low + j);
        for (int64_t at = j; at < d; at += m) {
            const __m256i u =
                _mm256_or_si256(_mm256_slli_epi32(widen_bytes(high + at), 2), _mm256_and_si256(parts, three));
            const __m256 q = _mm256_cvtepi32_ps(_mm256_sub_epi32(u, zero));
            const __m256 x = clamped(_mm256_fmadd_ps(step, q, _mm256_loadu_ps(mean + at)), half_max);
            _mm_storeu_si128((__m128i *) (out + at), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
            parts = _mm256_srli_epi32(parts, 2);
        }
    }
}

} // namespace subkv::avx2

#endif
