// path_search.h: the encoder's search for paths through a trellis. It follows its definition, ref/trellis.cpp,
// operation by operation, so the same coefficients give the same bytes. lanes.h documents Isa.
//
// The search of the scale has a candidate of one of two rows in each lane. All lanes are at the same place of the path,
// so a transition between states needs no moves between lanes. The search of the final path has one state per lane.
#pragma once

#include "lanes.h"
#include "scale_search.h"
#include "subkv/trellis.h"

#include <stdint.h>

namespace subkv::cpu {

constexpr int   PATH_STATES = 4;
constexpr int   PATH_ROWS   = 2; // rows whose scales are searched at once
constexpr float INF         = __builtin_inff();
static_assert(TRELLIS_TRIED * PATH_ROWS == 8, "a candidate of a row in each lane");

// Candidate i of the scale codes around `middle`, or 0 if that is not a scale code.
static inline int scale_candidate(int middle, int i) {
    const int k = middle - TRELLIS_BELOW + i;
    return k >= 1 && k <= SCALE_MOST ? k : 0;
}

// Constants to find the levels of a width.
struct LevelSearch {
    float factor[N_LINES] = {}, constant[N_LINES] = {}; // a and b of trellis_line
    float origin[PATH_STATES]   = {}; // for each subset, the position of its first level in units of its levels
    float value[PATH_STATES][8] = {}; // for up to 4 bits, the values of its levels
    float last = 0.0f, bend = 0.0f, both_bends = 0.0f, n_upper = 0.0f; // n_upper counts the levels above 0.

