// tiles.cpp: the tile format (tiles.h), one cell at a time, and rows by way of tiles.
//   row [row_bytes] <-> cell c of a tile [TILE * row_bytes]: the same scale code, codes and halves at other places
#include "subkv/tiles.h"

#include "subkv/ops.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace subkv {

namespace {

// Bits [out_shift, out_shift + width) of n bytes of `out` become bits [in_shift, in_shift + width) of those of `in`;
// eight bytes at a time where there are.
template <typename Word>
void move_word(const uint8_t * in, int32_t in_shift, uint8_t * out, int32_t out_shift, int32_t width) {
    const auto mask = (Word) ((Word) -1 / 255 * ((1u << width) - 1));
    Word       from, to;
    std::memcpy(&from, in, sizeof(from));
    std::memcpy(&to, out, sizeof(to));
    to = (Word) ((to & ~(mask << out_shift)) | (from >> in_shift & mask) << out_shift);
    std::memcpy(out, &to, sizeof(to));
}

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

// Calls use(bytes, codes, n, shift, from, width) for the planes of a band (ops.h): bits [from, from + width) of n codes
// are at `shift` of n bytes. codes: a byte each.
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

// Calls use(line, codes, field) for every line of the band's octets that register rho is in; codes: of the octet.
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

// The byte of all eight coefficients of an octet in a line of values.
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
        for_planes(band, row, codes,
                   [](const uint8_t * bytes, uint8_t * run, int32_t n, int32_t shift, int32_t from, int32_t width) {
                       move_bits(bytes, shift, run, from, width, n);
                   });
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

// 64 bytes as words: loops over them are of fixed length, and compilers make registers of them.
struct alignas(LINE) Line {
    uint64_t word[LINE / 8];
};

// OR of bits [in_shift, in_shift + width) of every byte of `in` as bits from out_shift on.
void add_bits(const Line & __restrict in, int32_t in_shift, Line & __restrict out, int32_t out_shift, int32_t width) {
    const uint64_t mask = (uint64_t) -1 / 255 * ((1u << width) - 1);
    for (int32_t i = 0; i < LINE / 8; ++i) {
        out.word[i] |= (in.word[i] >> in_shift & mask) << out_shift;
    }
}

// Codes of an octet, a byte each: its registers, from and to its lines; `to` is zeros before.
void open_octet(int32_t bits, const Line * lines, Line * to) {
    for (int32_t rho = 0; rho < 8; ++rho) {
        const TileFields fields = tile_fields(bits, rho);
        for (int32_t i = 0; i < fields.n; ++i) {
            const TileField f = fields.field[i];
            add_bits(lines[f.line], f.shift, to[rho], f.from, f.width);
        }
    }
}

void close_octet(int32_t bits, const Line * codes, Line * to) {
    for (int32_t rho = 0; rho < 8; ++rho) {
        const TileFields fields = tile_fields(bits, rho);
        for (int32_t i = 0; i < fields.n; ++i) {
            const TileField f = fields.field[i];
            add_bits(codes[rho], f.from, to[f.line], f.shift, f.width);
        }
    }
}

// out = a0 b0 a1 b1 ... of 16 bytes each. Of a loop compilers make no interleaving instructions, and it takes three times
// as long.
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

// One half of an octet's registers of keys, four of 16 cells, to the same of values: its 8 bytes of each.
// The place of a byte in 32 of keys is cell (3 bits), coefficient (2); in values coefficient, cell: three turns by a bit,
// each of which interleaves the upper half with the lower.
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

namespace {

// Place of byte i of memory in a qword.
int32_t byte_of(int32_t i) {
    const uint16_t one = 1;
    uint8_t        low;
    std::memcpy(&low, &one, sizeof(low));
    return low != 0 ? i : 7 - i;
}

// Bits [in_shift, in_shift + width) of a cell's bytes in a line of an octet become bits [out_shift, ...) of those of
// another cell in another line. A field of the one register and one of the other have at most one such run in common.
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

// Of keys a cell's codes are two dwords of every octet, of values a byte of each of eight qwords. `to` has zeros there.
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

// Of the lines that a cell is in: each is another miss, and a cell is in as many as a tile has for 30 cells or so.
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
            for (uint32_t rest = used; rest != 0; rest &= rest - 1) {
                __builtin_prefetch(from + __builtin_ctz(rest) * LINE, 0, 2);
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
