// avx2_linear.cpp: project, reconstruct, moment. Definitions: ref/linear.cpp.
#include "versions.h"

#if defined(SUBKV_X86)

#    include "avx2_simd.h"
#    include "matrix.h"
#    include "scratch.h"

#    include <string.h>

namespace subkv::avx2 {

constexpr int64_t TOKENS = 64; // of the second moment: summed in float before they are added to the doubles

// Eight entries of a matrix. The conversion costs an instruction, but keeps the value in a register: a compiler would
// fold a load of floats into every product that uses it, and loads are the bottleneck of the loops below.
static inline __m256 load8(const uint16_t * m) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) m));
}

static inline __m256 load8(const int8_t * m) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *) m)));
}

static inline float to_float(uint16_t h) {
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(h)));
}

static inline float to_float(int8_t b) {
    return (float) b;
}

template <typename T> static float dot(const T * a, const float * b, int64_t d) {
    __m256  sum = _mm256_setzero_ps();
    int64_t j   = 0;
    for (; j + 8 <= d; j += 8) {
        sum = _mm256_fmadd_ps(load8(a + j), _mm256_loadu_ps(b + j), sum);
    }
    float total = horizontal_sum(sum);
    for (; j < d; ++j) {
        total += to_float(a[j]) * b[j];
    }
    return total;
}

// y[k] = scale[k] * m[k] . x for eight rows of m
template <typename T> static void dot8(const T * m, int64_t d, const float * x, __m256 scale, float * y) {
    __m256 sum[8];
    for (int i = 0; i < 8; ++i) {
        sum[i] = _mm256_setzero_ps();
    }
    for (int64_t j = 0; j < d; j += 8) {
        const __m256 v = _mm256_loadu_ps(x + j);
        for (int i = 0; i < 8; ++i) {
            sum[i] = _mm256_fmadd_ps(v, load8(m + i * d + j), sum[i]);
        }
    }
    const __m256 total = sum_pairs(_mm256_hadd_ps(sum[0], sum[1]), _mm256_hadd_ps(sum[2], sum[3]),
                                   _mm256_hadd_ps(sum[4], sum[5]), _mm256_hadd_ps(sum[6], sum[7]));
    _mm256_storeu_ps(y, _mm256_mul_ps(total, scale));
}

// The same for two tokens and four rows: six loads serve eight products.
template <typename T>
static void dot4x2(const T * m, int64_t d, const float * x0, const float * x1, __m128 scale, float * y0, float * y1) {
    __m256 a[4];
    __m256 b[4];
    for (int i = 0; i < 4; ++i) {
        a[i] = _mm256_setzero_ps();
        b[i] = _mm256_setzero_ps();
    }
    for (int64_t j = 0; j < d; j += 8) {
        const __m256 v0 = _mm256_loadu_ps(x0 + j);
        const __m256 v1 = _mm256_loadu_ps(x1 + j);
        for (int i = 0; i < 4; ++i) {
            const __m256 w = load8(m + i * d + j);
            a[i]           = _mm256_fmadd_ps(v0, w, a[i]);
            b[i]           = _mm256_fmadd_ps(v1, w, b[i]);
        }
    }
    const __m256 total = _mm256_mul_ps(sum_pairs(_mm256_hadd_ps(a[0], a[1]), _mm256_hadd_ps(a[2], a[3]),
                                                 _mm256_hadd_ps(b[0], b[1]), _mm256_hadd_ps(b[2], b[3])),
                                       _mm256_set_m128(scale, scale));
    _mm_storeu_ps(y0, _mm256_castps256_ps128(total));
    _mm_storeu_ps(y1, _mm256_extractf128_ps(total, 1));
}

// scale * step of rows from i on; without steps of ones
static inline __m256 scales8(float scale, const uint16_t * step, int64_t i) {
    const __m256 s = _mm256_set1_ps(scale);
    return step ? _mm256_mul_ps(s, load8(step + i)) : s;
}

static inline __m128 scales4(float scale, const uint16_t * step, int64_t i) {
    const __m128 s = _mm_set1_ps(scale);
    return step ? _mm_mul_ps(s, _mm_cvtph_ps(_mm_loadl_epi64((const __m128i *) (step + i)))) : s;
}

template <typename T>
static void project_rows(const T * m, const uint16_t * step, int64_t r, int64_t d, const float * x, int64_t ldx,
                         int64_t n, float scale, float * y, int64_t ldy) {
    const int64_t whole = d % 8 == 0 ? r / 8 * 8 : 0;
    int64_t       t     = 0;
    for (; t + 2 <= n; t += 2) {
        for (int64_t i = 0; i < whole; i += 4) {
            dot4x2(m + i * d, d, x + t * ldx, x + (t + 1) * ldx, scales4(scale, step, i), y + t * ldy + i,
                   y + (t + 1) * ldy + i);
        }
    }
    for (; t < n; ++t) {
        for (int64_t i = 0; i < whole; i += 8) {
            dot8(m + i * d, d, x + t * ldx, scales8(scale, step, i), y + t * ldy + i);
        }
    }
    for (t = 0; t < n && whole < r; ++t) {
        for (int64_t i = whole; i < r; ++i) {
            y[t * ldy + i] = scale * (step ? to_float(step[i]) : 1.0f) * dot(m + i * d, x + t * ldx, d);
        }
    }
}

