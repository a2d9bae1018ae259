// trellis.cpp: rows whose codes are paths through a trellis (subkv/trellis.h).
//   c [rank] f32 | code [rank]: only entries of coefficients on the path are written
//
// The scale code. The candidates are TRELLIS_TRIED codes from middle - TRELLIS_BELOW on, within 1..SCALE_MOST, where
// `middle` is the best code without a trellis (encode.cpp). The one of least cost wins, and of equal ones the smaller.
//   cost = squared error of bands outside the path + cost of the best path with free ends, a sum in f32
//
// The errors. A place with coefficient c has step = s * level_step. In each subset of the levels, those with i % 4 = q,
// the nearest level is i_q, and its error e_q:
//   y = c * (1 / step),  P = sign(y) min_n (a_n |y| + b_n)  (trellis_line; n = 0 is |y| itself)
//   i_q = q + 4 clamp(round(P / 4 + (2^b - 1/2 - q) / 4), 0, 2^(b-1) - 1), round half to even
//   e_q = c - step * (level(b, i_q) + 1/2)
//
// The path, by Viterbi's algorithm. cost[w] after place t is the least cost of a path that ends in state w. Branch x
// from state p costs e_q^2 with q = 2 (x ^ p / 2) + p % 2. Of two branches of equal cost into a state the one from the
// smaller state wins.
//   free ends     Every state starts with cost 0, and the least final cost counts.
//   PATH_CIRCLE   The path tries each of the four states as its start and end, and of equal ones takes the smaller.
//   PATH_LANES    Also for the scale, a lane starts in state 0 with the least final cost of the lane before.
//
// As in encode.cpp the bytes depend only on the f32 coefficients: every operation is rounded as written here, and fused
// multiply-adds are explicit.
#include "subkv/trellis.h"

#include "rows.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace subkv {

static int32_t path_length(const HeadCodec & codec) {
    int32_t n = 0;
    for (int32_t i = 0; i < codec.n_bands; ++i) {
        n += codec.bands[i].bits <= TRELLIS_BITS ? codec.bands[i].n : 0;
    }
    return n;
}

Path path_of(const HeadCodec & codec) {
    return path_length(codec) < TRELLIS_LEAST ? PATH_NONE : PATH_CIRCLE;
}

Path latent_path(const HeadCodec & codec) {
    return path_length(codec) < TRELLIS_LEAST_LATENT ? PATH_NONE : PATH_LANES;
}

} // namespace subkv

namespace subkv::ref {

namespace {

constexpr int32_t STATES = 4;
constexpr float   INF    = std::numeric_limits<float>::infinity();

struct Place {
    int32_t      j; // the coefficient at this place
    const Band * band;
    bool         first; // Is this the first place of its lane?
};

struct Places {
    size_t n = 0;
    Place  at[MAX_HEAD_SIZE];

    explicit Places(const HeadCodec & codec) {
        for (int32_t lane = 0; lane < BAND_STEP; ++lane) {
            bool first = true;
            for (int32_t i = 0; i < codec.n_bands; ++i) {
                const Band & band = codec.bands[i];
                for (int32_t j = lane; on_path(codec, band) && j < band.n; j += BAND_STEP) {
                    at[n++] = { band.first + j, &band, first };
                    first   = false;
                }
            }
        }
    }

    const Place * begin() const { return at; }

