// tables.glsl: code for all shaders: a layer's tables in the format of make_tables() (ops.cpp), halves, scales, tiles.
//
// All buffers are arrays of words, so that a device needs no feature beyond Vulkan 1.1; no subgroup size is assumed.
// Offsets and strides are in words, unless noted otherwise.
#extension GL_GOOGLE_include_directive : require

#ifndef TABLES_ACCESS
#    define TABLES_ACCESS readonly
#endif
layout(std430, binding = 0) TABLES_ACCESS buffer Tables {
    uint tables[];
};

const uint N_BAD = 0, N_HEAD_KV = 1, N_GROUP = 2, D_K = 3, D_V = 4, WIDTH_K = 5, N_SINK = 6, N_RECENT = 7;
const uint LATENT = 8; // 1 if values are the first elements of keys, without tiles, and paths are PATH_LANES
const uint SLOPES = 9, FIELDS = 10, EIGHTHS = 11, ALPHABETS = 12, HEADS = 13; // words that hold offsets

const uint HEAD_WORDS = 67, BAND_WORDS = 7, OCTET_WORDS = 4, ALPHABET_WORDS = 12;
const uint MAX_HEAD_SIZE = 576, MAX_FIELDS = 3, TILE = 64, LINE_WORDS = 16;
const uint SCALE_ONE = 160, SCALE_MOST = 254, SCALE_NAN = 255; // SCALE_NAN marks a row that could not be coded

const uint ALL_EXPONENT = 0x7f800000u, HALF_EXPONENT = 0x7c00u, MINUS_INFINITY = 0xff800000u;

// Drivers may compute as if NaN and infinities did not exist (Vulkan's SignedZeroInfNanPreserve is optional). So masks
// and maxima use large numbers, tests use bits, and NaN results are stored as the bits NOT_A_NUMBER.
const float HIDDEN = -3.0e38; // a mask or logit of a hidden cell, a maximum without visible cells
const float LOST   = 3.0e38;  // a mask that is NaN or infinite, which makes the row's result NaN
#define NOT_A_NUMBER uintBitsToFloat(0x7fc00000u)
const uint HALF_NAN = 0x7e00u; // every element of an exact row that is not finite

struct Head {
    uint  d, rank, n_bands;
    uint  encode, decode, offset, mean; // offsets, or 0 if there are none
    uint  tile;                         // offset of the head's tile among those of all heads
    float gamma;
    uint  n_path, path; // number and offset of the octets on the path (trellis.h)
    uint  bands;        // offset of the bands
};

struct Band {
    uint  n, bits, first;
    uint  at;    // first word of its lines in the tile
    uint  place; // place of its first octet on the path, or NO_PLACE
    float ratio;
    float step; // distance of values, relative to the row's scale
};

const uint NO_PLACE = 0xffffffffu;

// An octet on the path.
struct Octet {
    uint  at, bits;
    uint  first; // first coefficient
    float step;
};

// `side` is 0 for K and 1 for V.
Head head_of(uint side, uint h) {
    const uint at = tables[HEADS] + (side * tables[N_HEAD_KV] + h) * HEAD_WORDS;
    return Head(tables[at], tables[at + 1], tables[at + 2], tables[at + 3], tables[at + 4], tables[at + 5],
                tables[at + 6], tables[at + 7], uintBitsToFloat(tables[at + 8]), tables[at + 9],
                tables[at + 10], at + 11);
}

Band band_of(Head head, uint i) {
    const uint at = head.bands + i * BAND_WORDS;
    return Band(tables[at], tables[at + 1], tables[at + 2], tables[at + 3], tables[at + 4],
                uintBitsToFloat(tables[at + 5]), uintBitsToFloat(tables[at + 6]));
}

Octet octet_of(Head head, uint place) {
    const uint at = head.path + place * OCTET_WORDS;
    return Octet(tables[at], tables[at + 1], tables[at + 2], uintBitsToFloat(tables[at + 3]));
}

// Returns the bends of the levels of a band on the path. Magnitude k becomes k + max(k - bends.x, 0) + max(k - bends.y,
// 0), and a half.
uvec2 bends_of(uint bits) {
    const uint at = tables[ALPHABETS] + bits * ALPHABET_WORDS;
    return uvec2(tables[at], tables[at + 1]);
}

