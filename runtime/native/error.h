// error.h: error messages: the thread's last error (subkv_last_error()) and exceptions.
#pragma once

#include <cstdio>
#include <stdexcept>
#include <string>

#if defined(__MINGW_PRINTF_FORMAT) // C99 format: Windows' own printf lacks %zu
#    define SUBKV_FORMAT __attribute__((format(__MINGW_PRINTF_FORMAT, 1, 2)))
#elif defined(__GNUC__)
#    define SUBKV_FORMAT __attribute__((format(printf, 1, 2)))
#else
#    define SUBKV_FORMAT
#endif

namespace subkv {

// what() is a complete sentence for the user.
struct Invalid : std::runtime_error {
    using std::runtime_error::runtime_error;
};

SUBKV_FORMAT std::string sentence(const char * fmt, ...);

// Sets the error and returns false. Throws nothing: without memory the error says so.
SUBKV_FORMAT bool reject(const char * fmt, ...);

// Sets the error and throws an Invalid with the same sentence.
[[noreturn]] SUBKV_FORMAT void fail(const char * fmt, ...);

// Throws an Invalid for the value `found` of a key, an argument or a file.
[[noreturn]] void refuse(const std::string & key, const std::string & expected, const std::string & found);

void clear_error();

// Returns body(), or on an exception `failed` with the error set: exceptions must not reach C code. `subject` precedes
// messages other than an Invalid's.
template <typename T, typename F> T guarded(const char * subject, T failed, F body) {
    try {
        return body();
    } catch (const Invalid & e) {
        reject("%s", e.what());
    } catch (const std::exception & e) {
        reject("%s: %s", subject, e.what());
    }
    return failed;
}

} // namespace subkv
