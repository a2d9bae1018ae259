// neon.h: registers of four and of eight floats, shared by the NEON files.
#pragma once

#include "subkv/ops.h"

#include <arm_neon.h>

namespace subkv::neon {

// Widens four halves.
static inline float32x4_t widen(const uint16_t * h) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(h)));
}

// Registers of four floats, with the functions that lanes.h needs of any register.
struct Floats {
    using F = float32x4_t;

    static F set(float x) { return vdupq_n_f32(x); }

    static F load(const float * x) { return vld1q_f32(x); }

    static void store(float * at, F x) { vst1q_f32(at, x); }

    static F plus(F a, F b) { return vaddq_f32(a, b); }

    static F sub(F a, F b) { return vsubq_f32(a, b); }

    static F mul(F a, F b) { return vmulq_f32(a, b); }

    static F div(F a, F b) { return vdivq_f32(a, b); }

    static F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }

    static F fnma(F a, F b, F c) { return vfmsq_f32(c, a, b); }

    static F min(F a, F b) { return vbslq_f32(vcltq_f32(a, b), a, b); }

    static F max(F a, F b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }

    static F abs(F x) { return vabsq_f32(x); }

    static F with_sign(F size, F of) { return vbslq_f32(vdupq_n_u32(0x80000000u), of, size); }

    static F round(F x) { return vrndnq_f32(x); }

    static F power(F t) { return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_f32(t), 23)); }

    static F mul_from(float least, F x, F a, F b) { // NaN is not less than `least`, so it stays visible.
        const uint32x4_t less = vcltq_f32(x, set(least));
        return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(mul(a, b)), less));
    }

    static F hide(F x, F bias) { // sets x to -infinity where the bias is -infinity
        const F minus_inf = set(-__builtin_inff());
        return vbslq_f32(vceqq_f32(bias, minus_inf), minus_inf, x);
    }

    static float first(F x) { return vgetq_lane_f32(x, 0); }
};

// The Isa of lanes.h, with eight floats in two registers of four. Sums are in AVX2's order.
struct Lanes {
    static constexpr int  W          = 8;
    static constexpr bool HAS_LOOKUP = false;

    struct F {
        float32x4_t low, high;
    };

    using Half = Floats;

    static F set(float x) { return { Half::set(x), Half::set(x) }; }

    static F load(const float * x) { return { Half::load(x), Half::load(x + 4) }; }

    static void store(float * at, F x) { store_parts(at, at + 4, x); }

    static F plus(F a, F b) { return { Half::plus(a.low, b.low), Half::plus(a.high, b.high) }; }

    static F sub(F a, F b) { return { Half::sub(a.low, b.low), Half::sub(a.high, b.high) }; }

    static F mul(F a, F b) { return { Half::mul(a.low, b.low), Half::mul(a.high, b.high) }; }

    static F div(F a, F b) { return { Half::div(a.low, b.low), Half::div(a.high, b.high) }; }

    static F fma(F a, F b, F c) { return { Half::fma(a.low, b.low, c.low), Half::fma(a.high, b.high, c.high) }; }

    static F fnma(F a, F b, F c) { return { Half::fnma(a.low, b.low, c.low), Half::fnma(a.high, b.high, c.high) }; }

    static F min(F a, F b) { return { Half::min(a.low, b.low), Half::min(a.high, b.high) }; }

    static F max(F a, F b) { return { Half::max(a.low, b.low), Half::max(a.high, b.high) }; }

    static F abs(F x) { return { Half::abs(x.low), Half::abs(x.high) }; }

    static F with_sign(F size, F of) {
        return { Half::with_sign(size.low, of.low), Half::with_sign(size.high, of.high) };
    }

    static F round(F x) { return { Half::round(x.low), Half::round(x.high) }; }

    static F power(F t) { return { Half::power(t.low), Half::power(t.high) }; }

    static F mul_from(float least, F x, F a, F b) {
        return { Half::mul_from(least, x.low, a.low, b.low), Half::mul_from(least, x.high, a.high, b.high) };
    }

    static F hide(F x, F bias) { return { Half::hide(x.low, bias.low), Half::hide(x.high, bias.high) }; }

    static float first(F x) { return Half::first(x.low); }

    static float largest(F x) { return vmaxvq_f32(Half::max(x.low, x.high)); }

    static float sum(F x) {
        const float32x4_t four = vaddq_f32(x.low, x.high);
        const float32x2_t two  = vadd_f32(vget_low_f32(four), vget_high_f32(four));
        return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
    }

    static F widen(const uint16_t * h) { return { neon::widen(h), neon::widen(h + 4) }; }

