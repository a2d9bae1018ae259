// checksum.h: FNV-1a, for libllama and libsubkv. A change of one byte always changes it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace subkv {

constexpr uint64_t CHECKSUM_OF_NOTHING = UINT64_C(0xcbf29ce484222325);

// The checksum of the bytes before, continued.
inline uint64_t checksum(uint64_t sum, const uint8_t * bytes, size_t n) {
    for (size_t i = 0; i < n; ++i) {
        sum = (sum ^ bytes[i]) * UINT64_C(0x100000001b3);
    }
    return sum;
}

} // namespace subkv