    const Place * end() const { return at + n; }
};

// The nearest level to c in each subset of the levels, and its error.
struct Nearest {
    int32_t index[STATES];
    float   error[STATES];
};

Nearest nearest(int32_t bits, float step, float c) {
    const float inverse = 1.0f / step;
    const float y       = c * inverse;
    const float size    = std::fabs(y);
    float       p       = size;
    for (int32_t n = 1; n < N_LINES; ++n) {
        const TrellisLine line = trellis_line(bits, n);
        p                      = std::fmin(p, std::fma(size, line.a, line.b));
    }
    p                = std::copysign(p, y);
    const auto  half = (float) (1 << bits);
    const float last = 0.5f * half - 1.0f;
    Nearest     found;
    for (int32_t q = 0; q < STATES; ++q) {
        const float g  = std::nearbyint(std::fma(p, 0.25f, 0.25f * (half - 0.5f - (float) q)));
        found.index[q] = 4 * (int32_t) std::fmin(std::fmax(g, 0.0f), last) + q;
        found.error[q] = std::fma(-step, (float) trellis_level(bits, found.index[q]) + 0.5f, c);
    }
    return found;
}

int32_t subset(int32_t p, int32_t x) {
    return 2 * (x ^ p >> 1) + (p & 1);
}

float least_of(const float * cost) {
    return std::min(std::min(cost[0], cost[1]), std::min(cost[2], cost[3]));
}

// Starts a lane of PATH_LANES: it begins in state 0 and costs as much as the cheapest end of the lane before it.
void begin_lane(float * cost) {
    cost[0] = least_of(cost);
    std::fill_n(cost + 1, STATES - 1, INF);
}

// Adds one place to the paths that end in each state. Two branches lead into a state; `decisions` says whether the
// cheaper one comes from the larger of its two states.
void extend(const Nearest & choice, float * cost, bool * decisions) {
    float next[STATES];
    for (int32_t w = 0; w < STATES; ++w) { // The branches come from states w >> 1 and w >> 1 | 2.
        const int32_t x = w & 1, p = w >> 1;
        const float   from_p = choice.error[subset(p, x)], from_other = choice.error[subset(p | 2, x)];
        const float   a = std::fma(from_p, from_p, cost[p]);
        const float   b = std::fma(from_other, from_other, cost[p | 2]);
        decisions[w]    = b < a;
        next[w]         = decisions[w] ? b : a;
    }
    std::copy_n(next, STATES, cost);
}

float free_cost(const HeadCodec & codec, const Places & places, const float * c, float s) {
    float cost[STATES] = {};
    bool  decisions[STATES];
    for (const Place & place : places) {
        if (codec.path == PATH_LANES && place.first) {
            begin_lane(cost);
        }
        const float step = s * level_step(codec, *place.band);
        extend(nearest(place.band->bits, step, c[place.j]), cost, decisions);
    }
    return least_of(cost);
}

} // namespace

int32_t choose_path_scale(const HeadCodec & codec, const float * c, int32_t middle) {
    const Places places(codec);
    int32_t      best  = middle;
    float        least = INF;
    for (int32_t k = middle - TRELLIS_BELOW; k < middle - TRELLIS_BELOW + TRELLIS_TRIED; ++k) {
        if (k < 1 || k > SCALE_MOST) {
            continue;
        }
        const float cost = free_cost(codec, places, c, SCALES[k]) + squared_error(codec, c, SCALES[k], TRELLIS_BITS);
        if (cost < least) {
            best  = k;
            least = cost;
        }
    }
    return best;
}

float find_path(const HeadCodec & codec, const float * c, float s, uint8_t * code) {
    struct Step {
        Nearest choice;
        bool    decisions[STATES];
        int32_t from; // For PATH_LANES, the state in which the previous lane ends.
    };

    const Places      places(codec);
    std::vector<Step> steps(places.n);
    for (size_t t = 0; t < places.n; ++t) {
        const float step = s * level_step(codec, *places.at[t].band);
        steps[t].choice  = nearest(places.at[t].band->bits, step, c[places.at[t].j]);
    }
    float     least  = INF;
    const int n_ends = codec.path == PATH_LANES ? 1 : STATES;
    for (int32_t ends = 0; ends < n_ends; ++ends) {
        float cost[STATES] = { INF, INF, INF, INF };
        cost[ends]         = 0.0f;
        const auto last = [&] { return n_ends == 1 ? (int32_t) (std::min_element(cost, cost + STATES) - cost) : ends; };
        for (size_t t = 0; t < places.n; ++t) {
            if (codec.path == PATH_LANES && places.at[t].first) {
                steps[t].from = last();
                begin_lane(cost);
            }
            extend(steps[t].choice, cost, steps[t].decisions);
        }
        int32_t w = last();
        if (ends > 0 && !(cost[w] < least)) {
            continue;
        }
        least = cost[w];
        for (size_t t = places.n; t-- > 0;) {
            const int32_t x      = w & 1;
            const int32_t p      = w >> 1 | (steps[t].decisions[w] ? 2 : 0);
            const int32_t i      = steps[t].choice.index[subset(p, x)];
            code[places.at[t].j] = (uint8_t) ((i ^ 2 * (p >> 1) ^ (p & 1)) >> 1);
            w                    = codec.path == PATH_LANES && places.at[t].first ? steps[t].from : p;
        }
    }
    return least;
}

void path_levels(const HeadCodec & codec, const uint8_t * code, int32_t * level) {
    const Places places(codec);
    const size_t n     = places.n;
    const bool   lanes = codec.path == PATH_LANES;
    // The lowest bit of the code `back` places before place t: x_{t-1} or x_{t-2} of trellis.h.
    const auto low_bit = [&](size_t t, size_t back) { return code[places.at[(t + n - back) % n].j] & 1; };
    for (size_t t = 0; t < n; ++t) {
        const Place & place  = places.at[t];
        const bool    first  = lanes && place.first; // Zeros precede a lane, not the codes of the lane before it.
        const bool    second = lanes && t > 0 && places.at[t - 1].first;
        const int32_t one    = first ? 0 : low_bit(t, 1);
        const int32_t two    = first || second ? 0 : low_bit(t, 2);
        level[place.j]       = trellis_level(place.band->bits, 2 * code[place.j] ^ 2 * two ^ one);
    }
}

} // namespace subkv::ref