    static F widen(const int8_t * b) {
        const int16x8_t words = vmovl_s8(vld1_s8(b));
        return { vcvtq_f32_s32(vmovl_s16(vget_low_s16(words))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(words))) };
    }

    static float to_float(uint16_t h) { return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(h))), 0); }

    static float to_float(int8_t b) { return (float) b; }

    static F widen_twice(const uint16_t * h) { return { neon::widen(h), neon::widen(h) }; }

    static void to_halves(uint16_t * h, F x) {
        vst1_u16(h, vreinterpret_u16_f16(vcvt_f16_f32(x.low)));
        vst1_u16(h + 4, vreinterpret_u16_f16(vcvt_f16_f32(x.high)));
    }

    static void to_bytes(uint8_t * at, F x) {
        const uint16x4_t low = vmovn_u32(vcvtq_u32_f32(x.low)), high = vmovn_u32(vcvtq_u32_f32(x.high));
        vst1_u8(at, vmovn_u16(vcombine_u16(low, high)));
    }

    static void store_parts(float * low, float * high, F x) {
        Half::store(low, x.low);
        Half::store(high, x.high);
    }

    static F sums(const F (&x)[8]) { return { sums_of_four(x), sums_of_four(x + 4) }; }

    static void add_to_doubles(double * s, F x) {
        add_two(s, vcvt_f64_f32(vget_low_f32(x.low)));
        add_two(s + 2, vcvt_high_f64_f32(x.low));
        add_two(s + 4, vcvt_f64_f32(vget_low_f32(x.high)));
        add_two(s + 6, vcvt_high_f64_f32(x.high));
    }

    static void transpose(F (&r)[8]) {
        float32x4_t part[4][4]; // low halves of registers 0 to 3 and 4 to 7, then high halves
        for (int i = 0; i < 4; ++i) {
            part[0][i] = r[i].low;
            part[1][i] = r[4 + i].low;
            part[2][i] = r[i].high;
            part[3][i] = r[4 + i].high;
        }
        for (auto & four : part) {
            transpose_four(four);
        }
        for (int i = 0; i < 4; ++i) {
            r[i]     = { part[0][i], part[1][i] };
            r[4 + i] = { part[2][i], part[3][i] };
        }
    }

    static unsigned less(F a, F b) { return bits_of(vcltq_f32(a.low, b.low), vcltq_f32(a.high, b.high)); }

    static unsigned visible(F bias) {
        const float32x4_t minus_inf = Half::set(-__builtin_inff());
        return bits_of(vmvnq_u32(vceqq_f32(bias.low, minus_inf)), vmvnq_u32(vceqq_f32(bias.high, minus_inf)));
    }

    static bool any_nan(F x) { return vminvq_u32(vandq_u32(vceqq_f32(x.low, x.low), vceqq_f32(x.high, x.high))) == 0; }

    static void low_bits(int32_t * at, F x) {
        vst1q_s32(at, vreinterpretq_s32_f32(x.low));
        vst1q_s32(at + 4, vreinterpretq_s32_f32(x.high));
    }

    static F rows(const float * a, const float * b) { return { Half::set(*a), Half::set(*b) }; }

    static F load_twice(const float * at) { return { Half::load(at), Half::load(at) }; }

    static F swap_pairs(F x) { return { vrev64q_f32(x.low), vrev64q_f32(x.high) }; }

    static F repeat_low(F x) { return { vzip1q_f32(x.low, x.low), vzip1q_f32(x.high, x.high) }; }

    static F repeat_high(F x) { return { vzip2q_f32(x.low, x.low), vzip2q_f32(x.high, x.high) }; }

private:
    static float32x4_t sums_of_four(const F * x) {
        const float32x4_t low  = vpaddq_f32(vpaddq_f32(x[0].low, x[1].low), vpaddq_f32(x[2].low, x[3].low));
        const float32x4_t high = vpaddq_f32(vpaddq_f32(x[0].high, x[1].high), vpaddq_f32(x[2].high, x[3].high));
        return vaddq_f32(low, high);
    }

    static void add_two(double * s, float64x2_t x) { vst1q_f64(s, vaddq_f64(vld1q_f64(s), x)); }

    static void transpose_four(float32x4_t (&r)[4]) {
        const float32x4x2_t a = vtrnq_f32(r[0], r[1]), b = vtrnq_f32(r[2], r[3]);
        r[0] = vcombine_f32(vget_low_f32(a.val[0]), vget_low_f32(b.val[0]));
        r[1] = vcombine_f32(vget_low_f32(a.val[1]), vget_low_f32(b.val[1]));
        r[2] = vcombine_f32(vget_high_f32(a.val[0]), vget_high_f32(b.val[0]));
        r[3] = vcombine_f32(vget_high_f32(a.val[1]), vget_high_f32(b.val[1]));
    }

    static unsigned bits_of(uint32x4_t low, uint32x4_t high) { // a bit for each lane of two masks
        static const uint32_t bits[8] = { 1, 2, 4, 8, 16, 32, 64, 128 };
        return vaddvq_u32(vorrq_u32(vandq_u32(low, vld1q_u32(bits)), vandq_u32(high, vld1q_u32(bits + 4))));
    }
};

void attend(const AttendArgs & a); // neon_attend.cpp

} // namespace subkv::neon
