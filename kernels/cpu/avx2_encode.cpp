// avx2_encode.cpp: encode, dequantize, to_half. Definitions: ref/encode.cpp, ref/rows.cpp.
//
// The scale search follows ref/encode.cpp operation by operation (explicit fused multiply-adds, coefficient j in lane
// j % 8): the same coefficients give the same bytes.
#include "versions.h"

#if defined(SUBKV_X86)

#    include "avx2_path.h"
#    include "avx2_simd.h"
#    include "cells.h"
#    include "subkv/trellis.h"

#    include <string.h>

namespace subkv::avx2 {

static inline __m256 quantize(__m256 c, __m256 inverse, __m256 middle) {
    const __m256 u =
        _mm256_round_ps(_mm256_fmadd_ps(c, inverse, middle), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return _mm256_min_ps(_mm256_max_ps(u, _mm256_setzero_ps()), _mm256_add_ps(middle, middle));
}

float squared_error(const HeadCodec & codec, const float * c, float s, int32_t beyond) {
    __m256 sum = _mm256_setzero_ps();
    for (int32_t i = 0; i < codec.n_bands; ++i) {
        const Band & band = codec.bands[i];
        if (band.bits == 16 || band.bits <= beyond) {
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

// The codes of a cell that are not on a path, for its scale code; 16-bit bands have halves instead.
static void quantize_bands(const HeadCodec & codec, const float * c, cpu::Cell & cell) {
    const float s = SCALES[cell.scale];
    for (int32_t i = 0; i < codec.n_bands; ++i) {
        const Band & band = codec.bands[i];
        if (band.bits == 16) {
            for (int32_t j = band.first; j < band.first + band.n; j += 8) {
                // max, min in this order: as ref, finite input
                const __m256 v = _mm256_min_ps(_mm256_max_ps(_mm256_loadu_ps(c + j), _mm256_set1_ps(-HALF_MAX)),
                                               _mm256_set1_ps(HALF_MAX));
                _mm_storeu_si128((__m128i *) (cell.half + j), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
            }
            continue;
        }
        const __m256 inverse = _mm256_set1_ps(1.0f / (s * band.ratio));
        const __m256 middle  = _mm256_set1_ps(half_range(band.bits));
        for (int32_t j = band.first; !on_path(codec, band) && j < band.first + band.n; j += 8) {
            const __m256i u = _mm256_cvtps_epi32(quantize(_mm256_loadu_ps(c + j), inverse, middle));
            const __m128i w = _mm_packus_epi32(_mm256_castsi256_si128(u), _mm256_extracti128_si256(u, 1));
            _mm_storel_epi64((__m128i *) (cell.code + j), _mm_packus_epi16(w, w));
        }
    }
}

static_assert(cpu::TOGETHER == PATH_ROWS, "paths of as many rows are searched at once");

static void quantize_cells(const HeadCodec & codec, const float * const * c, int n, cpu::Cell * const * cell) {
    uint8_t scale[PATH_ROWS];
    for (int i = 0; i < n; ++i) {
        const auto error = [&](float s) { return squared_error(codec, c[i], s, 0); };
        scale[i]         = (uint8_t) cpu::choose_scale(codec, c[i], largest_of, error);
    }
    if (codec.path != PATH_NONE) {
        choose_path_scales(codec, c, n, scale);
    }
    for (int i = 0; i < n; ++i) {
        cell[i]->scale = scale[i];
        if (codec.path != PATH_NONE) {
            find_path(codec, c[i], SCALES[scale[i]], cell[i]->code);
        }
        quantize_bands(codec, c[i], *cell[i]);
    }
}

static cpu::Coefficients centre(const HeadCodec & codec, float * c) {
    const __m256 limit  = _mm256_set1_ps(__FLT_MAX__);
    __m256       finite = _mm256_cmp_ps(limit, limit, _CMP_EQ_OQ);
    __m256       any    = _mm256_setzero_ps();
    for (int32_t j = 0; j < codec.rank; j += 8) {
        __m256 value = _mm256_loadu_ps(c + j);
        if (codec.offset != nullptr) {
            value = _mm256_sub_ps(value, _mm256_loadu_ps(codec.offset + j));
            _mm256_storeu_ps(c + j, value);
        }
        const __m256 magnitude = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), value);
        finite                 = _mm256_and_ps(finite, _mm256_cmp_ps(magnitude, limit, _CMP_LE_OQ));
        any                    = _mm256_or_ps(any, magnitude);
    }
    if (_mm256_movemask_ps(finite) != 0xff) {
        return cpu::Coefficients::BAD;
    }
    const bool zero = _mm256_testz_si256(_mm256_castps_si256(any), _mm256_castps_si256(any)) != 0;
    return zero ? cpu::Coefficients::ZERO : cpu::Coefficients::FINITE;
}

int64_t encode(const HeadCodec & codec, const float * x, int64_t ldx, int64_t n, const int64_t * cells, uint8_t * tiles,
               int64_t tile_stride) {
    return cpu::encode_cells(codec, x, ldx, n, cells, tiles, tile_stride, project, centre, quantize_cells);
}

void dequantize(const HeadCodec & codec, const uint8_t * tiles, int64_t tile_stride, int64_t n, const int64_t * cells,
                float * c) {
    for (int64_t t = 0; t < n; ++t) {
        cpu::Cell cell;
        cpu::get_cell(codec, tiles + cells[t] / TILE * tile_stride, (int32_t) (cells[t] % TILE), cell);
        float * out = c + t * codec.rank;
        int32_t level[MAX_HEAD_SIZE];
        ref::path_levels(codec, cell.code, level);
        for (int32_t i = 0; i < codec.n_bands; ++i) {
            const Band & band = codec.bands[i];
            const float  step = SCALES[cell.scale] * level_step(codec, band);
            for (int32_t j = band.first; j < band.first + band.n; ++j) {
                if (band.bits == 16) {
                    const uint16_t half = cell.scale == 0 ? 0 : cell.scale == SCALE_NAN ? HALF_NAN : cell.half[j];
                    out[j]              = _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(half)));
                } else {
                    const float u =
                        on_path(codec, band) ? (float) level[j] + 0.5f : (float) cell.code[j] - half_range(band.bits);
                    out[j] = cell.scale != 0 ? step * u : 0.0f;
                }
            }
        }
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
