// pack.h: what encode_rows does alike in every version: coefficients, the search of a scale code, codes to planes.
// Definition: ref/encode.cpp. Static, as all that ISA files include.
#pragma once

#include "../ref/rows.h"

#include <stdint.h>
#include <string.h>

namespace subkv::cpu {

// c [n][rank] = E x of x [n][ldx], by a version's project.
template <typename Project>
static inline void coefficients(const Project & project, const HeadCodec & codec, const float * x, int64_t ldx,
                                int64_t n, float * c) {
    if (codec.encode != nullptr) {
        project(codec.encode, codec.rank, codec.d, x, ldx, n, 1.0f, c, codec.rank);
        return;
    }
    for (int64_t t = 0; t < n; ++t) {
        memcpy(c + t * codec.rank, x + t * ldx, (size_t) codec.rank * sizeof(float));
    }
}

// The scale code of a row of coefficients c. largest(x, n): largest magnitude of n of them; error(s): squared error of
// the quantized ones at scale s.
template <typename Largest, typename Error>
static inline int32_t choose_scale(const HeadCodec & codec, const float * c, const Largest & largest,
                                   const Error & error) {
    float reach     = 0.0f; // the smallest scale that clips nothing
    bool  quantized = false;
    for (int32_t i = 0; i < codec.n_bands; ++i) {
        const Band & band = codec.bands[i];
        if (band.bits != 16) {
            quantized     = true;
            const float r = largest(c + band.first, band.n) / (band.ratio * half_range(band.bits));
            reach         = r > reach ? r : reach;
        }
    }
    if (!quantized) {
        return SCALE_ONE;
    }
    int32_t low  = 1; // smallest code in [low, high] that does not clip
    int32_t high = 255;
    while (low < high) {
        const int32_t k = (low + high) / 2;
        if (SCALES[k] < reach) {
            low = k + 1;
        } else {
            high = k;
        }
    }
    int32_t best       = low;
    float   best_error = error(SCALES[low]);
    for (int32_t k = low - 1; k >= 1 && k >= low - SCALE_CANDIDATES_BELOW; --k) {
        const float e = error(SCALES[k]);
        if (e < best_error) {
            best       = k;
            best_error = e;
        }
    }
    return best;
}

// ORs the w-bit values (code >> drop) & mask of n codes into the m = n*w/8 bytes of a plane.
static inline void put_plane(const uint8_t * code, int32_t n, int32_t w, int32_t drop, uint8_t * plane) {
    const int32_t m    = n * w / 8;
    const int32_t mask = (1 << w) - 1;
    for (int32_t b = 0; b < m; ++b) {
        int32_t byte = 0;
        for (int32_t k = 0; k * w < 8; ++k) {
            byte |= (code[k * m + b] >> drop & mask) << (k * w);
        }
        plane[b] = (uint8_t) byte;
    }
}

static inline void put_codes(const uint8_t * code, int32_t n, int32_t bits, uint8_t * planes) {
    const int32_t low = low_plane(bits);
    put_plane(code, n, low, 0, planes);
    if (low < bits) {
        put_plane(code, n, bits - low, low, planes + n * low / 8);
    }
}

} // namespace subkv::cpu
