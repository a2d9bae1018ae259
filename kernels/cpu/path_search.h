// path_search.h: code common to all searches for paths through a trellis (avx2_path.cpp, neon_path.cpp). Definition:
// ref/trellis.cpp. Static, like everything that ISA files include.
#pragma once

#include "subkv/trellis.h"

namespace subkv::cpu {

constexpr int PATH_STATES = 4;

// Candidate i of the scale codes around `middle`; 0: none.
static inline int tried_code(int middle, int i) {
    const int k = middle - TRELLIS_BELOW + i;
    return k >= 1 && k <= SCALE_MOST ? k : 0;
}

static inline float tried_scale(int middle, int i) {
    const int k = tried_code(middle, i);
    return k != 0 ? SCALES[k] : 1.0f;
}

// The scale code of least cost: cost of the path [TRELLIS_TRIED] plus squared_error(s) outside it.
template <typename Error>
static inline uint8_t least_tried(int middle, const float * path_cost, const Error & squared_error) {
    int   best  = middle;
    float least = __builtin_inff();
    for (int i = 0; i < TRELLIS_TRIED; ++i) {
        const int k = tried_code(middle, i);
        if (k == 0) {
            continue;
        }
        const float cost = path_cost[i] + squared_error(SCALES[k]);
        if (cost < least) {
            best  = k;
            least = cost;
        }
    }
    return (uint8_t) best;
}

static inline int first_least(const float * cost) {
    int best = 0;
    for (int w = 1; w < PATH_STATES; ++w) {
        best = cost[w] < cost[best] ? w : best;
    }
    return best;
}

// First coefficients of the octets on a path.
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

// The codes of the path that ends in state w. number(t, q): index of subset q's level at place t; from_larger(t, w):
// true if the branch into state w comes from the larger state; before [BAND_STEP]: final state of the lane before;
// nullptr: lanes are connected.
template <typename Number, typename FromLarger>
static inline void trace_back(const PathOctets & octets, int w, const int * before, const Number & number,
                              const FromLarger & from_larger, uint8_t * code) {
    for (int32_t lane = BAND_STEP - 1, t = 8 * octets.n - 1; lane >= 0; --lane) {
        for (int32_t octet = octets.n - 1; octet >= 0; --octet, --t) {
            const int p = w >> 1 | (from_larger(t, w) ? 2 : 0);
            const int q = 2 * ((w & 1) ^ p >> 1) + (p & 1);
            const int i = 4 * number(t, q) + q;

            code[octets.first[octet] + lane] = (uint8_t) ((i ^ 2 * (p >> 1) ^ (p & 1)) >> 1);
            w                                = p;
        }
        w = before != nullptr ? before[lane] : w;
    }
}

} // namespace subkv::cpu
