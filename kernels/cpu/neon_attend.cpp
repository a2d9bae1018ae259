// neon_attend.cpp: the Isa of attend_tiles.h with NEON. Products use SDOT on signed bytes, so 128 is subtracted from
// codes.
#include "versions.h"

#if defined(SUBKV_ARM64)

#    include "attend_tiles.h"
#    include "level_tables.h"
#    include "neon.h"

namespace subkv::neon {
namespace {

struct Isa : Floats {
    static constexpr int     W               = 4;
    static constexpr int32_t ZERO_SHIFT      = 128; // subtracted from codes
    static constexpr bool    FROM_TILE       = false;
    static constexpr int     FROM_TILE_ROWS  = 0;
    static constexpr int     KEY_ROWS        = 2;
    static constexpr int     VALUE_ROWS      = 4;
    static constexpr int     CODE_BIT        = 0;
    static constexpr bool    OTHER_BITS_ZERO = true;

    static constexpr int key_regs(int) { return 4; } // 16 sums, 4 registers of codes, 2 of queries

    static constexpr int octets(int) { return 1; }

    using I      = int32x4_t;
    using Opened = int8x16_t;

    template <typename Isa> using TilePath = cpu::RegisterPath<Isa>;

    struct Sum {
        int32x4_t high, low;
    };

    static float largest(F x) { return vmaxvq_f32(x); }

    static float sum(F x) { return vaddvq_f32(x); }

    static F keep(F x, uint32_t lanes) {
        static const uint32_t bits[4] = { 1, 2, 4, 8 };
        const uint32x4_t      on      = vtstq_u32(vdupq_n_u32(lanes), vld1q_u32(bits));
        return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(x), on));
    }

    static I zero() { return vdupq_n_s32(0); }

    static I to_int(F x) { return vcvtnq_s32_f32(x); }

    static F to_float(I x) { return vcvtq_f32_s32(x); }

    static I plus_int(I a, I b) { return vaddq_s32(a, b); }

    static int32_t sum_int(I x) { return vaddvq_s32(x); }

    static void store_int(int32_t * at, I x) { vst1q_s32(at, x); }

    static I bytes(const uint8_t * at) { return vreinterpretq_s32_u8(vld1q_u8(at)); }

    static void put_bytes(uint8_t * at, I x) { vst1q_u8(at, vreinterpretq_u8_s32(x)); }

    template <int RIGHT> static I shift(I x) {
        if constexpr (RIGHT > 0) {
            return vreinterpretq_s32_u8(vshrq_n_u8(vreinterpretq_u8_s32(x), RIGHT));
        } else if constexpr (RIGHT < 0) {
            return vreinterpretq_s32_u8(vshlq_n_u8(vreinterpretq_u8_s32(x), -RIGHT));
        } else {
            return x;
        }
    }

    static I mask(I x, int byte) {
        return vreinterpretq_s32_u8(vandq_u8(vreinterpretq_u8_s32(x), vdupq_n_u8((uint8_t) byte)));
    }

    template <bool> static I join(I x, I y, int byte) { return vorrq_s32(x, mask(y, byte)); }

    static I plus_bytes(I x, int byte) {
        return vreinterpretq_s32_u8(vaddq_u8(vreinterpretq_u8_s32(x), vdupq_n_u8((uint8_t) byte)));
    }

    static I raise_keys(I x, I other) {
        const uint32x4_t last = vshrq_n_u32(vreinterpretq_u32_s32(other), 24);
        return vreinterpretq_s32_u32(vsliq_n_u32(last, vreinterpretq_u32_s32(x), 8));
    }

    static I raise_values(I x, I below) {
        return vreinterpretq_s32_u8(vextq_u8(vreinterpretq_u8_s32(below), vreinterpretq_u8_s32(x), 8));
    }

    struct Previous {
        uint8x16_t window; // 4 u_t + 2 x_{t-1} + x_{t-2}
    };

    static I ends(I one, I two) { // a window without its own code
        const uint8x16_t low = vshlq_n_u8(vandq_u8(vreinterpretq_u8_s32(two), vdupq_n_u8(1)), 1);
        return vreinterpretq_s32_u8(vsliq_n_u8(low, vreinterpretq_u8_s32(one), 2));
    }

    static Previous begin(I ends) { return { vreinterpretq_u8_s32(ends) }; }

