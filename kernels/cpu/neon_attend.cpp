// neon_attend.cpp: the products of integer_attend.h with SDOT, four cells or coefficients at a time. SDOT multiplies
// signed bytes, so codes are taken less 128.
#include "versions.h"

#if defined(SUBKV_ARM64)

#    include "integer_attend.h"
#    include "neon.h"

namespace subkv::neon {

using cpu::BLOCK;
using cpu::BytePart;
using cpu::BytePlan;
using cpu::LARGEST;
using cpu::Row;
using cpu::Rows;
using cpu::Tile;
using cpu::TILE;

constexpr int     VECS   = 4;   // registers of four cells, or of four coefficients
constexpr int32_t BEFORE = 128; // what codes are taken less

// Integers u, |u| <= LARGEST, as signed bytes u = 256 * high + low.
static inline void split(int32x4_t u, int8_t * high, int8_t * low) {
    const int32x4_t h = vshrq_n_s32(vaddq_s32(u, vdupq_n_s32(128)), 8);
    const int32x4_t l = vsubq_s32(u, vshlq_n_s32(h, 8));
    const int8x8_t  b = vmovn_s16(vcombine_s16(vmovn_s32(h), vmovn_s32(l)));
    vst1_lane_s32((int32_t *) high, vreinterpret_s32_s8(b), 0);
    vst1_lane_s32((int32_t *) low, vreinterpret_s32_s8(b), 1);
}

// Codes less 128 of one group of a row.
static inline int8x16_t codes_of(const BytePart * part, int32_t n_parts, const uint8_t * row) {
    uint8x16_t codes = vdupq_n_u8(0);
    for (int32_t i = 0; i < n_parts; ++i) {
        const uint8x16_t bytes = vqtbl1q_u8(vld1q_u8(row + part[i].window), vld1q_u8(part[i].index));
        codes = vorrq_u8(codes, vandq_u8(vshlq_u8(bytes, vld1q_s8(part[i].left)), vld1q_u8(part[i].mask)));
    }
    return vreinterpretq_s8_u8(veorq_u8(codes, vdupq_n_u8(BEFORE)));
}

// What centring takes off a code, twice, now that it is less 128. Places beyond the rank hold -128 and count nothing.
static inline int32x4_t odd_of(const BytePlan & plan, int32_t j) {
    return vsubq_s32(vld1q_s32(plan.odd + j), vdupq_n_s32(2 * BEFORE));
}

struct Isa {
    using Plan                 = BytePlan;
    static constexpr int LANES = cpu::LANES_128;
    static constexpr int MR    = 2; // 16 sums, 4 registers of codes

    static float exp_nonpositive(float x) { return vgetq_lane_f32(neon::exp_nonpositive(vdupq_n_f32(x)), 0); }

    static uint64_t open_cells(const float * bias, int32_t n) {
        uint64_t open = 0;
        for (int32_t c = 0; c < n; ++c) {
            open |= (uint64_t) (bias[c] != cpu::MINUS_INF) << c;
        }
        return open;
    }

    static void widen8(const uint8_t * halves, float * x) {
        uint16_t h[8];
        memcpy(h, halves, sizeof(h));
        vst1q_f32(x, widen(h));
        vst1q_f32(x + 4, widen(h + 4));
    }

    static void unpack_keys(const BytePlan & plan, const Rows & rows, uint8_t * out) {
        for (int32_t g = 0; g < plan.n_groups; ++g) {
            const BytePart * part = plan.parts + plan.groups[g].first_part;
            for (int32_t c = 0; c < rows.n; c += 4) {
                int32x4_t r[4];
                for (int i = 0; i < 4; ++i) {
                    rows.prefetch(c + i);
                    r[i] = vreinterpretq_s32_s8(codes_of(part, plan.groups[g].n_parts, rows.at(c + i)));
                }
                const int64x2_t even_01 = vreinterpretq_s64_s32(vtrn1q_s32(r[0], r[1]));
                const int64x2_t odd_01  = vreinterpretq_s64_s32(vtrn2q_s32(r[0], r[1]));
                const int64x2_t even_23 = vreinterpretq_s64_s32(vtrn1q_s32(r[2], r[3]));
                const int64x2_t odd_23  = vreinterpretq_s64_s32(vtrn2q_s32(r[2], r[3]));
                const int64x2_t dword[] = { vtrn1q_s64(even_01, even_23), vtrn1q_s64(odd_01, odd_23),
                                            vtrn2q_s64(even_01, even_23), vtrn2q_s64(odd_01, odd_23) };
                for (int k = 0; k < 4; ++k) {
                    vst1q_s64((int64_t *) (out + (g * 4 + k) * BLOCK + c * 4), dword[k]);
                }
            }
        }
    }