// Returns the factor and the constant of line n (trellis.h).
vec2 line_of(uint bits, uint n) {
    const uint at = tables[ALPHABETS] + bits * ALPHABET_WORDS + 2 + 2 * n;
    return vec2(uintBitsToFloat(tables[at]), uintBitsToFloat(tables[at + 1]));
}

float slope_of(uint query_head) {
    return uintBitsToFloat(tables[tables[SLOPES] + query_head]);
}

// Returns half number i of the array at word `at` of the tables.
float table_half(uint at, uint i) {
    const vec2 pair = unpackHalf2x16(tables[at + i / 2]);
    return i % 2 == 0 ? pair.x : pair.y;
}

// Returns the (fractional) code of 0.
float half_range(uint bits) {
    return 0.5 * float((1u << bits) - 1u);
}

// Returns the scale of a row, which is 2^((code - SCALE_ONE)/8) rounded to f32, or 0 for code 0. Callers test for
// SCALE_NAN.
float row_scale(uint code) {
    const float eighth = uintBitsToFloat(tables[tables[EIGHTHS] + code % 8]);
    return code == 0 ? 0.0 : uintBitsToFloat((code / 8 + 127 - SCALE_ONE / 8) << 23) * eighth;
}

// A field of the codes of a register (subkv/tiles.h). n_fields returns the number of fields of register rho.
struct Field {
    uint line, shift, width, from;
};

uint n_fields(uint bits, uint rho) {
    return tables[tables[FIELDS] + (bits * 8 + rho) * 4];
}

Field field_of(uint bits, uint rho, uint i) {
    const uint f = tables[tables[FIELDS] + (bits * 8 + rho) * 4 + 1 + i];
    return Field(f & 255u, f >> 8 & 255u, f >> 16 & 255u, f >> 24);
}

// Returns the words of a window row or fresh row, which has keys of all heads, then values. A latent layer's values are
// a part of its key.
uint exact_width() {
    return tables[N_HEAD_KV] * (tables[D_K] + (tables[LATENT] != 0 ? 0 : tables[D_V])) / 2;
}

// Returns the index of the first half of a head's value in such a row.
uint exact_value(uint h) {
    return tables[LATENT] != 0 ? 0 : tables[N_HEAD_KV] * tables[D_K] + h * tables[D_V];
}

bool finite(float x) {
    return (floatBitsToUint(x) & ALL_EXPONENT) != ALL_EXPONENT;
}

// Returns half number i % 2 of a word.
uint half_bits(uint word, uint i) {
    return word >> 16 * (i % 2) & 0xffffu;
}

bool finite_half(uint bits) {
    return (bits & HALF_EXPONENT) != HALF_EXPONENT;
}

// Returns the maximum of a softmax state as it is stored. Minus infinity means no visible cell, so a lost row has
// another number.
float stored_top(float m, bool lost) {
    return m != HIDDEN ? m : lost ? 0.0 : uintBitsToFloat(MINUS_INFINITY);
}

float loaded_top(float m) {
    return floatBitsToUint(m) == MINUS_INFINITY ? HIDDEN : m;
}

// Rounds a finite number within the range of halves to nearest even, as kernels/ref/half.h does. packHalf2x16 may
// differ.
uint to_half(float x) {
    const uint bits = floatBitsToUint(x), sign = bits >> 16 & 0x8000u, mag = bits & 0x7fffffffu;
    if (mag < 0x33000000u) {
        return sign;
    }
    const uint e = mag >> 23, mantissa = (mag & 0x7fffffu) | 0x800000u, drop = e >= 113 ? 13 : 126 - e;
    const uint kept = mantissa >> drop, rest = mantissa & ((1u << drop) - 1u), middle = 1u << (drop - 1);
    const uint up   = rest > middle || (rest == middle && (kept & 1u) != 0) ? 1 : 0;
    const uint base = e >= 113 ? (e - 113) << 10 : 0;
    return sign | (base + kept + up);
}
