// neon_encode.cpp: encode and to_half. Definition: ref/encode.cpp, which the scale search follows operation by
// operation (explicit fused multiply-adds, coefficient j in lane j % 8): the same coefficients give the same bytes.
#include "versions.h"

#if defined(SUBKV_ARM64)

#    include "cells.h"
#    include "neon.h"
#    include "recent_rows.h"
#    include "subkv/trellis.h"

#    include <string.h>

namespace subkv::neon {

static inline float32x4_t quantize(float32x4_t c, float32x4_t inverse, float32x4_t middle) {
    const float32x4_t u = vrndnq_f32(vfmaq_f32(middle, c, inverse));
    return vminq_f32(vmaxq_f32(u, vdupq_n_f32(0.0f)), vaddq_f32(middle, middle));
}

float squared_error(const HeadCodec & codec, const float * c, float s, int32_t beyond) {
    float32x4_t sum[2] = { vdupq_n_f32(0.0f), vdupq_n_f32(0.0f) };
    for (int32_t i = 0; i < codec.n_bands; ++i) {
        const Band & band = codec.bands[i];
        if (band.bits == 16 || band.bits <= beyond) {
            continue;
        }
        const float       step    = s * band.ratio;
        const float32x4_t inverse = vdupq_n_f32(1.0f / step);
        const float32x4_t middle  = vdupq_n_f32(half_range(band.bits));
        for (int32_t j = 0; j < band.n; j += 8) {
            for (int k = 0; k < 2; ++k) {
                const float32x4_t x = vld1q_f32(c + band.first + j + 4 * k);
                const float32x4_t e = vfmsq_f32(x, vdupq_n_f32(step), vsubq_f32(quantize(x, inverse, middle), middle));
                sum[k]              = vfmaq_f32(sum[k], e, e);
            }
        }
    }
    float lane[8];
    vst1q_f32(lane, sum[0]);
    vst1q_f32(lane + 4, sum[1]);
    return ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
}

static float largest_of(const float * x, int32_t n) {
    float32x4_t largest = vdupq_n_f32(0.0f);
    for (int32_t j = 0; j < n; j += 4) {
        largest = vmaxq_f32(largest, vabsq_f32(vld1q_f32(x + j)));
    }
    return vmaxvq_f32(largest);
}

// A cell's scale code and codes; 16-bit bands have halves instead.
static void quantize_cell(const HeadCodec & codec, const float * c, cpu::Cell & cell) {
    const auto error = [&](float s) { return squared_error(codec, c, s, 0); };
    cell.scale       = (uint8_t) cpu::choose_scale(codec, c, largest_of, error);
    if (codec.path != PATH_NONE) {
        cell.scale = choose_path_scale(codec, c, cell.scale);
        find_path(codec, c, SCALES[cell.scale], cell.code);
    }
    const float s = SCALES[cell.scale];
    for (int32_t i = 0; i < codec.n_bands; ++i) {
        const Band &  band = codec.bands[i];
        const float * x    = c + band.first;
        if (band.bits == 16) {
            float within[MAX_HEAD_SIZE];
            for (int32_t j = 0; j < band.n; j += 4) {
                vst1q_f32(within + j,
                          vminq_f32(vmaxq_f32(vld1q_f32(x + j), vdupq_n_f32(-HALF_MAX)), vdupq_n_f32(HALF_MAX)));
            }
            to_half(within, cell.half + band.first, band.n);
            continue;
        }
        const float32x4_t inverse = vdupq_n_f32(1.0f / (s * band.ratio));
        const float32x4_t middle  = vdupq_n_f32(half_range(band.bits));
        for (int32_t j = 0; !on_path(codec, band) && j < band.n; j += 8) {
            const uint16x4_t a = vmovn_u32(vcvtq_u32_f32(quantize(vld1q_f32(x + j), inverse, middle)));
            const uint16x4_t b = vmovn_u32(vcvtq_u32_f32(quantize(vld1q_f32(x + j + 4), inverse, middle)));
            vst1_u8(cell.code + band.first + j, vmovn_u16(vcombine_u16(a, b)));
        }
    }
}

static void quantize_cells(const HeadCodec & codec, const float * const * c, int n, cpu::Cell * const * cell) {
    for (int i = 0; i < n; ++i) {
        quantize_cell(codec, c[i], *cell[i]);
    }
}

static cpu::Coefficients centre(const HeadCodec & codec, float * c) {
    bool finite = true;
    bool any    = false;
    for (int32_t j = 0; j < codec.rank; ++j) {
        c[j] -= codec.offset != nullptr ? codec.offset[j] : 0.0f;
        finite = finite && __builtin_fabsf(c[j]) <= __FLT_MAX__;
        any    = any || c[j] != 0.0f;
    }
    return !finite ? cpu::Coefficients::BAD : any ? cpu::Coefficients::FINITE : cpu::Coefficients::ZERO;
}

int64_t encode(const HeadCodec & codec, const float * x, int64_t ldx, int64_t n, const int64_t * cells, uint8_t * tiles,
               int64_t tile_stride) {
    return cpu::encode_cells(codec, x, ldx, n, cells, tiles, tile_stride, project, centre, quantize_cells);
}

void to_half(const float * x, uint16_t * h, int64_t n) {
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) {
        vst1_u16(h + i, vreinterpret_u16_f16(vcvt_f16_f32(vld1q_f32(x + i))));
    }
    for (; i < n; ++i) {
        h[i] = vget_lane_u16(vreinterpret_u16_f16(vcvt_f16_f32(vdupq_n_f32(x[i]))), 0);
    }
}

bool pack_recent(const float * x, const float * mean, int64_t d, uint8_t * row) {
    return cpu::pack_recent<to_half>(x, mean, d, row);
}

void unpack_recent(const uint8_t * row, const float * mean, int64_t d, uint16_t * out) {
    cpu::unpack_recent<to_half>(row, mean, d, out);
}

} // namespace subkv::neon

#endif