    static void unpack_values(const BytePlan & plan, const Rows & rows, uint8_t * out) {
        const int64_t stride = plan.n_groups * LANES * 4;
        for (int32_t g = 0; g < plan.n_groups; ++g) {
            const BytePart * part = plan.parts + plan.groups[g].first_part;
            for (int32_t c = 0; c < rows.n; c += 4) {
                int8x16_t r[4];
                for (int i = 0; i < 4; ++i) {
                    rows.prefetch(c + i);
                    r[i] = codes_of(part, plan.groups[g].n_parts, rows.at(c + i));
                }
                const int16x8_t low_01  = vreinterpretq_s16_s8(vzip1q_s8(r[0], r[1]));
                const int16x8_t high_01 = vreinterpretq_s16_s8(vzip2q_s8(r[0], r[1]));
                const int16x8_t low_23  = vreinterpretq_s16_s8(vzip1q_s8(r[2], r[3]));
                const int16x8_t high_23 = vreinterpretq_s16_s8(vzip2q_s8(r[2], r[3]));
                int16_t *       to      = (int16_t *) (out + c / 4 * stride + g * LANES * 4);
                vst1q_s16(to, vzip1q_s16(low_01, low_23));
                vst1q_s16(to + 8, vzip2q_s16(low_01, low_23));
                vst1q_s16(to + 16, vzip1q_s16(high_01, high_23));
                vst1q_s16(to + 24, vzip2q_s16(high_01, high_23));
            }
        }
    }

    static float read_scales(const Rows & rows, uint64_t seen, float * scale) {
        float largest = 0.0f;
        for (int32_t c = 0; c < rows.n; ++c) {
            scale[c] = (seen >> c & 1) != 0 ? SCALES[*rows.at(c)] : 0.0f;
            largest  = scale[c] > largest ? scale[c] : largest;
        }
        return largest;
    }

