// neon.cpp: project, reconstruct, attend_exact, and the NEON table. Definitions: ref/linear.cpp, ref/attend.cpp.
#include "versions.h"

#if defined(SUBKV_ARM64)

#    include "../ref/rows.h"
#    include "attend_tiles.h"
#    include "matrix.h"
#    include "neon.h"

#    include <string.h>

namespace subkv::neon {

static inline float to_float(uint16_t h) {
    return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(h))), 0);
}

static inline float to_float(int8_t b) {
    return (float) b;
}

// Four entries of a matrix in bytes.
static inline float32x4_t widen(const int8_t * m) {
    int32_t four;
    memcpy(&four, m, sizeof(four));
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four))))));
}

// y[t][i] of ROWS tokens: an entry of the matrix is widened once for all of them
template <int ROWS, typename T>
static void project_block(const T * m, const uint16_t * step, int64_t r, int64_t d, const float * x, int64_t ldx,
                          float scale, float * y, int64_t ldy) {
    for (int64_t i = 0; i < r; ++i) {
        float32x4_t sum[ROWS];
        for (int t = 0; t < ROWS; ++t) {
            sum[t] = vdupq_n_f32(0.0f);
        }
        int64_t j = 0;
        for (; j + 4 <= d; j += 4) {
            const float32x4_t entry = widen(m + i * d + j);
            for (int t = 0; t < ROWS; ++t) {
                sum[t] = vfmaq_f32(sum[t], entry, vld1q_f32(x + t * ldx + j));
            }
        }
        for (int t = 0; t < ROWS; ++t) {
            float total = vaddvq_f32(sum[t]);
            for (int64_t k = j; k < d; ++k) {
                total += to_float(m[i * d + k]) * x[t * ldx + k];
            }
            y[t * ldy + i] = scale * (step ? to_float(step[i]) : 1.0f) * total;
        }
    }
}

