// avx512_dwords.h: a tile's rows as bytes of codes, in the orders of integer_attend.h, without permutations of bytes. The
// bytes of four cells are brought together first; what follows treats them alike, a dword at a time (DwordPlan).
#pragma once

#include "avx512_attend.h"

namespace subkv::avx512 {
namespace {

using cpu::DwordPart;
using cpu::DwordPlan;
using cpu::PIECE;

constexpr int QUAD_BYTES = 64;                    // a register: 16 dwords of four cells
constexpr int DRAWN      = TILE / 4 * QUAD_BYTES; // that register of all the tile's quads

// The tile's rows as [register][quad of cells] dwords of four cells, one for each byte.
static const uint8_t * draw(const DwordPlan & plan, const Rows & rows) {
    // unpacking takes dword k of every lane to register k: put there what register k is to have
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    uint8_t *     drawn = (uint8_t *) cpu::scratch(cpu::SLOT_DRAWN, (size_t) (plan.n_windows * 4 * DRAWN));
    for (int32_t w = 0; w < plan.n_windows; ++w) {
        const int32_t   left   = rows.row_bytes - w * LANES;
        const __mmask64 inside = left >= LANES ? ~0ull : (1ull << left) - 1;
        for (int32_t c = 0; c < rows.n; c += 4) {
            __m512i r[4];
            for (int i = 0; i < 4; ++i) {
                rows.prefetch(c + i);
                r[i] = _mm512_permutexvar_epi32(order, _mm512_maskz_loadu_epi8(inside, rows.at(c + i) + w * LANES));
            }
            interleave(r, drawn + w * 4 * DRAWN + c / 4 * QUAD_BYTES, DRAWN);
        }
    }
    return drawn;
}

// A part of a piece, ready for many quads.
struct OpenPart {
    __m512i         index, rotate, mask;
    const uint8_t * a;
    const uint8_t * b;

    OpenPart() = default;

    OpenPart(const DwordPart & part, const uint8_t * drawn) :
        index(_mm512_load_si512(part.index)), rotate(_mm512_load_si512(part.rotate)),
        mask(_mm512_load_si512(part.mask)), a(drawn + part.sources[0] * DRAWN), b(drawn + part.sources[1] * DRAWN) {}

    // codes | this part's fields of the quad that begins at `at`
    inline __m512i add(__m512i codes, int32_t at) const {
        const __m512i bytes = _mm512_permutex2var_epi32(_mm512_load_si512(a + at), index, _mm512_load_si512(b + at));
        return _mm512_ternarylogic_epi64(codes, _mm512_rorv_epi32(bytes, rotate), mask, 0xf8);
    }
};

// The codes of a piece: [coefficient] dwords of four cells. N parts, or any number.
template <int N> struct OpenPiece {
    OpenPart part[N];

    OpenPiece(const DwordPart * parts, int32_t, const uint8_t * drawn) {
        for (int i = 0; i < N; ++i) {
            part[i] = OpenPart(parts[i], drawn);
        }
    }

    inline __m512i codes(int32_t at) const {
        __m512i codes = _mm512_setzero_si512();
        for (int i = 0; i < N; ++i) {
            codes = part[i].add(codes, at);
        }
        return codes;
    }
};

struct AnyPiece {
    const DwordPart * parts;
    int32_t           n;
    const uint8_t *   drawn;

    inline __m512i codes(int32_t at) const {
        __m512i codes = _mm512_setzero_si512();
        for (int32_t i = 0; i < n; ++i) {
            codes = OpenPart(parts[i], drawn).add(codes, at);
        }
        return codes;
    }
};

template <typename Use> static void with_piece(const DwordPlan & plan, int32_t i, const uint8_t * drawn, Use use) {
    const DwordPart * parts = plan.parts + plan.pieces[i].first_part;
    const int32_t     n     = plan.pieces[i].n_parts;
    switch (n) {
        case 1: use(OpenPiece<1>(parts, n, drawn)); break;
        case 2: use(OpenPiece<2>(parts, n, drawn)); break;
        default: use(AnyPiece{ parts, n, drawn }); break;
    }
}

// out: [dword of four coefficients][cell]
template <typename Piece> static void keys_of(const Piece & piece, int32_t n_cells, uint8_t * out) {
    // dwords of four cells to dwords of four coefficients: every lane has four of both
    const __m512i flip = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    for (int32_t c = 0; c < n_cells; c += 16) {
        __m512i r[4]; // lane l: dword l of four cells
        for (int i = 0; i < 4; ++i) {
            r[i] = _mm512_shuffle_epi8(piece.codes((c / 4 + i) * QUAD_BYTES), flip);
        }
        const __m512i low_01  = _mm512_shuffle_i32x4(r[0], r[1], 0x44);
        const __m512i high_01 = _mm512_shuffle_i32x4(r[0], r[1], 0xee);
        const __m512i low_23  = _mm512_shuffle_i32x4(r[2], r[3], 0x44);
        const __m512i high_23 = _mm512_shuffle_i32x4(r[2], r[3], 0xee);
        uint8_t *     to      = out + c * sizeof(int32_t);
        _mm512_store_si512(to, _mm512_shuffle_i32x4(low_01, low_23, 0x88));
        _mm512_store_si512(to + BLOCK, _mm512_shuffle_i32x4(low_01, low_23, 0xdd));
        _mm512_store_si512(to + 2 * BLOCK, _mm512_shuffle_i32x4(high_01, high_23, 0x88));
        _mm512_store_si512(to + 3 * BLOCK, _mm512_shuffle_i32x4(high_01, high_23, 0xdd));
    }
}

struct PermutedDwords {
    using Plan = DwordPlan;

    static const Plan & keys_plan(const HeadCodec & codec) { return cpu::dword_plan_of(codec); }

    static const Plan & values_plan(const HeadCodec & codec) { return cpu::dword_plan_of(codec); }

    // out: [dword of the row's codes][cell] dwords of four coefficients
    static void unpack_keys(const DwordPlan & plan, const Rows & rows, uint8_t * out) {
        const uint8_t * drawn = draw(plan, rows);
        for (int32_t i = 0; i < plan.n_groups * (LANES / PIECE); ++i) {
            with_piece(plan, i, drawn,
                       [&](const auto & piece) { keys_of(piece, rows.n, out + i * (PIECE / 4) * BLOCK); });
        }
    }

    // out: [quad of cells][coefficient] dwords of four cells
    static void unpack_values(const DwordPlan & plan, const Rows & rows, uint8_t * out) {
        const uint8_t * drawn  = draw(plan, rows);
        const int64_t   stride = plan.n_groups * BLOCK;
        for (int32_t i = 0; i < plan.n_groups * (LANES / PIECE); ++i) {
            with_piece(plan, i, drawn, [&](const auto & piece) {
                for (int32_t quad = 0; quad < rows.n / 4; ++quad) {
                    _mm512_store_si512(out + quad * stride + i * QUAD_BYTES, piece.codes(quad * QUAD_BYTES));
                }
            });
        }
    }
};

} // namespace
} // namespace subkv::avx512
