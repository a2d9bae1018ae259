// entries.cuh: a head's codes as the decode kernel reads them, four bytes at a time.
#pragma once

#include "rows.cuh"

namespace subkv::cuda {

// The codes of four coefficients in one plane, or, of a band of 16 bits, two halves.
struct Entry {
    uint16_t at;       // byte in the row where the word begins
    uint8_t  shift;    // of the codes within every byte
    uint8_t  mask;     // of one code; 0: halves
    int16_t  first[4]; // the coefficients, -1: none (the band ends)
    uint8_t  up;       // bits of the code below this plane's
    float    zero;     // to subtract from a code; in the low plane of a band
};

constexpr int SIGNED      = 255; // the mask of codes that only fit signed bytes less 128
constexpr int MAX_ENTRIES = 224; // 2 planes of 256 coefficients, and words that bands of 8 leave unfilled

// Entries of a band: those of its planes, each of which has words of four bytes with 8/w codes per byte.
__device__ inline int band_entries(const Band & band) {
    if (band.bits == 16) {
        return band.n / 2;
    }
    const int low  = low_plane(band.bits);
    const int rest = band.bits - low;
    const int n    = (band.n * low / 8 + 3) / 4 * (8 / low);
    return rest == 0 ? n : n + (band.n * rest / 8 + 3) / 4 * (8 / rest);
}

__device__ inline Entry band_entry(const Band & band, int e) {
    Entry entry = {};
    if (band.bits == 16) {
        entry.at       = (uint16_t) (band.offset + 4 * e);
        entry.first[0] = (int16_t) (band.first + 2 * e);
        entry.first[1] = (int16_t) (band.first + 2 * e + 1);
        entry.first[2] = entry.first[3] = -1;
        return entry;
    }
    int       w     = low_plane(band.bits);
    int       start = band.offset;
    const int n_low = (band.n * w / 8 + 3) / 4 * (8 / w);
    entry.zero      = half_range(band.bits);
    if (e >= n_low) {
        e -= n_low;
        start += band.n * w / 8;
        entry.up   = (uint8_t) w;
        entry.zero = 0.0f;
        w          = band.bits - w;
    }
    const int m    = band.n * w / 8;
    const int word = e / (8 / w), slot = e % (8 / w);
    entry.at    = (uint16_t) (start + 4 * word);
    entry.shift = (uint8_t) (w * slot);
    entry.mask  = (uint8_t) ((1 << w) - 1);
    for (int i = 0; i < 4; ++i) {
        entry.first[i] = (int16_t) (4 * word + i < m ? band.first + slot * m + 4 * word + i : -1);
    }
    return entry;
}

// All entries of a head, by the whole block; returns how many.
__device__ inline int fill_entries(const HeadCodec & codec, Entry * entries) {
    int n = 0;
    for (int b = 0; b < codec.n_bands; ++b) {
        const int count = band_entries(codec.bands[b]);
        for (int e = (int) threadIdx.x; e < count; e += THREADS) {
            entries[n + e] = band_entry(codec.bands[b], e);
        }
        n += count;
    }
    return n;
}

} // namespace subkv::cuda
