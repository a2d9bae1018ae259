// base64.h: strict RFC 4648 base64 with padding, as FORMAT.md §1 requires: no whitespace, no other alphabet, length a
// multiple of 4, unused bits of the last group zero (so that a block of bytes has exactly one encoding).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace subkv {

// Length of the text that encodes n_bytes bytes.
constexpr size_t base64_length(size_t n_bytes) {
    return (n_bytes / 3 + (n_bytes % 3 != 0)) * 4;
}

// Decodes text[n_text] into out[n_out]. n_text must be base64_length(n_out).
// On a defect returns false; `err` has the expected and the actual value and the place.
bool base64_decode(const char * text, size_t n_text, uint8_t * out, size_t n_out, std::string & err);

} // namespace subkv
