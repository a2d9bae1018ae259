// format.h: the constants of the formats (converter/FORMAT.md). All kernels use them and compute the same row bytes;
// Python reads them through subkv_constants().
#pragma once

#include "subkv/widths.h"

#include <cstdint>

namespace subkv {

//
// rows
//

// 2^(i/8) rounded to f32. These are literals, because the scales must not depend on the math library's exp2().
constexpr float EIGHTHS[8] = { 1.0f,        1.09050775f, 1.18920708f, 1.29683959f,
                               1.41421354f, 1.54221082f, 1.68179286f, 1.8340081f };

// Scale code u means s = EIGHTHS[u % 8] * 2^(u / 8 - SCALE_ONE / 8), and 0 means s = 0. SCALE_NAN marks a row that
// could not be coded, all of whose coefficients are NaN.
constexpr int32_t  SCALE_ONE  = 160; // s = 1
constexpr int32_t  SCALE_MOST = 254; // the largest scale
constexpr int32_t  SCALE_NAN  = 255;
extern const float SCALES[256]; // scales by scale code

// If an element of an exact row is not finite, all its elements become this half. No other NaN and no infinity is
// stored.
constexpr uint16_t HALF_NAN = 0x7e00;

// The scale codes that encode tries are the smallest code without clipping and this many below it (factor 2^(-10/8)).
constexpr int32_t SCALE_CANDIDATES_BELOW = 10;
constexpr float   HALF_MAX               = 65504.0f; // coefficients of 16-bit bands are clamped to +-HALF_MAX

constexpr int     MAX_BANDS     = 8;   // bands of a head
constexpr int     MAX_HEAD_SIZE = 576; // d, a multiple of BAND_STEP
constexpr int32_t BAND_STEP     = 8;   // bands have multiples of this many coefficients

// A trellis codes bands of at most TRELLIS_BITS bits, if a row has TRELLIS_LEAST such coefficients or more (trellis.h).
constexpr int32_t TRELLIS_BITS         = 6;
constexpr int32_t TRELLIS_LEAST        = 24;
constexpr int32_t TRELLIS_LEAST_LATENT = 64; // for keys of latent layers, where every lane is a separate path

// The (fractional) code of 0 without a trellis, in c = s * ratio * (u - half_range(b)).
SUBKV_EVERYWHERE float half_range(int32_t bits) {
    return 0.5f * (float) ((1 << bits) - 1);
}

//
// files
//

constexpr int FORMAT_VERSION        = 5;
constexpr int FORMAT_WITHOUT_DIGEST = 4; // an older version, which is also read
constexpr int CODES_VERSION         = 4; // version of rows and bases, a part of the fingerprint
constexpr int MAX_LAYERS            = 1024;
constexpr int MAX_HEADS_KV          = 1024;
constexpr int MAX_SINK              = 4096;
constexpr int MAX_RECENT            = 65536;

//
// caches
//

// The defaults of the exact window. python/subkv/format/window.py has the same ones, and a test compares them.
constexpr int32_t DEFAULT_SINK     = 4;
constexpr int32_t DEFAULT_RECENT   = 128;
constexpr int32_t DEFAULT_ROLLBACK = 16; // exact rows beyond n_recent

} // namespace subkv
