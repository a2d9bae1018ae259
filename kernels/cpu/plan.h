// plan.h: how to unpack the planes of a layout 16 coefficients at a time with byte shuffles.
//
// A group is 16 consecutive coefficients, one 16-bit lane each. For lane L with code field(s) at bit s of byte A (low
// plane) and bit t of byte B (high plane, h bits above): shuffle brings A and B into the lane's low and high byte,
// `mask` keeps their fields, and the signed pair multiply-add by (2, 2 * 2^(s + h - t)) yields code * 2^(s+1).
// 0x4a80'0000 | that is the float 2^22 + code * 2^s; subtracting `offset` = 2^22 + (2^b - 1)/2 * 2^s leaves the centred
// code times 2^s, exactly. Nothing shifts it back: `unit` = 2^-s is folded into queries, steps and final sums. All bytes
// that a lane needs are usually in one 16-byte window of the row; a group whose bytes are not has several parts, which
// add up.
//
// Lanes are ordered so that unpacking with 16-bit interleaves gives coefficients 0..7 and 8..15.
// Windows lie inside the row; rows shorter than 16 bytes must be copied to 16 bytes first.
#pragma once

#include "subkv/ops.h"

namespace subkv::cpu {

constexpr int GROUP      = 16;
constexpr int MAX_GROUPS = MAX_HEAD_SIZE / GROUP;

struct alignas(32) Part {
    uint8_t shuffle[32];
    uint8_t mask[32];
    int8_t  weight[32];
    int32_t window; // first byte inside the row
};

struct alignas(32) Group {
    float   offset[16]; // natural order
    int32_t first_part;
    int32_t n_parts;
};

struct Plan {
    int32_t      n_groups;
    bool         has_half; // a 16-bit band: the groups do not describe it
    bool         single;   // every group has one part
    const Part * parts;
    Group        groups[MAX_GROUPS];
    float        unit[MAX_HEAD_SIZE]; // per coefficient; 1 in 16-bit bands
};

// The plan of codec's bands, made at first use by this thread and kept.
const Plan & plan_of(const HeadCodec & codec);

// Zeroed-once, 64-byte aligned memory of this thread for purpose `slot`; grows, never shrinks.
constexpr int MAX_SLOTS = 12;
void *        scratch(int slot, size_t bytes);

static inline int32_t padded(int64_t rank) { // whole groups
    return (int32_t) ((rank + GROUP - 1) / GROUP * GROUP);
}

} // namespace subkv::cpu
