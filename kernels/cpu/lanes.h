// lanes.h: functions over registers of floats, common to all instruction sets.
//
// Isa, a type local to the including file (the compiler compiles its functions for the file's instructions), has
//   F                       a register of W floats
//   set, load, store, plus, sub, mul, div, fma (a b + c), fnma (c - a b), abs
//   min, max                the second number if one is NaN, as x86 does
//   with_sign(size, of)     size >= 0 with the sign of `of`
//   round                   to integers, to nearest even
//   power(t)                the low bits of t, as the exponent of a float
//   mul_from(least, x, a, b)  a b; 0 where x < least
//   first, largest, sum     of a register
//
// Kernels of encode.h, path_search.h, linear.h and exact_keys.h use registers of eight floats (Lanes in avx2_simd.h and
// neon.h), because the format sums squared errors in eight lanes (ref/encode.cpp). All their versions add the same
// numbers in the same order. These types also have
//   widen(p), to_float(x)   eight halves or signed bytes as floats; one of them
//   widen_twice(p)          four halves, twice
//   to_halves(p, x)         eight halves, to nearest even
//   to_bytes(p, x)          eight integers of 0 to 255
//   store_parts(low, high, x)  four floats each
//   sums(x)                 the sums of eight registers
//   add_to_doubles(p, x)
//   transpose(x)            of eight registers
//   less(a, b), visible(bias)  a bit for each lane: a < b; the bias is not -infinity
//   any_nan(x)
// and, for paths,
//   HAS_LOOKUP, lookup(table, x)  entries of eight floats, by the low three bits of each lane
//   low_bits(p, x)          stores the bits of eight floats as integers
//   rows(a, b)              four times a, four times b
//   load_twice(p)           four floats, twice
//   swap_pairs, repeat_low, repeat_high  of each four lanes a b c d: b a d c, a a b b, c c d d
#pragma once

namespace subkv::cpu {

// exp(x) for x <= 0, 0 below -87.3 and for -inf: 2^y of y = x log2(e) as 2^n 2^f, n = round(y). 2^f on |f| <= 1/2 is
// the polynomial of degree 5 with the least largest relative error, 2e-7; EXP2 has its halves. Rounding y adds a
// relative error of |x| * 9e-8; weights with large |x| are small. The low bits of y + ROUNDER are n + 128: shifted to
// the exponent, they are 2^(n + 1). The last step multiplies, so that the exponential of NaN is NaN.
constexpr float LOG2_E  = 1.44269504f;
constexpr float ROUNDER = 12582912.0f + 128.0f; // 1.5 * 2^23
constexpr float EXP2[6] = { 0.5f * 1.32764713e-3f, 0.5f * 9.67554096e-3f, 0.5f * 5.55071309e-2f,
                            0.5f * 2.40221202e-1f, 0.5f * 6.93146944e-1f, 0.5f };

template <typename Isa> static inline typename Isa::F exp_nonpositive(typename Isa::F x) {
    const auto rounder = Isa::set(ROUNDER);
    const auto y       = Isa::mul(x, Isa::set(LOG2_E));
    const auto t       = Isa::plus(y, rounder);
    const auto f       = Isa::sub(y, Isa::sub(t, rounder));
    auto       p       = Isa::set(EXP2[0]);
#pragma GCC unroll 5
    for (int i = 1; i < 6; ++i) {
        p = Isa::fma(p, f, Isa::set(EXP2[i]));
    }
    return Isa::mul_from(-87.3f, x, p, Isa::power(t));
}

template <typename Isa> static inline float exp_nonpositive(float x) {
    return Isa::first(exp_nonpositive<Isa>(Isa::set(x)));
}

// cap * tanh(x / cap); absolute error a few ulp of cap.
template <typename Isa> static inline typename Isa::F soft_cap(typename Isa::F x, float cap) {
    const auto size  = Isa::mul(Isa::abs(x), Isa::set(1.0f / cap));
    const auto e     = exp_nonpositive<Isa>(Isa::mul(size, Isa::set(-2.0f)));
    const auto one   = Isa::set(1.0f);
    const auto ratio = Isa::div(Isa::sub(one, e), Isa::plus(one, e));
    return Isa::with_sign(Isa::mul(ratio, Isa::set(cap)), x);
}

} // namespace subkv::cpu
