// neon.h: shared by the NEON files.
#pragma once

#include "subkv/ops.h"

#include <arm_neon.h>

namespace subkv::neon {

// exp(x) for x <= 0, 0 below -87.3, relative error about 2 ulp: Cody-Waite reduction, then Taylor to degree 7.
static inline float32x4_t exp_nonpositive(float32x4_t x) {
    const float32x4_t floor_x = vdupq_n_f32(-87.3f);
    const uint32x4_t  dead    = vcltq_f32(x, floor_x); // false for NaN: it shall stay visible
    x                         = vmaxq_f32(floor_x, x);
    const float32x4_t n       = vrndnq_f32(vmulq_n_f32(x, 1.44269504f));
    float32x4_t       r       = vfmsq_n_f32(x, n, 0.693145752f);
    r                         = vfmsq_n_f32(r, n, 1.42860677e-6f);
    float32x4_t p             = vdupq_n_f32(1.98412698e-4f);
    p                         = vfmaq_f32(vdupq_n_f32(1.38888889e-3f), p, r);
    p                         = vfmaq_f32(vdupq_n_f32(8.33333333e-3f), p, r);
    p                         = vfmaq_f32(vdupq_n_f32(4.16666667e-2f), p, r);
    p                         = vfmaq_f32(vdupq_n_f32(1.66666667e-1f), p, r);
    p                         = vfmaq_f32(vdupq_n_f32(0.5f), p, r);
    p                         = vfmaq_f32(vdupq_n_f32(1.0f), p, r);
    p                         = vfmaq_f32(vdupq_n_f32(1.0f), p, r);
    const int32x4_t power     = vshlq_n_s32(vcvtnq_s32_f32(n), 23);
    const int32x4_t y         = vaddq_s32(vreinterpretq_s32_f32(p), power);
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_s32(y), dead));
}

// cap * tanh(x / cap)
static inline float32x4_t soft_cap(float32x4_t x, float cap) {
    const float32x4_t e     = exp_nonpositive(vmulq_n_f32(vabsq_f32(x), -2.0f / cap));
    const float32x4_t one   = vdupq_n_f32(1.0f);
    const float32x4_t value = vmulq_n_f32(vdivq_f32(vsubq_f32(one, e), vaddq_f32(one, e)), cap);
    return vbslq_f32(vdupq_n_u32(0x80000000u), x, value); // the sign of x
}

// Four halves, widened.
static inline float32x4_t widen(const uint16_t * h) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(h)));
}

// Squared error of coefficients c [rank] in bands of more than `beyond` bits, but not of 16, at scale s (neon_encode.cpp).
float squared_error(const HeadCodec & codec, const float * c, float s, int32_t beyond);

// For codecs with a path (neon_path.cpp): the scale code for c, with `middle` the best one without a path; and the codes
// [rank] of the path of least cost at scale s (other entries stay unchanged).
uint8_t choose_path_scale(const HeadCodec & codec, const float * c, uint8_t middle);
void    find_path(const HeadCodec & codec, const float * c, float s, uint8_t * code);

// kernels of the table
void    attend(const AttendArgs & a);
void    attend_exact(const ExactArgs & a);
bool    pack_recent(const float * x, const float * mean, int64_t d, uint8_t * row);
void    unpack_recent(const uint8_t * row, const float * mean, int64_t d, uint16_t * out);
int64_t encode(const HeadCodec & codec, const float * x, int64_t ldx, int64_t n, const int64_t * cells, uint8_t * tiles,
               int64_t tile_stride);
void    project(const Matrix & m, int64_t r, int64_t d, const float * x, int64_t ldx, int64_t n, float scale, float * y,
                int64_t ldy);
void    reconstruct(const Matrix & m, int64_t r, int64_t d, const float * e, float * o);
void    to_half(const float * x, uint16_t * h, int64_t n);

} // namespace subkv::neon
