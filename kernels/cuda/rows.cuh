// rows.cuh: where codes sit in a row (kernels/include/subkv/ops.h has the format).
#pragma once

#include "device.cuh"

namespace subkv::cuda {

// Where one coefficient's code is: (row[low] >> low_shift & low_mask) | (row[high] >> high_shift & high_mask) << up
struct Place {
    uint16_t low, high;
    uint8_t  low_shift, low_mask, high_shift, high_mask;
    uint8_t  up;
    uint8_t  half; // 1: the code is the bits of a half
    float    step; // ratio; 1 for a half
    float    zero; // the code that stands for 0
};

__device__ inline Place place_of(const HeadCodec & codec, int coefficient) {
    int i = 0;
    while (i + 1 < codec.n_bands && coefficient >= codec.bands[i + 1].first) {
        ++i;
    }
    const Band & band = codec.bands[i];
    const int    j    = coefficient - band.first;
    Place        p    = {};
    if (band.bits == 16) {
        p.low      = (uint16_t) (band.offset + 2 * j);
        p.high     = (uint16_t) (p.low + 1);
        p.low_mask = p.high_mask = 255;
        p.up                     = 8;
        p.half                   = 1;
        p.step                   = 1.0f;
        return p;
    }
    const int w = low_plane(band.bits);
    const int m = band.n * w / 8;
    p.low       = (uint16_t) (band.offset + j % m);
    p.low_shift = (uint8_t) (w * (j / m));
    p.low_mask  = (uint8_t) ((1 << w) - 1);
    p.high      = p.low; // read and masked away where there is no second plane
    if (w < band.bits) {
        const int rest   = band.bits - w;
        const int m_high = band.n * rest / 8;
        p.high           = (uint16_t) (band.offset + m + j % m_high);
        p.high_shift     = (uint8_t) (rest * (j / m_high));
        p.high_mask      = (uint8_t) ((1 << rest) - 1);
        p.up             = (uint8_t) w;
    }
    p.step = band.ratio;
    p.zero = half_range(band.bits);
    return p;
}

// The coefficient of a row of scale s > 0.
__device__ inline float coefficient_at(const uint8_t * row, const Place & p, float s) {
    const uint32_t u = (uint32_t) (row[p.low] >> p.low_shift & p.low_mask) |
                       (uint32_t) (row[p.high] >> p.high_shift & p.high_mask) << p.up;
    return p.half != 0 ? from_half((uint16_t) u) : s * p.step * ((float) u - p.zero);
}

// What attend adds to a logit: the mask's value times the head's slope; -INFINITY: the token does not see the cell, or
// sees it exactly.
__device__ inline float mask_value(const Attend & a, int64_t token, int64_t cell) {
    const int64_t at = token * a.n_kv + cell;
    return a.mask_half ? from_half(((const uint16_t *) a.mask)[at]) : ((const float *) a.mask)[at];
}

__device__ inline bool is_exact(const Attend & a, int32_t key, int32_t query) {
    return key < a.n_sink || (key <= query && key > query - a.n_recent);
}

__device__ inline float coded_bias(const Attend & a, int64_t token, int64_t cell) {
    const int32_t pos = a.cell_pos[token / a.n_tps * a.n_kv + cell];
    return is_exact(a, pos, a.tokens[4 * token]) ? -INFINITY : mask_value(a, token, cell);
}

__device__ inline float capped(float x, float softcap) {
    return softcap > 0.0f ? softcap * tanhf(x / softcap) : x;
}

} // namespace subkv::cuda
