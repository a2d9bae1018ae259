// levels.glsl: converts codes to bytes, and codes on a path to levels (subkv/trellis.h). The *choice* of a code is its
// lowest bit, which selects the levels of the next two places. Include it after tables.glsl.

const uint ONES = 0x01010101u; // the choices of four codes

// A part of a register's codes (tables.glsl), a byte each: bits of a word of the octet's lines, after a shift.
struct Term {
    uint at, shift, mask;
};

Term term_of(uint bits, uint rho, uint i) {
    const Field f = field_of(bits, rho, i); // a missing field has width 0
    return Term(f.line * LINE_WORDS, f.shift - f.from, ONES * ((1u << f.width) - 1u) << f.from);
}

// Returns the maximum number of fields, which is that of the last register.
uint n_terms(uint bits) {
    return n_fields(bits, 7);
}

// Returns max(k - bend, 0) for four magnitudes k, a byte each.
uint beyond(uint k, uint bend) {
    const uint above = k + (128 - bend) * ONES, is = above & 128 * ONES;
    return above & (is - (is >> 7));
}

// Returns the levels of four codes of a place on the path as signed bytes, or plus 128 as unsigned ones if `biased`.
// `one` and `two` are the choices one and two places before.
uint to_levels(uint codes, uint bits, uvec2 bends, uint one, uint two, bool biased) {
    const uint index = (codes ^ two) << 1 | one;
    const uint half_ = index >> bits & ONES, upper = (half_ << 8) - half_; // `upper` is 255 in the upper half
    const uint k     = ~(index ^ upper) & ONES * ((1u << bits) - 1u);
    return k + beyond(k, bends.x) + beyond(k, bends.y) ^ upper ^ (biased ? 127 : 255) * ONES;
}
