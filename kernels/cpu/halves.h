// halves.h: the contribution of 16-bit bands to attention over tiles (attend_tiles.h), in float.
#pragma once

#include "subkv/ops.h"

#include <stdint.h>

namespace subkv::cpu {

constexpr int32_t HALVES_STRIDE = 256; // cells of a step

// The coefficients of all 16-bit bands of K or V, in blocks of eight, and their values in a step's cells.
struct Halves {
    int32_t n; // blocks of eight
    int32_t first[MAX_HEAD_SIZE / 8];
    int32_t offset[MAX_HEAD_SIZE / 8]; // offset of the block's octet in a tile
    float * values;                    // [8 * n][HALVES_STRIDE]
};

static inline void find_halves(const HeadCodec & codec, Halves & halves) {
    halves.n = 0;
    for (int32_t i = 0; i < codec.n_bands; ++i) {
        const Band & band = codec.bands[i];
        for (int32_t j = 0; band.bits == 16 && j < band.n; j += 8) {
            halves.first[halves.n]    = band.first + j;
            halves.offset[halves.n++] = TILE * (band.offset + 2 * j);
        }
    }
}

// Reads the halves of a step's cells. It stores zeros for zero rows, for cells not in `visible`, whose bytes may be
// NaN, and for visible halves that are not finite, whose cells it adds to `bad`.
template <typename Isa>
static void read_halves(const Halves & halves, const uint8_t * tile, int64_t stride, const uint64_t * visible,
                        int32_t n_tiles, uint64_t * bad) {
    uint64_t kept[HALVES_STRIDE / TILE];
    for (int32_t t = 0; halves.n > 0 && t < n_tiles; ++t) {
        kept[t] = visible[t] & ~Isa::equal_bytes(tile + t * stride, 0);
    }
    for (int32_t j = 0; j < 8 * halves.n; ++j) {
        const uint8_t * at = tile + halves.offset[j / 8] + j % 8 * 2 * TILE;
        for (int32_t t = 0; t < n_tiles; ++t, at += stride) {
            float * x       = halves.values + j * HALVES_STRIDE + t * TILE;
            auto    nothing = Isa::set(0.0f); // It is NaN if a half is not finite.
            for (int32_t c = 0; c < TILE; c += Isa::W) {
                const auto value = Isa::keep(Isa::widen_cells(at + 2 * c), (uint32_t) (kept[t] >> c));
                nothing          = Isa::plus(nothing, Isa::sub(value, value));
                Isa::store(x + c, value);
            }
            const bool check = !(Isa::sum(nothing) == 0.0f);
            for (int32_t c = 0; check && c < TILE; ++c) {
                if (!(__builtin_fabsf(x[c]) <= HALF_MAX)) {
                    bad[t] |= (uint64_t) 1 << c;
                    x[c] = 0.0f;
                }
            }
        }
    }
}

// common [n] = shift + contribution of 16-bit bands to the logits of a query row q [rank]
static inline void add_key_halves(const Halves & halves, const float * q, float shift, int32_t n, float * common) {
    for (int32_t c = 0; c < n; ++c) {
        common[c] = shift;
    }
    for (int32_t j = 0; j < 8 * halves.n; ++j) {
        const float   x      = q[halves.first[j / 8] + j % 8];
        const float * values = halves.values + j * HALVES_STRIDE;
        for (int32_t c = 0; c < n; ++c) {
            common[c] += x * values[c];
        }
    }
}

// sum [rank] = shrink * sum + weight_scale * sum of the cells' 16-bit bands, times weight [n]; n is a multiple of 16
static inline void add_value_halves(const Halves & halves, const float * weight, int32_t n, float shrink,
                                    float weight_scale, float * sum) {
    for (int32_t j = 0; j < 8 * halves.n; ++j) {
        const float * values    = halves.values + j * HALVES_STRIDE;
        float         total[16] = {}; // They fit the registers.
        for (int32_t c = 0; c < n; c += 16) {
            for (int32_t k = 0; k < 16; ++k) {
                total[k] += weight[c + k] * values[c + k];
            }
        }
        for (int k = 1; k < 16; ++k) {
            total[0] += total[k];
        }
        float & at = sum[halves.first[j / 8] + j % 8];
        at         = shrink * at + weight_scale * total[0];
    }
}

} // namespace subkv::cpu
