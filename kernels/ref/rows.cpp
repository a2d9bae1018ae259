// rows.cpp: the row format, dequantize, and to_half.
// A row [row_bytes] is a scale byte u and then the planes of every band. With s = SCALES[u] a coefficient of c [rank]
// is c_j = s * ratio * (u_j - (2^b - 1)/2), or follows from the path. A w-bit plane of n coefficients has m = n*w/8
// bytes, with coefficient j in byte j % m at bit w*(j / m). A 16-bit band has little-endian halves without scale and
// ratio. If u is 0, every coefficient is zero; if it is SCALE_NAN, every coefficient is NaN.
#include "rows.h"

#include "half.h"
#include "subkv/trellis.h"

#include <cmath>
#include <vector>

namespace subkv {

#define S6(e) EIGHTHS[1] * e, EIGHTHS[2] * e, EIGHTHS[3] * e, EIGHTHS[4] * e, EIGHTHS[5] * e, EIGHTHS[6] * e
#define S7(e) S6(e), EIGHTHS[7] * e
#define S8(e) EIGHTHS[0] * e, S7(e)
// Powers of two are exact, and so is every product with one.
const float SCALES[256] = {
    0.0f,         S7(0x1p-20f), S8(0x1p-19f), S8(0x1p-18f), S8(0x1p-17f),          S8(0x1p-16f), S8(0x1p-15f),
    S8(0x1p-14f), S8(0x1p-13f), S8(0x1p-12f), S8(0x1p-11f), S8(0x1p-10f),          S8(0x1p-9f),  S8(0x1p-8f),
    S8(0x1p-7f),  S8(0x1p-6f),  S8(0x1p-5f),  S8(0x1p-4f),  S8(0x1p-3f),           S8(0x1p-2f),  S8(0x1p-1f),
    S8(0x1p+0f),  S8(0x1p+1f),  S8(0x1p+2f),  S8(0x1p+3f),  S8(0x1p+4f),           S8(0x1p+5f),  S8(0x1p+6f),
    S8(0x1p+7f),  S8(0x1p+8f),  S8(0x1p+9f),  S8(0x1p+10f), EIGHTHS[0] * 0x1p+11f, S6(0x1p+11f), NAN,
};
#undef S8
#undef S7
#undef S6

} // namespace subkv

namespace subkv::ref {

static uint32_t plane_value(const uint8_t * plane, int32_t n, int32_t w, int32_t j) {
    const int32_t m = n * w / 8;
    return (uint32_t) (plane[j % m] >> (w * (j / m))) & ((1u << w) - 1);
}

uint32_t code(const uint8_t * planes, int32_t n, int32_t bits, int32_t j) {
    const int32_t  low = low_plane(bits);
    const uint32_t u   = plane_value(planes, n, low, j);
    return low == bits ? u : u | plane_value(planes + n * low / 8, n, bits - low, j) << low;
}

static void put_plane(uint8_t * plane, int32_t n, int32_t w, int32_t j, uint32_t value) {
    const int32_t m = n * w / 8;
    plane[j % m]    = (uint8_t) (plane[j % m] | (value & ((1u << w) - 1)) << (w * (j / m)));
}

void put_code(uint8_t * planes, int32_t n, int32_t bits, int32_t j, uint32_t u) {
    const int32_t low = low_plane(bits);
    put_plane(planes, n, low, j, u);
    if (low < bits) {
        put_plane(planes + n * low / 8, n, bits - low, j, u >> low);
    }
}

void dequantize_row(const HeadCodec & codec, const uint8_t * row, float * c) {
    uint8_t u[MAX_HEAD_SIZE];
    int32_t level[MAX_HEAD_SIZE];
    for (int32_t i = 0; i < codec.n_bands; ++i) {
        const Band & band = codec.bands[i];
        for (int32_t j = 0; band.bits != 16 && j < band.n; ++j) {
            u[band.first + j] = (uint8_t) code(row + band.offset, band.n, band.bits, j);
        }
    }
    path_levels(codec, u, level);
    for (int32_t i = 0; i < codec.n_bands; ++i) {
        const Band &    band   = codec.bands[i];
        const uint8_t * planes = row + band.offset;
        const float     step   = SCALES[row[0]] * level_step(codec, band);
        for (int32_t j = band.first; j < band.first + band.n; ++j, planes += 2) {
            if (row[0] == 0) {
                c[j] = 0.0f;
            } else if (band.bits == 16) {
                c[j] = row[0] == SCALE_NAN ? NAN : half_to_float((uint16_t) (planes[0] | planes[1] << 8));
            } else if (on_path(codec, band)) {
                c[j] = step * ((float) level[j] + 0.5f);
            } else {
                c[j] = step * ((float) u[j] - half_range(band.bits));
            }
        }
    }
}

void dequantize(const HeadCodec & codec, const uint8_t * tiles, int64_t tile_stride, int64_t n, const int64_t * cells,
                float * c) {
    std::vector<uint8_t> row((size_t) codec.row_bytes);
    for (int64_t t = 0; t < n; ++t) {
        tile_to_row(codec, tiles + cells[t] / TILE * tile_stride, cells[t] % TILE, row.data());
        dequantize_row(codec, row.data(), c + t * codec.rank);
    }
}

void to_half(const float * x, uint16_t * h, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        h[i] = float_to_half(x[i]);
    }
}

} // namespace subkv::ref
