// avx2_simd.h: registers of eight floats, and helpers shared by the AVX2 files. Everything is static, and these files
// use no templates of the standard library, because the linker must never use code compiled with AVX2 flags in other
// files.
#pragma once

#include "../ref/rows.h"

#include <immintrin.h>

namespace subkv::avx2 {

static inline float horizontal_max(__m256 x) {
    __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y        = _mm_max_ps(y, _mm_movehl_ps(y, y));
    y        = _mm_max_ss(y, _mm_movehdup_ps(y));
    return _mm_cvtss_f32(y);
}

static inline float horizontal_sum(__m256 x) {
    __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y        = _mm_add_ps(y, _mm_movehl_ps(y, y));
    y        = _mm_add_ss(y, _mm_movehdup_ps(y));
    return _mm_cvtss_f32(y);
}

// Loads are the bottleneck of the inner loops, and compilers fold a load into every instruction that uses its value. A
// pinned value is loaded once.
static inline __m256i pin(__m256i x) {
#if defined(__GNUC__)
    __asm__("" : "+x"(x));
#endif
    return x;
}

static inline __m256 pin(__m256 x) {
    return _mm256_castsi256_ps(pin(_mm256_castps_si256(x)));
}

// at[j] = shrink * at[j] + weight_step * (2 * sum[j] - middle). The product may wrap, but the centred sum fits.
static inline void add_eight(__m256i sum, int32_t middle, float shrink, float weight_step, float * at) {
    const __m256i centred = _mm256_sub_epi32(_mm256_slli_epi32(sum, 1), _mm256_set1_epi32(middle));
    const __m256  add     = _mm256_mul_ps(_mm256_cvtepi32_ps(centred), _mm256_set1_ps(weight_step));
    _mm256_storeu_ps(at, _mm256_fmadd_ps(_mm256_set1_ps(shrink), _mm256_loadu_ps(at), add));
}

// The namespace is unnamed, because every including file has its own instruction flags and needs its own copy.
namespace {

// The Isa of lanes.h, with eight floats in a register.
struct Lanes {
    static constexpr int  W          = 8;
    static constexpr bool HAS_LOOKUP = true;

    using F = __m256;

    static F set(float x) { return _mm256_set1_ps(x); }

    static F load(const float * x) { return _mm256_loadu_ps(x); }

    static void store(float * at, F x) { _mm256_storeu_ps(at, x); }

    static F plus(F a, F b) { return _mm256_add_ps(a, b); }

    static F sub(F a, F b) { return _mm256_sub_ps(a, b); }

    static F mul(F a, F b) { return _mm256_mul_ps(a, b); }

    static F div(F a, F b) { return _mm256_div_ps(a, b); }

    static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }

    static F fnma(F a, F b, F c) { return _mm256_fnmadd_ps(a, b, c); }

    static F min(F a, F b) { return _mm256_min_ps(a, b); }

    static F max(F a, F b) { return _mm256_max_ps(a, b); }

    static F abs(F x) { return _mm256_andnot_ps(set(-0.0f), x); }

    static F with_sign(F size, F of) { return _mm256_or_ps(size, _mm256_and_ps(of, set(-0.0f))); }

