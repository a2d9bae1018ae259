// line_paths.h: converts paths in tiles to bytes, octet by octet. RegisterPath (tile_bytes.h) does it register by
// register. A code's two predecessors are in the lines of the two octets before, at the same bits if these belong to
// the same band. Therefore one exclusive or of a line serves all of its registers, and no state is kept from one octet
// to the next. At the beginning of a band, the low bits of the two octets before are copied to two octets of the band's
// width.
//
// Besides raise_keys and raise_values (tile_codes.h), Isa (attend_tiles.h) has
//   exclusive_or(x, y)
//   line_code_bit(bits)          bit of a byte at which level() expects codes; the other bits are 0
//   level<BITS, LOW>(code, line) levels plus 128. `code` is exclusive or'ed with the low bits of the codes two places
//                                before. Bit LOW of the bytes of `line` is the low bit of the preceding code.
#pragma once

#include "tile_codes.h"

#include <string.h>

namespace subkv::cpu {

// Returns the bits of a line's bytes that are the lowest bits of codes.
static constexpr int low_bits(int bits, int line) {
    int mask = 0;
    for (int rho = 0; rho < 8; ++rho) {
        const TileField low = tile_fields(bits, rho).field[0];
        mask |= low.line == line ? 1 << low.shift : 0;
    }
    return mask;
}

// Returns those of these bits, in line `to` of an octet of to_bits bits, that a shift by `left` brings from line `from`
// of an octet of from_bits bits. Register rho receives the bits of register rho ^ other.
static constexpr int moved_bits(int from_bits, int to_bits, int other, int from, int to, int left) {
    int mask = 0;
    for (int rho = 0; rho < 8; ++rho) {
        const TileField source = tile_fields(from_bits, rho ^ other).field[0];
        const TileField low    = tile_fields(to_bits, rho).field[0];
        if (source.line == from && low.line == to && low.shift - source.shift == left) {
            mask |= 1 << low.shift;
        }
    }
    return mask;
}

// Copies low bits of codes from the lines `from` of an octet of FROM bits to x, which is line TO_LINE of an octet of TO
// bits.
template <typename Isa, int FROM, int TO, int OTHER, int TO_LINE, int FROM_LINE = 0, int LEFT = -7>
static inline void move_bits(const typename Isa::I * from, typename Isa::I & x) {
    if constexpr (LEFT > 7) {
        move_bits<Isa, FROM, TO, OTHER, TO_LINE, FROM_LINE + 1>(from, x);
    } else if constexpr (FROM_LINE < FROM) {
        constexpr int BITS = moved_bits(FROM, TO, OTHER, FROM_LINE, TO_LINE, LEFT);
        if constexpr (BITS != 0) {
            x = Isa::template join<true>(x, Isa::template shift<-LEFT>(from[FROM_LINE]), BITS);
        }
        move_bits<Isa, FROM, TO, OTHER, TO_LINE, FROM_LINE, LEFT + 1>(from, x);
    }
}

template <typename Isa, int LINES> static inline void read_lines(const uint8_t * octet, typename Isa::I * line) {
#pragma GCC                                           unroll 6
    for (int i = 0; i < LINES; ++i) {
        line[i] = Isa::bytes(octet + i * LINE);
    }
}

template <typename Isa, int FROM, int TO, int TO_LINE = 0>
static inline void convert_lines(const typename Isa::I * from, uint8_t * to) {
    if constexpr (TO_LINE < TO) {
        auto x = Isa::zero();
        move_bits<Isa, FROM, TO, 0, TO_LINE>(from, x);
        Isa::put_bytes(to + TO_LINE * LINE, x);
        convert_lines<Isa, FROM, TO, TO_LINE + 1>(from, to);
    }
}

// Converts the low bits of an octet's codes to an octet of TO bits.
template <typename Isa, int FROM, int TO> static void convert_octet(const uint8_t * from, uint8_t * to) {
    for (int at = 0; at < LINE; at += 4 * Isa::W) {
        typename Isa::I line[FROM];
        read_lines<Isa, FROM>(from + at, line);
        convert_lines<Isa, FROM, TO>(line, to + at);
    }
}

template <typename Isa, int TO> static void convert_octet(int32_t bits, const uint8_t * from, uint8_t * to) {
#define CONVERT(FROM) convert_octet<Isa, FROM, TO>(from, to)
    SUBKV_BY_PATH_BITS(bits, CONVERT)
#undef CONVERT
}

template <typename Isa, int BITS, int AT = 0>
static inline void raise_key_lines(const typename Isa::I * line, uint8_t * to) {
    if constexpr (AT < BITS) {
        auto other = Isa::zero();
        move_bits<Isa, BITS, BITS, 4, AT>(line, other);
        Isa::put_bytes(to + AT * LINE, Isa::raise_keys(line[AT], other));
        raise_key_lines<Isa, BITS, AT + 1>(line, to);
    }
}

// Moves the low bits of an octet's codes up by a lane.
template <typename Isa, int BITS> static void raise_octet(bool value, const uint8_t * from, uint8_t * to) {
    constexpr int PART = 4 * Isa::W;
    for (int at = 0; at < LINE; at += PART) {
        if (value) {
            for (int i = 0; i < BITS * LINE; i += LINE) {
                const auto below = Isa::bytes(from + i + (at + LINE - PART) % LINE);
                Isa::put_bytes(to + i + at, Isa::raise_values(Isa::bytes(from + i + at), below));
            }
        } else {
            typename Isa::I line[BITS];
            read_lines<Isa, BITS>(from + at, line);
            raise_key_lines<Isa, BITS>(line, to + at);
        }
    }
}

// Writes the levels of an octet's registers from RHO on. `line` has the lines that combine_lines returns, and `one` is
// the octet before.
template <typename Isa, int BITS, int RHO = 0>
static inline void levels_of_lines(const typename Isa::I * line, const uint8_t * one, uint8_t * out) {
    if constexpr (RHO < 8) {
        constexpr TileField LOW = tile_fields(BITS, RHO).field[0];
        const auto code = codes_of<Isa, BITS, RHO, Isa::line_code_bit(BITS), true>([line](int i) { return line[i]; });
        const auto x    = Isa::template level<BITS, LOW.shift>(code, Isa::bytes(one + LOW.line * LINE));
        Isa::put_bytes(out + RHO * LINE, x);
        levels_of_lines<Isa, BITS, RHO + 1>(line, one, out);
    }
}

// Returns an octet's lines, exclusive or'ed with the low bits of `two`, the second octet before.
template <typename Isa, int BITS, int AT = 0>
static inline void combine_lines(const uint8_t * octet, const uint8_t * two, typename Isa::I * line) {
    if constexpr (AT < BITS) {
        constexpr int LOW = low_bits(BITS, AT);
        line[AT]          = Isa::bytes(octet + AT * LINE);
        if constexpr (LOW != 0) {
            line[AT] = Isa::exclusive_or(line[AT], Isa::mask(Isa::bytes(two + AT * LINE), LOW));
        }
        combine_lines<Isa, BITS, AT + 1>(octet, two, line);
    }
}

// The state of a tile's path, which advances octet by octet.
template <typename Isa> struct LinePath {
    int32_t         bits;     // bits of codes in `one` and `two`
    const uint8_t * one;      // the octet before
    const uint8_t * two;      // the second octet before
    int             free = 1; // index of the part of `start` that `one` and `two` do not use
    alignas(LINE) uint8_t start[2][2][TRELLIS_BITS * LINE];

    LinePath(const HeadCodec & codec, const uint8_t * tile) {
        PathOctet last[2] = {};
        last_octets(codec, last);
        bits = last[0].bits;
        one  = start[0][0];
        two  = start[0][1];
        if (codec.path == PATH_LANES) {
            memset(start[0], 0, sizeof(start[0]));
        }
        if (codec.path != PATH_CIRCLE) {
            return;
        }
        const uint8_t * octet[2] = { tile + last[0].at, tile + last[1].at };
        if (last[1].bits != bits) {
#define CONVERT(TO) convert_octet<Isa, TO>(last[1].bits, octet[1], start[1][0])
            SUBKV_BY_PATH_BITS(bits, CONVERT)
#undef CONVERT
            octet[1] = start[1][0];
        }
        for (int i = 0; i < 2; ++i) {
#define RAISE(BITS) raise_octet<Isa, BITS>(codec.value != 0, octet[i], start[0][i])
            SUBKV_BY_PATH_BITS(bits, RAISE)
#undef RAISE
        }
    }

    template <int BITS> void enter_band() {
        if (bits == BITS) {
            return;
        }
        convert_octet<Isa, BITS>(bits, one, start[free][0]);
        convert_octet<Isa, BITS>(bits, two, start[free][1]);
        bits = BITS;
        one  = start[free][0];
        two  = start[free][1];
        free ^= 1;
    }

    template <int BITS> void unpack_band(const uint8_t * octet, int32_t n, int64_t ahead, uint8_t * out) {
        enter_band<BITS>();
        for (int32_t j = 0; j < n; j += 8, octet += BITS * LINE, out += 8 * LINE) {
            prefetch_octet(octet, BITS, ahead);
            for (int at = 0; at < LINE; at += 4 * Isa::W) {
                typename Isa::I line[BITS];
                combine_lines<Isa, BITS>(octet + at, two + at, line);
                levels_of_lines<Isa, BITS>(line, one + at, out + at);
            }
            two = one;
            one = octet;
        }
    }
};

} // namespace subkv::cpu
