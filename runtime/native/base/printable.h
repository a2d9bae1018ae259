// printable.h: text of files for a terminal and a log. Used by libsubkv and by libllama.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>

namespace subkv {

// Bytes of the UTF-8 character at `i`, and its code. Returns 0 if the bytes there are none.
inline size_t utf8_at(std::string_view s, size_t i, uint32_t & code) {
    const uint8_t c = (uint8_t) s[i];
    const int     n = c < 0x80 ? 0 : (c & 0xe0) == 0xc0 ? 1 : (c & 0xf0) == 0xe0 ? 2 : (c & 0xf8) == 0xf0 ? 3 : -1;
    if (n < 0 || s.size() - i <= (size_t) n) {
        return 0;
    }
    code = n == 0 ? c : c & (0x3fu >> n);
    for (int j = 1; j <= n; ++j) {
        const uint8_t next = (uint8_t) s[i + (size_t) j];
        if ((next & 0xc0) != 0x80) {
            return 0;
        }
        code = code << 6 | (next & 0x3f);
    }
    static constexpr uint32_t SMALLEST[] = { 0, 0x80, 0x800, 0x10000 };
    if (code < SMALLEST[n] || code > 0x10ffff || (code >= 0xd800 && code <= 0xdfff)) {
        return 0;
    }
    return (size_t) n + 1;
}

// Characters that a terminal obeys or hides: control characters, line and paragraph separators, and those that change
// the direction of text or have no width.
inline bool is_hidden(uint32_t code) {
    return code < 0x20 || (code >= 0x7f && code < 0xa0) || code == 0xad || code == 0x61c || code == 0x180e ||
           (code >= 0x200b && code <= 0x200f) || (code >= 0x2028 && code <= 0x202e) ||
           (code >= 0x2060 && code <= 0x206f) || code == 0xfeff || (code >= 0xfff9 && code <= 0xfffb) ||
           (code >= 0xe0000 && code <= 0xe007f);
}

// Escapes hidden characters and bytes that are not UTF-8, as in a Python string, like subkv.base.text.printable.
inline std::string printable(std::string_view text) {
    std::string out;
    out.reserve(text.size());
    const auto escape = [&](const char * format, uint32_t value) {
        char digits[12];
        std::snprintf(digits, sizeof(digits), format, (unsigned) value);
        out += digits;
    };
    for (size_t i = 0; i < text.size();) {
        uint32_t     code = 0;
        const size_t n    = utf8_at(text, i, code);
        if (n == 0) {
            escape("\\x%02x", (uint8_t) text[i]);
        } else if (!is_hidden(code)) {
            out.append(text, i, n);
        } else if (code == '\n' || code == '\r' || code == '\t') {
            out += code == '\n' ? "\\n" : code == '\r' ? "\\r" : "\\t";
        } else {
            escape(code < 0x100 ? "\\x%02x" : code < 0x10000 ? "\\u%04x" : "\\U%08x", code);
        }
        i += n == 0 ? 1 : n;
    }
    return out;
}

} // namespace subkv