template <typename T>
static void project_rows(const T * m, const uint16_t * step, int64_t r, int64_t d, const float * x, int64_t ldx,
                         int64_t n, float scale, float * y, int64_t ldy) {
    int64_t t = 0;
    for (; t + 8 <= n; t += 8) {
        project_block<8>(m, step, r, d, x + t * ldx, ldx, scale, y + t * ldy, ldy);
    }
    for (; t < n; ++t) {
        project_block<1>(m, step, r, d, x + t * ldx, ldx, scale, y + t * ldy, ldy);
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
    for (; j + 16 <= d; j += 16) {
        float32x4_t sum[4];
        for (int k = 0; k < 4; ++k) {
            sum[k] = vld1q_f32(o + j + 4 * k);
        }
        for (int64_t i = 0; i < r; ++i) {
            for (int k = 0; k < 4; ++k) {
                sum[k] = vfmaq_n_f32(sum[k], widen(m + i * d + j + 4 * k), e[i]);
            }
        }
        for (int k = 0; k < 4; ++k) {
            vst1q_f32(o + j + 4 * k, sum[k]);
        }
    }
    for (; j < d; ++j) {
        for (int64_t i = 0; i < r; ++i) {
            o[j] += e[i] * to_float(m[i * d + j]);
        }
    }
}

void reconstruct(const Matrix & m, int64_t r, int64_t d, const float * e, float * o) {
    cpu::by_entries(m, r, [&](const auto * rows, const uint16_t * step, int64_t first, int64_t count) {
        const auto of_half = [](uint16_t half) { return to_float(half); };
        add_rows(rows, count, d, cpu::with_steps(e + first, step, count, of_half), o);
    });
}

constexpr int64_t KEYS = PAGE / 2; // at once

// One query row against keys [first, first + n). Head sizes are multiples of 8.
static void exact_row(const ExactArgs & a, int64_t row, int64_t first, int64_t n) {
    const float * q     = a.q + row * a.d_k;
    const float * bias  = a.bias + row / a.n_group * a.bias_stride + first;
    const float   slope = a.slope[row % a.n_group];
    float         x[KEYS];
    float         top  = -__builtin_inff();
    bool          seen = false;
    for (int64_t c = 0; c < KEYS; ++c) {
        x[c] = -__builtin_inff();
        if (c >= n || bias[c] == -__builtin_inff()) {
            continue; // masked keys are not read
        }
        seen                    = true;
        const uint16_t * key    = a.k[first + c];
        float32x4_t      sum[2] = { vdupq_n_f32(0.0f), vdupq_n_f32(0.0f) };
        for (int64_t j = 0; j < a.d_k; j += 8) {
            sum[0] = vfmaq_f32(sum[0], widen(key + j), vld1q_f32(q + j));
            sum[1] = vfmaq_f32(sum[1], widen(key + j + 4), vld1q_f32(q + j + 4));
        }
        float logit = vaddvq_f32(vaddq_f32(sum[0], sum[1]));
        logit += 0.0f * logit; // infinite: NaN
        if (a.softcap > 0.0f) {
            logit = vgetq_lane_f32(soft_cap(vdupq_n_f32(logit), a.softcap), 0);
        }
        x[c] = logit + slope * bias[c];
        top  = x[c] > top ? x[c] : top;
    }
    const auto lose = [&] {
        a.m[row] = a.m[row] > -__builtin_inff() ? a.m[row] : 0.0f;
        a.z[row] = __builtin_nanf("");
    };
    if (!(top > -__builtin_inff())) {
        return seen ? lose() : (void) 0;
    }
    const float new_m  = top > a.m[row] ? top : a.m[row];
    const float old    = a.m[row];
    const float shrink = old == new_m             ? 1.0f :
                         old == -__builtin_inff() ? 0.0f :
                                                    vgetq_lane_f32(exp_nonpositive(vdupq_n_f32(old - new_m)), 0);
    float32x4_t total  = vdupq_n_f32(0.0f);
    for (int64_t c = 0; c < KEYS; c += 4) {
        const float32x4_t e = exp_nonpositive(vsubq_f32(vld1q_f32(x + c), vdupq_n_f32(new_m)));
        total               = vaddq_f32(total, e);
        vst1q_f32(x + c, e);
    }
    const float new_z = a.z[row] * shrink + vaddvq_f32(total);
    if (new_z != new_z) {
        return lose();
    }
    a.m[row]    = new_m;
    a.z[row]    = new_z;
    float * acc = a.acc + row * a.acc_stride;
    for (int64_t j = 0; j < a.d_v; j += 8) {
        float32x4_t low  = vmulq_n_f32(vld1q_f32(acc + j), shrink);
        float32x4_t high = vmulq_n_f32(vld1q_f32(acc + j + 4), shrink);
        for (int64_t c = 0; c < n; ++c) {
            if (x[c] > 0.0f) { // values of weight 0 may be infinite
                low  = vfmaq_n_f32(low, widen(a.v[first + c] + j), x[c]);
                high = vfmaq_n_f32(high, widen(a.v[first + c] + j + 4), x[c]);
            }
        }
        vst1q_f32(acc + j, low);
        vst1q_f32(acc + j + 4, high);
    }
}

void attend_exact(const ExactArgs & a) {
    for (int64_t first = 0; first < a.n_keys; first += KEYS) {
        for (int64_t row = 0; row < a.n_tok * a.n_group; ++row) {
            exact_row(a, row, first, a.n_keys - first < KEYS ? a.n_keys - first : KEYS);
        }
    }
}

} // namespace subkv::neon

namespace subkv {

// dequantize is the reference's, because only tests and tools call it; the compiler vectorizes moment's reference
const Ops ops_neon = { "neon",
                       neon::encode,
                       ref::dequantize,
                       neon::project,
                       neon::reconstruct,
                       neon::attend,
                       neon::attend_exact,
                       ref::moment,
                       neon::to_half,
                       neon::pack_recent,
                       neon::unpack_recent,
                       1.0f / cpu::LARGEST };

} // namespace subkv

#endif
