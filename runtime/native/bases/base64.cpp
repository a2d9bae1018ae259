#include "base64.h"

#include "error.h"
#include "sha256.h"

namespace subkv {

static int digit_value(char c) {
    if (c >= 'A' && c <= 'Z') {
        return c - 'A';
    }
    if (c >= 'a' && c <= 'z') {
        return c - 'a' + 26;
    }
    if (c >= '0' && c <= '9') {
        return c - '0' + 52;
    }
    return c == '+' ? 62 : c == '/' ? 63 : -1;
}

[[noreturn]] static void refuse_at(const std::string & key, size_t at, const char * expected, char found) {
    const uint8_t byte  = (uint8_t) found;
    const bool    shown = byte > 0x20 && byte < 0x7f;
    refuse(key, std::string(expected) + " at character " + std::to_string(at),
           shown ? std::string("'") + found + "'" : "byte 0x" + hex_digits(&byte, 1));
}

void base64_decode(const std::string & key, std::string_view text, uint8_t * out, size_t n_out) {
    if (text.size() != base64_length(n_out)) {
        refuse(key, std::to_string(base64_length(n_out)) + " base64 characters", std::to_string(text.size()));
    }
    size_t o = 0;
    for (size_t i = 0; i < text.size(); i += 4) {
        const size_t n_left  = n_out - o;
        const int    n_group = n_left < 3 ? (int) n_left : 3; // bytes in this group
        uint32_t     bits    = 0;
        for (int j = 0; j < 4; ++j) {
            const char c = text[i + j];
            int        v = 0;
            if (j <= n_group) {
                v = digit_value(c);
                if (v < 0) {
                    refuse_at(key, i + j, "a base64 digit", c);
                }
            } else if (c != '=') {
                refuse_at(key, i + j, "'=' padding", c);
            }
            bits = bits << 6 | (uint32_t) v;
        }
        const uint32_t unused = (1u << (8 * (3 - n_group))) - 1;
        if (bits & unused) {
            refuse_at(key, i + n_group, "a digit whose unused bits are zero", text[i + n_group]);
        }
        for (int j = 0; j < n_group; ++j) {
            out[o++] = (uint8_t) (bits >> (16 - 8 * j));
        }
    }
}

} // namespace subkv