    constexpr explicit LevelSearch(int32_t bits) {
        for (int n = 0; n < N_LINES; ++n) {
            factor[n]   = trellis_line(bits, n).a;
            constant[n] = trellis_line(bits, n).b;
        }
        n_upper = (float) (1 << bits);
        last    = 0.5f * n_upper - 1.0f;
        for (int q = 0; q < PATH_STATES; ++q) {
            origin[q] = 0.25f * (n_upper - 0.5f - (float) q);
            for (int n = 0; n < 8; ++n) {
                value[q][n] = (float) trellis_level(bits, (4 * n + q) % (2 << bits)) + 0.5f;
            }
        }
        bend       = -((float) trellis_double(bits) + 0.5f);
        both_bends = bend - ((float) trellis_triple(bits) + 0.5f);
    }
};

#define SUBKV_SEARCH(bits, ...) LevelSearch(bits),
static constexpr LevelSearch LEVEL_SEARCH[] = { SUBKV_PATH_WIDTHS(SUBKV_SEARCH, ) };
#undef SUBKV_SEARCH

static inline const LevelSearch & level_search(int32_t bits) {
    return LEVEL_SEARCH[bits - WIDTHS[0]];
}

// The number of the nearest level in each subset, in the low bits, and its error.
template <typename Isa> struct Nearest {
    typename Isa::F number[PATH_STATES];
    typename Isa::F error[PATH_STATES];
};

// FEW means that a subset has at most 8 levels.
template <typename Isa, bool FEW>
static inline Nearest<Isa> nearest_levels(const LevelSearch & l, typename Isa::F step, typename Isa::F inverse,
                                          typename Isa::F c) {
    const auto y    = Isa::mul(c, inverse);
    const auto size = Isa::abs(y);
    auto       p    = size;
    for (int n = 1; n < N_LINES; ++n) {
        p = Isa::min(p, Isa::fma(size, Isa::set(l.factor[n]), Isa::set(l.constant[n])));
    }
    p = Isa::with_sign(p, y);
    Nearest<Isa> found;
    for (int q = 0; q < PATH_STATES; ++q) {
        const auto g      = Isa::fma(p, Isa::set(0.25f), Isa::set(l.origin[q]));
        const auto within = Isa::min(Isa::max(g, Isa::set(0.0f)), Isa::set(l.last)); // max() of NaN and 0 is 0.
        found.number[q]   = Isa::plus(within, Isa::set(ROUNDER));
        typename Isa::F value;
        if constexpr (FEW && Isa::HAS_LOOKUP) {
            value = Isa::lookup(l.value[q], found.number[q]);
        } else {
            const auto number = Isa::sub(found.number[q], Isa::set(ROUNDER));
            const auto place  = Isa::fma(number, Isa::set(4.0f), Isa::set((float) q - l.n_upper + 0.5f));
            const auto far    = Isa::abs(place);
            const auto two    = Isa::fma(far, Isa::set(2.0f), Isa::set(l.bend));
            const auto all    = Isa::fma(far, Isa::set(3.0f), Isa::set(l.both_bends));
            value             = Isa::with_sign(Isa::max(far, Isa::max(two, all)), place);
        }
        found.error[q] = Isa::fnma(step, value, c);
    }
    return found;
}

template <typename Isa> static inline typename Isa::F add_square(typename Isa::F error, typename Isa::F cost) {
    return Isa::fma(error, error, cost);
}

template <typename Isa> static inline typename Isa::F least_cost(const typename Isa::F * cost) {
    return Isa::min(Isa::min(cost[0], cost[1]), Isa::min(cost[2], cost[3]));
}

// Extends the paths of two rows by their coefficients c[row][j] of a band, j = first, first + 8, and so on, below
// `end`.
template <typename Isa, bool FEW>
static void extend_paths(const LevelSearch & l, typename Isa::F step, typename Isa::F inverse, const float * const * c,
                         int32_t first, int32_t end, typename Isa::F (&cost)[PATH_STATES]) {
    for (int32_t j = first; j < end; j += BAND_STEP) {
        const auto            n      = nearest_levels<Isa, FEW>(l, step, inverse, Isa::rows(c[0] + j, c[1] + j));
        const auto            branch = [&](int q, int state) { return add_square<Isa>(n.error[q], cost[state]); };
        const typename Isa::F next[PATH_STATES] = {
            Isa::min(branch(2, 2), branch(0, 0)),
            Isa::min(branch(0, 2), branch(2, 0)),
            Isa::min(branch(3, 3), branch(1, 1)),
            Isa::min(branch(1, 3), branch(3, 1)),
        };
        for (int w = 0; w < PATH_STATES; ++w) {
            cost[w] = next[w];
        }
    }
}

// Finds the scale codes of n <= PATH_ROWS rows c[row] [rank] of one head. On entry, `scale` has the best codes without
// a path.
template <typename Isa>
static void choose_path_scales(const HeadCodec & codec, const float * const * c, int n, uint8_t * scale) {
    const float * rows[PATH_ROWS] = { c[0], c[n - 1] };
    float         s[8], path_cost[8];
    for (int i = 0; i < 8; ++i) {
        const int row = i / TRELLIS_TRIED < n ? i / TRELLIS_TRIED : 0;
        const int k   = scale_candidate(scale[row], i % TRELLIS_TRIED);
        s[i]          = k != 0 ? SCALES[k] : 1.0f;
    }
    typename Isa::F step[MAX_BANDS], inverse[MAX_BANDS], cost[PATH_STATES];
    for (int32_t b = 0; b < codec.n_bands; ++b) {
        if (on_path(codec, codec.bands[b])) {
            step[b]    = Isa::mul(Isa::load(s), Isa::set(level_step(codec, codec.bands[b])));
            inverse[b] = Isa::div(Isa::set(1.0f), step[b]);
        }
    }
    for (auto & state : cost) {
        state = Isa::set(0.0f);
    }
    for (int32_t lane = 0; lane < BAND_STEP; ++lane) {
        if (codec.path == PATH_LANES) {
            cost[0] = least_cost<Isa>(cost);
            cost[1] = cost[2] = cost[3] = Isa::set(INF);
        }
        for (int32_t b = 0; b < codec.n_bands; ++b) {
            const Band & band = codec.bands[b];
            if (on_path(codec, band)) {
                const auto extend = band.bits <= 4 ? extend_paths<Isa, true> : extend_paths<Isa, false>;
                extend(level_search(band.bits), step[b], inverse[b], rows, band.first + lane, band.first + band.n,
                       cost);
            }
        }
    }
    Isa::store(path_cost, least_cost<Isa>(cost));
    for (int row = 0; row < n; ++row) {
        const int middle = scale[row];
        float     least  = INF;
        for (int i = 0; i < TRELLIS_TRIED; ++i) {
            const int k = scale_candidate(middle, i);
            if (k == 0) {
                continue;
            }
            const float other = squared_error<Isa>(codec, c[row], SCALES[k], TRELLIS_BITS);
            const float total = path_cost[row * TRELLIS_TRIED + i] + other;
            if (total < least) {
                scale[row] = (uint8_t) k;
                least      = total;
            }
        }
    }
}

// Errors of all subsets at a place, in the order 0, 2, 1, 3, and the numbers of their levels in the order 0, 1, 2, 3,
// in the low five bits.
struct alignas(16) Choice {
    float   error[PATH_STATES];
    int32_t number[PATH_STATES];
};

// Stores the choices of eight coefficients, which are `places` entries apart in `out`.
template <typename Isa> static void store_choices(const Nearest<Isa> & n, Choice * out, int32_t places) {
    float   error[PATH_STATES][8];
    int32_t number[PATH_STATES][8];
    for (int q = 0; q < PATH_STATES; ++q) {
        Isa::store(error[q], n.error[q]);
        Isa::low_bits(number[q], n.number[q]);
    }
    for (int lane = 0; lane < 8; ++lane, out += places) {
        *out = { { error[0][lane], error[2][lane], error[1][lane], error[3][lane] },
                 { number[0][lane], number[1][lane], number[2][lane], number[3][lane] } };
    }
}

static inline int first_least(const float * cost) {
    int best = 0;
    for (int w = 1; w < PATH_STATES; ++w) {
        best = cost[w] < cost[best] ? w : best;
    }
    return best;
}

// The first coefficient of each octet on a path.
struct PathOctets {
    int32_t n = 0;
    int32_t first[MAX_HEAD_SIZE / 8];