    static void quantize_query(const float * q, const float * ratio, int32_t rank, const BytePlan & plan, int8_t * high,
                               int8_t * low, Row & row) {
        alignas(16) float x[MAX_HEAD_SIZE];
        const int32_t     n       = plan.n_groups * LANES;
        float             largest = 0.0f;
        bool              finite  = true;
        for (int32_t j = 0; j < n; ++j) {
            x[j]                  = j < rank ? q[j] * ratio[j] : 0.0f;
            const float magnitude = __builtin_fabsf(x[j]);
            finite                = finite && magnitude <= __FLT_MAX__;
            largest               = magnitude > largest ? magnitude : largest;
        }
        const float inverse = largest > 1e-30f ? LARGEST / largest : 0.0f;
        int64x2_t   middle  = vdupq_n_s64(0); // twice what centring takes off
        for (int32_t j = 0; j < n; j += 4) {
            const int32x4_t u = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + j), inverse));
            split(u, high + j, low + j);
            middle = vpadalq_s32(middle, vmulq_s32(u, odd_of(plan, j)));
        }
        const int64_t twice = vaddvq_s64(middle);
        row.start           = (int32_t) -(twice >> 1);
        row.half            = (twice & 1) != 0 ? 0.5f : 0.0f;
        row.delta           = finite ? largest / LARGEST : __builtin_nanf("");
    }

    template <int ROWS>
    static void dots(const uint8_t * codes, int32_t n_dwords, const int8_t * q, int64_t stride, const Row * row,
                     Tile & tile) {
        for (int32_t first = 0; first < TILE; first += 4 * VECS) {
            int32x4_t high[ROWS][VECS];
            int32x4_t low[ROWS][VECS];
            for (int i = 0; i < ROWS; ++i) {
                for (int v = 0; v < VECS; ++v) {
                    high[i][v] = vdupq_n_s32(0);
                    low[i][v]  = vdupq_n_s32(row[i].start);
                }
            }
            for (int32_t j = 0; j < n_dwords; ++j) {
                int8x16_t c[VECS];
                for (int v = 0; v < VECS; ++v) {
                    c[v] = vld1q_s8((const int8_t *) codes + j * BLOCK + 4 * first + 16 * v);
                }
                for (int i = 0; i < ROWS; ++i) {
                    const int32_t * bytes = (const int32_t *) (q + 2 * i * stride);
                    const int8x16_t h     = vreinterpretq_s8_s32(vdupq_n_s32(bytes[j]));
                    const int8x16_t l     = vreinterpretq_s8_s32(vdupq_n_s32(bytes[stride / 4 + j]));
                    for (int v = 0; v < VECS; ++v) {
                        high[i][v] = vdotq_s32(high[i][v], c[v], h);
                        low[i][v]  = vdotq_s32(low[i][v], c[v], l);
                    }
                }
            }
            for (int i = 0; i < ROWS; ++i) {
                for (int v = 0; v < VECS; ++v) {
                    const int32x4_t sum = vaddq_s32(vshlq_n_s32(high[i][v], 8), low[i][v]);
                    vst1q_f32(tile.logit[i] + first + 4 * v, vsubq_f32(vcvtq_f32_s32(sum), vdupq_n_f32(row[i].half)));
                }
            }
        }
    }

    template <int ROWS> static void soften(Tile & tile, float softcap, Row * row) {
        for (int i = 0; i < ROWS; ++i) {
            soften_row(tile, i, softcap, row[i]);
        }
    }

    // Dots of a query row become integer weights; m, z, shrink, unit and weights of the row follow.
    static void soften_row(Tile & tile, int i, float softcap, Row & r) {
        const float32x4_t minus_inf = vdupq_n_f32(cpu::MINUS_INF);
        float32x4_t       top       = minus_inf;
        for (int32_t c = 0; c < TILE; c += 4) {
            const float32x4_t unit = vmulq_n_f32(vld1q_f32(tile.scale_k + c), r.delta);
            float32x4_t       x    = vfmaq_f32(vld1q_f32(tile.common[i] + c), vld1q_f32(tile.logit[i] + c), unit);
            if (softcap > 0.0f) {
                x = soft_cap(x, softcap);
            }
            const float32x4_t bias = vld1q_f32(tile.bias[i] + c);
            x                      = vfmaq_n_f32(x, bias, r.slope);
            x                      = vbslq_f32(vceqq_f32(bias, minus_inf), minus_inf, x);
            top                    = vmaxq_f32(top, x);
            vst1q_f32(tile.logit[i] + c, x);
        }
        const float tile_top = vmaxvq_f32(top);
        if (!(tile_top > cpu::MINUS_INF)) {
            cpu::skip_tile(tile, i, r);
            return;
        }
        const float inverse = tile.largest_v > 0.0f ? LARGEST / tile.largest_v : 0.0f;
        float32x4_t total   = vdupq_n_f32(0.0f);
        int32x4_t   sum     = vdupq_n_s32(0);
        for (int32_t c = 0; c < TILE; c += 4) {
            const float32x4_t e = neon::exp_nonpositive(vsubq_f32(vld1q_f32(tile.logit[i] + c), vdupq_n_f32(tile_top)));
            const int32x4_t   u = vcvtnq_s32_f32(vmulq_f32(e, vmulq_n_f32(vld1q_f32(tile.scale_v + c), inverse)));
            total               = vaddq_f32(total, e);
            vst1q_f32(tile.logit[i] + c, e);
            sum = vaddq_s32(sum, u);
            split(u, (int8_t *) tile.first[i] + c, (int8_t *) tile.second[i] + c);
        }
        cpu::take_tile<Isa>(tile, tile_top, vaddvq_f32(total), vaddvq_s32(sum), r);
    }

    template <int ROWS>
    static void add_values(const uint8_t * codes, const BytePlan & plan, const Row * row, float * sum,
                           int64_t sum_stride, const Tile & tile) {
        const int64_t stride  = plan.n_groups * LANES * 4;
        const int32_t n_quads = (tile.n + 3) / 4;
        for (int32_t g = 0; g < plan.n_groups; ++g) {
            int32x4_t high[ROWS][VECS];
            int32x4_t low[ROWS][VECS];
            for (int i = 0; i < ROWS; ++i) {
                for (int v = 0; v < VECS; ++v) {
                    high[i][v] = low[i][v] = vdupq_n_s32(0);
                }
            }
            for (int32_t c = 0; c < n_quads; ++c) {
                int8x16_t u[VECS];
                for (int v = 0; v < VECS; ++v) {
                    u[v] = vld1q_s8((const int8_t *) codes + c * stride + g * LANES * 4 + 16 * v);
                }
                for (int i = 0; i < ROWS; ++i) {
                    const int8x16_t h = vreinterpretq_s8_s32(vdupq_n_s32(((const int32_t *) tile.first[i])[c]));
                    const int8x16_t l = vreinterpretq_s8_s32(vdupq_n_s32(((const int32_t *) tile.second[i])[c]));
                    for (int v = 0; v < VECS; ++v) {
                        high[i][v] = vdotq_s32(high[i][v], u[v], h);
                        low[i][v]  = vdotq_s32(low[i][v], u[v], l);
                    }
                }
            }
            for (int i = 0; i < ROWS; ++i) {
                for (int v = 0; v < VECS; ++v) { // twice the sum, since twice the middle is an integer
                    const int32_t     j      = g * LANES + 4 * v;
                    const int32x4_t   twice  = vaddq_s32(vshlq_n_s32(high[i][v], 9), vshlq_n_s32(low[i][v], 1));
                    const int32x4_t   middle = vmulq_n_s32(odd_of(plan, j), row[i].weights);
                    float *           at     = sum + i * sum_stride + j;
                    const float32x4_t add    = vmulq_n_f32(vcvtq_f32_s32(vsubq_s32(twice, middle)), 0.5f * row[i].unit);
                    vst1q_f32(at, vfmaq_n_f32(add, vld1q_f32(at), row[i].shrink));
                }
            }
        }
    }
};

void attend(const AttendArgs & a) {
    const auto plan = [](const HeadCodec & codec) -> const BytePlan & {
        return cpu::byte_plan_of(codec, cpu::Order::NATURAL_128);
    };
    cpu::attend_codes<Isa>(a, plan(*a.k), plan(*a.v));
}

} // namespace subkv::neon

#endif
