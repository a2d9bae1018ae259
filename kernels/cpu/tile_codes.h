// tile_codes.h: tiles as bytes: every code, on a path or not, becomes a byte; its value is (byte - 127.5) steps, so
// products need one width only (tile_products.h). Formats: subkv/tiles.h, subkv/trellis.h.
//
// A register has the codes of many cells at one place of an octet. The preceding codes on the path are in the same
// register of the octet before, so a level needs no other register; at the beginning of a lane it needs the last two
// octets, moved by a lane.
//
// Members of Isa (attend_tiles.h) for this:
//   CODE_BIT              bit of a byte at which level() expects codes
//   OTHER_BITS_ZERO       the other bits must be 0
//   Before                the required bits of a register's two preceding codes
//   ends(one, two)        the low bits of the last code and of the one before it, in begin()'s format
//   begin(ends)           Before of a register
//   level<BITS>(code, before)  levels plus 128; before follows
//   raise_keys(x, other)    shifts the bytes of each dword up by one; the first byte is other's last one
//   raise_values(x, below)  shifts the qwords up by one; the first qword is below's last one
#pragma once

#include "cells.h"
#include "subkv/trellis.h"

namespace subkv::cpu {

constexpr int32_t BYTE_MIDDLE = 128; // half a step above the byte value of 0

// Register RHO of an octet, W of its dwords from the pointer on: a code at bit CODE_BIT of each byte. OTHER_BITS_ZERO:
// the other bits are 0.
template <typename Isa, int BITS, int RHO, int CODE_BIT, bool OTHER_BITS_ZERO> static inline typename Isa::I
codes_of(const uint8_t * octet) {
    constexpr TileFields f = tile_fields(BITS, RHO);
    constexpr TileField  a = f.field[0], b = f.field[1], c = f.field[2];
    const auto           part = [&](const TileField & field) { return Isa::bytes(octet + field.line * LINE); };
    auto                 x    = Isa::template shift<a.shift - a.from - CODE_BIT>(part(a));
    if constexpr (OTHER_BITS_ZERO && BITS != 8) {
        x = Isa::mask(x, ((1 << a.width) - 1) << (a.from + CODE_BIT));
    }
    if constexpr (f.n > 1) {
        constexpr int BITS_B = ((1 << b.width) - 1) << (b.from + CODE_BIT);
        x = Isa::template join<OTHER_BITS_ZERO>(x, Isa::template shift<b.shift - b.from - CODE_BIT>(part(b)), BITS_B);
    }
    if constexpr (f.n > 2) {
        constexpr int BITS_C = ((1 << c.width) - 1) << (c.from + CODE_BIT);
        x = Isa::template join<OTHER_BITS_ZERO>(x, Isa::template shift<c.shift - c.from - CODE_BIT>(part(c)), BITS_C);
    }
    return x;
}

static inline void prefetch_octet(const uint8_t * octet, int32_t bits, int64_t ahead) {
    for (int32_t line = 0; line < bits; ++line) {
        __builtin_prefetch(octet + ahead + line * LINE, 0, 2); // into L2: L1 waits for few lines at a time
    }
}

// Register RHO of a band's octet as bytes. before: state of codes on a path
template <typename Isa, int BITS, bool PATH> struct FromCodes {
    static constexpr int LINES = BITS;
    using Before               = typename Isa::Before;

    template <int RHO> static typename Isa::I bytes(const uint8_t * octet, Before & before) {
        if constexpr (PATH) {
            return Isa::template level<BITS>(codes_of<Isa, BITS, RHO, Isa::CODE_BIT, Isa::OTHER_BITS_ZERO>(octet),
                                             before);
        } else {
            return Isa::plus_bytes(codes_of<Isa, BITS, RHO, 0, true>(octet), BYTE_MIDDLE - (1 << (BITS - 1)));
        }
    }
};

//
// bands that are not on a path
//

template <typename Isa, int BITS, int RHO = 0> static inline void unpack_octet(const uint8_t * octet, uint8_t * out) {
    if constexpr (RHO < 8) {
        for (int at = 0; at < LINE; at += 4 * Isa::W) {
            typename Isa::Before none = {};
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
// paths
//

// A register of W dwords for every place of an octet, and the state from the preceding codes.
template <typename Isa> struct Path8 {
    static constexpr int PARTS = 16 / Isa::W; // registers of a line
    typename Isa::Before before[PARTS][8];
};

// The lowest bits of an octet's codes, at bit CODE_BIT of each byte; the other bits are undefined.
template <typename Isa, int BITS, int RHO = 0>
static inline void read_low(const uint8_t * octet, typename Isa::I * out) {
    if constexpr (RHO < 8) {
        constexpr TileField low = tile_fields(BITS, RHO).field[0];
        out[RHO]                = Isa::template shift<low.shift - Isa::CODE_BIT>(Isa::bytes(octet + low.line * LINE));
        read_low<Isa, BITS, RHO + 1>(octet, out);
    }
}

// Octets of a head on its path, in order.
struct PathOctet {
    int32_t at; // offset in a tile
    int32_t bits;
};

// The last octet and the one before it.
static inline void last_octets(const HeadCodec & codec, PathOctet (&last)[2]) {
    int n = 0;
    for (int32_t b = codec.n_bands - 1; b >= 0 && n < 2; --b) {
        const Band & band = codec.bands[b];
        for (int32_t j = band.n - 8; on_path(codec, band) && j >= 0 && n < 2; j -= 8) {
            last[n++] = { TILE * band.offset + j * band.bits * LINE / 8, band.bits };
        }
    }
}

// Start of the lanes of a tile's path.
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

// Registers QUARTER and QUARTER + 4 of a band's octets, which often share a line. The bits of their preceding codes stay
// in registers.
template <typename Isa, int BITS, int QUARTER = 0>
static void path_band(const uint8_t * from, int32_t n, int64_t ahead, Path8<Isa> & path, uint8_t * out) {
    if constexpr (QUARTER < 4) {
        constexpr int PARTS = Path8<Isa>::PARTS, REGS_PER_PASS = PARTS < 2 ? PARTS : 2, OTHER = QUARTER + 4;
        for (int first = 0; first < PARTS; first += REGS_PER_PASS) {
            typename Isa::Before before[REGS_PER_PASS][2];
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

//
// sources of bytes for products
//

// A tile as bytes: an octet has LINES lines, one per register RHO.
template <typename Isa> struct FromBytes {
    static constexpr int LINES = 8;
    struct Before {};

    template <int RHO> static typename Isa::I bytes(const uint8_t * octet, Before &) {
        return Isa::bytes(octet + RHO * LINE);
    }
};

//
// tiles
//

// Runs of coefficients with integer codes (all except 16-bit bands); these become bytes.
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

// true: the tile already has this format, after its scales.
static inline bool all_bytes(const HeadCodec & codec) {
    for (int32_t b = 0; b < codec.n_bands; ++b) {
        if (codec.bands[b].bits != 8) {
            return false;
        }
    }
    return true;
}

// Converts a tile to 8-bit bands: coefficient j's octet at LINE * j of `out`, without 16-bit bands. Returns a pointer to
// the bytes. ahead: offset of the tile to prefetch.
template <typename Isa>
static const uint8_t * unpack_tile(const HeadCodec & codec, const uint8_t * tile, int64_t ahead, uint8_t * out) {
    if (all_bytes(codec)) {
        prefetch_octet(tile + LINE, codec.rank, ahead);
        return tile + LINE;
    }
    Path8<Isa> path;
    if (codec.path != PATH_NONE) {
        begin_path<Isa>(codec, tile, path);
    }
    for (int32_t b = 0; b < codec.n_bands; ++b) {
        const Band &    band = codec.bands[b];
        const uint8_t * from = tile + LINE * band.offset;
        uint8_t *       to   = out + LINE * band.first;
        if (on_path(codec, band)) {
#define LEVELS(BITS) path_band<Isa, BITS>(from, band.n, ahead, path, to)
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
