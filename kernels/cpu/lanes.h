// lanes.h: functions over registers of floats, shared by all instruction sets.
//
// Isa is a type that is local to the including file, so that its functions are compiled for that file's instructions.
// It has
//   F                       a register of W floats
//   set, load, store, plus, sub, mul, div, fma (a b + c), fnma (c - a b), abs
//   min, max                return the second number if one is NaN, as on x86
//   with_sign(size, of)     size >= 0 with the sign of `of`
//   round                   rounds to integers, to nearest even
//   power(t)                the low bits of t, as the exponent of a float
//   mul_from(least, x, a, b)  a b, or 0 where x < least
//   first, largest, sum     return one float of a register
//
// Kernels of encode.h, path_search.h, linear.h and exact_keys.h use registers of eight floats (Lanes in avx2_simd.h and
// neon.h), because the format sums squared errors in eight lanes (ref/encode.cpp). All their versions add the same
// numbers in the same order. These types also have
//   widen(p)                loads eight halves or signed bytes as floats
//   to_float(x)             converts one half or signed byte
//   widen_twice(p)          loads four halves, twice
//   to_halves(p, x)         stores eight halves, rounded to nearest even
//   to_bytes(p, x)          stores eight integers of 0 to 255
//   store_parts(low, high, x)  stores four floats each
//   sums(x)                 returns the sums of eight registers
//   add_to_doubles(p, x)
//   transpose(x)            transposes eight registers
//   less(a, b)              a bit for each lane where a < b
//   visible(bias)           a bit for each lane where the bias is not -infinity
//   any_nan(x)
// and, for paths,
//   HAS_LOOKUP, lookup(table, x)  entries of eight floats, by the low three bits of each lane
//   low_bits(p, x)          stores the bits of eight floats as integers
//   rows(a, b)              *a in four lanes, *b in the other four
//   load_twice(p)           loads four floats, twice
//   swap_pairs              b a d c for each four lanes a b c d
//   repeat_low, repeat_high  a a b b and c c d d for them
#pragma once

namespace subkv::cpu {

// Returns exp(x) for x <= 0, and 0 below -87.3 and for -inf. With y = x log2(e) and n = round(y) it is 2^n 2^f, |f| <=
// 1/2. 2^f is the polynomial of degree 5 with the least largest relative error, 2e-7. Rounding y adds a relative error
// of |x| * 9e-8, but weights with large |x| are small. The low bits of y + ROUNDER are n + 128, which are 2^(n + 1)
// when they are shifted to the exponent. Therefore EXP2 has the halved coefficients of the polynomial. The last step
// multiplies, so that the exponential of NaN is NaN.
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

// Returns cap * tanh(x / cap) with an absolute error of a few ulp of cap.
template <typename Isa> static inline typename Isa::F soft_cap(typename Isa::F x, float cap) {
    const auto size  = Isa::mul(Isa::abs(x), Isa::set(1.0f / cap));
    const auto e     = exp_nonpositive<Isa>(Isa::mul(size, Isa::set(-2.0f)));
    const auto one   = Isa::set(1.0f);
    const auto ratio = Isa::div(Isa::sub(one, e), Isa::plus(one, e));
    return Isa::with_sign(Isa::mul(ratio, Isa::set(cap)), x);
}

} // namespace subkv::cpu
