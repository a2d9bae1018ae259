// encode.h: encode, dequantize and to_half for all versions, defined by ref/encode.cpp and ref/rows.cpp. lanes.h
// documents Isa.
#pragma once

#include "cells.h"
#include "linear.h"
#include "path_search.h"

#include <string.h>

namespace subkv::cpu {

// Writes the codes of a cell that are not on a path, and the halves of 16-bit bands, for the scale code cell.scale.
template <typename Isa> static void quantize_bands(const HeadCodec & codec, const float * c, Cell & cell) {
    const float s = SCALES[cell.scale];
    for (int32_t i = 0; i < codec.n_bands; ++i) {
        const Band & band = codec.bands[i];
        if (band.bits == 16) {
            for (int32_t j = band.first; j < band.first + band.n; j += 8) {
                const auto above = Isa::max(Isa::load(c + j), Isa::set(-HALF_MAX));
                Isa::to_halves(cell.half + j, Isa::min(above, Isa::set(HALF_MAX)));
            }
            continue;
        }
        const auto inverse = Isa::set(1.0f / (s * band.ratio));
        const auto middle  = Isa::set(half_range(band.bits));
        for (int32_t j = band.first; !on_path(codec, band) && j < band.first + band.n; j += 8) {
            Isa::to_bytes(cell.code + j, quantize<Isa>(Isa::load(c + j), inverse, middle));
        }
    }
}

constexpr int64_t ENCODE_TOKENS = 32; // tokens projected together
constexpr int     ENCODE_ROWS   = PATH_ROWS;

// Quantizes n <= ENCODE_ROWS rows of finite coefficients, c[row] [rank].
template <typename Isa>
static void quantize_cells(const HeadCodec & codec, const float * const * c, int n, Cell * const * cell) {
    uint8_t scale[ENCODE_ROWS];
    for (int i = 0; i < n; ++i) {
        scale[i] = (uint8_t) choose_scale<Isa>(codec, c[i]);
    }
    if (codec.path != PATH_NONE) {
        choose_path_scales<Isa>(codec, c, n, scale);
    }
    for (int i = 0; i < n; ++i) {
        cell[i]->scale = scale[i];
        if (codec.path != PATH_NONE) {
            find_path<Isa>(codec, c[i], SCALES[scale[i]], cell[i]->code);
        }
        quantize_bands<Isa>(codec, c[i], *cell[i]);
    }
}

// c [n][rank] = E x, where x is [n][ldx]
template <typename Isa>
static void compute_coefficients(const HeadCodec & codec, const float * x, int64_t ldx, int64_t n, float * c) {
    if (present(codec.encode)) {
        project<Isa>(codec.encode, codec.rank, codec.d, x, ldx, n, 1.0f, c, codec.rank);
        return;
    }
    for (int64_t t = 0; t < n; ++t) {
        memcpy(c + t * codec.rank, x + t * ldx, (size_t) codec.rank * sizeof(float));
    }
}

enum class Coefficients { ZERO, FINITE, BAD }; // BAD means that some are not finite.

// Subtracts the offset from coefficients c [rank], and classifies the result.
template <typename Isa> static Coefficients subtract_offset(const HeadCodec & codec, float * c) {
    auto largest = Isa::set(0.0f), bad = Isa::set(0.0f);
    for (int32_t j = 0; j < codec.rank; j += 8) {
        auto value = Isa::load(c + j);
        if (codec.offset != nullptr) {
            value = Isa::sub(value, Isa::load(codec.offset + j));
            Isa::store(c + j, value);
        }
        largest = Isa::max(Isa::abs(value), largest);
        bad     = Isa::plus(bad, Isa::sub(value, value)); // NaN if it is not finite, else 0
    }
    return Isa::any_nan(bad)             ? Coefficients::BAD :
           Isa::largest(largest) == 0.0f ? Coefficients::ZERO :
                                           Coefficients::FINITE;
}

template <typename Isa>
static int64_t encode(const HeadCodec & codec, const float * x, int64_t ldx, int64_t n, const int64_t * cells,
                      uint8_t * tiles, int64_t tile_stride) {
    float * block = (float *) scratch(SLOT_COEFFICIENTS, (size_t) (ENCODE_TOKENS * codec.rank) * sizeof(float));
    int64_t n_bad = 0;
    for (int64_t first = 0; first < n; first += ENCODE_TOKENS) {
        const int64_t count = n - first < ENCODE_TOKENS ? n - first : ENCODE_TOKENS;
        compute_coefficients<Isa>(codec, x + first * ldx, ldx, count, block);
        for (int64_t t = 0; t < count; t += ENCODE_ROWS) {
            Cell          cell[ENCODE_ROWS];
            Cell *        coded[ENCODE_ROWS];
            const float * rows[ENCODE_ROWS];
            const int     n_rows  = count - t < ENCODE_ROWS ? (int) (count - t) : ENCODE_ROWS;
            int           n_coded = 0;
            for (int i = 0; i < n_rows; ++i) {
                prefetch_tile(codec, tiles + cells[first + t + i] / TILE * tile_stride);
                float *            c    = block + (t + i) * codec.rank;
                const Coefficients kind = subtract_offset<Isa>(codec, c);
                n_bad += kind == Coefficients::BAD ? 1 : 0;
                if (kind == Coefficients::FINITE) {
                    rows[n_coded]    = c;
                    coded[n_coded++] = cell + i;
                } else {
                    memset(cell + i, 0, sizeof(Cell));
                    cell[i].scale = kind == Coefficients::BAD ? SCALE_NAN : 0;
                }
            }
            if (n_coded > 0) {
                quantize_cells<Isa>(codec, rows, n_coded, coded);
            }
            for (int i = 0; i < n_rows; ++i) {
                const int64_t at = cells[first + t + i];
                put_cell(codec, cell[i], tiles + at / TILE * tile_stride, (int32_t) (at % TILE));
            }
        }
    }
    return n_bad;
}

template <typename Isa>
static void dequantize(const HeadCodec & codec, const uint8_t * tiles, int64_t tile_stride, int64_t n,
                       const int64_t * cells, float * c) {
    for (int64_t t = 0; t < n; ++t) {
        Cell cell;
        get_cell(codec, tiles + cells[t] / TILE * tile_stride, (int32_t) (cells[t] % TILE), cell);
        float * out = c + t * codec.rank;
        int32_t level[MAX_HEAD_SIZE];
        ref::path_levels(codec, cell.code, level);
        for (int32_t i = 0; i < codec.n_bands; ++i) {
            const Band & band = codec.bands[i];
            const float  step = SCALES[cell.scale] * level_step(codec, band);
            for (int32_t j = band.first; j < band.first + band.n; ++j) {
                if (band.bits == 16) {
                    out[j] = Isa::to_float(cell.scale == 0         ? (uint16_t) 0 :
                                           cell.scale == SCALE_NAN ? HALF_NAN :
                                                                     cell.half[j]);
                } else {
                    const float u =
                        on_path(codec, band) ? (float) level[j] + 0.5f : (float) cell.code[j] - half_range(band.bits);
                    out[j] = cell.scale != 0 ? step * u : 0.0f;
                }
            }
        }
    }
}

template <typename Isa> static void to_half(const float * x, uint16_t * h, int64_t n) {
    for (int64_t i = 0; i < n; i += 8) {
        float    last[8] = {};
        uint16_t out[8];
        if (i + 8 <= n) {
            Isa::to_halves(h + i, Isa::load(x + i));
            continue;
        }
        memcpy(last, x + i, (size_t) (n - i) * sizeof(float));
        Isa::to_halves(out, Isa::load(last));
        memcpy(h + i, out, (size_t) (n - i) * sizeof(uint16_t));
    }
}

} // namespace subkv::cpu
