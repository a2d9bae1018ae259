// derive_rotation.h: which coordinates of a key RoPE turns together, and at which frequency (subkv/plan/positions.py).
#pragma once

#include "weights_file.h"

#include <optional>
#include <vector>

namespace subkv {

// Keys are not rotated.
bool is_unrotated(const std::string & arch);

// The partner [d] of each coordinate, which is itself if it is not rotated. Returns nothing if partners are unknown.
std::optional<std::vector<int>> rotary_partners(const WeightsFile & weights, int d);

// The rotation by position p maps x to x cos(omega p) + x[partner] sin(omega p).
struct RotaryPairs {
    std::vector<int>    partner; // [d]
    std::vector<double> omega;   // [d] radians per position

    // Means [d] averaged over all positions in [0, span].
    std::vector<double> averaged(const std::vector<double> & means, double span) const;
};

// Nothing if the model's kind of rotation is unknown.
std::optional<RotaryPairs> rotary_pairs(const WeightsFile & weights, int d);

} // namespace subkv