    template <int BITS> static I level(I code, Previous & before) {
        const uint8x16_t w = vsliq_n_u8(vshrq_n_u8(before.window, 1), vreinterpretq_u8_s32(code), 2);
        before.window      = w;
        if constexpr (BITS == 2) {
            const auto & table =
                cpu::BY_WINDOW<2, 16>.byte; // Clang's loads are macros, which split their arguments at commas.
            return vreinterpretq_s32_u8(vqtbl1q_u8(vld1q_u8(table), w));
        } else if constexpr (BITS == 3) {
            const auto & table = cpu::BY_WINDOW<3, 32>.byte;
            return vreinterpretq_s32_u8(vqtbl2q_u8(vld1q_u8_x2(table), w));
        } else if constexpr (BITS == 4) {
            const auto & table = cpu::BY_WINDOW<4, 64>.byte;
            return vreinterpretq_s32_u8(vqtbl4q_u8(vld1q_u8_x4(table), w));
        } else {
            const uint8x16_t two   = vshlq_n_u8(vandq_u8(w, vdupq_n_u8(1)), 1);
            const uint8x16_t index = veorq_u8(vshrq_n_u8(w, 1), two);
            const uint8_t *  table = cpu::BY_INDEX<BITS, 2 << BITS>.byte;
            const uint8x16_t low   = vqtbl4q_u8(vld1q_u8_x4(table), index);
            if constexpr (BITS == 5) {
                return vreinterpretq_s32_u8(low);
            } else { // For an index outside the table, TBL gives 0 and TBX keeps the byte.
                const uint8x16_t above = vsubq_u8(index, vdupq_n_u8(64));
                return vreinterpretq_s32_u8(vqtbx4q_u8(low, vld1q_u8_x4(table + 64), above));
            }
        }
    }

    static int8x16_t spread_dword(const int8_t * at) {
        int32_t x;
        memcpy(&x, at, sizeof(x));
        return vreinterpretq_s8_s32(vdupq_n_s32(x));
    }

    static int8x16_t spread_qword(const int8_t * at) {
        int64_t x;
        memcpy(&x, at, sizeof(x));
        return vreinterpretq_s8_s64(vdupq_n_s64(x));
    }

    static F scales_of(const uint8_t * codes) {
        const float x[4] = { SCALES[codes[0]], SCALES[codes[1]], SCALES[codes[2]], SCALES[codes[3]] };
        return vld1q_f32(x);
    }

    static uint64_t visible_cells(const float * bias, int32_t n) {
        uint64_t open = 0;
        for (int32_t c = 0; c < n; ++c) {
            open |= (uint64_t) (bias[c] != cpu::MINUS_INF) << c;
        }
        return open;
    }

    static uint64_t equal_bytes(const uint8_t * at, int byte) { // a bit for each of 64 bytes
        const uint8x16_t wanted = vdupq_n_u8((uint8_t) byte);
        const auto       equal  = [&](int i) { return vceqq_u8(vld1q_u8(at + 16 * i), wanted); };
        uint64_t         bits   = 0;
        if (vmaxvq_u8(vorrq_u8(vorrq_u8(equal(0), equal(1)), vorrq_u8(equal(2), equal(3)))) != 0) {
            for (int c = 0; c < TILE; ++c) {
                bits |= (uint64_t) (at[c] == (uint8_t) byte) << c;
            }
        }
        return bits;
    }

    static F widen_cells(const uint8_t * halves) {
        uint16_t h[4];
        memcpy(h, halves, sizeof(h));
        return widen(h);
    }

    // Splits integers u, |u| <= LARGEST, into signed bytes with u = 256 * high + low.
    static void split(I u, int8_t * high, int8_t * low) {
        const int32x4_t h        = vshrq_n_s32(vaddq_s32(u, vdupq_n_s32(128)), 8);
        const int32x4_t l        = vsubq_s32(u, vshlq_n_s32(h, 8));
        const int32x2_t b        = vreinterpret_s32_s8(vmovn_s16(vcombine_s16(vmovn_s32(h), vmovn_s32(l))));
        const int32_t   parts[2] = { vget_lane_s32(b, 0), vget_lane_s32(b, 1) };
        memcpy(high, parts, sizeof(int32_t));
        memcpy(low, parts + 1, sizeof(int32_t));
    }

    static Opened open(I codes) {
        return vreinterpretq_s8_u8(veorq_u8(vreinterpretq_u8_s32(codes), vdupq_n_u8(ZERO_SHIFT)));
    }

    static Sum start(int32_t x) { return { vdupq_n_s32(0), vdupq_n_s32(x) }; }

    static void add(Sum & sum, Opened codes, int8x16_t first, int8x16_t second) {
        sum.high = vdotq_s32(sum.high, codes, first);
        sum.low  = vdotq_s32(sum.low, codes, second);
    }

    static I total(Sum sum) { return vaddq_s32(vshlq_n_s32(sum.high, 8), sum.low); }

    // at[j] = shrink * at[j] + weight_step * (2 * the sum of coefficient j - middle). The sum is that of two dwords.
    static void add_octet(const Sum * sum, int32_t middle, float shrink, float weight_step, float * at) {
        for (int k = 0; k < 2; ++k) {
            const I pairs   = vpaddq_s32(total(sum[2 * k]), total(sum[2 * k + 1]));
            const I centred = vsubq_s32(vshlq_n_s32(pairs, 1), vdupq_n_s32(middle));
            const F add     = vmulq_n_f32(vcvtq_f32_s32(centred), weight_step);
            vst1q_f32(at + 4 * k, vfmaq_n_f32(add, vld1q_f32(at + 4 * k), shrink));
        }
    }
};

} // namespace

void attend(const AttendArgs & a) {
    cpu::attend<Isa>(a);
}

} // namespace subkv::neon

#endif
