// avx2_simd.h: helpers shared by the AVX2 files. Everything is static, and these files use no standard library
// templates: the linker must never use code compiled with AVX2 flags in other files.
#pragma once

#include "../ref/rows.h"

#include <immintrin.h>

namespace subkv::avx2 {

constexpr float NEG_INF = -__builtin_inff();
constexpr int   GROUP   = 16; // entries per loop iteration; head sizes are multiples of 8

static inline int32_t padded(int64_t d) { // d rounded up to groups
    return (int32_t) ((d + GROUP - 1) / GROUP * GROUP);
}

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

// Sums of eight vectors, given as four hadd'ed pairs.
static inline __m256 sum_pairs(__m256 h01, __m256 h23, __m256 h45, __m256 h67) {
    const __m256 low  = _mm256_hadd_ps(h01, h23);
    const __m256 high = _mm256_hadd_ps(h45, h67);
    return _mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31));
}

// exp(x) for x <= 0, 0 below -87.3 and for -inf: 2^y of y = x log2(e) as 2^n 2^f, n = round(y). 2^f on |f| <= 1/2 is the
// polynomial of degree 5 with the least largest relative error, 2e-7; EXP2 has its halves. Rounding y adds a relative
// error of |x| * 9e-8; weights with large |x| are small. The low bits of y + ROUNDER are n + 128: shifted to the
// exponent, they are 2^(n + 1). The last step multiplies, so that the exponential of NaN is NaN.
constexpr float LOG2_E  = 1.44269504f;
constexpr float ROUNDER = 12582912.0f + 128.0f; // 1.5 * 2^23
constexpr float EXP2[6] = { 0.5f * 1.32764713e-3f, 0.5f * 9.67554096e-3f, 0.5f * 5.55071309e-2f,
                            0.5f * 2.40221202e-1f, 0.5f * 6.93146944e-1f, 0.5f };

static inline __m256 exp_nonpositive(__m256 x) {
    const __m256 floor_x = _mm256_set1_ps(-87.3f);
    const __m256 alive   = _mm256_cmp_ps(x, floor_x, _CMP_NLT_UQ); // true for NaN: it shall stay visible
    const __m256 rounder = _mm256_set1_ps(ROUNDER);
    const __m256 y       = _mm256_mul_ps(_mm256_max_ps(floor_x, x), _mm256_set1_ps(LOG2_E));
    const __m256 t       = _mm256_add_ps(y, rounder);
    const __m256 f       = _mm256_sub_ps(y, _mm256_sub_ps(t, rounder));
    __m256       p       = _mm256_set1_ps(EXP2[0]);
    for (int i = 1; i < 6; ++i) {
        p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(EXP2[i]));
    }
    const __m256 power = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(t), 23));
    return _mm256_and_ps(_mm256_mul_ps(p, power), alive);
}

static inline float exp_nonpositive(float x) {
    return _mm256_cvtss_f32(exp_nonpositive(_mm256_set1_ps(x)));
}

// cap * tanh(x / cap); absolute error a few ulp of cap.
static inline __m256 soft_cap(__m256 x, float cap) {
    const __m256 sign  = _mm256_and_ps(x, _mm256_set1_ps(-0.0f));
    const __m256 mag   = _mm256_mul_ps(_mm256_andnot_ps(_mm256_set1_ps(-0.0f), x), _mm256_set1_ps(1.0f / cap));
    const __m256 e     = exp_nonpositive(_mm256_mul_ps(mag, _mm256_set1_ps(-2.0f)));
    const __m256 one   = _mm256_set1_ps(1.0f);
    const __m256 ratio = _mm256_div_ps(_mm256_sub_ps(one, e), _mm256_add_ps(one, e));
    return _mm256_or_ps(_mm256_mul_ps(ratio, _mm256_set1_ps(cap)), sign);
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

// at[j] = shrink * at[j] + unit * (2 * sum[j] - middle); wraps, but the centred sum fits
static inline void add_eight(__m256i sum, int32_t middle, float shrink, float unit, float * at) {
    const __m256i centred = _mm256_sub_epi32(_mm256_slli_epi32(sum, 1), _mm256_set1_epi32(middle));
    const __m256  add     = _mm256_mul_ps(_mm256_cvtepi32_ps(centred), _mm256_set1_ps(unit));
    _mm256_storeu_ps(at, _mm256_fmadd_ps(_mm256_set1_ps(shrink), _mm256_loadu_ps(at), add));
}

// kernels of the table
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
