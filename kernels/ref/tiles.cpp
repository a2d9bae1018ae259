// tiles.cpp: the tile format (tiles.h), one cell at a time, and rows by way of tiles.
//   row [row_bytes] <-> cell c of a tile [TILE * row_bytes]: the same scale code, codes and halves at other places
#include "subkv/tiles.h"

#include "rows.h"

#include <algorithm>
#include <vector>

namespace subkv {

namespace {

struct Place {
    int32_t rho, byte;
};

Place place_of(const HeadCodec & codec, int32_t j, int32_t c) {
    return codec.value != 0 ? Place{ c / 8, 8 * j + c % 8 } : Place{ 4 * (j / 4) + c / 16, 4 * (c % 16) + j % 4 };
}

void put_code(uint8_t * octet, Place at, int32_t bits, uint32_t u) {
    const TileFields fields = tile_fields(bits, at.rho);
    for (int32_t i = 0; i < fields.n; ++i) {
        const TileField & f    = fields.field[i];
        const uint32_t    mask = (1u << f.width) - 1;
        uint8_t &         byte = octet[f.line * LINE + at.byte];
        byte                   = (uint8_t) ((byte & ~(mask << f.shift)) | (u >> f.from & mask) << f.shift);
    }
}

uint32_t get_code(const uint8_t * octet, Place at, int32_t bits) {
    const TileFields fields = tile_fields(bits, at.rho);
    uint32_t         u      = 0;
    for (int32_t i = 0; i < fields.n; ++i) {
        const TileField & f = fields.field[i];
        u |= (octet[f.line * LINE + at.byte] >> f.shift & ((1u << f.width) - 1)) << f.from;
    }
    return u;
}

// use(octet's lines, its band, index within the band of its first coefficient)
template <typename Byte, typename Use> void for_octets(const HeadCodec & codec, Byte * tile, Use use) {
    for (int32_t i = 0; i < codec.n_bands; ++i) {
        const Band & band = codec.bands[i];
        for (int32_t j = 0; j < band.n; j += 8) {
            use(tile + TILE * band.offset + j / 8 * band.bits * LINE, band, j);
        }
    }
}

} // namespace

void row_to_tile(const HeadCodec & codec, const uint8_t * row, uint8_t * tile, int64_t cell) {
    const auto c = (int32_t) cell;
    tile[c]      = row[0];
    for_octets(codec, tile, [&](uint8_t * octet, const Band & band, int32_t first) {
        const uint8_t * planes = row + band.offset;
        for (int32_t j = 0; j < 8; ++j) {
            if (band.bits == 16) {
                std::copy_n(planes + 2 * (first + j), 2, octet + 2 * (j * TILE + c));
            } else {
                put_code(octet, place_of(codec, j, c), band.bits, ref::code(planes, band.n, band.bits, first + j));
            }
        }
    });
}

void tile_to_row(const HeadCodec & codec, const uint8_t * tile, int64_t cell, uint8_t * row) {
    const auto c = (int32_t) cell;
    std::fill_n(row, codec.row_bytes, (uint8_t) 0);
    row[0] = tile[c];
    for_octets(codec, tile, [&](const uint8_t * octet, const Band & band, int32_t first) {
        uint8_t * planes = row + band.offset;
        for (int32_t j = 0; j < 8; ++j) {
            if (band.bits == 16) {
                std::copy_n(octet + 2 * (j * TILE + c), 2, planes + 2 * (first + j));
            } else {
                ref::put_code(planes, band.n, band.bits, first + j, get_code(octet, place_of(codec, j, c), band.bits));
            }
        }
    });
}

// Calls use(first, count, cells, tile) for rows [first, first + count), count <= TILE, with memory of one tile.
template <typename Use> static void by_tile(const HeadCodec & codec, int64_t n, Use use) {
    std::vector<uint8_t> tile((size_t) (TILE * codec.row_bytes));
    int64_t              cells[TILE];
    for (int64_t c = 0; c < TILE; ++c) {
        cells[c] = c;
    }
    for (int64_t first = 0; first < n; first += TILE) {
        use(first, std::min<int64_t>(TILE, n - first), cells, tile.data());
    }
}

int64_t encode_rows(const Ops & ops, const HeadCodec & codec, const float * x, int64_t ldx, int64_t n, uint8_t * rows) {
    int64_t n_bad = 0;
    by_tile(codec, n, [&](int64_t first, int64_t count, const int64_t * cells, uint8_t * tile) {
        n_bad += ops.encode(codec, x + first * ldx, ldx, count, cells, tile, TILE * codec.row_bytes);
        for (int64_t c = 0; c < count; ++c) {
            tile_to_row(codec, tile, c, rows + (first + c) * codec.row_bytes);
        }
    });
    return n_bad;
}

void dequantize_rows(const Ops & ops, const HeadCodec & codec, const uint8_t * rows, int64_t n, float * c) {
    by_tile(codec, n, [&](int64_t first, int64_t count, const int64_t * cells, uint8_t * tile) {
        for (int64_t t = 0; t < count; ++t) {
            row_to_tile(codec, rows + (first + t) * codec.row_bytes, tile, t);
        }
        ops.dequantize(codec, tile, TILE * codec.row_bytes, count, cells, c + first * codec.rank);
    });
}

} // namespace subkv
