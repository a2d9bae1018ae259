// scale_search.h: the search of a row's scale code without a path. It follows its definition, ref/encode.cpp, operation
// by operation (explicit fused multiply-adds, coefficient j in lane j % 8), so the same coefficients give the same
// bytes. lanes.h documents Isa.
#pragma once

#include "subkv/ops.h"

namespace subkv::cpu {

template <typename Isa>
static inline typename Isa::F quantize(typename Isa::F c, typename Isa::F inverse, typename Isa::F middle) {
    const auto u = Isa::round(Isa::fma(c, inverse, middle));
    return Isa::min(Isa::max(u, Isa::set(0.0f)), Isa::plus(middle, middle));
}

// Squared error of coefficients c [rank] in bands of more than `beyond` bits, but not of 16, at scale s.
template <typename Isa> static float squared_error(const HeadCodec & codec, const float * c, float s, int32_t beyond) {
    auto sum = Isa::set(0.0f);
    for (int32_t i = 0; i < codec.n_bands; ++i) {
        const Band & band = codec.bands[i];
        if (band.bits == 16 || band.bits <= beyond) {
            continue;
        }
        const float step    = s * band.ratio;
        const auto  inverse = Isa::set(1.0f / step);
        const auto  middle  = Isa::set(half_range(band.bits));
        for (int32_t j = 0; j < band.n; j += 8) {
            const auto x = Isa::load(c + band.first + j);
            const auto e = Isa::fnma(Isa::set(step), Isa::sub(quantize<Isa>(x, inverse, middle), middle), x);
            sum          = Isa::fma(e, e, sum);
        }
    }
    return Isa::sum(sum);
}

template <typename Isa> static float largest_magnitude(const float * x, int32_t n) {
    auto largest = Isa::set(0.0f);
    for (int32_t j = 0; j < n; j += 8) {
        largest = Isa::max(largest, Isa::abs(Isa::load(x + j)));
    }
    return Isa::largest(largest);
}

// Returns the scale code of a row of coefficients c [rank].
template <typename Isa> static int32_t choose_scale(const HeadCodec & codec, const float * c) {
    float reach     = 0.0f; // the smallest scale without clipping
    bool  quantized = false;
    for (int32_t i = 0; i < codec.n_bands; ++i) {
        const Band & band = codec.bands[i];
        if (band.bits != 16) {
            quantized     = true;
            const float r = largest_magnitude<Isa>(c + band.first, band.n) / (band.ratio * half_range(band.bits));
            reach         = r > reach ? r : reach;
        }
    }
    if (!quantized) {
        return SCALE_ONE;
    }
    int32_t low  = 1; // The smallest code that does not clip is in [low, high].
    int32_t high = SCALE_MOST;
    while (low < high) {
        const int32_t k = (low + high) / 2;
        if (SCALES[k] < reach) {
            low = k + 1;
        } else {
            high = k;
        }
    }
    int32_t best       = low;
    float   best_error = squared_error<Isa>(codec, c, SCALES[low], 0);
    for (int32_t k = low - 1; k >= 1 && k >= low - SCALE_CANDIDATES_BELOW; --k) {
        const float e = squared_error<Isa>(codec, c, SCALES[k], 0);
        if (e < best_error) {
            best       = k;
            best_error = e;
        }
    }
    return best;
}

} // namespace subkv::cpu
