// format.h: the numbers of the formats (converter/FORMAT.md), stated once. Kernels of every kind agree on those of the
// row bit for bit; Python reads all of them through subkv_constants().
#pragma once

#include <cstdint>

// Functions here run on GPUs, too. Static: ISA files include them, whose copy must not be the one that is linked.
#if defined(__CUDACC__)
#    define SUBKV_EVERYWHERE static __host__ __device__ constexpr
#else
#    define SUBKV_EVERYWHERE static constexpr
#endif

namespace subkv {

//
// rows
//

// 2^(i/8) rounded to f32. Literals, not exp2(): the scales must not depend on a libm.
constexpr float EIGHTHS[8] = { 1.0f,        1.09050775f, 1.18920708f, 1.29683959f,
                               1.41421354f, 1.54221082f, 1.68179286f, 1.8340081f };

// Scale code of s = 1: code u means s = EIGHTHS[u % 8] * 2^(u / 8 - SCALE_ONE / 8), 0 means s = 0.
constexpr int32_t  SCALE_ONE = 160;
extern const float SCALES[256]; // by scale code

// Scale codes tried by encode: the smallest one that clips nothing and this many below it (factor 2^(-10/8)).
constexpr int32_t SCALE_CANDIDATES_BELOW = 10;
constexpr float   HALF_MAX               = 65504.0f; // coefficients of 16-bit bands saturate there

constexpr int     MAX_BANDS     = 8;                        // of a head
constexpr int     MAX_HEAD_SIZE = 576;                      // d, a multiple of BAND_STEP
constexpr int32_t BAND_STEP     = 8;                        // bands have multiples of this many coefficients
constexpr int32_t WIDTHS[]      = { 2, 3, 4, 5, 6, 8, 16 }; // bits of a band

static constexpr bool is_width(int32_t bits) {
    for (const int32_t width : WIDTHS) {
        if (bits == width) {
            return true;
        }
    }
    return false;
}

// Codes of b bits are stored as one or two bit planes: of low_plane(b) bits, then of the rest.
SUBKV_EVERYWHERE int32_t low_plane(int32_t bits) {
    return bits == 6 || bits == 5 ? 4 : bits == 3 ? 2 : bits;
}

// The widest band, and the fewest coefficients of such bands in a row, that a trellis codes (trellis.h).
constexpr int32_t TRELLIS_BITS         = 6;
constexpr int32_t TRELLIS_LEAST        = 24;
constexpr int32_t TRELLIS_LEAST_LATENT = 64; // of a row of keys, whose lanes are paths of their own

// The code that would stand for 0, without a trellis: c = s * ratio * (u - half_range(b)).
SUBKV_EVERYWHERE float half_range(int32_t bits) {
    return 0.5f * (float) ((1 << bits) - 1);
}

//
// files
//

constexpr int FORMAT_VERSION = 4;
constexpr int MAX_LAYERS     = 1024;
constexpr int MAX_HEADS_KV   = 1024;
constexpr int MAX_SINK       = 4096;
constexpr int MAX_RECENT     = 65536;

//
// caches
//

constexpr int32_t N_ROLLBACK = 16; // exact rows beyond n_recent that a cache keeps unless it is told

} // namespace subkv
