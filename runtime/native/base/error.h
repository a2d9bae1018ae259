// error.h: the thread's last error (subkv_last_error()) and exceptions.
#pragma once

#include "printable.h"
#include "subkv.h"

#include <cstdint>
#include <cstdio>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>

#if defined(__MINGW_PRINTF_FORMAT) // C99 format, because Windows' own printf lacks %zu
#    define SUBKV_FORMAT __attribute__((format(__MINGW_PRINTF_FORMAT, 1, 2)))
#elif defined(__GNUC__)
#    define SUBKV_FORMAT __attribute__((format(printf, 1, 2)))
#else
#    define SUBKV_FORMAT
#endif

namespace subkv {

// subkv_error, with texts of its own.
struct Error {
    int32_t     kind   = SUBKV_ERROR_INVALID;
    std::string key    = {};
    std::string reason = {};
    std::string remedy = {};

    // With texts as of sentence().
    Error printed() const { return { kind, printable(key), printable(reason), printable(remedy) }; }

    // For the user. It may quote a file, so it has no characters that a terminal obeys.
    std::string sentence() const {
        return printable((key.empty() ? "" : key + ": ") + reason + (remedy.empty() ? "" : "; " + remedy));
    }
};

// what() is the error's sentence.
struct Invalid : std::runtime_error {
    explicit Invalid(const Error & error) : std::runtime_error(error.sentence()), error(error) {}

    explicit Invalid(const std::string & reason) : Invalid(Error{ SUBKV_ERROR_INVALID, "", reason }) {}

    Error error;
};

// The system cannot read a file (access, memory, open files, the disk), which itself may be sound.
struct Unavailable : Invalid {
    Unavailable(const std::string & key, const std::string & expected, const std::string & found) :
        Invalid(Error{ SUBKV_ERROR_UNAVAILABLE, key, "expected " + expected + ", found " + found }) {}
};

SUBKV_FORMAT std::string sentence(const char * fmt, ...);

// Sets the error and returns false. Throws nothing, and if there is no memory, the error says so.
bool              reject(const Error & error);
SUBKV_FORMAT bool reject(const char * fmt, ...);

// Sets the error and throws it as an Invalid.
[[noreturn]] void              fail(const Error & error);
[[noreturn]] SUBKV_FORMAT void fail(const char * fmt, ...);

// Throws an Invalid for the value `found` of a key, an argument or a file.
[[noreturn]] void refuse(const std::string & key, const std::string & expected, const std::string & found,
                         const std::string & remedy = "");

// As reject(Error).
void reject_for(int32_t kind, const char * key, const char * reason);

void clear_error();

// Returns body(), or on an exception `failed` with the error set, because exceptions must not reach C code. `subject`
// precedes messages other than an Invalid's.
template <typename T, typename F> T guarded(const char * subject, T failed, F body) noexcept {
    try {
        return body();
    } catch (const Invalid & e) {
        reject(e.error);
    } catch (const std::bad_alloc &) {
        reject_for(SUBKV_ERROR_MEMORY, subject, "out of memory");
    } catch (const std::system_error & e) {
        reject_for(SUBKV_ERROR_UNAVAILABLE, subject, e.what());
    } catch (const std::exception & e) {
        reject_for(SUBKV_ERROR_INVALID, subject, e.what());
    } catch (...) {
        reject_for(SUBKV_ERROR_INVALID, subject, "unknown error");
    }
    return failed;
}

// The same for a body without a result. Returns false if the error is set.
template <typename F> bool guarded(const char * subject, F body) noexcept {
    return guarded(subject, false, [&] {
        body();
        return true;
    });
}

// The object of a pointer argument of a C function. Throws Invalid for NULL, where `argument` is "function: name".
template <typename T> T & not_null(T * pointer, const char * argument) {
    if (!pointer) {
        fail("%s: expected a pointer, found NULL", argument);
    }
    return *pointer;
}

// Refuses a count of elements that is negative, or a NULL array for a positive one. Throws Invalid.
void check_array(const void * array, int64_t n, const char * argument);

} // namespace subkv
