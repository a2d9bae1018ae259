// unfused.h: included before the reference's sources. It defines std::fma like devices without fused operations
// (lavapipe). Vulkan allows both. If two paths of a row cost almost the same, the choice may differ.
#pragma once

#include <cmath>

namespace std {

inline float unfused(float a, float b, float c) {
    const float product = a * b; // the build does not contract
    return product + c;
}

} // namespace std

#define fma unfused
