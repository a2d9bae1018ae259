// avx512_codes.h: a tile's rows as bytes of codes, in the orders of integer_attend.h, with permutations of bytes (VBMI).
#pragma once

#include "avx512_attend.h"

namespace subkv::avx512 {
namespace {

using cpu::BytePart;
using cpu::BytePlan;

// How a group is unpacked: one part, two parts of one window (all rows of up to 64 bytes), any number.
enum Parts { ONE, TWO, ANY };

// Codes of one group of a row, a byte each, in the plan's order.
template <Parts PARTS> static inline __m512i codes_of(const BytePart * part, int32_t n_parts, const uint8_t * row) {
    const auto load  = [&](const BytePart & p) { return _mm512_maskz_loadu_epi8(p.inside, row + p.window); };
    const auto field = [](const BytePart & p, __m512i bytes) {
        return _mm512_multishift_epi64_epi8(_mm512_load_si512(p.rotate),
                                            _mm512_permutexvar_epi8(_mm512_load_si512(p.index), bytes));
    };
    const __m512i bytes = load(part[0]);
    __m512i       codes = _mm512_and_si512(field(part[0], bytes), _mm512_load_si512(part[0].mask));
    const int32_t n     = PARTS == ONE ? 1 : PARTS == TWO ? 2 : n_parts;
    for (int32_t i = 1; i < n; ++i) { // codes | field & mask
        const __m512i more = field(part[i], PARTS == TWO ? bytes : load(part[i]));
        codes              = _mm512_ternarylogic_epi64(codes, more, _mm512_load_si512(part[i].mask), 0xf8);
    }
    return codes;
}

static Parts parts_of(const BytePart * part, int32_t n) {
    return n == 1 ? ONE : n == 2 && part[0].window == part[1].window ? TWO : ANY;
}

// 16 cells' groups to dwords: out[j] = dword j of all cells, BLOCK apart.
static inline void transpose(__m512i r[16], uint8_t * out) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i]     = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) { // r[i + k]: dword k of every 128-bit lane of cells i..i+3
        r[i]     = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int k = 0; k < 4; ++k) { // lane l of r[4c + k] belongs to lane c of dword 4l + k
        const __m512i low_a  = _mm512_shuffle_i32x4(r[k], r[4 + k], 0x88);
        const __m512i high_a = _mm512_shuffle_i32x4(r[k], r[4 + k], 0xdd);
        const __m512i low_b  = _mm512_shuffle_i32x4(r[8 + k], r[12 + k], 0x88);
        const __m512i high_b = _mm512_shuffle_i32x4(r[8 + k], r[12 + k], 0xdd);
        _mm512_store_si512(out + k * BLOCK, _mm512_shuffle_i32x4(low_a, low_b, 0x88));
        _mm512_store_si512(out + (4 + k) * BLOCK, _mm512_shuffle_i32x4(high_a, high_b, 0x88));
        _mm512_store_si512(out + (8 + k) * BLOCK, _mm512_shuffle_i32x4(low_a, low_b, 0xdd));
        _mm512_store_si512(out + (12 + k) * BLOCK, _mm512_shuffle_i32x4(high_a, high_b, 0xdd));
    }
}

template <Parts PARTS>
static void unpack_keys_group(const BytePart * part, int32_t n_parts, const Rows & rows, uint8_t * out) {
    for (int32_t c = 0; c < rows.n; c += 16) {
        __m512i r[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) {
            rows.prefetch(c + i);
            r[i] = codes_of<PARTS>(part, n_parts, rows.at(c + i));
        }
        transpose(r, out + c * sizeof(int32_t));
    }
}

template <Parts PARTS>
static void unpack_values_group(const BytePart * part, int32_t n_parts, const Rows & rows, uint8_t * out,
                                int64_t stride) {
    for (int32_t c = 0; c < rows.n; c += 4) {
        __m512i r[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            rows.prefetch(c + i);
            r[i] = codes_of<PARTS>(part, n_parts, rows.at(c + i));
        }
        interleave(r, out + c / 4 * stride, 64);
    }
}

struct PermutedBytes {
    using Plan = BytePlan;

    static const Plan & keys_plan(const HeadCodec & codec) { return cpu::byte_plan_of(codec, cpu::Order::NATURAL_512); }

    static const Plan & values_plan(const HeadCodec & codec) {
        return cpu::byte_plan_of(codec, cpu::Order::INTERLEAVED_512);
    }

    // out: [dword of the row's codes][cell] dwords of four coefficients
    static void unpack_keys(const BytePlan & plan, const Rows & rows, uint8_t * out) {
        for (int32_t g = 0; g < plan.n_groups; ++g) {
            const BytePart * part = plan.parts + plan.groups[g].first_part;
            const int32_t    n    = plan.groups[g].n_parts;
            uint8_t *        to   = out + g * 16 * BLOCK;
            switch (parts_of(part, n)) {
                case ONE: unpack_keys_group<ONE>(part, n, rows, to); break;
                case TWO: unpack_keys_group<TWO>(part, n, rows, to); break;
                default: unpack_keys_group<ANY>(part, n, rows, to); break;
            }
        }
    }

    // out: [quad of cells][coefficient] dwords of four cells; the plan's order is INTERLEAVED_512
    static void unpack_values(const BytePlan & plan, const Rows & rows, uint8_t * out) {
        const int64_t stride = plan.n_groups * BLOCK;
        for (int32_t g = 0; g < plan.n_groups; ++g) {
            const BytePart * part = plan.parts + plan.groups[g].first_part;
            const int32_t    n    = plan.groups[g].n_parts;
            switch (parts_of(part, n)) {
                case ONE: unpack_values_group<ONE>(part, n, rows, out + g * BLOCK, stride); break;
                case TWO: unpack_values_group<TWO>(part, n, rows, out + g * BLOCK, stride); break;
                default: unpack_values_group<ANY>(part, n, rows, out + g * BLOCK, stride); break;
            }
        }
    }
};

} // namespace
} // namespace subkv::avx512
