// tiles.cuh: reads a head's tile (subkv/tiles.h), an octet at a time. It converts codes on a path (trellis.h) to
// levels, four in a word, which are bytes like codes of 8 bits.
#pragma once

#include "device.cuh"
#include "subkv/trellis.h"

namespace subkv::cuda {

constexpr int NO_PLACE = 255;

// Octet number i of a head has its coefficients 8 * i to 8 * i + 7.
struct alignas(8) Octet {
    uint16_t line;  // first line in the tile (lines of TILE bytes)
    uint8_t  bits;  // bits per code, 16 for halves
    uint8_t  place; // place on its lane of the path (trellis.h), or NO_PLACE
    float    step;  // distance of values, relative to the row's scale; 1 for halves

    __host__ __device__ int at() const { return TILE * line; }
};

// A head's octets in shared memory, and the numbers of those on the path, in order.
struct Octets {
    Octet *   octet;
    uint8_t * path;
    int       n, n_path;
    bool      lanes; // whether the path is PATH_LANES, so that no choices precede place 0

    // Takes memory for a head of `rank` coefficients.
    __host__ __device__ static Octets take(Carve & shared, int rank) {
        Octets octets = {};
        octets.octet  = shared.take<Octet>((size_t) rank / 8);
        octets.path   = shared.take<uint8_t>((size_t) rank / 8);
        return octets;
    }

    // Returns the octet at a place, which is -n_path or higher.
    __device__ const Octet & at_place(int place) const { return octet[path[place < 0 ? place + n_path : place]]; }
};

// The whole block calls this. The octets are valid after the next barrier.
__device__ inline void fill_octets(const HeadCodec & codec, Octets & octets) {
    octets.n      = codec.rank / 8;
    octets.n_path = 0;
    octets.lanes  = codec.path == PATH_LANES;
    for (int b = 0; b < codec.n_bands; ++b) {
        const Band & band = codec.bands[b];
        const bool   on   = on_path(codec, band);
        for (int i = (int) threadIdx.x; i < band.n / 8; i += THREADS) {
            const int place                  = on ? octets.n_path + i : NO_PLACE;
            octets.octet[band.first / 8 + i] = { (uint16_t) (band.offset + i * band.bits), (uint8_t) band.bits,
                                                 (uint8_t) place, band.bits == 16 ? 1.0f : level_step(codec, band) };
            if (on) {
                octets.path[place] = (uint8_t) (band.first / 8 + i);
            }
        }
        octets.n_path += on ? band.n / 8 : 0;
    }
}

// Returns `zero`, with which a byte of read_bytes means byte - zero / 2 steps.
__device__ inline int zero_of(const Octet & octet) {
    return octet.place != NO_PLACE ? 255 : (1 << octet.bits) - 1;
}

constexpr uint32_t ONES = 0x01010101u; // in each of four codes, the bit that selects the levels of the next two places

// Reads codes of registers quarter and quarter + 4 (tiles.h), a byte each, from the words at byte `at` of their lines.
//   K   dwords at 4 * (c % 16) with quarter c / 16 have coefficients 0 to 3 and 4 to 7 of cell c
//   V   qwords at 8 * j have coefficient j of eight cells from 8 * quarter on, and of eight from 32 + 8 * quarter on
template <int BITS, typename Word>
__device__ inline void read_codes(const uint8_t * octet, int quarter, int at, Word (&codes)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const TileFields fields = tile_fields(BITS, 4 * half + quarter);
        codes[half]             = 0;
#pragma unroll
        for (int i = 0; i < 3; ++i) {
            if (i < fields.n) {
                const TileField f    = fields.field[i];
                const Word      mask = (Word) -1 / 255 * ((1u << f.width) - 1);
                const Word      line = *reinterpret_cast<const Word *>(octet + f.line * LINE + at);
                codes[half] |= (line >> f.shift & mask) << f.from;
            }
        }
    }
}

// Reads only the choices, which are the lowest bits of these codes and select the levels of the next two places.
template <typename Word>
__device__ inline void read_choices(int bits, const uint8_t * octet, int quarter, int at, Word (&choice)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const TileField f = tile_fields(bits, 4 * half + quarter).field[0]; // the field with bit 0
        choice[half]      = *reinterpret_cast<const Word *>(octet + f.line * LINE + at) >> f.shift & (Word) -1 / 255;
    }
}

// The choices before place 0 are those of the previous lane's last places, so lane j of a key's words becomes j + 1.
__device__ inline void rotate_lanes(uint32_t (&choice)[2]) {
    const uint32_t low = choice[0];
    choice[0]          = low << 8 | choice[1] >> 24;
    choice[1]          = choice[1] << 8 | low >> 24;
}

// Reads the choices at place `place`, which is -n_path or higher, of the key of cell `cell`.
__device__ inline void choices_at(const Octets & octets, const uint8_t * tile, int place, int cell,
                                  uint32_t (&choice)[2]) {
    if (octets.lanes && place < 0) {
        choice[0] = choice[1] = 0;
        return;
    }
    const Octet octet = octets.at_place(place);
    read_choices(octet.bits, tile + octet.at(), cell / 16, 4 * (cell % 16), choice);
    if (place < 0) {
        rotate_lanes(choice);
    }
}

