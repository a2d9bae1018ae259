// variables.h: numbers in environment variables and cache types, for libllama and libsubkv.
#pragma once

#include "error.h"
#include "numbers.h"

#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <string>

namespace subkv {

// A variable's number, from `least` to `most`, or `unset` if it is unset or empty. Throws Invalid.
inline int64_t number_of(const char * name, int64_t least, int64_t most, int64_t unset) {
    const char * text = std::getenv(name);
    if (!text || !*text) {
        return unset;
    }
    char * end             = nullptr;
    errno                  = 0;
    const long long number = std::strtoll(text, &end, 10);
    if (*end || errno != 0 || number < least || number > most) {
        throw Invalid({ SUBKV_ERROR_INVALID, name,
                        "expected a number from " + std::to_string(least) + " to " + std::to_string(most) +
                            ", found '" + std::string(text).substr(0, 60) + "'" });
    }
    return number;
}

// SUBKV: "auto", "subkv", "off", or a file with bases (resolve.cpp); "": unset.
inline std::string cache_setting() {
    const char * value = std::getenv("SUBKV");
    return value ? value : "";
}

// Whether the value of SUBKV asks for a coded cache.
inline bool asks_coded(const std::string & setting) {
    return !setting.empty() && setting != "off";
}

// Bits per K/V element that a file of bases may have a plan for.
constexpr float MAX_BUDGET = 64.0f;

// The budget that a text names, such as 3 or 4.25, or 0 if it names none.
inline float parse_budget(const std::string & text) {
    const bool plain = text.find_first_not_of("0123456789.") == std::string::npos;
    float      value = 0.0f;
    return plain && read_number(text, value) && value > 0.0f && value <= MAX_BUDGET ? value : 0.0f;
}

// The value of SUBKV_BITS, in bits per K/V element of coded caches, or 0 if it is unset. Throws Invalid.
inline float budget_of_environment() {
    const char *      value  = std::getenv("SUBKV_BITS");
    const std::string text   = value ? value : "";
    const float       budget = parse_budget(text);
    if (!text.empty() && budget == 0.0f) {
        throw Invalid({ SUBKV_ERROR_INVALID, "SUBKV_BITS",
                        "expected bits per element, such as 3 or 4.25, found '" + text.substr(0, 60) + "'" });
    }
    return budget;
}

// With SUBKV_STORE_MOVED=1, a server moves text behind another beginning. Throws Invalid.
inline bool moved_of_environment() {
    return number_of("SUBKV_STORE_MOVED", 0, 1, 0) == 1;
}

// The value of SUBKV_STORE, the folder where a server stores prompts, or nullptr if there is none.
inline const char * prompt_folder() {
    const char * folder = std::getenv("SUBKV_STORE");
    return folder && *folder ? folder : nullptr;
}

} // namespace subkv
