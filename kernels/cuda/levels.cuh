// levels.cuh: converts codes of an octet (tiles.h) to bytes for tensor cores, eight at a time, from one word each of
// registers q and q + 4. Codes of up to 4 bits first become nibbles of one word, with register q in the lower nibble of
// a byte, because prmt selects bytes by nibbles. The resulting order of bytes is
//   out[0]   q: byte 0, q + 4: byte 0, q: byte 1, q + 4: byte 1
//   out[1]   the same of bytes 2 and 3
#pragma once

#include "device.cuh"
#include "subkv/trellis.h"

namespace subkv::cuda {

constexpr uint32_t NIBBLES = 0x11111111u, BYTES = 0x01010101u;

// Selects bytes of low (0 to 3) and high (4 to 7) by the four nibbles in the lower half of `by`. A nibble plus 8
// selects the sign of the byte instead, 255 for bytes of at least 128, else 0.
__device__ inline uint32_t choose(uint32_t low, uint32_t high, uint32_t by) {
    uint32_t out;
#if defined(__CUDA_ARCH__)
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(low), "r"(high), "r"(by));
#else
    out = 0;
    for (int i = 0; i < 4; ++i) {
        const uint32_t at   = by >> 4 * i;
        const uint32_t byte = ((at & 4 ? high : low) >> 8 * (at & 3)) & 255;
        out |= ((at & 8) == 0 ? byte : byte >= 128 ? 255u : 0u) << 8 * i;
    }
#endif
    return out;
}

__device__ inline uint32_t choose(uint64_t table, uint32_t by) {
    return choose((uint32_t) table, (uint32_t) (table >> 32), by);
}

// Converts each byte to 255 if it is at least 128, else to 0.
__device__ inline uint32_t spread_signs(uint32_t x) {
    return choose(x, 0, 0xBA98);
}

__device__ inline void interleave(uint32_t low, uint32_t high, uint32_t (&out)[2]) {
    out[0] = choose(low, high, 0x5140);
    out[1] = choose(low, high, 0x7362);
}

// The *choices* of codes are their lowest bits, which select the levels of the next two places on the path. `one` has
// those of the place before, and `two` those of the place before that, in the lowest bits of nibbles. They are 0
// outside a path.
struct Choices {
    uint32_t one = 0, two = 0;
};

// Returns the codes of registers q and q + 4, of 2 to 4 bits, as nibbles. line(i) returns their word of line i of the
// octet. The code repeats the layout of tile_fields with few operations.
template <int BITS, typename Line> __device__ inline uint32_t nibbles_of(const Line & line, int q) {
    if (BITS == 4) {
        return line(q);
    }
    if (BITS == 2) {
        return (line(0) >> 2 * q & 0x03030303u) | (line(1) >> 2 * q << 4 & 0x30303030u);
    }
    if (q < 3) {
        const uint32_t x = line(q);
        return (x & 0x07070707u) | (x << 1 & 0x70707070u);
    }
    const uint32_t top = line(2);
    return (line(0) >> 6 & 0x03030303u) | (line(1) >> 2 & 0x30303030u) | (top >> 4 & 0x04040404u) |
           (top >> 1 & 0x40404040u);
}

// Does the same for codes of 5 and 6 bits, and of 8 bits minus 128, as bytes.
template <int BITS, typename Line>
__device__ inline void bytes_of(const Line & line, int q, uint32_t & low, uint32_t & high) {
    if (BITS == 8) { // signed
        low  = line(q) ^ 128 * BYTES;
        high = line(4 + q) ^ 128 * BYTES;
    } else if (BITS == 6) {
        const auto last_register = [&](int i) {
            return (line(i) >> 6 & 0x03030303u) | (line(i + 1) >> 4 & 0x0C0C0C0Cu) | (line(i + 2) >> 2 & 0x30303030u);
        };
        low  = q < 3 ? line(q) & 0x3F3F3F3Fu : last_register(0);
        high = q < 3 ? line(3 + q) & 0x3F3F3F3Fu : last_register(3);
    } else {
        low = line(q) & 0x1F1F1F1Fu;
        if (q == 0) {
            high = line(4) & 0x1F1F1F1Fu;
        } else if (q == 3) {
            high = (line(4) >> 5 & 0x07070707u) | (line(1) >> 4 & 0x08080808u) | (line(3) >> 3 & 0x10101010u);
        } else {
            high = (line(2 * q - 2) >> 5 & 0x07070707u) | (line(2 * q - 1) >> 2 & 0x18181818u);
        }
    }
}

// Returns the lowest bits of codes of 2 to 6 bits in the format of Choices.
template <int BITS, typename Line> __device__ inline uint32_t choices_of(const Line & line, int q) {
    if (BITS <= 4) {
        return nibbles_of<BITS>(line, q) & NIBBLES;
    }
    uint32_t low, high;
    bytes_of<BITS>(line, q, low, high);
    return (low & BYTES) | (high << 4 & 16 * BYTES);
}

// Constants that convert the codes of a band to bytes.
struct Levels {
    // table and flip are for codes of up to 4 bits, bend and to_sign for codes of 5 and 6 bits on a path.
    uint64_t table[2]; // bytes of codes after choice 0; for 2 bits, the second table is by code and choice
    uint32_t choices;  // NIBBLES on a path, else 0
    uint32_t flip;     // xor mask of a byte after choice 1, in byte 1
    uint32_t codes;    // largest code, from 5 bits on in every byte
    uint32_t bend[2];  // 128 minus the magnitudes where levels begin to lie farther apart, in every byte
    int      to_sign;  // left shift of an index that makes its highest bit the sign of a byte
    int      zero;     // a byte means byte - zero / 2 steps
};

