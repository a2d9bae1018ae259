// coefficients.cuh: a tile's coefficients as halves, operands of tensor cores.
#pragma once

#include "tiles.cuh"

namespace subkv::cuda {

constexpr int SIDE = 16; // size of tensor cores' matrices
constexpr int PAD  = 8;  // halves between rows, which prevent bank conflicts

__host__ __device__ inline int up_to_side(int n) {
    return (n + SIDE - 1) / SIDE * SIDE;
}

// Returns a bound of the coefficients of a row with scale 1, without 16-bit bands.
__device__ inline float reach_of(const HeadCodec & codec) {
    float reach = 0.0f;
    for (int i = 0; i < codec.n_bands; ++i) {
        const Band & band = codec.bands[i];
        if (band.bits != 16) {
            const float last = on_path(codec, band) ? (float) trellis_level(band.bits, (2 << band.bits) - 1) + 0.5f :
                                                      half_range(band.bits);
            reach            = fmaxf(reach, level_step(codec, band) * last);
        }
    }
    return reach;
}

// Returns the largest magnitude in a cell's 16-bit bands, 0 without such bands, or NaN if a half is not finite.
__device__ inline float largest_half(const HeadCodec & codec, const uint8_t * tile, int c) {
    float largest = 0.0f, bad = 0.0f;
    for (int i = 0; i < codec.n_bands; ++i) {
        const Band & band = codec.bands[i];
        for (int j = 0; band.bits == 16 && j < band.n; ++j) {
            const float x = from_half(*half_of(tile + TILE * band.offset, j, c));
            largest       = fmaxf(largest, fabsf(x));
            bad           = fmaf(x, 0.0f, bad);
        }
    }
    return largest + bad;
}

// A cell's scale, and a bound of its coefficients, the maximum of scale times reach and of the largest half. A cell
// that could not be coded, or has a half that is not finite, has the scale NaN and the bound 0.
struct CellScale {
    float scale, bound;
};

__device__ inline CellScale cell_scale(const HeadCodec & codec, const uint8_t * tile, int c, float reach) {
    const float scale = row_scale(tile[c]);
    const float half  = scale > 0.0f ? largest_half(codec, tile, c) : 0.0f;
    return is_nan(scale) || is_nan(half) ? CellScale{ not_a_number(), 0.0f } :
                                           CellScale{ scale, fmaxf(scale * reach, half) };
}

struct alignas(16) Halves {
    __half x[8];
};

// x [cells][pitch] = keys of a tile's cells from c0 on, times inverse(cell). It is 0 from the rank to `width`, and in
// cells whose scale[cell] is 0 or NaN. Numbers of cells count from c0.
template <typename Inverse>
__device__ inline void fill_keys(const HeadCodec & codec, const Octets & octets, const uint8_t * tile, int c0,
                                 int cells, int width, const float * scale, Inverse inverse, __half * x, int pitch) {
    for (int i = (int) threadIdx.x; i < cells * width / 8; i += THREADS) {
        const int   c = i % cells, o = i / cells;
        const float factor = scale[c] * inverse(c);
        Halves      out    = {};
        if (o < codec.rank / 8 && factor > 0.0f) {
            const Octet     octet    = octets.octet[o];
            const uint8_t * lines    = tile + octet.at();
            const float     zero     = 0.5f * (float) zero_of(octet);
            uint32_t        codes[2] = {};
            uint32_t        one[2] = {}, two[2] = {};
            if (octet.place != NO_PLACE) {
                choices_at(octets, tile, octet.place - 1, c0 + c, one);
                choices_at(octets, tile, octet.place - 2, c0 + c, two);
            }
            if (octet.bits != 16) {
                read_bytes(octet, tile, (c0 + c) / 16, 4 * ((c0 + c) % 16), one, two, codes);
            }
            for (int j = 0; j < 8; ++j) {
                const float u = (float) (octet.bits == 16 ? 0 : codes[j / 4] >> 8 * (j % 4) & 255);
                out.x[j]      = __float2half_rn(octet.bits == 16 ? from_half(*half_of(lines, j, c0 + c)) * inverse(c) :
                                                                   factor * octet.step * (u - zero));
            }
        }
        *reinterpret_cast<Halves *>(x + c * pitch + 8 * o) = out;
    }
}

// x [width][pitch] = values times inverse(cell), coefficient by coefficient, because eight adjacent codes are eight
// cells of one coefficient. It is 0 where fill_keys writes 0.
template <typename Inverse>
__device__ inline void fill_values(const HeadCodec & codec, const Octets & octets, const uint8_t * tile, int c0,
                                   int cells, int width, const float * scale, Inverse inverse, __half * x, int pitch) {
    for (int i = (int) threadIdx.x; i < 4 * width; i += THREADS) {
        const int       j = i % width, quarter = i / width;
        const bool      there    = j < codec.rank;
        const Octet     octet    = there ? octets.octet[j / 8] : Octet{ 0, 16, NO_PLACE, 0.0f };
        const uint8_t * lines    = tile + octet.at();
        const float     zero     = 0.5f * (float) zero_of(octet);
        uint64_t        codes[2] = {};
        uint64_t        one[2] = {}, two[2] = {};
        if (octet.place != NO_PLACE) {
            choices_at(octets, tile, octet.place - 1, j % 8, quarter, one);
            choices_at(octets, tile, octet.place - 2, j % 8, quarter, two);
        }
        if (octet.bits != 16) {
            read_bytes(octet, tile, quarter, 8 * (j % 8), one, two, codes);
        }
        for (int half = 0; half < 2; ++half) {
            const int first = 8 * (4 * half + quarter) - c0; // first of eight cells
            if (first < 0 || first >= cells) {
                continue;
            }
            Halves out = {};
            for (int c = 0; there && c < 8; ++c) {
                const float of_cell = scale[first + c];
                if (of_cell > 0.0f) {
                    const float u     = (float) (octet.bits == 16 ? 0 : codes[half] >> 8 * c & 255);
                    const float value = octet.bits == 16 ? from_half(*half_of(lines, j % 8, c0 + first + c)) :
                                                           of_cell * octet.step * (u - zero);
                    out.x[c]          = __float2half_rn(value * inverse(first + c));
                }
            }
            *reinterpret_cast<Halves *>(x + j * pitch + first) = out;
        }
    }
}

} // namespace subkv::cuda
