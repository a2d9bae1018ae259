// avx2_path.cpp: paths through a trellis (avx2_path.h).
//
// The search of the scale has one candidate of one of two rows in every lane, all at the same place of the path, so
// that a transition between states needs no moves between lanes. The search of the final path has one state per lane.
#include "versions.h"

#if defined(SUBKV_X86)

#    include "avx2_path.h"
#    include "path_search.h"

namespace subkv::avx2 {
namespace {

constexpr int   STATES = cpu::PATH_STATES;
constexpr float INF    = __builtin_inff();
static_assert(TRELLIS_TRIED * PATH_ROWS == 8, "a candidate of a row in each lane");

// Constants to find the levels of a width.
struct Levels {
    float factor[N_LINES] = {}, constant[N_LINES] = {}; // of trellis_line
    float origin[STATES]   = {};                        // per subset: position of its first level, in its levels
    float value[STATES][8] = {};                        // up to 4 bits: values of its levels
    float last = 0.0f, bend = 0.0f, both_bends = 0.0f, half = 0.0f;

    constexpr explicit Levels(int32_t bits) {
        for (int n = 0; n < N_LINES; ++n) {
            factor[n]   = trellis_line(bits, n).a;
            constant[n] = trellis_line(bits, n).b;
        }
        half = (float) (1 << bits);
        last = 0.5f * half - 1.0f;
        for (int q = 0; q < STATES; ++q) {
            origin[q] = 0.25f * (half - 0.5f - (float) q);
            for (int n = 0; n < 8; ++n) {
                value[q][n] = (float) trellis_level(bits, (4 * n + q) % (2 << bits)) + 0.5f;
            }
        }
        bend       = -((float) trellis_double(bits) + 0.5f);
        both_bends = bend - ((float) trellis_triple(bits) + 0.5f);
    }
};

constexpr Levels LEVELS[TRELLIS_BITS - 1] = { Levels(2), Levels(3), Levels(4), Levels(5), Levels(6) };

const Levels & levels_of(int32_t bits) {
    return LEVELS[bits - 2];
}

// The number of the nearest level in each subset, and its error.
struct Nearest {
    __m256i number[STATES];
    __m256  error[STATES];
};

// FEW: at most 8 levels of a subset
template <bool FEW> inline Nearest nearest(const Levels & l, __m256 step, __m256 inverse, __m256 c) {
    const __m256 sign_bit = _mm256_set1_ps(-0.0f);
    const __m256 y        = _mm256_mul_ps(c, inverse);
    const __m256 size     = _mm256_andnot_ps(sign_bit, y);
    __m256       p        = size;
    for (int n = 1; n < N_LINES; ++n) {
        p = _mm256_min_ps(p, _mm256_fmadd_ps(size, _mm256_set1_ps(l.factor[n]), _mm256_set1_ps(l.constant[n])));
    }
    p = _mm256_or_ps(p, _mm256_and_ps(y, sign_bit));
    Nearest found;
    for (int q = 0; q < STATES; ++q) {
        const __m256 g       = _mm256_fmadd_ps(p, _mm256_set1_ps(0.25f), _mm256_set1_ps(l.origin[q]));
        const __m256 within  = _mm256_min_ps(_mm256_max_ps(g, _mm256_setzero_ps()), _mm256_set1_ps(l.last));
        const __m256 rounded = _mm256_add_ps(within, _mm256_set1_ps(ROUNDER)); // a number, in its lowest bits
        __m256       value;
        found.number[q] = _mm256_castps_si256(rounded);
        if constexpr (FEW) {
            value = _mm256_permutevar8x32_ps(_mm256_loadu_ps(l.value[q]), found.number[q]);
        } else {
            const __m256 number = _mm256_sub_ps(rounded, _mm256_set1_ps(ROUNDER));
            const __m256 place =
                _mm256_fmadd_ps(number, _mm256_set1_ps(4.0f), _mm256_set1_ps((float) q - l.half + 0.5f));
            const __m256 far = _mm256_andnot_ps(sign_bit, place);
            const __m256 two = _mm256_fmadd_ps(far, _mm256_set1_ps(2.0f), _mm256_set1_ps(l.bend));
            const __m256 all = _mm256_fmadd_ps(far, _mm256_set1_ps(3.0f), _mm256_set1_ps(l.both_bends));
            value = _mm256_or_ps(_mm256_max_ps(far, _mm256_max_ps(two, all)), _mm256_and_ps(place, sign_bit));
        }
        found.error[q] = _mm256_fnmadd_ps(step, value, c);
    }
    return found;
}

inline __m256 from(__m256 error, __m256 cost) {
    return _mm256_fmadd_ps(error, error, cost);
}

inline __m256 least_of(const __m256 * cost) {
    return _mm256_min_ps(_mm256_min_ps(cost[0], cost[1]), _mm256_min_ps(cost[2], cost[3]));
}

// The coefficients of a band with the same j % 8, in ascending order.
template <bool FEW>
void extend(const Levels & l, __m256 step, __m256 inverse, const float * const * c, int32_t first, int32_t end,
            __m256 (&cost)[STATES]) {
    for (int32_t j = first; j < end; j += BAND_STEP) {
        const __m256  x            = _mm256_set_m128(_mm_broadcast_ss(c[1] + j), _mm_broadcast_ss(c[0] + j));
        const Nearest n            = nearest<FEW>(l, step, inverse, x);
        const __m256  next[STATES] = {
            _mm256_min_ps(from(n.error[2], cost[2]), from(n.error[0], cost[0])),
            _mm256_min_ps(from(n.error[0], cost[2]), from(n.error[2], cost[0])),
            _mm256_min_ps(from(n.error[3], cost[3]), from(n.error[1], cost[1])),
            _mm256_min_ps(from(n.error[1], cost[3]), from(n.error[3], cost[1])),
        };
        for (int w = 0; w < STATES; ++w) {
            cost[w] = next[w];
        }
    }
}

// Errors of all subsets at a place, in the order 0, 2, 1, 3, and the numbers of their levels in the order 0, 1, 2, 3.
struct alignas(16) Choice {
    float   error[STATES];
    int32_t number[STATES];
};

// For eight coefficients; their entries are `places` apart in `out`.
void store_choices(const Nearest & n, Choice * out, int32_t places) {
    float   error[STATES][8];
    int32_t number[STATES][8];
    for (int q = 0; q < STATES; ++q) {
        _mm256_storeu_ps(error[q], n.error[q]);
        _mm256_storeu_si256((__m256i *) number[q], n.number[q]);
    }
    for (int lane = 0; lane < 8; ++lane, out += places) {
        *out = { { error[0][lane], error[2][lane], error[1][lane], error[3][lane] },
                 { number[0][lane], number[1][lane], number[2][lane], number[3][lane] } };
    }
}

} // namespace

void choose_path_scales(const HeadCodec & codec, const float * const * c, int n, uint8_t * scale) {
    const float *     rows[PATH_ROWS] = { c[0], c[n - 1] };
    alignas(32) float s[8], cost_of[8];
    for (int i = 0; i < 8; ++i) {
        s[i] = cpu::tried_scale(scale[i / TRELLIS_TRIED < n ? i / TRELLIS_TRIED : 0], i % TRELLIS_TRIED);
    }
    __m256 step[MAX_BANDS], inverse[MAX_BANDS];
    for (int32_t b = 0; b < codec.n_bands; ++b) {
        if (on_path(codec, codec.bands[b])) {
            step[b]    = _mm256_mul_ps(_mm256_load_ps(s), _mm256_set1_ps(level_step(codec, codec.bands[b])));
            inverse[b] = _mm256_div_ps(_mm256_set1_ps(1.0f), step[b]);
        }
    }
    __m256 cost[STATES];
    for (__m256 & state : cost) {
        state = _mm256_setzero_ps();
    }
    for (int32_t lane = 0; lane < BAND_STEP; ++lane) {
        if (codec.path == PATH_LANES) {
            cost[0] = least_of(cost);
            cost[1] = cost[2] = cost[3] = _mm256_set1_ps(INF);
        }
        for (int32_t b = 0; b < codec.n_bands; ++b) {
            const Band & band = codec.bands[b];
            if (on_path(codec, band)) {
                const auto extended = band.bits <= 4 ? extend<true> : extend<false>;
                extended(levels_of(band.bits), step[b], inverse[b], rows, band.first + lane, band.first + band.n, cost);
            }
        }
    }
    _mm256_store_ps(cost_of, least_of(cost));
    for (int row = 0; row < n; ++row) {
        scale[row] = cpu::least_tried(scale[row], cost_of + row * TRELLIS_TRIED,
                                      [&](float at) { return squared_error(codec, c[row], at, TRELLIS_BITS); });
    }
}

void find_path(const HeadCodec & codec, const float * c, float s, uint8_t * code) {
    constexpr int32_t     MOST = MAX_HEAD_SIZE;
    Choice                choice[MOST];
    uint16_t              decisions[MOST]; // bit 4 * start + state: the branch is from the larger state
    const cpu::PathOctets octets(codec);
    for (int32_t b = 0, octet = 0; b < codec.n_bands; ++b) {
        const Band & band = codec.bands[b];
        if (!on_path(codec, band)) {
            continue;
        }
        const Levels & levels  = levels_of(band.bits);
        const float    step    = s * level_step(codec, band);
        const __m256   steps   = _mm256_set1_ps(step);
        const __m256   inverse = _mm256_set1_ps(1.0f / step);
        for (int32_t j = band.first; j < band.first + band.n; j += 8, ++octet) {
            const auto found = band.bits <= 4 ? nearest<true> : nearest<false>;
            store_choices(found(levels, steps, inverse, _mm256_loadu_ps(c + j)), choice + octet, octets.n);
        }
    }
    const bool lanes = codec.path == PATH_LANES;
    int        before[BAND_STEP]; // PATH_LANES: final state of the previous lane
    // costs of paths that start in state 0, and in state 1
    __m256 low  = _mm256_setr_ps(0.0f, INF, INF, INF, INF, 0.0f, INF, INF);
    __m256 high = _mm256_setr_ps(INF, INF, 0.0f, INF, INF, INF, INF, 0.0f);
    float  cost[4 * STATES];
    for (int32_t t = 0; t < 8 * octets.n; ++t) {
        if (lanes && t % octets.n == 0) {
            _mm256_storeu_ps(cost, low);
            const int state      = cpu::first_least(cost);
            before[t / octets.n] = state;
            low                  = _mm256_setr_ps(cost[state], INF, INF, INF, INF, INF, INF, INF);
        }
        const __m256 error   = _mm256_broadcast_ps((const __m128 *) choice[t].error);
        const __m256 swapped = _mm256_permute_ps(error, 0xb1);
        const __m256 a0      = from(error, _mm256_unpacklo_ps(low, low));
        const __m256 a1      = from(error, _mm256_unpacklo_ps(high, high));
        const __m256 b0      = from(swapped, _mm256_unpackhi_ps(low, low));
        const __m256 b1      = from(swapped, _mm256_unpackhi_ps(high, high));
        decisions[t]         = (uint16_t) (_mm256_movemask_ps(_mm256_cmp_ps(b0, a0, _CMP_LT_OQ)) |
                                           _mm256_movemask_ps(_mm256_cmp_ps(b1, a1, _CMP_LT_OQ)) << 8);
        low                  = _mm256_min_ps(b0, a0);
        high                 = _mm256_min_ps(b1, a1);
    }
    _mm256_storeu_ps(cost, low);
    _mm256_storeu_ps(cost + 8, high);
    int start = 0;
    for (int w = 1; w < STATES && !lanes; ++w) {
        start = cost[5 * w] < cost[5 * start] ? w : start;
    }
    cpu::trace_back(
        octets, lanes ? cpu::first_least(cost) : start, lanes ? before : nullptr,
        [&](int32_t t, int q) { return choice[t].number[q] & 31; }, // in the lowest bits
        [&](int32_t t, int w) { return (decisions[t] >> (4 * start + w) & 1) != 0; }, code);
}

} // namespace subkv::avx2

#endif