void project(const Matrix & m, int64_t r, int64_t d, const float * x, int64_t ldx, int64_t n, float scale, float * y,
             int64_t ldy) {
    cpu::by_entries(m, r, [&](const auto * rows, const uint16_t * step, int64_t first, int64_t count) {
        project_rows(rows, step, count, d, x, ldx, n, scale, y + first, ldy);
    });
}

template <typename T>
static void add_rows(const T * m, int64_t r, int64_t d, const float * e, float * o) {
    int64_t j = 0;
    for (; j + 32 <= d; j += 32) {
        __m256 sum[4];
        for (int k = 0; k < 4; ++k) {
            sum[k] = _mm256_setzero_ps();
        }
        for (int64_t i = 0; i < r; ++i) {
            const __m256 w = _mm256_broadcast_ss(e + i);
            for (int k = 0; k < 4; ++k) {
                sum[k] = _mm256_fmadd_ps(w, load8(m + i * d + j + 8 * k), sum[k]);
            }
        }
        for (int k = 0; k < 4; ++k) {
            _mm256_storeu_ps(o + j + 8 * k, _mm256_add_ps(_mm256_loadu_ps(o + j + 8 * k), sum[k]));
        }
    }
    for (; j + 8 <= d; j += 8) {
        __m256 sum = _mm256_setzero_ps();
        for (int64_t i = 0; i < r; ++i) {
            sum = _mm256_fmadd_ps(_mm256_broadcast_ss(e + i), load8(m + i * d + j), sum);
        }
        _mm256_storeu_ps(o + j, _mm256_add_ps(_mm256_loadu_ps(o + j), sum));
    }
    for (; j < d; ++j) {
        float sum = 0.0f;
        for (int64_t i = 0; i < r; ++i) {
            sum += e[i] * to_float(m[i * d + j]);
        }
        o[j] += sum;
    }
}

void reconstruct(const Matrix & m, int64_t r, int64_t d, const float * e, float * o) {
    cpu::by_entries(m, r, [&](const auto * rows, const uint16_t * step, int64_t first, int64_t count) {
        const auto of_half = [](uint16_t half) { return to_float(half); };
        add_rows(rows, count, d, cpu::with_steps(e + first, step, count, of_half), o);
    });
}

static void add_to_doubles(double * s, __m256 x) {
    _mm256_storeu_pd(s, _mm256_add_pd(_mm256_loadu_pd(s), _mm256_cvtps_pd(_mm256_castps256_ps128(x))));
    _mm256_storeu_pd(s + 4, _mm256_add_pd(_mm256_loadu_pd(s + 4), _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1))));
}

// s[0..3][0..15] += sum_t x[t][i..i+3]' x[t][j..j+15]; x [n][ld], s [..][ld]
static void moment_4x16(const float * x, int64_t n, int64_t ld, int64_t i, int64_t j, double * s) {
    __m256 low[4];
    __m256 high[4];
    for (int k = 0; k < 4; ++k) {
        low[k]  = _mm256_setzero_ps();
        high[k] = _mm256_setzero_ps();
    }
    for (int64_t t = 0; t < n; ++t) {
        const __m256 b_low  = _mm256_load_ps(x + t * ld + j);
        const __m256 b_high = _mm256_load_ps(x + t * ld + j + 8);
        for (int k = 0; k < 4; ++k) {
            const __m256 a = _mm256_broadcast_ss(x + t * ld + i + k);
            low[k]         = _mm256_fmadd_ps(a, b_low, low[k]);
            high[k]        = _mm256_fmadd_ps(a, b_high, high[k]);
        }
    }
    for (int k = 0; k < 4; ++k) {
        add_to_doubles(s + (i + k) * ld + j, low[k]);
        add_to_doubles(s + (i + k) * ld + j + 8, high[k]);
    }
}

// Upper triangle (in 4x16 blocks) of this call alone in scratch, mirrored into s at the end.
void moment(const float * x, int64_t ldx, int64_t n, int64_t d, double * s, double * sum) {
    const int64_t ld    = padded(d);
    float *       block = (float *) cpu::scratch(cpu::SLOT_MOMENT_ROWS, (size_t) (TOKENS * ld) * sizeof(float));
    double *      upper = (double *) cpu::scratch(cpu::SLOT_MOMENT_SUMS, (size_t) (ld * ld) * sizeof(double));
    memset(upper, 0, (size_t) (ld * ld) * sizeof(double));
    for (int64_t first = 0; first < n; first += TOKENS) {
        const int64_t count = n - first < TOKENS ? n - first : TOKENS;
        for (int64_t t = 0; t < count; ++t) {
            const float * row = x + (first + t) * ldx;
            memcpy(block + t * ld, row, (size_t) d * sizeof(float));
            memset(block + t * ld + d, 0, (size_t) (ld - d) * sizeof(float));
            for (int64_t i = 0; i < d; ++i) {
                sum[i] += row[i];
            }
        }
        for (int64_t i = 0; i < ld; i += 4) {
            for (int64_t j = i / GROUP * GROUP; j < ld; j += GROUP) {
                moment_4x16(block, count, ld, i, j, upper);
            }
        }
    }
    for (int64_t i = 0; i < d; ++i) {
        for (int64_t j = i; j < d; ++j) {
            s[i * d + j] += upper[i * ld + j];
            if (j > i) {
                s[j * d + i] += upper[i * ld + j];
            }
        }
    }
}

} // namespace subkv::avx2

#endif
