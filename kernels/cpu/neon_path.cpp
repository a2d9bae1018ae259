// neon_path.cpp: the encoder's search for paths through a trellis. Definition: ref/trellis.cpp, which it follows operation
// by operation: the same coefficients give the same bytes. As avx2_path.cpp: candidates of a row in lanes, then states.
#include "versions.h"

#if defined(SUBKV_ARM64)

#    include "neon.h"
#    include "path_search.h"

namespace subkv::neon {
namespace {

constexpr int   STATES = cpu::PATH_STATES;
constexpr float INF    = __builtin_inff();
static_assert(TRELLIS_TRIED == 4, "a candidate in each lane");

// The number of the nearest level in each subset, and its error.
struct Nearest {
    float32x4_t number[STATES];
    float32x4_t error[STATES];
};

float32x4_t with_sign(float32x4_t size, float32x4_t of) {
    return vbslq_f32(vdupq_n_u32(0x80000000u), of, size);
}

Nearest nearest(int32_t bits, float32x4_t step, float32x4_t inverse, float32x4_t c) {
    const float32x4_t y    = vmulq_f32(c, inverse);
    const float32x4_t size = vabsq_f32(y);
    float32x4_t       p    = size;
    for (int n = 1; n < N_LINES; ++n) {
        const TrellisLine line = trellis_line(bits, n);
        p                      = vminq_f32(p, vfmaq_n_f32(vdupq_n_f32(line.b), size, line.a));
    }
    p                 = with_sign(p, y);
    const float half  = (float) (1 << bits);
    const float bend  = (float) trellis_double(bits) + 0.5f;
    const float bends = bend + ((float) trellis_triple(bits) + 0.5f);
    Nearest     found;
    for (int q = 0; q < STATES; ++q) {
        const float32x4_t g = vrndnq_f32(vfmaq_n_f32(vdupq_n_f32(0.25f * (half - 0.5f - (float) q)), p, 0.25f));
        // the result for NaN is 0
        found.number[q]         = vminq_f32(vmaxnmq_f32(g, vdupq_n_f32(0.0f)), vdupq_n_f32(0.5f * half - 1.0f));
        const float32x4_t place = vfmaq_n_f32(vdupq_n_f32((float) q - half + 0.5f), found.number[q], 4.0f);
        const float32x4_t far   = vabsq_f32(place);
        const float32x4_t two   = vfmaq_n_f32(vdupq_n_f32(-bend), far, 2.0f);
        const float32x4_t all   = vfmaq_n_f32(vdupq_n_f32(-bends), far, 3.0f);
        found.error[q]          = vfmsq_f32(c, step, with_sign(vmaxq_f32(far, vmaxq_f32(two, all)), place));
    }
    return found;
}

float32x4_t from(float32x4_t error, float32x4_t cost) {
    return vfmaq_f32(cost, error, error);
}

float32x4_t least_of(const float32x4_t * cost) {
    return vminq_f32(vminq_f32(cost[0], cost[1]), vminq_f32(cost[2], cost[3]));
}

void extend(const Nearest & n, float32x4_t (&cost)[STATES]) {
    const float32x4_t next[STATES] = {
        vminq_f32(from(n.error[2], cost[2]), from(n.error[0], cost[0])),
        vminq_f32(from(n.error[0], cost[2]), from(n.error[2], cost[0])),
        vminq_f32(from(n.error[3], cost[3]), from(n.error[1], cost[1])),
        vminq_f32(from(n.error[1], cost[3]), from(n.error[3], cost[1])),
    };
    for (int w = 0; w < STATES; ++w) {
        cost[w] = next[w];
    }
}

// Errors of all subsets at a place, in the order 0, 2, 1, 3, and the numbers of their levels in the order 0, 1, 2, 3.
struct Choice {
    float   error[STATES];
    uint8_t number[STATES];
};

// For four coefficients; their entries are `places` apart in `out`.
void store_choices(const Nearest & n, Choice * out, int32_t places) {
    float error[STATES][4], number[STATES][4];
    for (int q = 0; q < STATES; ++q) {
        vst1q_f32(error[q], n.error[q]);
        vst1q_f32(number[q], n.number[q]);
    }
    for (int lane = 0; lane < 4; ++lane, out += places) {
        *out = { { error[0][lane], error[2][lane], error[1][lane], error[3][lane] },
                 { (uint8_t) number[0][lane], (uint8_t) number[1][lane], (uint8_t) number[2][lane],
                   (uint8_t) number[3][lane] } };
    }
}

} // namespace

uint8_t choose_path_scale(const HeadCodec & codec, const float * c, uint8_t middle) {
    float s[TRELLIS_TRIED], cost_of[TRELLIS_TRIED];
    for (int i = 0; i < TRELLIS_TRIED; ++i) {
        s[i] = cpu::tried_scale(middle, i);
    }
    float32x4_t step[MAX_BANDS], inverse[MAX_BANDS], cost[STATES];
    for (int32_t b = 0; b < codec.n_bands; ++b) {
        step[b]    = vmulq_n_f32(vld1q_f32(s), level_step(codec, codec.bands[b]));
        inverse[b] = vdivq_f32(vdupq_n_f32(1.0f), step[b]);
    }
    for (float32x4_t & state : cost) {
        state = vdupq_n_f32(0.0f);
    }
    for (int32_t lane = 0; lane < BAND_STEP; ++lane) {
        if (codec.path == PATH_LANES) {
            cost[0] = least_of(cost);
            cost[1] = cost[2] = cost[3] = vdupq_n_f32(INF);
        }
        for (int32_t b = 0; b < codec.n_bands; ++b) {
            const Band & band = codec.bands[b];
            for (int32_t j = lane; on_path(codec, band) && j < band.n; j += BAND_STEP) {
                extend(nearest(band.bits, step[b], inverse[b], vdupq_n_f32(c[band.first + j])), cost);
            }
        }
    }
    vst1q_f32(cost_of, least_of(cost));
    return cpu::least_tried(middle, cost_of, [&](float at) { return squared_error(codec, c, at, TRELLIS_BITS); });
}

void find_path(const HeadCodec & codec, const float * c, float s, uint8_t * code) {
    Choice   choice[MAX_HEAD_SIZE];
    uint32_t decisions[MAX_HEAD_SIZE][STATES] = {}; // [place][start], bit w: state w's branch is from the larger state
    const cpu::PathOctets octets(codec);
    for (int32_t b = 0, octet = 0; b < codec.n_bands; ++b) {
        const Band & band = codec.bands[b];
        const float  step = s * level_step(codec, band);
        for (int32_t j = band.first; on_path(codec, band) && j < band.first + band.n; j += 8, ++octet) {
            for (int half = 0; half < 2; ++half) {
                store_choices(
                    nearest(band.bits, vdupq_n_f32(step), vdupq_n_f32(1.0f / step), vld1q_f32(c + j + 4 * half)),
                    choice + 4 * half * octets.n + octet, octets.n);
            }
        }
    }
    const bool lanes             = codec.path == PATH_LANES;
    const int  n_starts          = lanes ? 1 : STATES;
    int        before[BAND_STEP] = {}; // PATH_LANES: final state of the previous lane
    float      cost[STATES][STATES];   // of a start, by state
    for (int w = 0; w < STATES; ++w) {
        for (int at = 0; at < STATES; ++at) {
            cost[w][at] = w == at ? 0.0f : INF;
        }
    }
    static const uint32_t states[STATES] = { 1, 2, 4, 8 };
    for (int w = 0; w < n_starts; ++w) {
        float32x4_t now = vld1q_f32(cost[w]);
        for (int32_t t = 0; t < 8 * octets.n; ++t) {
            if (lanes && t % octets.n == 0) {
                vst1q_f32(cost[w], now);
                before[t / octets.n] = cpu::first_least(cost[w]);
                now                  = vsetq_lane_f32(cost[w][before[t / octets.n]], vdupq_n_f32(INF), 0);
            }
            const float32x4_t error = vld1q_f32(choice[t].error);
            const float32x4_t a     = from(error, vzip1q_f32(now, now));
            const float32x4_t b     = from(vrev64q_f32(error), vzip2q_f32(now, now));
            decisions[t][w]         = vaddvq_u32(vandq_u32(vcltq_f32(b, a), vld1q_u32(states)));
            now                     = vminq_f32(b, a);
        }
        vst1q_f32(cost[w], now);
    }
    int start = 0;
    for (int w = 1; w < n_starts; ++w) {
        start = cost[w][w] < cost[start][start] ? w : start;
    }
    cpu::trace_back(
        octets, lanes ? cpu::first_least(cost[0]) : start, lanes ? before : nullptr,
        [&](int32_t t, int q) { return choice[t].number[q]; },
        [&](int32_t t, int w) { return (decisions[t][start] >> w & 1) != 0; }, code);
}

} // namespace subkv::neon

#endif
