// tiles.h: the order of coded cells in the cache. 64 cells of one head and side are a *tile* of TILE * row_bytes bytes:
// the same bits as 64 rows (ops.h), reordered for vector loads. A register loaded from a tile has codes of many cells
// at the same bits of its bytes; one shift and one mask extract them, without a permutation. Files, states and Python
// use rows; row_to_tile and tile_to_row convert between rows and tiles.
//
//   line 0                the scale code of cell c at byte c
//   then octet by octet   8 coefficients of one band with b bits, bands in order: b lines of 64 bytes
//
// A line is LINE bytes. An octet decodes to eight *registers* rho of 64 codes, one byte each. The code of coefficient j
// (0..7) of the octet and cell c is at
//   K: rho = 4*(j/4) + c/16, byte 4*(c%16) + j%4    a dword has 4 coefficients of a cell
//   V: rho = c/8,            byte 8*j + c%8         a qword has 8 cells of a coefficient
// so products accumulate without sums over the lanes of a register.
// All codes of a register are at the same bits of the same lines; tile_fields(b, rho) returns these bits and lines.
// A 16-bit band has 16 lines per octet: coefficient j of all cells as little-endian halves, cell c at byte 128*j + 2*c.
#pragma once

#include "subkv/format.h"

#include <cstdint>

namespace subkv {

constexpr int32_t LINE = 64; // bytes
constexpr int32_t TILE = 64; // cells

// Bits [from, from + width) of a register's codes are bits [shift, shift + width) of the bytes of a line of the octet.
struct TileField {
    int32_t line, shift, width, from;
};

struct TileFields {
    int32_t   n;
    TileField field[3];
};

// For codes of 3, 5 and 6 bits most registers use one line, and the others combine the unused bits of several lines.
// Widths without a case have no fields.
SUBKV_EVERYWHERE TileFields tile_fields(int32_t bits, int32_t rho) {
    const int32_t half = rho / 4, quarter = rho % 4;
    switch (bits) {
        case 2: return { 1, { { half, 2 * quarter, 2, 0 } } };
        case 3:
            return quarter < 3 ? TileFields{ 1, { { quarter, 3 * half, 3, 0 } } } :
                                 TileFields{ 2, { { half, 6, 2, 0 }, { 2, 6 + half, 1, 2 } } };
        case 4: return { 1, { { quarter, 4 * half, 4, 0 } } };
        case 5:
            return rho < 5 ? TileFields{ 1, { { rho, 0, 5, 0 } } } :
                   rho < 7 ? TileFields{ 2, { { 2 * (rho - 5), 5, 3, 0 }, { 2 * (rho - 5) + 1, 5, 2, 3 } } } :
                             TileFields{ 3, { { 4, 5, 3, 0 }, { 1, 7, 1, 3 }, { 3, 7, 1, 4 } } };
        case 6:
            return quarter < 3 ?
                       TileFields{ 1, { { 3 * half + quarter, 0, 6, 0 } } } :
                       TileFields{ 3, { { 3 * half, 6, 2, 0 }, { 3 * half + 1, 6, 2, 2 }, { 3 * half + 2, 6, 2, 4 } } };
        case 8: return { 1, { { rho, 0, 8, 0 } } };
        default: return {};
    }
}

} // namespace subkv
