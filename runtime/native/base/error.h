// error.h: error messages: the thread's last error (subkv_last_error()) and exceptions.
#pragma once

#include "printable.h"

#include <cstdint>
#include <cstdio>
#include <new>
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

// what() is a complete sentence for the user, without characters that a terminal obeys: it may quote a file.
struct Invalid : std::runtime_error {
    explicit Invalid(const std::string & text) : std::runtime_error(printable(text)) {}
};

// The system cannot read a file (access, memory, open files, the disk): the file itself may be sound.
struct Unavailable : Invalid {
    Unavailable(const std::string & key, const std::string & expected, const std::string & found) :
        Invalid(key + ": expected " + expected + ", found " + found) {}
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
template <typename T, typename F> T guarded(const char * subject, T failed, F body) noexcept {
    try {
        return body();
    } catch (const Invalid & e) {
        reject("%s", e.what());
    } catch (const std::bad_alloc &) {
        reject("%s: out of memory", subject);
    } catch (const std::exception & e) {
        reject("%s: %s", subject, e.what());
    } catch (...) {
        reject("%s: unknown error", subject);
    }
    return failed;
}

// The same for a body without a result. false: the error is set.
template <typename F> bool guarded(const char * subject, F body) noexcept {
    return guarded(subject, false, [&] {
        body();
        return true;
    });
}

// The object of a pointer argument of a C function. Throws Invalid for NULL; `argument`: "function: name".
template <typename T> T & not_null(T * pointer, const char * argument) {
    if (!pointer) {
        fail("%s: expected a pointer, found NULL", argument);
    }
    return *pointer;
}

// Refuses a count of elements that is negative, or a NULL array for a positive one. Throws Invalid.
void check_array(const void * array, int64_t n, const char * argument);

} // namespace subkv
