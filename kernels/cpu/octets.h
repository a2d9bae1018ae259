// octets.h: the lines of an octet (tiles.h) and its registers of codes.
#pragma once

#include "subkv/ops.h"
#include "subkv/tiles.h"

namespace subkv {

// 64 bytes as words. Loops over them have a fixed length, so compilers use vector registers.
struct alignas(LINE) Line {
    uint64_t word[LINE / 8];
};

// ORs bits [in_shift, in_shift + width) of every byte of `in` to the bits from out_shift on.
inline void add_bits(const Line & __restrict in, int32_t in_shift, Line & __restrict out, int32_t out_shift,
                     int32_t width) {
    const uint64_t mask = (uint64_t) -1 / 255 * ((1u << width) - 1);
    for (int32_t i = 0; i < LINE / 8; ++i) {
        out.word[i] |= (in.word[i] >> in_shift & mask) << out_shift;
    }
}

// Converts an octet's lines to its registers, where a code is a byte, and back. The output must be zeros before.
inline void open_octet(int32_t bits, const Line * lines, Line * to) {
    for (int32_t rho = 0; rho < 8; ++rho) {
        const TileFields fields = tile_fields(bits, rho);
        for (int32_t i = 0; i < fields.n; ++i) {
            const TileField f = fields.field[i];
            add_bits(lines[f.line], f.shift, to[rho], f.from, f.width);
        }
    }
}

inline void close_octet(int32_t bits, const Line * codes, Line * to) {
    for (int32_t rho = 0; rho < 8; ++rho) {
        const TileFields fields = tile_fields(bits, rho);
        for (int32_t i = 0; i < fields.n; ++i) {
            const TileField f = fields.field[i];
            add_bits(codes[rho], f.from, to[f.line], f.shift, f.width);
        }
    }
}

// Writes the codes [band.n] of a row's band, a byte each.
void band_codes(const Band & band, const uint8_t * row, uint8_t * codes);

} // namespace subkv
