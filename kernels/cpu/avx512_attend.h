// avx512_attend.h: the Isa of attend_tiles.h with AVX-512 F, BW, DQ and VL. The including file defines the products:
//   Products  split(u, first, second)      stores 16 integers, |u| <= LARGEST, as 16-byte operands of two products
//             Opened, open(codes)          64 codes as operands
//             Sum, start(x)                16 sums, all x
//             add(sum, opened, first, second), total(sum)
//             FROM_TILE_ROWS               see attend_tiles.h
//             octets(rows)                 octets of values that fit the registers besides the rows' sums
//             CODE_BIT, OTHER_BITS_ZERO, Previous, ends, begin, level  see tile_codes.h
#pragma once

#include "attend_tiles.h"
#include "avx2_simd.h"
#include "versions.h"

// The namespace is unnamed, because every including file has its own instruction flags and needs its own copy.
namespace subkv::avx512 {
namespace {

struct Registers {
    static constexpr int     W          = 16;
    static constexpr bool    FROM_TILE  = true;
    static constexpr int     KEY_ROWS   = 3;
    static constexpr int     VALUE_ROWS = 4;
    static constexpr int32_t ZERO_SHIFT = 0;

    static constexpr int key_regs(int) { return 4; }

    using F = __m512;
    using I = __m512i;

    template <typename Isa> using TilePath = cpu::RegisterPath<Isa>;

    static F set(float x) { return _mm512_set1_ps(x); }

    static F load(const float * x) { return _mm512_loadu_ps(x); }

    static void store(float * at, F x) { _mm512_storeu_ps(at, x); }

    static F plus(F a, F b) { return _mm512_add_ps(a, b); }

    static F sub(F a, F b) { return _mm512_sub_ps(a, b); }

    static F mul(F a, F b) { return _mm512_mul_ps(a, b); }

    static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }

    static F max(F a, F b) { return _mm512_max_ps(a, b); }

    static float largest(F x) { return _mm512_reduce_max_ps(x); }

    static float sum(F x) { return _mm512_reduce_add_ps(x); }

    static F hide(F x, F bias) { // sets x to -infinity where the bias is -infinity
        const F minus_inf = set(cpu::MINUS_INF);
        return _mm512_mask_mov_ps(minus_inf, _mm512_cmp_ps_mask(bias, minus_inf, _CMP_NEQ_UQ), x);
    }

    static F keep(F x, uint32_t lanes) { return _mm512_maskz_mov_ps((__mmask16) lanes, x); }

    static F div(F a, F b) { return _mm512_div_ps(a, b); }

    static F abs(F x) { return _mm512_abs_ps(x); }

    static F with_sign(F size, F of) { return _mm512_or_ps(size, _mm512_and_ps(of, set(-0.0f))); }

