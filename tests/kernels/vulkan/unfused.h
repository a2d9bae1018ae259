// unfused.h: included before the reference's sources, std::fma as devices have it that do not fuse (lavapipe). Both are
// within what Vulkan allows; where two paths of a row cost almost the same, the other may be found.
#pragma once

#include <cmath>

namespace std {

inline float unfused(float a, float b, float c) {
    const float product = a * b; // the build does not contract
    return product + c;
}

} // namespace std

#define fma unfused
