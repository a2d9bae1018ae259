// base64.h: strict RFC 4648 base64 with padding, as FORMAT.md §1 requires: no whitespace, no other alphabet, length a
// multiple of 4, unused bits of the last group zero (so that a block of bytes has exactly one encoding).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace subkv {

// Length of the text that encodes n_bytes bytes.
constexpr size_t base64_length(size_t n_bytes) {
    return (n_bytes / 3 + (n_bytes % 3 != 0)) * 4;
}

// A half of decoded bytes.
inline uint16_t le16(const uint8_t * p) {
    return (uint16_t) (p[0] | p[1] << 8);
}

// Decodes the text of a key into out[n_out]. Throws Invalid with the place of a defect.
void base64_decode(const std::string & key, std::string_view text, uint8_t * out, size_t n_out);

} // namespace subkv
