// gather.cpp: copies a list of cells to new tiles, from tiles or from rows.
#include "octets.h"
#include "subkv/ops.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace subkv {

namespace {

// Returns the number, counted from the low end, of the byte of a qword that is at place i in memory.
int32_t byte_of(int32_t i) {
    const uint16_t one = 1;
    uint8_t        low;
    std::memcpy(&low, &one, sizeof(low));
    return low != 0 ? i : 7 - i;
}

// A run of bits to copy: bits [in_shift, in_shift + width) of a cell's bytes in a line of an octet become bits
// [out_shift, out_shift + width) of another cell's bytes in another line. Two fields of different registers share at
// most one run.
struct Moved {
    int32_t in_line, in_shift, out_line, out_shift;
    uint8_t mask;
};

int32_t moves(int32_t bits, int32_t rho, int32_t new_rho, Moved * out) {
    const TileFields from = tile_fields(bits, rho), to = tile_fields(bits, new_rho);
    int32_t          n = 0;
    for (int32_t i = 0; i < from.n; ++i) {
        for (int32_t k = 0; k < to.n; ++k) {
            const TileField f = from.field[i], g = to.field[k];
            const int32_t   first = std::max(f.from, g.from);
            const int32_t   width = std::min(f.from + f.width, g.from + g.width) - first;
            if (width > 0) {
                out[n++] = { f.line, f.shift + first - f.from, g.line, g.shift + first - g.from,
                             (uint8_t) ((1u << width) - 1) };
            }
        }
    }
    return n;
}

constexpr int32_t MOST_MOVES = 9;

// Copies a cell's codes, two dwords per octet of keys or one byte in each of eight qwords of values. These bits of `to`
// must be 0 before.
void move_keys(const Band & band, const uint8_t * from, int32_t c, uint8_t * to, int32_t place) {
    const size_t size = (size_t) band.bits * LINE;
    for (int32_t half = 0; half < 8; half += 4) {
        Moved         moved[MOST_MOVES];
        const int32_t n = moves(band.bits, half + c / 16, half + place / 16, moved);
        for (int32_t i = 0; i < n; ++i) {
            const Moved     m    = moved[i];
            const uint32_t  mask = m.mask * 0x01010101u;
            const uint8_t * in   = from + m.in_line * LINE + 4 * (c % 16);
            uint8_t *       out  = to + m.out_line * LINE + 4 * (place % 16);
            for (int32_t j = 0; j < band.n; j += 8, in += size, out += size) {
                uint32_t four, there;
                std::memcpy(&four, in, sizeof(four));
                std::memcpy(&there, out, sizeof(there));
                there |= (four >> m.in_shift & mask) << m.out_shift;
                std::memcpy(out, &there, sizeof(there));
            }
        }
    }
}

void move_values(const Band & band, const uint8_t * from, int32_t c, uint8_t * to, int32_t place) {
    const size_t  size = (size_t) band.bits * LINE;
    Moved         moved[MOST_MOVES];
    const int32_t n = moves(band.bits, c / 8, place / 8, moved);
    for (int32_t i = 0; i < n; ++i) {
        const Moved     m         = moved[i];
        const int32_t   in_shift  = m.in_shift + 8 * byte_of(c % 8);
        const int32_t   out_shift = m.out_shift + 8 * byte_of(place % 8);
        const uint8_t * in        = from + m.in_line * LINE;
        uint8_t *       out       = to + m.out_line * LINE;
        for (int32_t j = 0; j < band.n; j += 8, in += size, out += size) {
            Line codes, there;
            std::memcpy(&codes, in, sizeof(codes));
            std::memcpy(&there, out, sizeof(there));
            for (int32_t q = 0; q < LINE / 8; ++q) {
                there.word[q] |= (codes.word[q] >> in_shift & m.mask) << out_shift;
            }
            std::memcpy(out, &there, sizeof(there));
        }
    }
}

// Prefetches the lines of a cell. Each line is a separate cache miss.
void prefetch_cell(const HeadCodec & codec, const uint8_t * tile, int32_t c) {
#if defined(__GNUC__)
    for (int32_t b = 0; b < codec.n_bands; ++b) {
        const Band &    band = codec.bands[b];
        const uint8_t * from = tile + TILE * band.offset;
        uint32_t        used = 0;
        for (int32_t half = 0; half < 8 && band.bits != 16; half += codec.value != 0 ? 8 : 4) {
            const TileFields fields = tile_fields(band.bits, codec.value != 0 ? c / 8 : half + c / 16);
            for (int32_t i = 0; i < fields.n; ++i) {
                used |= 1u << fields.field[i].line;
            }
        }
        for (int32_t j = 0; j < band.n; j += 8, from += band.bits * LINE) {
            for (uint32_t lines = used; lines != 0; lines &= lines - 1) {
                __builtin_prefetch(from + __builtin_ctz(lines) * LINE, 0, 2);
            }
        }
    }
#else
    (void) codec, (void) tile, (void) c;
#endif
}

} // namespace

