// avx2_rows.cpp: encode_rows, dequantize_rows, to_half. Definitions: ref/encode.cpp, ref/rows.cpp.
//
// The scale search follows ref/encode.cpp operation by operation (explicit fused multiply-adds, coefficient j in lane
// j % 8): the same coefficients give the same bytes.
#include "versions.h"

#if defined(SUBKV_X86)

#    include "avx2_simd.h"
#    include "pack.h"

#    include <string.h>

namespace subkv::avx2 {

enum Slot { SLOT_COEF = 10 };

constexpr int64_t TOKENS = 32; // projected together

static inline __m256 quantize(__m256 c, __m256 inverse, __m256 middle) {
    const __m256 u =
        _mm256_round_ps(_mm256_fmadd_ps(c, inverse, middle), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return _mm256_min_ps(_mm256_max_ps(u, _mm256_setzero_ps()), _mm256_add_ps(middle, middle));
}

static float squared_error(const HeadCodec & codec, const float * c, float s) {
    __m256 sum = _mm256_setzero_ps();
    for (int32_t i = 0; i < codec.n_bands; ++i) {
        const Band & band = codec.bands[i];
        if (band.bits == 16) {
            continue;
        }
        const float  step    = s * band.ratio;
        const __m256 inverse = _mm256_set1_ps(1.0f / step);
        const __m256 middle  = _mm256_set1_ps(half_range(band.bits));
        for (int32_t j = 0; j < band.n; j += 8) {
            const __m256 x = _mm256_loadu_ps(c + band.first + j);
            const __m256 e =
                _mm256_fnmadd_ps(_mm256_set1_ps(step), _mm256_sub_ps(quantize(x, inverse, middle), middle), x);
            sum = _mm256_fmadd_ps(e, e, sum);
        }
    }
    float lane[8];
    _mm256_storeu_ps(lane, sum);
    return ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
}

static float largest_of(const float * x, int32_t n) {
    __m256 largest = _mm256_setzero_ps();
    for (int32_t j = 0; j < n; j += 8) {
        largest = _mm256_max_ps(largest, _mm256_andnot_ps(_mm256_set1_ps(-0.0f), _mm256_loadu_ps(x + j)));
    }
    return horizontal_max(largest);
}

static void put_row(const HeadCodec & codec, const float * c, uint8_t * row) {
    const auto error = [&](float s) { return squared_error(codec, c, s); };
    row[0]           = (uint8_t) cpu::choose_scale(codec, c, largest_of, error);
    const float s    = SCALES[row[0]];
    for (int32_t i = 0; i < codec.n_bands; ++i) {
        const Band &  band = codec.bands[i];
        const float * x    = c + band.first;
        if (band.bits == 16) {
            for (int32_t j = 0; j < band.n; j += 8) { // max, min in this order: as ref, finite input
                const __m256 v = _mm256_min_ps(_mm256_max_ps(_mm256_loadu_ps(x + j), _mm256_set1_ps(-HALF_MAX)),
                                               _mm256_set1_ps(HALF_MAX));
                _mm_storeu_si128((__m128i *) (row + band.offset + 2 * j),
                                 _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
            }
            continue;
        }
        const __m256 inverse = _mm256_set1_ps(1.0f / (s * band.ratio));
        const __m256 middle  = _mm256_set1_ps(half_range(band.bits));
        uint8_t      code[MAX_HEAD_SIZE];
        for (int32_t j = 0; j < band.n; j += 8) {
            const __m256i u = _mm256_cvtps_epi32(quantize(_mm256_loadu_ps(x + j), inverse, middle));
            const __m128i w = _mm_packus_epi32(_mm256_castsi256_si128(u), _mm256_extracti128_si256(u, 1));
            _mm_storel_epi64((__m128i *) (code + j), _mm_packus_epi16(w, w));
        }
        cpu::put_codes(code, band.n, band.bits, row + band.offset);
    }
}

int64_t encode_rows(const HeadCodec & codec, const float * x, int64_t ldx, int64_t n, const int64_t * cells,
                    uint8_t * rows, int64_t row_stride) {
    float *      c     = (float *) cpu::scratch(SLOT_COEF, (size_t) (TOKENS * codec.rank) * sizeof(float));
    const __m256 limit = _mm256_set1_ps(__FLT_MAX__);
    const __m256 sign  = _mm256_set1_ps(-0.0f);
    int64_t      n_bad = 0;
    for (int64_t first = 0; first < n; first += TOKENS) {
        const int64_t count = n - first < TOKENS ? n - first : TOKENS;
        cpu::coefficients(project, codec, x + first * ldx, ldx, count, c);
        for (int64_t t = 0; t < count; ++t) {
            float * row_c  = c + t * codec.rank;
            __m256  finite = _mm256_cmp_ps(limit, limit, _CMP_EQ_OQ);
            __m256  any    = _mm256_setzero_ps();
            for (int32_t j = 0; j < codec.rank; j += 8) {
                __m256 value = _mm256_loadu_ps(row_c + j);
                if (codec.offset != nullptr) {
                    value = _mm256_sub_ps(value, _mm256_loadu_ps(codec.offset + j));
                    _mm256_storeu_ps(row_c + j, value);
                }
                const __m256 magnitude = _mm256_andnot_ps(sign, value);
                finite                 = _mm256_and_ps(finite, _mm256_cmp_ps(magnitude, limit, _CMP_LE_OQ));
                any                    = _mm256_or_ps(any, magnitude);
            }
            uint8_t * row = rows + cells[first + t] * row_stride;
            if (_mm256_movemask_ps(finite) != 0xff) {
                memset(row, 0, (size_t) codec.row_bytes);
                ++n_bad;
            } else if (_mm256_testz_si256(_mm256_castps_si256(any), _mm256_castps_si256(any)) != 0) {
                memset(row, 0, (size_t) codec.row_bytes);
            } else {
                put_row(codec, row_c, row);
            }
        }
    }
    return n_bad;
}

void dequantize_row(const HeadCodec & codec, const Plan & plan, const uint8_t * row, float * out) {
    if (row[0] == 0) {
        memset(out, 0, (size_t) (plan.n_groups * GROUP) * sizeof(float));
        return;
    }
    uint8_t         copy[16] = {};
    const uint8_t * from     = row;
    if (codec.row_bytes < 16) { // unpacking reads 16 bytes
        memcpy(copy, row, (size_t) codec.row_bytes);
        from = copy;
    }
    for (int32_t g = 0; g < plan.n_groups; ++g) {
        __m256 low, high;
        ManyWindows(plan.parts, plan.groups[g]).load(from, low, high);
        _mm256_store_ps(out + g * GROUP, low);
        _mm256_store_ps(out + g * GROUP + 8, high);
    }
    for (int32_t i = 0; i < codec.n_bands; ++i) {
        const Band & band = codec.bands[i];
        float *      c    = out + band.first;
        if (band.bits == 16) {
            for (int32_t j = 0; j < band.n; j += 8) {
                _mm256_storeu_ps(c + j,
                                 _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) (row + band.offset + 2 * j))));
            }
            continue;
        }
        const __m256 step = _mm256_set1_ps(SCALES[row[0]] * band.ratio);
        for (int32_t j = 0; j < band.n; j += 8) {
            const __m256 unit = _mm256_loadu_ps(plan.unit + band.first + j); // a power of two: exact
            _mm256_storeu_ps(c + j, _mm256_mul_ps(_mm256_mul_ps(step, unit), _mm256_loadu_ps(c + j)));
        }
    }
}

void dequantize_rows(const HeadCodec & codec, const uint8_t * rows, int64_t row_stride, int64_t n, float * c) {
    const Plan &      plan = cpu::plan_of(codec);
    alignas(32) float line[MAX_HEAD_SIZE];
    for (int64_t t = 0; t < n; ++t) {
        dequantize_row(codec, plan, rows + t * row_stride, line);
        memcpy(c + t * codec.rank, line, (size_t) codec.rank * sizeof(float));
    }
}

void to_half(const float * x, uint16_t * h, int64_t n) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        _mm_storeu_si128((__m128i *) (h + i), _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
    }
    for (; i < n; ++i) {
        h[i] = (uint16_t) _mm_extract_epi16(_mm_cvtps_ph(_mm_load_ss(x + i), _MM_FROUND_TO_NEAREST_INT), 0);
    }
}

} // namespace subkv::avx2

#endif
