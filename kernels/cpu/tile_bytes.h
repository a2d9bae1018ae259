// tile_bytes.h: conversion of tiles to bytes (tile_codes.h). Isa::TilePath<Isa> is RegisterPath<Isa> or LinePath<Isa>
// (line_paths.h).
#pragma once

#include "line_paths.h"

namespace subkv::cpu {

//
// bands that are not on a path
//

template <typename Isa, int BITS, int RHO = 0> static inline void unpack_octet(const uint8_t * octet, uint8_t * out) {
    if constexpr (RHO < 8) {
        for (int at = 0; at < LINE; at += 4 * Isa::W) {
            typename Isa::Previous none = {};
            Isa::put_bytes(out + RHO * LINE + at, FromCodes<Isa, BITS, false>::template bytes<RHO>(octet + at, none));
        }
        unpack_octet<Isa, BITS, RHO + 1>(octet, out);
    }
}

template <typename Isa, int BITS>
static void unpack_band(const uint8_t * from, int32_t n, int64_t ahead, uint8_t * out) {
    for (int32_t j = 0; j < n; j += 8, from += BITS * LINE, out += 8 * LINE) {
        prefetch_octet(from, BITS, ahead);
        unpack_octet<Isa, BITS>(from, out);
    }
}

//
// bands on a path
//

// Converts registers QUARTER and QUARTER + 4 of a band's octets, which often share a line. The bits of their preceding
// codes stay in registers.
template <typename Isa, int BITS, int QUARTER = 0>
static void path_band(const uint8_t * from, int32_t n, int64_t ahead, Path8<Isa> & path, uint8_t * out) {
    if constexpr (QUARTER < 4) {
        constexpr int PARTS = Path8<Isa>::PARTS, REGS_PER_PASS = PARTS < 2 ? PARTS : 2, OTHER = QUARTER + 4;
        for (int first = 0; first < PARTS; first += REGS_PER_PASS) {
            typename Isa::Previous before[REGS_PER_PASS][2];
            for (int p = 0; p < REGS_PER_PASS; ++p) {
                before[p][0] = path.before[first + p][QUARTER];
                before[p][1] = path.before[first + p][OTHER];
            }
            const uint8_t * octet = from + 4 * Isa::W * first;
            uint8_t *       to    = out + 4 * Isa::W * first;
            for (int32_t j = 0; j < n; j += 8, octet += BITS * LINE, to += 8 * LINE) {
                if (QUARTER == 0 && first == 0) {
                    prefetch_octet(octet, BITS, ahead);
                }
#pragma GCC unroll 2
                for (int p = 0; p < REGS_PER_PASS; ++p) {
                    using Levels   = FromCodes<Isa, BITS, true>;
                    const int  at  = 4 * Isa::W * p;
                    const auto one = Levels::template bytes<QUARTER>(octet + at, before[p][0]);
                    const auto two = Levels::template bytes<OTHER>(octet + at, before[p][1]);
                    Isa::put_bytes(to + QUARTER * LINE + at, one);
                    Isa::put_bytes(to + OTHER * LINE + at, two);
                }
            }
            for (int p = 0; p < REGS_PER_PASS; ++p) {
                path.before[first + p][QUARTER] = before[p][0];
                path.before[first + p][OTHER]   = before[p][1];
            }
        }
        path_band<Isa, BITS, QUARTER + 1>(from, n, ahead, path, out);
    }
}

// The state of a tile's path, which advances band by band.
template <typename Isa> struct RegisterPath {
    Path8<Isa> path;

    RegisterPath(const HeadCodec & codec, const uint8_t * tile) {
        if (codec.path != PATH_NONE) {
            begin_path<Isa>(codec, tile, path);
        }
    }

    template <int BITS> void unpack_band(const uint8_t * octet, int32_t n, int64_t ahead, uint8_t * out) {
        path_band<Isa, BITS>(octet, n, ahead, path, out);
    }
};

//
// tiles
//

// Returns whether the tile already has this format after its scales.
static inline bool all_bytes(const HeadCodec & codec) {
    for (int32_t b = 0; b < codec.n_bands; ++b) {
        if (codec.bands[b].bits != 8) {
            return false;
        }
    }
    return true;
}

// Converts the codes of a tile to bytes, with coefficient j's octet at LINE * j of `out`, and returns a pointer to the
// bytes. It skips 16-bit bands. `ahead` is the offset of the tile to prefetch.
template <typename Isa>
static const uint8_t * unpack_tile(const HeadCodec & codec, const uint8_t * tile, int64_t ahead, uint8_t * out) {
    if (all_bytes(codec)) {
        prefetch_octet(tile + LINE, codec.rank, ahead);
        return tile + LINE;
    }
    typename Isa::template TilePath<Isa> path(codec, tile);
    for (int32_t b = 0; b < codec.n_bands; ++b) {
        const Band &    band = codec.bands[b];
        const uint8_t * from = tile + LINE * band.offset;
        uint8_t *       to   = out + LINE * band.first;
        if (on_path(codec, band)) {
#define LEVELS(BITS) path.template unpack_band<BITS>(from, band.n, ahead, to)
            SUBKV_BY_PATH_BITS(band.bits, LEVELS)
#undef LEVELS
        } else {
#define UNPACK(BITS) unpack_band<Isa, BITS>(from, band.n, ahead, to)
            SUBKV_BY_BITS(band.bits, UNPACK)
#undef UNPACK
        }
    }
    return out;
}

} // namespace subkv::cpu