    static F round(F x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

    static F power(F t) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(t), 23)); }

    static F mul_from(float least, F x, F a, F b) { // NaN is not less than `least`, so it stays visible.
        return _mm256_and_ps(mul(a, b), _mm256_cmp_ps(x, set(least), _CMP_NLT_UQ));
    }

    static float first(F x) { return _mm256_cvtss_f32(x); }

    static float largest(F x) { return horizontal_max(x); }

    static float sum(F x) { return horizontal_sum(x); }

    static F hide(F x, F bias) { // sets x to -infinity where the bias is -infinity
        const F minus_inf = set(-__builtin_inff());
        return _mm256_blendv_ps(x, minus_inf, _mm256_cmp_ps(bias, minus_inf, _CMP_EQ_OQ));
    }

    // The conversion costs an instruction, but keeps the value in a register. A compiler would fold a load of floats
    // into every product that uses it, and loads are the bottleneck of products with matrices.
    static F widen(const uint16_t * h) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) h)); }

    static F widen(const int8_t * b) {
        return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *) b)));
    }

    static float to_float(uint16_t h) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(h))); }

    static float to_float(int8_t b) { return (float) b; }

    static F widen_twice(const uint16_t * h) {
        const __m128 four = _mm_cvtph_ps(_mm_loadl_epi64((const __m128i *) h));
        return _mm256_set_m128(four, four);
    }

    static void to_halves(uint16_t * h, F x) {
        _mm_storeu_si128((__m128i *) h, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
    }

    static void to_bytes(uint8_t * at, F x) {
        const __m256i u = _mm256_cvtps_epi32(x);
        const __m128i w = _mm_packus_epi32(_mm256_castsi256_si128(u), _mm256_extracti128_si256(u, 1));
        _mm_storel_epi64((__m128i *) at, _mm_packus_epi16(w, w));
    }

    static void store_parts(float * low, float * high, F x) {
        _mm_storeu_ps(low, _mm256_castps256_ps128(x));
        _mm_storeu_ps(high, _mm256_extractf128_ps(x, 1));
    }

    static F sums(const F (&x)[8]) {
        const F low  = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
        const F high = _mm256_hadd_ps(_mm256_hadd_ps(x[4], x[5]), _mm256_hadd_ps(x[6], x[7]));
        return plus(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31));
    }

    static void add_to_doubles(double * s, F x) {
        _mm256_storeu_pd(s, _mm256_add_pd(_mm256_loadu_pd(s), _mm256_cvtps_pd(_mm256_castps256_ps128(x))));
        _mm256_storeu_pd(s + 4, _mm256_add_pd(_mm256_loadu_pd(s + 4), _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1))));
    }

    static void transpose(F (&r)[8]) {
        F t[8];
        for (int i = 0; i < 8; i += 2) {
            t[i]     = _mm256_unpacklo_ps(r[i], r[i + 1]);
            t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
        }
        F s[8];
        for (int i = 0; i < 8; i += 4) {
            s[i]     = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
            s[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
            s[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
            s[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
        }
        for (int i = 0; i < 4; ++i) {
            r[i]     = _mm256_permute2f128_ps(s[i], s[i + 4], 0x20);
            r[i + 4] = _mm256_permute2f128_ps(s[i], s[i + 4], 0x31);
        }
    }

    static unsigned less(F a, F b) { return (unsigned) _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_LT_OQ)); }

    static unsigned visible(F bias) {
        return (unsigned) _mm256_movemask_ps(_mm256_cmp_ps(bias, set(-__builtin_inff()), _CMP_NEQ_UQ));
    }

    static bool any_nan(F x) { return _mm256_movemask_ps(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)) != 0; }

    static F lookup(const float * table, F x) {
        return _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), _mm256_castps_si256(x));
    }

    static void low_bits(int32_t * at, F x) { _mm256_storeu_si256((__m256i *) at, _mm256_castps_si256(x)); }

    static F rows(const float * a, const float * b) {
        return _mm256_set_m128(_mm_broadcast_ss(b), _mm_broadcast_ss(a));
    }

    static F load_twice(const float * at) { return _mm256_broadcast_ps((const __m128 *) at); }

    static F swap_pairs(F x) { return _mm256_permute_ps(x, 0xb1); }

    static F repeat_low(F x) { return _mm256_unpacklo_ps(x, x); }

    static F repeat_high(F x) { return _mm256_unpackhi_ps(x, x); }
};

} // namespace

// kernels of the tables
int64_t encode(const HeadCodec & codec, const float * x, int64_t ldx, int64_t n, const int64_t * cells, uint8_t * tiles,
               int64_t tile_stride);
void dequantize(const HeadCodec & codec, const uint8_t * tiles, int64_t tile_stride, int64_t n, const int64_t * cells,
                float * c);
void attend(const AttendArgs & a);
void attend_exact(const ExactArgs & a);
bool pack_recent(const float * x, const float * mean, int64_t d, uint8_t * row);
void unpack_recent(const uint8_t * row, const float * mean, int64_t d, uint16_t * out);
void project(const Matrix & m, int64_t r, int64_t d, const float * x, int64_t ldx, int64_t n, float scale, float * y,
             int64_t ldy);
void reconstruct(const Matrix & m, int64_t r, int64_t d, const float * e, float * o);
void moment(const float * x, int64_t ldx, int64_t n, int64_t d, double * s, double * sum);
void to_half(const float * x, uint16_t * h, int64_t n);

} // namespace subkv::avx2
