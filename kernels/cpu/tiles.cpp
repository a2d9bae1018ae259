// tiles.cpp: the tile format (tiles.h), one cell at a time, and row functions on top of tiles.
// A row [row_bytes] and a cell of a tile [TILE * row_bytes] have the same scale code, codes and halves at other places.
#include "subkv/tiles.h"

#include "octets.h"
#include "subkv/ops.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace subkv {

namespace {

// Copies bits [in_shift, in_shift + width) of each byte of a word to bits [out_shift, out_shift + width).
template <typename Word>
void move_word(const uint8_t * in, int32_t in_shift, uint8_t * out, int32_t out_shift, int32_t width) {
    const auto mask = (Word) ((Word) -1 / 255 * ((1u << width) - 1));
    Word       from, to;
    std::memcpy(&from, in, sizeof(from));
    std::memcpy(&to, out, sizeof(to));
    to = (Word) ((to & ~(mask << out_shift)) | (from >> in_shift & mask) << out_shift);
    std::memcpy(out, &to, sizeof(to));
}

// Does this for n bytes, eight at a time if possible.
void move_bits(const uint8_t * in, int32_t in_shift, uint8_t * out, int32_t out_shift, int32_t width, int32_t n) {
    int32_t i = 0;
    for (; i + 8 <= n; i += 8) {
        move_word<uint64_t>(in + i, in_shift, out + i, out_shift, width);
    }
    for (; i + 4 <= n; i += 4) {
        move_word<uint32_t>(in + i, in_shift, out + i, out_shift, width);
    }
    for (; i < n; ++i) {
        move_word<uint8_t>(in + i, in_shift, out + i, out_shift, width);
    }
}

// Calls use(bytes, codes, n, shift, from, width) for the planes of a band (ops.h). Bits [from, from + width) of n codes
// are at bit `shift` of n bytes. Every code is a byte of `codes`.
template <typename Byte, typename Code, typename Use>
void for_planes(const Band & band, Byte * row, Code * codes, Use use) {
    Byte * plane = row + band.offset;
    for (int32_t from = 0, width = low_plane(band.bits); width > 0; from += width, width = band.bits - from) {
        const int32_t n = band.n * width / 8;
        for (int32_t shift = 0; shift < 8; shift += width) {
            use(plane, codes + shift / width * n, n, shift, from, width);
        }
        plane += n;
    }
}

// Calls use(line, codes of the octet, field) for every line of the band's octets that has bits of register rho.
template <typename Byte, typename Code, typename Use>
void for_lines(const Band & band, Byte * tile, Code * codes, int32_t rho, Use use) {
    const TileFields fields = tile_fields(band.bits, rho);
    for (int32_t i = 0; i < fields.n; ++i) {
        const TileField f    = fields.field[i];
        Byte *          line = tile + TILE * band.offset + f.line * LINE;
        for (int32_t j = 0; j < band.n; j += 8, line += band.bits * LINE) {
            use(line, codes + j, f);
        }
    }
}

// Reads the bytes of cell c, one for each coefficient of an octet, from a line of values.
void get_column(const uint8_t * line, int32_t c, uint8_t * column) {
    for (int32_t j = 0; j < 8; ++j) {
        column[j] = line[8 * j + c % 8];
    }
}

void put_column(const uint8_t * column, uint8_t * line, int32_t c) {
    for (int32_t j = 0; j < 8; ++j) {
        line[8 * j + c % 8] = column[j];
    }
}

void put_codes(const HeadCodec & codec, const Band & band, const uint8_t * codes, uint8_t * tile, int32_t c) {
    if (codec.value != 0) {
        for_lines(band, tile, codes, c / 8, [&](uint8_t * line, const uint8_t * octet, const TileField & f) {
            uint8_t column[8];
            get_column(line, c, column);
            move_word<uint64_t>(octet, f.from, column, f.shift, f.width);
            put_column(column, line, c);
        });
        return;
    }
    for (int32_t half = 0; half < 2; ++half) {
        for_lines(band, tile, codes + 4 * half, 4 * half + c / 16,
                  [&](uint8_t * line, const uint8_t * four, const TileField & f) {
                      move_word<uint32_t>(four, f.from, line + 4 * (c % 16), f.shift, f.width);
                  });
    }
}

void get_codes(const HeadCodec & codec, const Band & band, const uint8_t * tile, int32_t c, uint8_t * codes) {
    if (codec.value != 0) {
        for_lines(band, tile, codes, c / 8, [&](const uint8_t * line, uint8_t * octet, const TileField & f) {
            uint8_t column[8];
            get_column(line, c, column);
            move_word<uint64_t>(column, f.shift, octet, f.from, f.width);
        });
        return;
    }
    for (int32_t half = 0; half < 2; ++half) {
        for_lines(band, tile, codes + 4 * half, 4 * half + c / 16,
                  [&](const uint8_t * line, uint8_t * four, const TileField & f) {
                      move_word<uint32_t>(line + 4 * (c % 16), f.shift, four, f.from, f.width);
                  });
    }
}

} // namespace