void gather_cells(const HeadCodec & codec, const uint8_t * tiles, int64_t tile_stride, const int32_t * cells, int64_t n,
                  uint8_t * out) {
    const int64_t size = TILE * codec.row_bytes;
    std::fill(out, out + (n + TILE - 1) / TILE * size, (uint8_t) 0);
    for (int64_t i = 0; i < n; ++i) {
        if (i + 1 < n && cells[i + 1] >= 0 && cells[i + 1] / TILE != cells[i] / TILE) {
            prefetch_cell(codec, tiles + cells[i + 1] / TILE * tile_stride, cells[i + 1] % TILE);
        }
        if (cells[i] < 0) {
            continue;
        }
        const uint8_t * from  = tiles + cells[i] / TILE * tile_stride;
        uint8_t *       to    = out + i / TILE * size;
        const int32_t   c     = cells[i] % TILE;
        const auto      place = (int32_t) (i % TILE);
        to[place]             = from[c];
        for (int32_t b = 0; b < codec.n_bands; ++b) {
            const Band &    band = codec.bands[b];
            const uint8_t * line = from + TILE * band.offset;
            uint8_t *       put  = to + TILE * band.offset;
            if (band.bits == 16) {
                for (int32_t j = 0; j < band.n; ++j, line += 2 * TILE, put += 2 * TILE) {
                    std::memcpy(put + 2 * place, line + 2 * c, 2);
                }
            } else if (codec.value != 0) {
                move_values(band, line, c, put, place);
            } else {
                move_keys(band, line, c, put, place);
            }
        }
    }
}

namespace {

// Writes the bytes of eight codes to their places for cell c in the octet's registers.
void put_eight(bool value, const uint8_t * codes, int32_t c, Line * registers) {
    auto * to = (uint8_t *) registers;
    if (!value) {
        std::memcpy(to + c / 16 * LINE + 4 * (c % 16), codes, 4);
        std::memcpy(to + (4 + c / 16) * LINE + 4 * (c % 16), codes + 4, 4);
        return;
    }
    for (int32_t j = 0; j < 8; ++j) {
        to[c / 8 * LINE + 8 * j + c % 8] = codes[j];
    }
}

// Builds a tile from rows; nullptr stands for a zero row. `codes` is memory of TILE * codec.rank bytes.
void fill_tile(const HeadCodec & codec, const uint8_t * const * row, uint8_t * codes, uint8_t * tile) {
    for (int32_t c = 0; c < TILE; ++c) {
        tile[c] = row[c] == nullptr ? 0 : row[c][0];
    }
    for (int32_t b = 0; b < codec.n_bands; ++b) {
        const Band & band = codec.bands[b];
        uint8_t *    to   = tile + TILE * band.offset;
        if (band.bits == 16) {
            for (int32_t j = 0; j < band.n; ++j) {
                for (int32_t c = 0; c < TILE; ++c, to += 2) {
                    const uint8_t none[2] = {};
                    std::memcpy(to, row[c] == nullptr ? none : row[c] + band.offset + 2 * j, 2);
                }
            }
            continue;
        }
        for (int32_t c = 0; c < TILE; ++c) {
            if (row[c] == nullptr) {
                std::fill_n(codes + c * band.n, band.n, (uint8_t) 0);
            } else {
                band_codes(band, row[c], codes + c * band.n);
            }
        }
        const size_t size = (size_t) band.bits * LINE;
        for (int32_t j = 0; j < band.n; j += 8, to += size) {
            Line registers[8], lines[8] = {};
            for (int32_t c = 0; c < TILE; ++c) {
                put_eight(codec.value != 0, codes + c * band.n + j, c, registers);
            }
            close_octet(band.bits, registers, lines);
            std::memcpy(to, lines, size);
        }
    }
}

} // namespace

void rows_to_tiles(const HeadCodec & codec, const uint8_t * rows, int64_t stride, const int32_t * cells, int64_t n,
                   uint8_t * out) {
    std::vector<uint8_t> codes((size_t) (TILE * codec.rank));
    for (int64_t first = 0; first < n; first += TILE, out += TILE * codec.row_bytes) {
        const uint8_t * row[TILE];
        for (int64_t c = 0; c < TILE; ++c) {
            const bool    there = first + c < n;
            const int64_t cell  = !there ? -1 : cells == nullptr ? first + c : cells[first + c];
            row[c]              = cell < 0 ? nullptr : rows + cell * stride;
#if defined(__GNUC__)
            for (int32_t byte = 0; cells != nullptr && cell >= 0 && byte < codec.row_bytes; byte += LINE) {
                __builtin_prefetch(row[c] + byte, 0, 2);
            }
#endif
        }
        fill_tile(codec, row, codes.data(), out);
    }
}

} // namespace subkv
