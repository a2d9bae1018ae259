// encode.cpp: quantizes c = E x - offset to rows, and writes them to tiles.
//   x [n][ldx] f32 | E [rank][d] half | offset [rank] f32 or none | row of token t: a cell of a tile
//
// Scale code. With r_j = |c_j| / (ratio * (2^b - 1)/2) over the quantized bands, k0 is the smallest code in
// 1..SCALE_MOST with SCALES[k0] >= max r_j, i.e. without clipping (SCALE_MOST if all clip). The candidates are k0,
// k0-1, ..., k0 - SCALE_CANDIDATES_BELOW, but not below 1. The one with the least sum of squared coefficient errors
// wins, and of equal ones the larger.
//   step = s * ratio;  u = clamp(round(c/step + (2^b - 1)/2), 0, 2^b - 1), round half to even
//   error = c - step * (u - (2^b - 1)/2)
// For codes on a path (trellis.h), trellis.cpp continues: it searches the scale code around this one and finds the
// codes of the bands on the path. A head with 16-bit bands only gets SCALE_ONE. A 16-bit coefficient beyond half's
// range is clamped to +-65504: rows contain finite halves only. A row with a non-finite coefficient is SCALE_NAN and
// zeros, so that whoever reads it gets NaN; a row that is all zero is a zero row (every byte 0).
//
// Guarantee: the bytes depend only on the f32 coefficients and are the same in every version. Therefore fused
// multiply-adds are explicit, and the error is summed in eight lanes (coefficient j in lane j % 8) in this order, so
// that a compiler can neither contract nor reorder relevant operations. The coefficients may differ between versions in
// the last bits of E x, which is rounded to f32 before the offset is subtracted.
#include "half.h"
#include "rows.h"
#include "subkv/trellis.h"

#include <cmath>
#include <vector>

namespace subkv::ref {

static float quantize(float c, float inverse, const Band & band) {
    const float u = std::nearbyint(std::fma(c, inverse, half_range(band.bits)));
    return std::fmin(std::fmax(u, 0.0f), 2.0f * half_range(band.bits));
}

float squared_error(const HeadCodec & codec, const float * c, float s, int32_t beyond) {
    float lane[8] = {};
    for (int32_t i = 0; i < codec.n_bands; ++i) {
        const Band & band = codec.bands[i];
        if (band.bits == 16 || band.bits <= beyond) {
            continue;
        }
        const float step    = s * band.ratio;
        const float inverse = 1.0f / step;
        for (int32_t j = 0; j < band.n; ++j) {
            const float x = c[band.first + j];
            const float e = std::fma(-step, quantize(x, inverse, band) - half_range(band.bits), x);
            lane[j % 8]   = std::fma(e, e, lane[j % 8]);
        }
    }
    return ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
}

static int32_t choose_scale(const HeadCodec & codec, const float * c) {
    float reach     = 0.0f;
    bool  quantized = false;
    for (int32_t i = 0; i < codec.n_bands; ++i) {
        const Band & band = codec.bands[i];
        if (band.bits != 16) {
            quantized     = true;
            float largest = 0.0f;
            for (int32_t j = 0; j < band.n; ++j) {
                largest = std::fmax(largest, std::fabs(c[band.first + j]));
            }
            reach = std::fmax(reach, largest / (band.ratio * half_range(band.bits)));
        }
    }
    if (!quantized) {
        return SCALE_ONE;
    }
    int32_t k0 = 1;
    while (k0 < SCALE_MOST && SCALES[k0] < reach) {
        ++k0;
    }
    int32_t best       = k0;
    float   best_error = squared_error(codec, c, SCALES[k0], 0);
    for (int32_t k = k0 - 1; k >= 1 && k >= k0 - SCALE_CANDIDATES_BELOW; --k) {
        const float error = squared_error(codec, c, SCALES[k], 0);
        if (error < best_error) {
            best       = k;
            best_error = error;
        }
    }
    return best;
}

static void put_row(const HeadCodec & codec, const float * c, uint8_t * row) {
    uint8_t path[MAX_HEAD_SIZE];
    row[0] = (uint8_t) choose_scale(codec, c);
    if (codec.path != PATH_NONE) {
        row[0] = (uint8_t) choose_path_scale(codec, c, row[0]);
        find_path(codec, c, SCALES[row[0]], path);
    }
    const float s = SCALES[row[0]];
    for (int32_t i = 0; i < codec.n_bands; ++i) {
        const Band & band    = codec.bands[i];
        uint8_t *    planes  = row + band.offset;
        const float  inverse = 1.0f / (s * band.ratio);
        for (int32_t j = 0; j < band.n; ++j) {
            const float x = c[band.first + j];
            if (band.bits == 16) {
                const uint16_t h  = float_to_half(std::fmin(std::fmax(x, -HALF_MAX), HALF_MAX));
                planes[2 * j]     = (uint8_t) h;
                planes[2 * j + 1] = (uint8_t) (h >> 8);
            } else {
                const bool on = on_path(codec, band);
                put_code(planes, band.n, band.bits, j,
                         on ? path[band.first + j] : (uint32_t) quantize(x, inverse, band));
            }
        }
    }
}

int64_t encode(const HeadCodec & codec, const float * x, int64_t ldx, int64_t n, const int64_t * cells, uint8_t * tiles,
               int64_t tile_stride) {
    std::vector<float>   c((size_t) codec.rank);
    std::vector<uint8_t> row((size_t) codec.row_bytes);
    int64_t              n_bad = 0;
    for (int64_t t = 0; t < n; ++t) {
        if (present(codec.encode)) {
            project(codec.encode, codec.rank, codec.d, x + t * ldx, ldx, 1, 1.0f, c.data(), codec.rank);
        } else {
            c.assign(x + t * ldx, x + t * ldx + codec.rank);
        }
        for (int32_t i = 0; codec.offset != nullptr && i < codec.rank; ++i) {
            c[(size_t) i] -= codec.offset[i];
        }
        bool finite = true;
        bool zero   = true;
        for (const float value : c) {
            finite = finite && std::isfinite(value);
            zero   = zero && value == 0.0f;
        }
        row.assign(row.size(), 0);
        if (!finite) {
            row[0] = SCALE_NAN;
            ++n_bad;
        } else if (!zero) {
            put_row(codec, c.data(), row.data());
        }
        row_to_tile(codec, row.data(), tiles + cells[t] / TILE * tile_stride, cells[t] % TILE);
    }
    return n_bad;
}

} // namespace subkv::ref
