// half.h: IEEE half <-> float in plain integer code, round to nearest even. Bit-identical to the F16C instructions.
#pragma once

#include <cstdint>
#include <cstring>

namespace subkv::ref {

// These functions are static because files with other ISA flags also include this header, and the linker must not pick
// their copies.
static inline float half_to_float(uint16_t h) {
    const uint32_t sign     = (uint32_t) (h & 0x8000) << 16;
    const uint32_t exponent = (h >> 10) & 31;
    uint32_t       mantissa = h & 0x3ff;
    uint32_t       bits;
    if (exponent == 31) {
        bits = sign | 0x7f800000u | (mantissa << 13) | (mantissa != 0 ? 0x400000u : 0u);
    } else if (exponent != 0) {
        bits = sign | ((exponent + 112) << 23) | (mantissa << 13);
    } else if (mantissa == 0) {
        bits = sign;
    } else {
        int32_t e = 113; // A subnormal is shifted until its leading one is bit 10.
        while ((mantissa & 0x400) == 0) {
            mantissa <<= 1;
            --e;
        }
        bits = sign | ((uint32_t) e << 23) | ((mantissa & 0x3ff) << 13);
    }
    float x;
    std::memcpy(&x, &bits, sizeof(x));
    return x;
}

static inline uint16_t float_to_half(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof(bits));
    const uint16_t sign = (uint16_t) ((bits >> 16) & 0x8000);
    const uint32_t mag  = bits & 0x7fffffffu;
    if (mag > 0x7f800000u) { // A NaN becomes quiet and keeps the part of its payload that fits.
        return (uint16_t) (sign | 0x7e00 | ((mag >> 13) & 0x3ff));
    }
    if (mag >= 0x477ff000u) { // 65520 and more round to infinity.
        return (uint16_t) (sign | 0x7c00);
    }
    if (mag < 0x33000000u) { // Less than 2^-25 rounds to zero.
        return sign;
    }
    const int32_t  e        = (int32_t) (mag >> 23);
    const uint32_t mantissa = (mag & 0x7fffffu) | 0x800000u;
    const int32_t  drop     = e >= 113 ? 13 : 126 - e;
    const uint32_t kept     = mantissa >> drop;
    const uint32_t rest     = mantissa & ((1u << drop) - 1);
    const uint32_t middle   = 1u << (drop - 1);
    const uint32_t up       = rest > middle || (rest == middle && (kept & 1) != 0) ? 1 : 0;
    // `kept` includes the leading one of a normal number, so the exponent is one less. A carry then raises it
    // correctly.
    const uint32_t base = e >= 113 ? (uint32_t) (e - 113) << 10 : 0;
    return (uint16_t) (sign | (base + kept + up));
}

} // namespace subkv::ref
