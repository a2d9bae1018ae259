// runs.cuh: a head's bands as runs of octets of one width, so that the decode kernel selects code for a width outside
// its loops. The host fills them (plan.cuh).
#pragma once

#include "levels.cuh"

namespace subkv::cuda {

// Octets of one band, which have coefficients 8 * first() to 8 * (first() + n()) - 1. One load reads a Run.
struct alignas(8) Run {
    uint32_t where, what;

    Run() = default;

    Run(int at, int bits, int first, int n, bool on_path, int band) :
        where((uint32_t) (at | first << 16) | (uint32_t) band << 24),
        what((uint32_t) (n | on_path << 8) | 1u << (9 + bits) | (uint32_t) (2 * (bits - 2) + on_path) << 26) {}

    __device__ int      at() const { return where & 0xFFFF; } // offset of their lines in the tile
    __device__ int      first() const { return where >> 16 & 255; }
    __device__ int      band() const { return (int) (where >> 24); } // number of the band
    __device__ int      n() const { return what & 255; }
    __device__ int      on_path() const { return what >> 8 & 1; }
    __device__ bool     halves() const { return (what & 1u << (9 + 16)) != 0; }
    __device__ uint32_t kind() const { return what >> 9 & 0x1FFFF; } // 1 << bits
    __device__ uint32_t levels() const { return what >> 26; }        // number of its entry in LEVELS

    // Returns level_zero of the run's codes.
    __device__ int zero() const {
        const bool wide = kind() == 1 << 8 || (on_path() && kind() > 1 << 4);
        return wide ? level_zero(8, false) : on_path() ? level_zero(4, true) : (int) kind() - 1;
    }
};

// An octet whose codes determine levels of later octets, which are in the next lane (trellis.h) if it is wrapped.
struct alignas(4) Place {
    uint16_t at;
    uint8_t  kind; // 1 << bits
    bool     wrapped;
};

// Adjacent octets of a head, in runs that are not empty.
struct Runs {
    Run   run[MAX_BANDS];
    Place before[2]; // the octets one and two places before the first octet on the path
    int   n;
    bool  on_path; // whether any octet is on the path
    bool  halves;
};

// Returns the octet at a place of the path, which is -2 or higher.
inline Place place_of(const HeadCodec & codec, int place) {
    int n_path = 0;
    for (int b = 0; b < codec.n_bands; ++b) {
        n_path += on_path(codec, codec.bands[b]) ? codec.bands[b].n / 8 : 0;
    }
    const bool wrapped = place < 0;
    int        left    = wrapped ? place + n_path : place;
    for (int b = 0; b < codec.n_bands; ++b) {
        const Band & band = codec.bands[b];
        if (!on_path(codec, band)) {
            continue;
        }
        if (left < band.n / 8) {
            return { (uint16_t) (TILE * (band.offset + left * band.bits)), (uint8_t) (1 << band.bits), wrapped };
        }
        left -= band.n / 8;
    }
    return {};
}

// Fills in octets first to end - 1.
inline void fill_runs(const HeadCodec & codec, int first, int end, Runs & runs) {
    int place = 0;
    runs      = {};
    for (int b = 0; b < codec.n_bands; ++b) {
        const Band & band = codec.bands[b];
        const bool   on   = on_path(codec, band);
        const int    from = band.first / 8 > first ? band.first / 8 : first;
        const int    skip = from - band.first / 8;
        const int    n    = (band.first + band.n) / 8 < end ? band.n / 8 - skip : end - from;
        if (n > 0) {
            runs.run[runs.n++] = Run(TILE * (band.offset + skip * band.bits), band.bits, from, n, on, b);
            runs.halves |= band.bits == 16;
            if (on && !runs.on_path) {
                runs.on_path = true;
                for (int i = 0; i < 2; ++i) {
                    runs.before[i] = place_of(codec, place + skip - 1 - i);
                }
            }
        }
        place += on ? band.n / 8 : 0;
    }
}

template <int BITS> struct Width {
    static constexpr int bits = BITS;
};

// Calls f(Width<BITS>{}) for kind 1 << BITS, if these are codes. The tests begin with the most frequent width.
template <typename F> __device__ inline void by_width(uint32_t kind, const F & f) {
    if (kind & 1 << 4) {
        f(Width<4>{});
    } else if (kind & 1 << 3) {
        f(Width<3>{});
    } else if (kind & 1 << 6) {
        f(Width<6>{});
    } else if (kind & 1 << 8) {
        f(Width<8>{});
    } else if (kind & 1 << 5) {
        f(Width<5>{});
    } else if (kind & 1 << 2) {
        f(Width<2>{});
    }
}

// Calls f with the width that selects the decoder of values, which is 3 for codes of 2 and 3 bits, and 6 for codes of 5
// and 6 bits. A decoder for each width would be more code, which a GPU has to fetch first.
template <typename F> __device__ inline void by_decoder(uint32_t kind, const F & f) {
    if (kind & 1 << 4) {
        f(Width<4>{});
    } else if (kind & (1 << 3 | 1 << 2)) {
        f(Width<3>{});
    } else if (kind & (1 << 6 | 1 << 5)) {
        f(Width<6>{});
    } else if (kind & 1 << 8) {
        f(Width<8>{});
    }
}

template <int BITS> constexpr bool one_width = BITS == 4 || BITS == 8;

// Calls f with the width of the codes, one of those that the decoder reads.
template <int BITS, typename F> __device__ inline void by_width_of(uint32_t kind, const F & f) {
    if (!one_width<BITS> && (kind & 1 << BITS) == 0) {
        f(Width<BITS - 1>{});
    } else {
        f(Width<BITS>{});
    }
}

} // namespace subkv::cuda
