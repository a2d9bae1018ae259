// sha256.h: SHA-256 (FIPS 180-4), for fingerprints and addresses of content, by the processor's instructions for it where
// it has them (x86).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace subkv {

// Lower-case digits, two per byte.
std::string hex_digits(const uint8_t * bytes, size_t n);

class Sha256 {
public:
    void update(const void * data, size_t n);

    // After either of these, do not use the object any more.
    std::array<uint8_t, 32> digest();
    std::string             hex() { return hex_digits(digest().data(), 32); }

private:
    void blocks(const uint8_t * p, size_t n);

    uint32_t state[8] = {
        0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19
    };
    uint8_t  buf[64] = {};
    uint64_t n_total = 0;
};

} // namespace subkv
