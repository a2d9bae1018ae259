// targets.h: the fuzz targets. A target takes any bytes. It must not crash, and must not keep data that it refused.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define EXPECT(held)                                                                                                   \
    do {                                                                                                               \
        if (!(held)) {                                                                                                 \
            std::fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #held);                              \
            std::abort();                                                                                              \
        }                                                                                                              \
    } while (0)

using Bytes = std::vector<uint8_t>;

struct Target {
    const char * name;
    void (*run)(const uint8_t * data, size_t n);
    std::vector<Bytes> (*seeds)(); // valid inputs to start from
};

// of targets.cpp or state.cpp: a program links one of them
extern const Target TARGETS[];
extern const size_t N_TARGETS;

// nullptr: none
inline const Target * find_target(const char * name) {
    for (size_t t = 0; t < N_TARGETS; ++t) {
        if (std::strcmp(TARGETS[t].name, name) == 0) {
            return &TARGETS[t];
        }
    }
    return nullptr;
}