void band_codes(const Band & band, const uint8_t * row, uint8_t * codes) {
    std::fill_n(codes, band.n, (uint8_t) 0);
    for_planes(band, row, codes,
               [](const uint8_t * bytes, uint8_t * run, int32_t n, int32_t shift, int32_t from, int32_t width) {
                   move_bits(bytes, shift, run, from, width, n);
               });
}

void row_to_tile(const HeadCodec & codec, const uint8_t * row, uint8_t * tile, int64_t cell) {
    const auto c                    = (int32_t) cell;
    uint8_t    codes[MAX_HEAD_SIZE] = {};
    tile[c]                         = row[0];
    for (int32_t i = 0; i < codec.n_bands; ++i) {
        const Band & band = codec.bands[i];
        if (band.bits == 16) {
            for (int32_t j = 0; j < band.n; ++j) {
                std::copy_n(row + band.offset + 2 * j, 2, tile + TILE * band.offset + 2 * (j * TILE + c));
            }
            continue;
        }
        band_codes(band, row, codes);
        put_codes(codec, band, codes, tile, c);
    }
}

void tile_to_row(const HeadCodec & codec, const uint8_t * tile, int64_t cell, uint8_t * row) {
    const auto c                    = (int32_t) cell;
    uint8_t    codes[MAX_HEAD_SIZE] = {};
    row[0]                          = tile[c];
    for (int32_t i = 0; i < codec.n_bands; ++i) {
        const Band & band = codec.bands[i];
        if (band.bits == 16) {
            for (int32_t j = 0; j < band.n; ++j) {
                std::copy_n(tile + TILE * band.offset + 2 * (j * TILE + c), 2, row + band.offset + 2 * j);
            }
            continue;
        }
        get_codes(codec, band, tile, c, codes);
        for_planes(band, row, codes,
                   [](uint8_t * bytes, const uint8_t * run, int32_t n, int32_t shift, int32_t from, int32_t width) {
                       move_bits(run, from, bytes, shift, width, n);
                   });
    }
}

namespace {

// out = a0 b0 a1 b1 ... of 16 bytes each. A loop takes three times as long, because compilers do not use interleaving
// instructions for it.
inline void interleave(const uint8_t * a, const uint8_t * b, uint8_t * out) {
#if defined(__clang__) || __GNUC__ >= 12
    typedef uint8_t Bytes __attribute__((vector_size(16)));
    Bytes           x, y;
    std::memcpy(&x, a, sizeof(x));
    std::memcpy(&y, b, sizeof(y));
    const Bytes low  = __builtin_shufflevector(x, y, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const Bytes high = __builtin_shufflevector(x, y, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    std::memcpy(out, &low, sizeof(low));
    std::memcpy(out + sizeof(low), &high, sizeof(high));
#else
    for (int32_t i = 0; i < 16; ++i) {
        out[2 * i]     = a[i];
        out[2 * i + 1] = b[i];
    }
#endif
}

// Converts one half of an octet's key registers (four of 16 cells) to value registers (8 bytes of each). The index of a
// byte in 32 bytes of keys consists of the cell (3 bits) and the coefficient (2 bits). In values the coefficient comes
// first. Three rotations of the index by one bit convert it. Each of them interleaves the upper half with the lower
// half.
void turn(const Line * keys, Line * values, int32_t half) {
    for (int32_t rho = 0; rho < 8; ++rho) {
        const uint8_t *     from = (const uint8_t *) (keys + rho / 2) + 32 * (rho % 2);
        alignas(32) uint8_t a[32], b[32];
        interleave(from, from + 16, a);
        interleave(a, a + 16, b);
        interleave(b, b + 16, (uint8_t *) (values + rho) + 32 * half);
    }
}

} // namespace

void keys_to_values(const HeadCodec & values, const uint8_t * key_tile, uint8_t * value_tile) {
    std::copy_n(key_tile, TILE, value_tile); // scales
    for (int32_t b = 0; b < values.n_bands; ++b) {
        const Band &    band = values.bands[b];
        const uint8_t * from = key_tile + TILE * band.offset;
        uint8_t *       to   = value_tile + TILE * band.offset;
        if (band.bits == 16) {
            std::copy_n(from, 2 * TILE * band.n, to);
            continue;
        }
        const size_t size = (size_t) band.bits * LINE;
        for (int32_t j = 0; j < band.n; j += 8, from += size, to += size) {
            Line lines[8], keys[8] = {}, out[8]; // codes of a register, a byte each
            std::memcpy(lines, from, size);
            open_octet(band.bits, lines, keys);
            turn(keys, out, 0);
            turn(keys + 4, out, 1);
            std::fill(lines, lines + band.bits, Line{});
            close_octet(band.bits, out, lines);
            std::memcpy(to, lines, size);
        }
    }
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