    explicit PathOctets(const HeadCodec & codec) {
        for (int32_t b = 0; b < codec.n_bands; ++b) {
            for (int32_t j = 0; on_path(codec, codec.bands[b]) && j < codec.bands[b].n; j += 8) {
                first[n++] = codec.bands[b].first + j;
            }
        }
    }
};

// Writes the codes of the coefficients on the path of least cost at scale s. Other codes stay unchanged.
template <typename Isa> static void find_path(const HeadCodec & codec, const float * c, float s, uint8_t * code) {
    Choice   choice[MAX_HEAD_SIZE];
    uint16_t from_larger[MAX_HEAD_SIZE]; // Bit 4 * start + state is set if the branch comes from the larger state.
    const PathOctets octets(codec);
    for (int32_t b = 0, octet = 0; b < codec.n_bands; ++b) {
        const Band & band = codec.bands[b];
        if (!on_path(codec, band)) {
            continue;
        }
        const float step    = s * level_step(codec, band);
        const auto  inverse = Isa::set(1.0f / step);
        const auto  find    = band.bits <= 4 ? nearest_levels<Isa, true> : nearest_levels<Isa, false>;
        for (int32_t j = band.first; j < band.first + band.n; j += 8, ++octet) {
            store_choices<Isa>(find(level_search(band.bits), Isa::set(step), inverse, Isa::load(c + j)), choice + octet,
                               octets.n);
        }
    }
    const bool lanes = codec.path == PATH_LANES;
    int        lane_end[BAND_STEP]; // for PATH_LANES, the state in which the previous lane ends
    float      cost[4 * PATH_STATES] = {
        0.0f, INF, INF, INF, INF, 0.0f, INF, INF, INF, INF, 0.0f, INF, INF, INF, INF, 0.0f
    };
    auto low  = Isa::load(cost); // costs of paths that start in states 0 and 1; `high` has those of 2 and 3
    auto high = Isa::load(cost + 8);
    for (int32_t t = 0; t < 8 * octets.n; ++t) {
        if (lanes && t % octets.n == 0) {
            Isa::store(cost, low);
            const int   state      = first_least(cost);
            const float start[8]   = { cost[state], INF, INF, INF, INF, INF, INF, INF };
            lane_end[t / octets.n] = state;
            low                    = Isa::load(start);
        }
        const auto error   = Isa::load_twice(choice[t].error);
        const auto swapped = Isa::swap_pairs(error);
        const auto a0      = add_square<Isa>(error, Isa::repeat_low(low));
        const auto a1      = add_square<Isa>(error, Isa::repeat_low(high));
        const auto b0      = add_square<Isa>(swapped, Isa::repeat_high(low));
        const auto b1      = add_square<Isa>(swapped, Isa::repeat_high(high));
        from_larger[t]     = (uint16_t) (Isa::less(b0, a0) | Isa::less(b1, a1) << 8);
        low                = Isa::min(b0, a0);
        high               = Isa::min(b1, a1);
    }
    Isa::store(cost, low);
    Isa::store(cost + 8, high);
    int start = 0;
    for (int w = 1; w < PATH_STATES && !lanes; ++w) {
        start = cost[5 * w] < cost[5 * start] ? w : start;
    }
    int w = lanes ? first_least(cost) : start;
    for (int32_t lane = BAND_STEP - 1, t = 8 * octets.n - 1; lane >= 0; --lane) {
        for (int32_t octet = octets.n - 1; octet >= 0; --octet, --t) {
            const int p = w >> 1 | ((from_larger[t] >> (4 * start + w) & 1) != 0 ? 2 : 0);
            const int q = 2 * ((w & 1) ^ p >> 1) + (p & 1);
            const int i = 4 * (choice[t].number[q] & 31) + q;

            code[octets.first[octet] + lane] = (uint8_t) ((i ^ 2 * (p >> 1) ^ (p & 1)) >> 1);
            w                                = p;
        }
        w = lanes ? lane_end[lane] : w;
    }
}

} // namespace subkv::cpu
