// error.h: sentences of errors: the thread's last one, see subkv_last_error(), and exceptions.
#pragma once

#include <cstdio>
#include <exception>
#include <string>

#if defined(__MINGW_PRINTF_FORMAT) // C99's: Windows' own printf has no %zu there
#    define SUBKV_FORMAT __attribute__((format(__MINGW_PRINTF_FORMAT, 1, 2)))
#elif defined(__GNUC__)
#    define SUBKV_FORMAT __attribute__((format(printf, 1, 2)))
#else
#    define SUBKV_FORMAT
#endif

namespace subkv {

SUBKV_FORMAT std::string sentence(const char * fmt, ...);

SUBKV_FORMAT void set_error(const char * fmt, ...);

// Sets the error and throws a std::runtime_error that says the same.
[[noreturn]] SUBKV_FORMAT void fail(const char * fmt, ...);

void clear_error();

// body(), or `failed` with the error set: nothing may be thrown into C.
template <typename T, typename F> T guarded(const char * subject, T failed, F body) {
    try {
        return body();
    } catch (const std::exception & e) {
        set_error("%s: %s", subject, e.what());
        return failed;
    }
}

} // namespace subkv
