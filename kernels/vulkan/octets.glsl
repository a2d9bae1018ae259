// octets.glsl: coefficients of a tile, an octet of a cell at a time, for prompt_rows.comp and attend_latent.comp.
// Include it after levels.glsl, the function word_of, which returns a word of the tiles, and PATH_LANES (trellis.h).

shared float scale[TILE]; // per cell, or 0 if its coefficients are zeros

// Returns the four codes of register rho in a dword, at word `at` of an octet's lines.
uint read_codes(bool value, uint at, uint bits, uint rho) {
    uint codes = 0;
    for (uint i = 0; i < n_fields(bits, rho); ++i) {
        const Term t = term_of(bits, rho, i);
        codes |= word_of(value, at + t.at) >> t.shift & t.mask;
    }
    return codes;
}

// The place of a thread's eight codes of an octet, in two dwords. For keys they are of one cell, and for values of one
// coefficient and eight cells.
struct Where {
    uint at[2], rho[2];
};

Where where(bool value, uint me, uint lane) {
    return value ? Where(uint[](2 * lane, 2 * lane + 1), uint[](me / 8, me / 8)) :
                   Where(uint[](me % 16, me % 16), uint[](me / 16, me / 16 + 4));
}

uvec2 read_octet(bool value, uint at, uint bits, Where w) {
    return uvec2(read_codes(value, at + w.at[0], bits, w.rho[0]), read_codes(value, at + w.at[1], bits, w.rho[1]));
}

// Returns the choices `back` places before a place on the path. Those before place 0 are the last ones of the previous
// lane, or zeros with PATH_LANES.
uvec2 choices_back(bool value, Head head, uint tile, uint me, uint place, uint back) {
    const bool turned = place < back;
    if (PATH_LANES && turned) {
        return uvec2(0);
    }
    const Octet octet  = octet_of(head, turned ? head.n_path + place - back : place - back);
    const Where w      = where(value, me, value && turned ? (me + 7) % 8 : me % 8);
    const uvec2 words  = read_octet(value, tile + octet.at, octet.bits, w) & ONES;
    return !value && turned ? uvec2(words.x << 8 | words.y >> 24, words.y << 8 | words.x >> 24) : words;
}

// Decodes eight coefficients of an octet of the tile at word `tile`. For keys they are those of cell `me`, and for
// values coefficient me % 8 of eight cells from me / 8 * 8 on. They are 0 after the last octet, and in cells with scale
// 0.
void decode_octet(bool value, Head head, uint tile, uint me, uint octet, out float x[8]) {
    [[unroll]] for (uint i = 0; i < 8; ++i) {
        x[i] = 0.0;
    }
    const uint first_cell = value ? me / 8 * 8 : me;
    for (uint b = 0; b < head.n_bands; ++b) {
        const Band band = band_of(head, b);
        const uint j    = 8 * octet - band.first; // It wraps around before the band.
        if (8 * octet >= head.rank || j >= band.n) {
            continue;
        }
        if (band.bits == 16) {
            [[unroll]] for (uint i = 0; i < 8; ++i) {
                const uint cell = value ? first_cell + i : me, of = j + (value ? me % 8 : i);
                const vec2 pair = unpackHalf2x16(word_of(value, tile + band.at + (of * TILE + cell) / 2));
                x[i]            = scale[cell] > 0.0 ? (cell % 2 == 0 ? pair.x : pair.y) : 0.0;
            }
            continue;
        }
        uvec2 codes = read_octet(value, tile + band.at + j / 8 * band.bits * LINE_WORDS, band.bits,
                                 where(value, me, me % 8));
        float zero  = half_range(band.bits);
        if (band.place != NO_PLACE) {
            const uint  place = band.place + j / 8;
            const uvec2 one = choices_back(value, head, tile, me, place, 1), bends = bends_of(band.bits);
            const uvec2 two = choices_back(value, head, tile, me, place, 2);
            codes = uvec2(to_levels(codes.x, band.bits, bends, one.x, two.x, true),
                          to_levels(codes.y, band.bits, bends, one.y, two.y, true));
            zero  = 127.5;
        }
        [[unroll]] for (uint i = 0; i < 8; ++i) {
            const float level = float((i < 4 ? codes.x : codes.y) >> 8 * (i % 4) & 255u) - zero;
            x[i]              = scale[first_cell + (value ? i : 0)] * band.step * level;
        }
    }
}
