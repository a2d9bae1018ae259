#include "error.h"

#include "subkv.h"

#include <cstdarg>
#include <cstdio>
#include <string>

namespace subkv {

// The latest error of a thread, and the C interface's view of it.
static thread_local struct LastError {
    Error       error = { SUBKV_ERROR_NONE };
    std::string sentence;
    subkv_error parts = { SUBKV_ERROR_NONE, "", "", "" };

    void set(const Error & next) {
        Error printed = next.printed(); // may throw
        sentence      = printed.sentence();
        error         = std::move(printed);
        show();
    }

    void show() { parts = { error.kind, error.key.c_str(), error.reason.c_str(), error.remedy.c_str() }; }
} last_error;

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

// Sets the error that make() returns, or, if there is no memory, one that says so.
template <typename F> static bool set_error(F make) {
    try {
        last_error.set(make());
    } catch (const std::exception &) {
        last_error.error.kind = SUBKV_ERROR_MEMORY;
        last_error.error.key.clear();
        last_error.error.remedy.clear();
        last_error.sentence = last_error.error.reason = "out of memory"; // short enough for a string's own bytes
        last_error.show();
    }
    return false;
}

bool reject(const Error & error) {
    return set_error([&] { return error; });
}

void reject_for(int32_t kind, const char * key, const char * reason) {
    set_error([&] { return Error{ kind, key, reason }; });
}

bool reject(const char * fmt, ...) {
    va_list args;
    va_start(args, fmt);
    set_error([&] { return Error{ SUBKV_ERROR_INVALID, "", formatted(fmt, args) }; });
    va_end(args);
    return false;
}

void fail(const Error & error) {
    last_error.set(error);
    throw Invalid(error);
}

void fail(const char * fmt, ...) {
    va_list args;
    va_start(args, fmt);
    const std::string reason = formatted(fmt, args);
    va_end(args);
    fail(Error{ SUBKV_ERROR_INVALID, "", reason });
}

void refuse(const std::string & key, const std::string & expected, const std::string & found,
            const std::string & remedy) {
    throw Invalid(Error{ SUBKV_ERROR_INVALID, key, "expected " + expected + ", found " + found, remedy });
}

void check_array(const void * array, int64_t n, const char * argument) {
    if (n < 0 || (n > 0 && !array)) {
        fail("%s: expected elements, found %lld%s", argument, (long long) n, n > 0 ? " at NULL" : "");
    }
}

void clear_error() {
    last_error.set({ SUBKV_ERROR_NONE });
}

} // namespace subkv

extern "C" const char * subkv_last_error(void) {
    return subkv::last_error.sentence.c_str();
}

extern "C" const subkv_error * subkv_last_error_parts(void) {
    return &subkv::last_error.parts;
}
