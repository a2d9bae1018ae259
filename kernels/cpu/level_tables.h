// level_tables.h: levels plus 128 as tables for permutations of bytes (tile_codes.h).
#pragma once

#include "subkv/trellis.h"

#include <stdint.h>

namespace subkv::cpu {

// Levels by index (trellis.h), repeated up to N entries.
template <int BITS, int N> struct alignas(64) ByIndex {
    uint8_t byte[N] = {};

    constexpr ByIndex() {
        for (int i = 0; i < N; ++i) {
            byte[i] = (uint8_t) (trellis_level(BITS, i % (2 << BITS)) + 128);
        }
    }
};

// Levels by window 4 u_t + 2 x_{t-1} + x_{t-2}, repeated up to N entries.
template <int BITS, int N> struct alignas(64) ByWindow {
    uint8_t byte[N] = {};

    constexpr ByWindow() {
        for (int i = 0; i < N; ++i) {
            const int w = i % (4 << BITS);
            byte[i]     = (uint8_t) (trellis_level(BITS, w >> 1 ^ (w & 1) << 1) + 128);
        }
    }
};

// Levels byte[x][u] by x = x_{t-1} and u = u_t ^ x_{t-2}, for codes of up to 4 bits.
template <int BITS> struct alignas(64) ByCode {
    uint8_t byte[2][16] = {};

    constexpr ByCode() {
        for (int x = 0; x < 2; ++x) {
            for (int u = 0; u < 16; ++u) {
                byte[x][u] = (uint8_t) (trellis_level(BITS, 2 * (u % (1 << BITS)) + x) + 128);
            }
        }
    }
};

// Levels by (u_t ^ x_{t-2}) + 2^BITS x_{t-1}, for codes of 2 and 3 bits.
template <int BITS> struct alignas(64) ByCodeAndBit {
    uint8_t byte[16] = {};

    constexpr ByCodeAndBit() {
        for (int i = 0; i < 16; ++i) {
            byte[i] = (uint8_t) (trellis_level(BITS, 2 * (i % (1 << BITS)) + (i >> BITS & 1)) + 128);
        }
    }
};

// The difference of level i and i - 2^BITS, for the lowest and the highest 16 indices i. It is 0 for the others.
template <int BITS> struct alignas(64) Bends {
    uint8_t low[16] = {}, high[16] = {};

    constexpr Bends() {
        static_assert(trellis_double(BITS) + 1 >= (1 << BITS) - 16, "other levels have bends");
        for (int i = 0; i < 16; ++i) {
            const int last = (2 << BITS) - 16 + i;
            low[i]         = (uint8_t) (trellis_level(BITS, i) - i + (1 << BITS));
            high[i]        = (uint8_t) (trellis_level(BITS, last) - last + (1 << BITS));
        }
    }
};

template <int BITS, int N> static constexpr ByIndex<BITS, N>  BY_INDEX        = {};
template <int BITS, int N> static constexpr ByWindow<BITS, N> BY_WINDOW       = {};
template <int BITS> static constexpr ByCode<BITS>             BY_CODE         = {};
template <int BITS> static constexpr ByCodeAndBit<BITS>       BY_CODE_AND_BIT = {};
template <int BITS> static constexpr Bends<BITS>              BENDS           = {};

} // namespace subkv::cpu
