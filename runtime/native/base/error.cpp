#include "error.h"

#include "subkv.h"

#include <cstdarg>
#include <cstdio>
#include <string>

namespace subkv {

static thread_local std::string last_error;

static std::string formatted(const char * fmt, va_list args) {
    va_list again;
    va_copy(again, args);
    const int   n = std::vsnprintf(nullptr, 0, fmt, args);
    std::string text;
    if (n > 0) {
        text.resize((size_t) n + 1);
        std::vsnprintf(text.data(), text.size(), fmt, again);
        text.resize((size_t) n);
    }
    va_end(again);
    return printable(text);
}

std::string sentence(const char * fmt, ...) {
    va_list args;
    va_start(args, fmt);
    std::string text = formatted(fmt, args);
    va_end(args);
    return text;
}

bool reject(const char * fmt, ...) {
    va_list args;
    va_start(args, fmt);
    try {
        last_error = formatted(fmt, args);
    } catch (const std::exception &) {
        last_error = "out of memory"; // short enough for the string's own bytes
    }
    va_end(args);
    return false;
}

void fail(const char * fmt, ...) {
    va_list args;
    va_start(args, fmt);
    last_error = formatted(fmt, args);
    va_end(args);
    throw Invalid(last_error);
}

void refuse(const std::string & key, const std::string & expected, const std::string & found) {
    throw Invalid(key + ": expected " + expected + ", found " + found);
}

void check_array(const void * array, int64_t n, const char * argument) {
    if (n < 0 || (n > 0 && !array)) {
        fail("%s: expected elements, found %lld%s", argument, (long long) n, n > 0 ? " at NULL" : "");
    }
}

void clear_error() {
    last_error.clear();
}

} // namespace subkv

extern "C" const char * subkv_last_error(void) {
    return subkv::last_error.c_str();
}
