// avx2_attend.h: the Isa of attend_tiles.h with AVX2. The including file defines the products, as in avx512_attend.h:
//   Products  split, Opened, open, Sum, start, add, total
//             key_regs(rows), VALUE_ROWS, octets(rows), for which all operands fit the registers
#pragma once

#include "attend_tiles.h"
#include "avx2_simd.h"
#include "level_tables.h"

// The namespace is unnamed, because every including file has its own instruction flags and needs its own copy.
namespace subkv::avx2 {
namespace {

struct Registers : Lanes {
    static constexpr bool    FROM_TILE      = false;
    static constexpr int     FROM_TILE_ROWS = 0;
    static constexpr int     KEY_ROWS       = 3;
    static constexpr int32_t ZERO_SHIFT     = 0;

    using I = __m256i;

    template <typename Isa> using TilePath = cpu::LinePath<Isa>;

    struct Previous {}; // LinePath reads preceding codes from their lines.

    static F keep(F x, uint32_t lanes) {
        const I bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
        const I on  = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32((int) lanes), bit), bit);
        return _mm256_and_ps(x, _mm256_castsi256_ps(on));
    }

    static I zero() { return _mm256_setzero_si256(); }

    static I to_int(F x) { return _mm256_cvtps_epi32(x); }

    static F to_float(I x) { return _mm256_cvtepi32_ps(x); }

    static I plus_int(I a, I b) { return _mm256_add_epi32(a, b); }

    static int32_t sum_int(I x) {
        __m128i y = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
        y         = _mm_add_epi32(y, _mm_shuffle_epi32(y, 0x4e));
        y         = _mm_add_epi32(y, _mm_shuffle_epi32(y, 0xb1));
        return _mm_cvtsi128_si32(y);
    }

    static void store_int(int32_t * at, I x) { _mm256_storeu_si256((__m256i *) at, x); }

    static I bytes(const uint8_t * at) { return _mm256_loadu_si256((const __m256i *) at); }

    static void put_bytes(uint8_t * at, I x) { _mm256_storeu_si256((__m256i *) at, x); }

    template <int RIGHT> static I shift(I x) { // Bits may cross into the next byte. The caller clears them.
        if constexpr (RIGHT > 0) {
            return _mm256_srli_epi16(x, RIGHT);
        } else if constexpr (RIGHT < 0) {
            return _mm256_slli_epi16(x, -RIGHT);
        } else {
            return x;
        }
    }

    static I mask(I x, int byte) { return _mm256_and_si256(x, _mm256_set1_epi8((char) byte)); }

    template <bool> static I join(I x, I y, int byte) { return _mm256_or_si256(x, mask(y, byte)); }

    static I plus_bytes(I x, int byte) { return _mm256_add_epi8(x, _mm256_set1_epi8((char) byte)); }

    static I raise_keys(I x, I other) { return _mm256_or_si256(_mm256_slli_epi32(x, 8), _mm256_srli_epi32(other, 24)); }

    static I raise_values(I x, I below) { return _mm256_alignr_epi8(x, _mm256_permute2x128_si256(below, x, 0x21), 8); }

    static I exclusive_or(I x, I y) { return _mm256_xor_si256(x, y); }

    static constexpr int line_code_bit(int bits) { return bits <= 4 ? 0 : 1; }

