// byte_plan.h: how to unpack the planes of a layout 64 coefficients at a time with whole-register byte permutations.
//
// A group is 64 consecutive coefficients, one byte each. A part reads 64 bytes of the row, moves to every place the byte
// that holds a field of its coefficient, and takes the field out: the 8 bits from bit `shift` of the place's eight-byte
// word on, of which `mask` keeps the field where the code has it. The parts of a group, or'ed, are its codes. Layouts of
// 2, 4 and 8 bits have one part per group, the others a second one for the high planes; long rows may need more, since
// all bytes of a part lie in one window.
#pragma once

#include "subkv/ops.h"

namespace subkv::cpu {

constexpr int LANES           = 64; // coefficients of a group
constexpr int MAX_BYTE_GROUPS = MAX_HEAD_SIZE / LANES;

struct alignas(64) BytePart {
    uint8_t  index[LANES]; // of the byte in the window
    uint8_t  shift[LANES];
    uint8_t  mask[LANES];
    uint64_t inside; // bytes of the window that belong to the row
    int32_t  window; // first byte inside the row
};

struct ByteGroup {
    int32_t first_part;
    int32_t n_parts;
};

struct alignas(64) BytePlan {
    int32_t odd[MAX_HEAD_SIZE]; // 2^bits - 1 of every coefficient, twice the middle of its codes; 0 beyond rank
    int32_t n_groups;
    bool    has_half; // a 16-bit band: the plan does not describe it
    const BytePart * parts;
    ByteGroup        groups[MAX_BYTE_GROUPS];
};

// Which coefficient of a group stands in place p. NATURAL: p. INTERLEAVED: the order that byte and word interleaves of
// four cells' registers turn into 16 consecutive coefficients per register (four bytes, one of each cell, apiece).
enum class Order { NATURAL, INTERLEAVED };

// The plan of codec's bands, made at first use by this thread and kept.
const BytePlan & byte_plan_of(const HeadCodec & codec, Order order);

} // namespace subkv::cpu
