// byte_plan.h: how to unpack the planes of a layout to a byte per code, with permutations of whole registers.
//
// BytePlan permutes bytes. A group is as many consecutive coefficients as a register has bytes, one byte each. A part
// reads a window of that many bytes of the row, moves to every place the byte that holds a field of its coefficient,
// shifts the field to where the code has it and masks the rest. The parts of a group, or'ed, are its codes. With
// registers of 64 bytes, layouts of 2, 4 and 8 bits have one part per group, the others a second one for the high planes;
// rows longer than a register may need more, since all bytes of a part lie in one window.
//
// DwordPlan permutes dwords, for AVX-512 without permutations of bytes: byte b of the rows of four cells makes a dword, and
// register r holds those of bytes 16 r to 16 r + 15. A piece is 16 consecutive coefficients of the four cells. A part of it
// takes dwords from two registers, rotates the fields to where the codes have them and masks the rest.
#pragma once

#include "subkv/ops.h"

namespace subkv::cpu {

constexpr int LANES_512       = 64; // bytes of a register
constexpr int LANES_128       = 16;
constexpr int MAX_BYTE_GROUPS = MAX_HEAD_SIZE / LANES_128;
constexpr int PIECE           = 16; // coefficients, and bytes of a row

struct alignas(64) BytePart {
    uint8_t  index[LANES_512];  // of the byte in the window
    uint8_t  rotate[LANES_512]; // first bit to take of the place's eight-byte word, for AVX-512's multishift
    int8_t   left[LANES_512];   // the same as a shift of the byte, to the right if negative
    uint8_t  mask[LANES_512];
    uint64_t inside; // bytes of the window that belong to the row
    int32_t  window; // first byte inside the row
};

struct alignas(64) DwordPart {
    int32_t  index[PIECE];  // of the dword, 16 and more in the second register
    int32_t  rotate[PIECE]; // to the right
    uint32_t mask[PIECE];
    int32_t  sources[2]; // the registers
};

struct PartRange {
    int32_t first_part;
    int32_t n_parts;
};

// What a plan says of the codes, however they are unpacked.
struct alignas(64) CodePlan {
    // 2^bits - 1 of every coefficient, twice the middle of its codes; 0 in 16-bit bands and beyond the rank
    int32_t odd[MAX_HEAD_SIZE] = {};
    int32_t n_groups           = 0; // of a register's bytes
};

struct BytePlan : CodePlan {
    const BytePart * parts;
    PartRange        groups[MAX_BYTE_GROUPS];
};

struct DwordPlan : CodePlan {
    const DwordPart * parts;
    PartRange         pieces[MAX_HEAD_SIZE / PIECE]; // whole groups; beyond the rank they have no parts
    int32_t           n_windows;                     // of 64 bytes of a row that hold fields
};

// Registers, and which coefficient of a group stands in place p.
//   NATURAL_512, NATURAL_128: p
//   INTERLEAVED_512: the order that byte and word interleaves of four cells' registers turn into 16 consecutive
//   coefficients per register (four bytes, one of each cell, apiece)
// Windows of 64 bytes may reach beyond the row (`inside`); windows of 16 bytes do not, but rows shorter than that must be
// copied to 16 bytes first.
enum class Order { NATURAL_512, INTERLEAVED_512, NATURAL_128 };

// The plans of codec's bands, made at first use by this thread and kept.
const BytePlan &  byte_plan_of(const HeadCodec & codec, Order order);
const DwordPlan & dword_plan_of(const HeadCodec & codec);

} // namespace subkv::cpu
