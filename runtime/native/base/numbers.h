// numbers.h: numbers as text in the C locale, whatever locale the program has set: a decimal point and no grouping.
// printf, strtof and std::to_string obey the program's locale, so no other native code writes or reads a fraction with
// them (tests/lint/cpp.py). Streams, because std::to_chars and std::from_chars for fractions are missing in libc++ of
// older systems.
#pragma once

#include <locale>
#include <sstream>
#include <string>

namespace subkv {

inline std::ostringstream plain_stream() {
    std::ostringstream out;
    out.imbue(std::locale::classic());
    return out;
}

// Prints like "%g", with this number of significant digits: 4.25, 1e-05.
inline std::string number(double x, int digits = 6) {
    std::ostringstream out = plain_stream();
    out.precision(digits);
    out << x;
    return out.str();
}

// As "%.2f" with 2 decimals.
inline std::string decimals(double x, int n) {
    std::ostringstream out = plain_stream();
    out.precision(n);
    out << std::fixed << x;
    return out.str();
}

// Reads a number from the beginning of a text. Returns false if there is none.
inline bool read_number(std::istringstream & in, float & x) {
    in.imbue(std::locale::classic());
    return (bool) (in >> x);
}

// The text is one number, and nothing else.
inline bool read_number(const std::string & text, float & x) {
    std::istringstream in(text);
    in.unsetf(std::ios::skipws);
    return read_number(in, x) && in.peek() == std::char_traits<char>::eof();
}

} // namespace subkv
