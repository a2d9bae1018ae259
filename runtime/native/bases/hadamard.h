// hadamard.h: orthogonal matrices that spread each coordinate evenly (subkv/plan/hadamard.py).
#pragma once

#include <cstdint>
#include <vector>

namespace subkv {

// A block on the diagonal of a spreading matrix, [n][n] of 1 and -1 with orthogonal rows.
struct HadamardBlock {
    int                 n = 0;
    std::vector<int8_t> sign;
};

// The blocks of an orthogonal [n][n] whose entries in a row have equal magnitude or are 0, which are one Hadamard
// matrix, or the largest ones. n is a multiple of 8.
const std::vector<HadamardBlock> & spreading(int n);

} // namespace subkv
