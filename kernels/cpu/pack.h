// pack.h: codes of a band to its planes (ops.h), the same in every version. Static, as all that ISA files include.
#pragma once

#include <stdint.h>

namespace subkv::cpu {

// ORs the w-bit values (code >> drop) & mask of n codes into the m = n*w/8 bytes of a plane.
static inline void put_plane(const uint8_t * code, int32_t n, int32_t w, int32_t drop, uint8_t * plane) {
    const int32_t m    = n * w / 8;
    const int32_t mask = (1 << w) - 1;
    for (int32_t b = 0; b < m; ++b) {
        int32_t byte = 0;
        for (int32_t k = 0; k * w < 8; ++k) {
            byte |= (code[k * m + b] >> drop & mask) << (k * w);
        }
        plane[b] = (uint8_t) byte;
    }
}

static inline void put_codes(const uint8_t * code, int32_t n, int32_t bits, uint8_t * planes) {
    const int32_t low = bits == 6 || bits == 5 ? 4 : bits == 3 ? 2 : bits;
    put_plane(code, n, low, 0, planes);
    if (low < bits) {
        put_plane(code, n, bits - low, low, planes + n * low / 8);
    }
}

} // namespace subkv::cpu