// Does the same for values, for lane j of the place and a quarter of the cells.
__device__ inline void choices_at(const Octets & octets, const uint8_t * tile, int place, int j, int quarter,
                                  uint64_t (&choice)[2]) {
    if (octets.lanes && place < 0) {
        choice[0] = choice[1] = 0;
        return;
    }
    const Octet octet = octets.at_place(place);
    read_choices(octet.bits, tile + octet.at(), quarter, 8 * (place < 0 ? (j + 7) % 8 : j), choice);
}

// Looks up four bytes in a table of eight bytes. The low three bits of each byte are the index. If bit 3 is set, the
// result is 0, provided that the table's byte is below 128.
__device__ inline uint32_t look_up(uint64_t table, uint32_t bytes) {
    const uint32_t pairs = bytes | bytes >> 4; // two nibbles each in bytes 0 and 2
#if defined(__CUDA_ARCH__)
    uint32_t nibbles, out;
    asm("prmt.b32 %0, %1, 0, 0x4420;" : "=r"(nibbles) : "r"(pairs));
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"((uint32_t) table), "r"((uint32_t) (table >> 32)), "r"(nibbles));
    return out;
#else
    const uint32_t nibbles = (pairs & 255) | (pairs >> 16 & 255) << 8;
    uint32_t       out     = 0;
    for (int i = 0; i < 4; ++i) {
        const uint32_t n = nibbles >> 4 * i & 15;
        out |= (n < 8 ? (uint32_t) (table >> 8 * n) & 255 : 0) << 8 * i;
    }
    return out;
#endif
}

// Returns max(k - bend, 0) for four magnitudes k, a byte each.
template <int bend> __device__ inline uint32_t beyond(uint32_t k) {
    const uint32_t above = (k | 128 * ONES) - bend * ONES, is = above & 128 * ONES;
    return above & (is - (is >> 7));
}

// The numbers that to_levels adds to magnitudes first to first + 7, a byte each.
__host__ __device__ constexpr uint64_t widened(int32_t bits, int32_t first) {
    uint64_t table = 0;
    for (int32_t i = 0; i < 8; ++i) {
        const int32_t k = first + i;
        table |= (uint64_t) (k < 1 << bits ? trellis_level(bits, (1 << bits) + k) - k : 0) << 8 * i;
    }
    return table;
}

// Returns the levels plus 128 of four codes of a place, with the choices one and two places before.
template <int BITS> __device__ inline uint32_t to_levels(uint32_t codes, uint32_t one, uint32_t two) {
    const uint32_t index = (codes ^ two) << 1 ^ one;
    const uint32_t upper = (index >> BITS & ONES) * 255; // 255 in the upper half of the alphabet
    uint32_t       k     = (index ^ ~upper) & ONES * ((1u << BITS) - 1);
    if (BITS <= 3) {
        constexpr uint64_t TABLE = widened(BITS, 0);
        k += look_up(TABLE, k);
    } else if (BITS == 4) {
        static_assert(widened(4, 0) == 0, "the first eight magnitudes are levels");
        constexpr uint64_t TABLE = widened(4, 8);
        k += look_up(TABLE, k ^ 8 * ONES);
    } else {
        k += beyond<trellis_double(BITS)>(k) + beyond<trellis_triple(BITS)>(k);
    }
    return k ^ upper ^ 127 * ONES;
}

template <int BITS> __device__ inline uint64_t to_levels(uint64_t codes, uint64_t one, uint64_t two) {
    const auto high = [](uint64_t x) { return (uint32_t) (x >> 32); };
    return (uint64_t) to_levels<BITS>(high(codes), high(one), high(two)) << 32 |
           to_levels<BITS>((uint32_t) codes, (uint32_t) one, (uint32_t) two);
}

// Does what read_codes does, but on a path returns levels plus 128 and advances the choices by a place.
template <int BITS, typename Word>
__device__ inline void read_bytes(bool on_path, const uint8_t * octet, int quarter, int at, Word (&one)[2],
                                  Word (&two)[2], Word (&bytes)[2]) {
    read_codes<BITS>(octet, quarter, at, bytes);
    if (BITS <= TRELLIS_BITS && on_path) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const Word codes = bytes[half];
            bytes[half]      = to_levels<BITS <= TRELLIS_BITS ? BITS : 2>(codes, one[half], two[half]);
            two[half]        = one[half];
            one[half]        = codes & (Word) -1 / 255;
        }
    }
}

// Selects code by an octet's width and path, which are equal in a warp. It does not read halves.
template <typename Word>
__device__ inline void read_bytes(const Octet & octet, const uint8_t * tile, int quarter, int at, Word (&one)[2],
                                  Word (&two)[2], Word (&bytes)[2]) {
    const uint8_t * lines   = tile + octet.at();
    const bool      on_path = octet.place != NO_PLACE;
    switch (octet.bits) {
#define SUBKV_READ(bits, ...)                                                                                          \
    case bits: return read_bytes<bits>(on_path, lines, quarter, at, one, two, bytes);
        SUBKV_PATH_WIDTHS(SUBKV_READ, )
#undef SUBKV_READ
        default: return read_bytes<8>(on_path, lines, quarter, at, one, two, bytes);
    }
}

// Returns coefficient j of cell c in an octet of a 16-bit band.
__device__ inline const uint16_t * half_of(const uint8_t * octet, int j, int c) {
    return reinterpret_cast<const uint16_t *>(octet) + j * TILE + c;
}

} // namespace subkv::cuda