    template <int BITS, int LOW> static I level(I code, I line) {
        if constexpr (BITS <= 3) { // The index is code + 2^BITS x_{t-1}.
            const auto & levels = cpu::BY_CODE_AND_BIT<BITS>.byte;
            return _mm256_shuffle_epi8(of(levels), _mm256_or_si256(code, mask(shift<LOW - BITS>(line), 1 << BITS)));
        } else if constexpr (BITS == 4) {
            const auto & levels = cpu::BY_CODE<BITS>.byte;
            return _mm256_blendv_epi8(_mm256_shuffle_epi8(of(levels[0]), code),
                                      _mm256_shuffle_epi8(of(levels[1]), code), shift<LOW - 7>(line));
        } else {
            constexpr int HALF = 1 << BITS;
            const I       y    = plus_bytes(_mm256_or_si256(code, mask(shift<LOW>(line), 1)), 128 - HALF);
            if constexpr (BITS == 5) { // An index above 127 gives 0.
                const I low  = _mm256_shuffle_epi8(of(cpu::BENDS<BITS>.low), plus_bytes(y, HALF - 16));
                const I high = _mm256_shuffle_epi8(of(cpu::BENDS<BITS>.high), plus_bytes(y, 144 - HALF));
                return _mm256_add_epi8(y, _mm256_add_epi8(low, high));
            } else { // This computes the levels of trellis.h plus 128.
                const auto above = [&](int t) { return _mm256_subs_epu8(y, _mm256_set1_epi8((char) (128 + t))); };
                const auto below = [&](int t) { return _mm256_subs_epu8(_mm256_set1_epi8((char) (127 - t)), y); };
                const int  far = trellis_double(BITS), more = trellis_triple(BITS);
                const I    higher = _mm256_add_epi8(y, _mm256_add_epi8(above(far), above(more)));
                return _mm256_sub_epi8(higher, _mm256_add_epi8(below(far), below(more)));
            }
        }
    }

    static I of(const uint8_t * sixteen) {
        return _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i *) sixteen));
    }

    static I spread_dword(const int8_t * at) {
        int32_t x;
        memcpy(&x, at, sizeof(x));
        return _mm256_set1_epi32(x);
    }

    static I spread_qword(const int8_t * at) {
        int64_t x;
        memcpy(&x, at, sizeof(x));
        return _mm256_set1_epi64x(x);
    }

    // Computes the exact SCALES of 8 scale codes from a table of eighth roots of two and the bits of the exponent.
    static F scales_of(const uint8_t * codes) {
        const I u    = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *) codes));
        const F root = _mm256_permutevar8x32_ps(_mm256_loadu_ps(SCALES + SCALE_ONE), u);
        const I power =
            _mm256_slli_epi32(_mm256_sub_epi32(_mm256_srli_epi32(u, 3), _mm256_set1_epi32(SCALE_ONE / 8)), 23);
        const I scale = _mm256_add_epi32(_mm256_castps_si256(root), power);
        return _mm256_castsi256_ps(_mm256_andnot_si256(_mm256_cmpeq_epi32(u, zero()), scale));
    }

    static uint64_t visible_cells(const float * bias, int32_t n) {
        uint64_t open = 0;
        int32_t  c    = 0;
        for (; c + 8 <= n; c += 8) {
            open |= (uint64_t) visible(load(bias + c)) << c;
        }
        for (; c < n; ++c) {
            open |= (uint64_t) (bias[c] != cpu::MINUS_INF) << c;
        }
        return open;
    }

    static uint64_t equal_bytes(const uint8_t * at, int byte) { // a bit for each of 64 bytes
        const auto bits_of = [&](int i) {
            const I equal = _mm256_cmpeq_epi8(bytes(at + 32 * i), _mm256_set1_epi8((char) byte));
            return (uint64_t) (uint32_t) _mm256_movemask_epi8(equal);
        };
        return bits_of(0) | bits_of(1) << 32;
    }

    static F widen_cells(const uint8_t * halves) { return widen((const uint16_t *) halves); }
};

template <typename Products> struct Isa : Registers, Products {
    using Sum = typename Products::Sum;

    // at[j] = shrink * at[j] + weight_step * (2 * the sum of coefficient j - middle). The sum is that of two dwords.
    static void add_octet(const Sum * sum, int32_t middle, float shrink, float weight_step, float * at) {
        const I both  = _mm256_hadd_epi32(Products::total(sum[0]), Products::total(sum[1]));
        const I pairs = _mm256_permute4x64_epi64(both, _MM_SHUFFLE(3, 1, 2, 0));
        add_eight(pairs, middle, shrink, weight_step, at);
    }
};

} // namespace
} // namespace subkv::avx2