    static F power(F t) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(t), 23)); }

    static F mul_from(float least, F x, F a, F b) {
        return _mm512_maskz_mul_ps(_mm512_cmp_ps_mask(x, set(least), _CMP_NLT_UQ), a, b);
    }

    static float first(F x) { return _mm512_cvtss_f32(x); }

    static I zero() { return _mm512_setzero_si512(); }

    static I to_int(F x) { return _mm512_cvtps_epi32(x); }

    static F to_float(I x) { return _mm512_cvtepi32_ps(x); }

    static I plus_int(I a, I b) { return _mm512_add_epi32(a, b); }

    static int32_t sum_int(I x) { return _mm512_reduce_add_epi32(x); }

    static void store_int(int32_t * at, I x) { _mm512_storeu_si512(at, x); }

    static I bytes(const uint8_t * at) { return _mm512_loadu_si512(at); }

    static void put_bytes(uint8_t * at, I x) { _mm512_storeu_si512(at, x); }

    template <int RIGHT> static I shift(I x) { // Bits may cross into the next byte. The caller drops them.
        if constexpr (RIGHT > 0) {
            return _mm512_srli_epi16(x, RIGHT);
        } else if constexpr (RIGHT < 0) {
            return _mm512_slli_epi16(x, -RIGHT);
        } else {
            return x;
        }
    }

    static I mask(I x, int byte) { return _mm512_and_si512(x, _mm512_set1_epi8((char) byte)); }

    // Takes the bits `byte` of every byte from y and the others from x, which has zeros there with OTHER_BITS_ZERO.
    template <bool OTHER_BITS_ZERO> static I join(I x, I y, int byte) {
        return _mm512_ternarylogic_epi32(x, y, _mm512_set1_epi8((char) byte), OTHER_BITS_ZERO ? 0xf8 : 0xd8);
    }

    static I plus_bytes(I x, int byte) { return _mm512_add_epi8(x, _mm512_set1_epi8((char) byte)); }

    static I raise_keys(I x, I other) { return _mm512_or_si512(_mm512_slli_epi32(x, 8), _mm512_srli_epi32(other, 24)); }

    static I raise_values(I x, I below) { return _mm512_alignr_epi64(x, below, 7); }

    static I spread_dword(const int8_t * at) {
        int32_t x;
        memcpy(&x, at, sizeof(x));
        return _mm512_set1_epi32(x);
    }

    static I spread_qword(const int8_t * at) {
        int64_t x;
        memcpy(&x, at, sizeof(x));
        return _mm512_set1_epi64(x);
    }

    // Computes the exact SCALES of 16 scale codes from a table of eighth roots of two and the bits of the exponent.
    static F scales_of(const uint8_t * codes) {
        const I u     = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *) codes));
        const F roots = _mm512_castps256_ps512(_mm256_loadu_ps(SCALES + SCALE_ONE));
        const F root  = _mm512_permutexvar_ps(u, _mm512_insertf32x8(roots, _mm512_castps512_ps256(roots), 1));
        const I power =
            _mm512_slli_epi32(_mm512_sub_epi32(_mm512_srli_epi32(u, 3), _mm512_set1_epi32(SCALE_ONE / 8)), 23);
        return _mm512_maskz_mov_ps(_mm512_test_epi32_mask(u, u),
                                   _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(root), power)));
    }

    static uint64_t visible_cells(const float * bias, int32_t n) {
        uint64_t open = 0;
        for (int32_t c = 0; c < n; c += 16) {
            const __mmask16 inside = n - c >= 16 ? 0xffff : (__mmask16) ((1 << (n - c)) - 1);
            const F         b      = _mm512_maskz_loadu_ps(inside, bias + c);
            open |= (uint64_t) _mm512_mask_cmp_ps_mask(inside, b, set(cpu::MINUS_INF), _CMP_NEQ_UQ) << c;
        }
        return open;
    }

    static uint64_t equal_bytes(const uint8_t * at, int byte) {
        return _mm512_cmpeq_epi8_mask(_mm512_loadu_si512(at), _mm512_set1_epi8((char) byte));
    }

    static F widen_cells(const uint8_t * halves) {
        return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *) halves));
    }
};

template <typename Products> struct Isa : Registers, Products {
    using Sum = typename Products::Sum;

    // at[j] = shrink * at[j] + weight_step * (2 * the sum of coefficient j - middle). The sum is that of two dwords.
    static void add_octet(const Sum * sum, int32_t middle, float shrink, float weight_step, float * at) {
        const I       t     = Products::total(*sum);
        const __m256i pairs = _mm512_cvtepi64_epi32(_mm512_add_epi32(t, _mm512_srli_epi64(t, 32)));
        avx2::add_eight(pairs, middle, shrink, weight_step, at);
    }
};

template <typename Products> static void attend(const AttendArgs & a) {
    cpu::attend<Isa<Products>>(a);
}

// The table does not copy ops_avx2's pointer, because that would run code on every processor when the library is
// loaded.
static void attend_exact(const ExactArgs & a) {
    ops_avx2.attend_exact(a);
}

template <typename Products> constexpr Ops table(const char * name) {
    return {
        name,         avx2::encode, avx2::dequantize, avx2::project,     avx2::reconstruct,   attend<Products>,
        attend_exact, avx2::moment, avx2::to_half,    avx2::pack_recent, avx2::unpack_recent, 1.0f / cpu::LARGEST
    };
}

} // namespace
} // namespace subkv::avx512
