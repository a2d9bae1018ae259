// variables.h: numbers in environment variables, for libllama and libsubkv.
#pragma once

#include "error.h"

#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <string>

namespace subkv {

// A variable's number, from `least` to `most`; `unset` if it is unset or empty. Throws Invalid.
inline int64_t number_of(const char * name, int64_t least, int64_t most, int64_t unset) {
    const char * text = std::getenv(name);
    if (!text || !*text) {
        return unset;
    }
    char * end             = nullptr;
    errno                  = 0;
    const long long number = std::strtoll(text, &end, 10);
    if (*end || errno != 0 || number < least || number > most) {
        throw Invalid(std::string(name) + ": expected a number from " + std::to_string(least) + " to " +
                      std::to_string(most) + ", found '" + std::string(text).substr(0, 60) + "'");
    }
    return number;
}

// SUBKV_STORE_MOVED: 1: a server moves text behind another beginning. Throws Invalid.
inline bool moved_of_environment() {
    return number_of("SUBKV_STORE_MOVED", 0, 1, 0) == 1;
}

} // namespace subkv