constexpr int LEVEL_ZERO = 64; // the byte of level 0 for codes of up to 4 bits, because table look-ups are unsigned

__host__ __device__ constexpr uint64_t level_table(int bits, int first, bool on_path) {
    uint64_t table = 0;
    for (int i = 0; i < 8 && first + i < 1 << bits; ++i) {
        const int byte = on_path ? trellis_level(bits, 2 * (first + i)) + LEVEL_ZERO : first + i;
        table |= (uint64_t) (byte & 255) << 8 * i;
    }
    return table;
}

__host__ __device__ constexpr uint64_t table_by_choice(bool on_path) {
    uint64_t table = 0;
    for (int i = 0; i < 8; ++i) {
        table |= (uint64_t) (on_path ? trellis_level(2, i) + LEVEL_ZERO : i / 2) << 8 * i;
    }
    return table;
}

// Returns twice the byte that means 0. Bytes are signed.
__host__ __device__ constexpr int level_zero(int bits, bool on_path) {
    return bits == 8 || (on_path && bits > 4) ? -1 : on_path ? 2 * LEVEL_ZERO - 1 : (1 << bits) - 1;
}

__host__ __device__ constexpr Levels levels_of(int bits, bool on_path) {
    const bool     by_table = bits <= 4;
    const uint32_t largest  = (1u << bits) - 1;
    return { { by_table ? level_table(bits, 0, on_path) : 0, bits == 4 ? level_table(bits, 8, on_path) :
                                                             bits == 2 ? table_by_choice(on_path) :
                                                                         0 },
             on_path ? NIBBLES : 0,
             on_path && by_table ? 127u << 8 : 0,
             by_table ? largest : BYTES * largest,
             { by_table || !on_path ? 0 : BYTES * (128 - trellis_double(bits)),
               by_table || !on_path ? 0 : BYTES * (128 - trellis_triple(bits)) },
             by_table ? 0 : 7 - bits,
             level_zero(bits, on_path) };
}

// Levels by bits - 2, without and with a path. They are in memory, because compilers recompute constants in every loop.
static __constant__ Levels LEVELS[][2] = {
    { levels_of(2, false), levels_of(2, true) },  { levels_of(3, false), levels_of(3, true) },
    { levels_of(4, false), levels_of(4, true) },  { levels_of(5, false), levels_of(5, true) },
    { levels_of(6, false), levels_of(6, true) },  {},
    { levels_of(8, false), levels_of(8, false) },
};

// Returns the levels of a width that is known at compile time.
template <int BITS> __device__ inline Levels levels_of_width(bool on_path) {
    constexpr Levels known  = levels_of(BITS, true);
    Levels           levels = LEVELS[BITS - 2][on_path];
    levels.codes            = known.codes;
    levels.bend[0]          = known.bend[0];
    levels.bend[1]          = known.bend[1];
    levels.to_sign          = known.to_sign;
    return levels;
}

// Converts codes of registers q and q + 4 from nibbles to bytes. BITS is 4, 2, or 3 for codes of 2 or 3 bits. By the
// alphabet's symmetry, a code after choice 1 has the complement of the level that the code's complement has after
// choice 0.
template <int BITS>
__device__ inline void nibble_levels(uint32_t codes, const Levels & levels, Choices & before, uint32_t (&out)[2]) {
    uint32_t index = codes ^ before.two;
    index          = BITS == 2 ? index * 2 + before.one : index ^ before.one * (BITS == 4 ? 15 : levels.codes);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        uint32_t byte = choose(levels.table[BITS == 2], index >> 16 * i);
        if (BITS == 4) { // Bytes are below 128, so the other table gives 0.
            byte |= choose(levels.table[1], (index ^ 8 * NIBBLES) >> 16 * i);
        }
        out[i] = BITS == 2 ? byte : byte ^ choose(levels.flip, 0, before.one >> 16 * i);
    }
    before = { codes & levels.choices, before.one };
}

// Returns the levels of four codes of 5 or 6 bits, with the choices before them in the lowest bits of bytes.
__device__ inline uint32_t wide_levels(uint32_t codes, const Levels & levels, uint32_t one, uint32_t two) {
    const uint32_t index = (codes ^ two) * 2 + one;
    const uint32_t lower = ~spread_signs(index << levels.to_sign); // 255 in the lower half of the alphabet
    const uint32_t k     = (index ^ lower) & levels.codes;
    const auto     above = [&](int i) { // amount by which magnitudes exceed the bend
        const uint32_t x = k + levels.bend[i];
        return x & 127 * BYTES & spread_signs(x);
    };
    return (k + above(0) + above(1)) ^ lower;
}

// Converts codes of registers q and q + 4 to bytes. The codes have 8 bits, minus 128, or for BITS below 8, 5 or 6 bits.
template <int BITS>
__device__ inline void byte_levels(uint32_t low, uint32_t high, const Levels & levels, Choices & before,
                                   uint32_t (&out)[2]) {
    uint32_t choices = 0;
    if (BITS < 8 && levels.choices != 0) {
        choices = (low & BYTES) | (high << 4 & 16 * BYTES);
        low     = wide_levels(low, levels, before.one & BYTES, before.two & BYTES);
        high    = wide_levels(high, levels, before.one >> 4 & BYTES, before.two >> 4 & BYTES);
    }
    interleave(low, high, out);
    if (BITS < 8) {
        before = { choices, before.one };
    }
}

} // namespace subkv::cuda
