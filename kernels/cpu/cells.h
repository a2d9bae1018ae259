// cells.h: reads and writes a cell of a tile (subkv/tiles.h). Everything is static, as in all headers of ISA files.
#pragma once

#include "../ref/rows.h"

#include <stdint.h>
#include <string.h>

namespace subkv::cpu {

// The content of a head's cell: its codes [rank], or halves in 16-bit bands.
struct Cell {
    uint8_t  scale;
    uint8_t  code[MAX_HEAD_SIZE];
    uint16_t half[MAX_HEAD_SIZE];
};

// Prefetches all lines of a cell's tile, because a write of the cell reads them.
static inline void prefetch_tile(const HeadCodec & codec, const uint8_t * tile) {
    for (int32_t line = 0; line < codec.row_bytes; ++line) {
        __builtin_prefetch(tile + LINE * line, 1);
    }
}

// Moves the bits `mask` of each of the four codes in a dword from bit `from` to bit `to`. Fields do not cross codes.
static inline uint32_t move_field(uint32_t codes, int32_t from, uint32_t mask, int32_t to) {
    return (codes >> from & 0x01010101u * mask) << to;
}

static inline uint32_t load32(const uint8_t * at) {
    uint32_t x;
    memcpy(&x, at, sizeof(x));
    return x;
}

static inline void store32(uint8_t * at, uint32_t x) {
    memcpy(at, &x, sizeof(x));
}

// Stores eight codes as cell c of an octet of keys (tiles.h), a dword in each of two registers.
template <int BITS> static inline void put_keys(const uint8_t * code, uint8_t * octet, int32_t c) {
    for (int32_t j = 0; j < 8; j += 4) {
        const TileFields fields = tile_fields(BITS, j + c / 16);
        for (int32_t i = 0; i < fields.n; ++i) {
            const TileField f    = fields.field[i];
            const uint32_t  mask = (1u << f.width) - 1;
            uint8_t *       at   = octet + f.line * LINE + c % 16 * 4;
            const uint32_t  kept = load32(at) & ~(0x01010101u * mask << f.shift);
            store32(at, kept | move_field(load32(code + j), f.from, mask, f.shift));
        }
    }
}

template <int BITS> static inline void get_keys(const uint8_t * octet, int32_t c, uint8_t * code) {
    for (int32_t j = 0; j < 8; j += 4) {
        const TileFields fields = tile_fields(BITS, j + c / 16);
        uint32_t         codes  = 0;
        for (int32_t i = 0; i < fields.n; ++i) {
            const TileField f = fields.field[i];
            codes |= move_field(load32(octet + f.line * LINE + c % 16 * 4), f.shift, (1u << f.width) - 1, f.from);
        }
        store32(code + j, codes);
    }
}

// Does the same for values, a byte in each qword of one register.
template <int BITS> static inline void put_values(const uint8_t * code, uint8_t * octet, int32_t c) {
    const TileFields fields = tile_fields(BITS, c / 8);
    for (int32_t i = 0; i < fields.n; ++i) {
        const TileField f    = fields.field[i];
        const int32_t   mask = (1 << f.width) - 1;
        uint8_t *       at   = octet + f.line * LINE + c % 8;
        for (int32_t j = 0; j < 8; ++j) {
            at[8 * j] = (uint8_t) ((at[8 * j] & ~(mask << f.shift)) | (code[j] >> f.from & mask) << f.shift);
        }
    }
}

template <int BITS> static inline void get_values(const uint8_t * octet, int32_t c, uint8_t * code) {
    const TileFields fields = tile_fields(BITS, c / 8);
    memset(code, 0, 8);
    for (int32_t i = 0; i < fields.n; ++i) {
        const TileField f    = fields.field[i];
        const int32_t   mask = (1 << f.width) - 1;
        const uint8_t * at   = octet + f.line * LINE + c % 8;
        for (int32_t j = 0; j < 8; ++j) {
            code[j] = (uint8_t) (code[j] | (at[8 * j] >> f.shift & mask) << f.from);
        }
    }
}

// Runs CALL with a band's width as a constant. An unknown width does nothing.
#define SUBKV_CALL_PATH(bits, low, twice, thrice, share, CALL)                                                         \
    case bits: CALL(bits); break;
#define SUBKV_CALL_PLAIN(bits, low, CALL)                                                                              \
    case bits: CALL(bits); break;

#define SUBKV_BY_PATH_BITS(bits, CALL)                                                                                 \
    switch (bits) {                                                                                                    \
        SUBKV_PATH_WIDTHS(SUBKV_CALL_PATH, CALL)                                                                       \
        default: break;                                                                                                \
    }

#define SUBKV_BY_BITS(bits, CALL)                                                                                      \
    switch (bits) {                                                                                                    \
        SUBKV_PATH_WIDTHS(SUBKV_CALL_PATH, CALL)                                                                       \
        SUBKV_PLAIN_WIDTHS(SUBKV_CALL_PLAIN, CALL)                                                                     \
        default: break;                                                                                                \
    }

// Runs CALL(BITS, PATH) with the width and `path` as constants.
#define SUBKV_CALL_CODE(bits, low, twice, thrice, share, CALL)                                                         \
    case -bits: CALL(bits, true); break;                                                                               \
    case bits: CALL(bits, false); break;
#define SUBKV_CALL_PLAIN_CODE(bits, low, CALL)                                                                         \
    case bits: CALL(bits, false); break;

#define SUBKV_BY_CODE(path, bits, CALL)                                                                                \
    switch ((path) ? -(bits) : (bits)) {                                                                               \
        SUBKV_PATH_WIDTHS(SUBKV_CALL_CODE, CALL)                                                                       \
        SUBKV_PLAIN_WIDTHS(SUBKV_CALL_PLAIN_CODE, CALL)                                                                \
        default: break;                                                                                                \
    }

static inline void put_cell(const HeadCodec & codec, const Cell & cell, uint8_t * tile, int32_t c) {
    tile[c] = cell.scale;
    for (int32_t i = 0; i < codec.n_bands; ++i) {
        const Band & band  = codec.bands[i];
        uint8_t *    octet = tile + LINE * band.offset;
        for (int32_t j = band.first; j < band.first + band.n; j += 8, octet += band.bits * LINE) {
            for (int32_t k = 0; band.bits == 16 && k < 8; ++k) {
                memcpy(octet + 2 * (k * TILE + c), cell.half + j + k, sizeof(uint16_t));
            }
#define PUT(BITS) (codec.value != 0 ? put_values<BITS> : put_keys<BITS>) (cell.code + j, octet, c)
            SUBKV_BY_BITS(band.bits, PUT)
#undef PUT
        }
    }
}

static inline void get_cell(const HeadCodec & codec, const uint8_t * tile, int32_t c, Cell & cell) {
    cell.scale = tile[c];
    for (int32_t i = 0; i < codec.n_bands; ++i) {
        const Band &    band  = codec.bands[i];
        const uint8_t * octet = tile + LINE * band.offset;
        for (int32_t j = band.first; j < band.first + band.n; j += 8, octet += band.bits * LINE) {
            for (int32_t k = 0; band.bits == 16 && k < 8; ++k) {
                memcpy(cell.half + j + k, octet + 2 * (k * TILE + c), sizeof(uint16_t));
            }
#define GET(BITS) (codec.value != 0 ? get_values<BITS> : get_keys<BITS>) (octet, c, cell.code + j)
            SUBKV_BY_BITS(band.bits, GET)
#undef GET
        }
    }
}

} // namespace subkv::cpu
