// tile_codes.h: conversion of tiles to bytes. Every code, on a path or not, becomes a byte whose value is (byte -
// 127.5) steps, so products need only one width (tile_products.h). subkv/tiles.h and subkv/trellis.h define the
// formats.
//
// A register has the codes of many cells at one place of an octet. The preceding codes on the path are in the same
// register of the octet before, so a level needs no other register. At the beginning of a lane it needs the last two
// octets, moved by a lane.
//
// Isa (attend_tiles.h) has these members, of which line_paths.h needs only the last two:
//   CODE_BIT              bit of a byte at which level() expects codes
//   OTHER_BITS_ZERO       the other bits must be 0
//   Previous              the required bits of a register's two preceding codes
//   ends(one, two)        the low bits of the last code and of the one before it, in begin()'s format
//   begin(ends)           Previous of a register
//   level<BITS>(code, before)  levels plus 128; updates `before`
//   raise_keys(x, other)    shifts the bytes of each dword up by one; the first byte is other's last one
//   raise_values(x, below)  shifts the qwords up by one; the first qword is below's last one
#pragma once

#include "cells.h"
#include "subkv/trellis.h"

namespace subkv::cpu {

constexpr int32_t BYTE_MIDDLE = 128; // half a step above the byte value of 0

// Returns W dwords of register RHO of an octet, with a code at bit CODE_BIT of each byte. OTHER_BITS_ZERO clears the
// other bits. line(i) returns these dwords of the octet's line i.
template <typename Isa, int BITS, int RHO, int CODE_BIT, bool OTHER_BITS_ZERO, typename Line>
static inline typename Isa::I codes_of(const Line & line) {
    constexpr TileFields f = tile_fields(BITS, RHO);
    constexpr TileField  a = f.field[0], b = f.field[1], c = f.field[2];
    auto                 x = Isa::template shift<a.shift - a.from - CODE_BIT>(line(a.line));
    if constexpr (OTHER_BITS_ZERO && BITS != 8) {
        x = Isa::mask(x, ((1 << a.width) - 1) << (a.from + CODE_BIT));
    }
    if constexpr (f.n > 1) {
        constexpr int BITS_B = ((1 << b.width) - 1) << (b.from + CODE_BIT);
        x = Isa::template join<OTHER_BITS_ZERO>(x, Isa::template shift<b.shift - b.from - CODE_BIT>(line(b.line)),
                                                BITS_B);
    }
    if constexpr (f.n > 2) {
        constexpr int BITS_C = ((1 << c.width) - 1) << (c.from + CODE_BIT);
        x = Isa::template join<OTHER_BITS_ZERO>(x, Isa::template shift<c.shift - c.from - CODE_BIT>(line(c.line)),
                                                BITS_C);
    }
    return x;
}

static inline void prefetch_octet(const uint8_t * octet, int32_t bits, int64_t ahead) {
    for (int32_t line = 0; line < bits; ++line) {
        __builtin_prefetch(octet + ahead + line * LINE, 0, 2); // into L2, because L1 waits for few lines at a time
    }
}

// Returns register RHO of a band's octet as bytes. `before` is the state of codes on a path.
template <typename Isa, int BITS, bool PATH> struct FromCodes {
    static constexpr int LINES = BITS;
    using Previous             = typename Isa::Previous;

    template <int RHO> static typename Isa::I bytes(const uint8_t * octet, Previous & before) {
        const auto line = [octet](int i) { return Isa::bytes(octet + i * LINE); };
        if constexpr (PATH) {
            return Isa::template level<BITS>(codes_of<Isa, BITS, RHO, Isa::CODE_BIT, Isa::OTHER_BITS_ZERO>(line),
                                             before);
        } else {
            return Isa::plus_bytes(codes_of<Isa, BITS, RHO, 0, true>(line), BYTE_MIDDLE - (1 << (BITS - 1)));
        }
    }
};

//
// paths
//

// The state from the preceding codes, for every register of W dwords of an octet.
template <typename Isa> struct Path8 {
    static constexpr int   PARTS = 16 / Isa::W; // registers of a line
    typename Isa::Previous before[PARTS][8];
};

// Reads the lowest bits of an octet's codes to bit CODE_BIT of each byte. The other bits are undefined.
template <typename Isa, int BITS, int RHO = 0>
static inline void read_low(const uint8_t * octet, typename Isa::I * out) {
    if constexpr (RHO < 8) {
        constexpr TileField low = tile_fields(BITS, RHO).field[0];
        out[RHO]                = Isa::template shift<low.shift - Isa::CODE_BIT>(Isa::bytes(octet + low.line * LINE));
        read_low<Isa, BITS, RHO + 1>(octet, out);
    }
}

// An octet of a head on its path.
struct PathOctet {
    int32_t at; // offset in a tile
    int32_t bits;
};

// Finds the last octet of a path and the one before it.
static inline void last_octets(const HeadCodec & codec, PathOctet (&last)[2]) {
    int n = 0;
    for (int32_t b = codec.n_bands - 1; b >= 0 && n < 2; --b) {
        const Band & band = codec.bands[b];
        for (int32_t j = band.n - 8; on_path(codec, band) && j >= 0 && n < 2; j -= 8) {
            last[n++] = { TILE * band.offset + j * band.bits * LINE / 8, band.bits };
        }
    }
}

// Sets `path` to the state at the start of the lanes of a tile's path.
template <typename Isa> static void begin_path(const HeadCodec & codec, const uint8_t * tile, Path8<Isa> & path) {
    constexpr int   PARTS = Path8<Isa>::PARTS;
    typename Isa::I ends[PARTS][8];
    if (codec.path == PATH_LANES) {
        for (int p = 0; p < PARTS; ++p) {
            for (int rho = 0; rho < 8; ++rho) {
                path.before[p][rho] = Isa::begin(Isa::zero());
            }
        }
        return;
    }
    PathOctet last[2] = {};
    last_octets(codec, last);
    for (int p = 0; p < PARTS; ++p) {
        typename Isa::I code[2][8] = {};
        for (int i = 0; i < 2; ++i) {
            const uint8_t * octet = tile + last[i].at + 4 * Isa::W * p;
#define READ(BITS) read_low<Isa, BITS>(octet, code[i])
            SUBKV_BY_PATH_BITS(last[i].bits, READ)
#undef READ
        }
        for (int rho = 0; rho < 8; ++rho) {
            ends[p][rho] = Isa::ends(code[0][rho], code[1][rho]);
        }
    }
    for (int p = 0; p < PARTS; ++p) {
        for (int rho = 0; rho < 8; ++rho) {
            path.before[p][rho] =
                Isa::begin(codec.value != 0 ? Isa::raise_values(ends[p][rho], ends[(p + PARTS - 1) % PARTS][rho]) :
                                              Isa::raise_keys(ends[p][rho], ends[p][rho ^ 4]));
        }
    }
}

//
// sources of bytes for products
//

// A tile as bytes, in which an octet has LINES lines, one for each register RHO.
template <typename Isa> struct FromBytes {
    static constexpr int LINES = 8;
    struct Previous {};

    template <int RHO> static typename Isa::I bytes(const uint8_t * octet, Previous &) {
        return Isa::bytes(octet + RHO * LINE);
    }
};

//
// tiles
//

// Runs of coefficients with integer codes (all except 16-bit bands), which become bytes.
struct Runs {
    int32_t n = 0;
    int32_t first[MAX_BANDS], end[MAX_BANDS];

    explicit Runs(const HeadCodec & codec) {
        for (int32_t b = 0; b < codec.n_bands; ++b) {
            const Band & band = codec.bands[b];
            if (band.bits == 16) {
                continue;
            }
            if (n > 0 && end[n - 1] == band.first) {
                end[n - 1] += band.n;
            } else {
                first[n] = band.first;
                end[n++] = band.first + band.n;
            }
        }
    }
};

} // namespace subkv::cpu
