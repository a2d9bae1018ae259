// keys_dot.glsl: dot products of a tile's keys with the query rows of quantize.comp, one cell per thread, in integers.
// Include it after levels.glsl.

// Sums of the products with the upper and the lower bytes of queries.
struct Sums {
    int high[ROWS], low[ROWS];
};

void add_products(inout Sums sums, uint codes, uint rows[ROWS], uint at) {
    [[unroll]] for (uint r = 0; r < ROWS; ++r) {
        sums.high[r] += dot_signed(codes, packed_queries[rows[r] + at], PACKED);
        sums.low[r] += dot_signed(codes, packed_queries[rows[r] + at + 1], PACKED);
    }
}

uint k_codes(uint at, Term terms[MAX_FIELDS], uint n) {
    uint codes = k_tiles[at + terms[0].at] >> terms[0].shift & terms[0].mask;
    [[unroll]] for (uint i = 1; i < MAX_FIELDS; ++i) {
        if (i < n) {
            codes |= k_tiles[at + terms[i].at] >> terms[i].shift & terms[i].mask;
        }
    }
    return codes;
}

// Does the same as dots() in keys.glsl.
void dots(uint h, uint tile, uint c, uint first, uint n_rows, out float dot[ROWS]) {
    const uint width = tables[WIDTH_K];
    float      halves[ROWS];
    uint       rows[ROWS]; // first word of each row
    Sums       sums;
    [[unroll]] for (uint r = 0; r < ROWS; ++r) {
        halves[r]    = 0.0;
        rows[r]      = p.packed_at + (first + min(r, n_rows - 1)) * (width / 2 + 2);
        sums.high[r] = 0;
        sums.low[r]  = 0;
    }
    const Head  head = head_of(0, h); // Loaded here, it holds no registers between tiles.
    const float s    = row_scale(k_tiles[tile + c / 4] >> 8 * (c % 4) & 255u);
    uvec4 before = uvec4(0); // choices at the two previous places of the path
    if (head.n_path > 0) {
        before = uvec4(choices_before(head, tile, c, 2), choices_before(head, tile, c, 1));
    }
    for (uint b = 0; b < head.n_bands; ++b) {
        const Band band = band_of(head, b);
        if (band.bits == 16) {
            for (uint j = 0; j < band.n; ++j) {
                const vec2  pair = unpackHalf2x16(k_tiles[tile + band.at + (j * TILE + c) / 2]);
                const float x    = c % 2 == 0 ? pair.x : pair.y;
                [[unroll]] for (uint r = 0; r < ROWS; ++r) {
                    halves[r] = fma(queries[p.qt_at + (first + min(r, n_rows - 1)) * width + band.first + j], x, halves[r]);
                }
            }
            continue;
        }
        Term       low[MAX_FIELDS], high[MAX_FIELDS]; // terms of the cell's two registers, four coefficients each
        const uint n = n_terms(band.bits);
        [[unroll]] for (uint i = 0; i < MAX_FIELDS; ++i) {
            low[i]  = term_of(band.bits, c / 16, i);
            high[i] = term_of(band.bits, c / 16 + 4, i);
        }
        for (uint octet = 0; octet < band.n / 8; ++octet) {
            const uint at    = tile + band.at + octet * band.bits * LINE_WORDS + c % 16;
            uint       codes = k_codes(at, low, n), next = k_codes(at, high, n);
            const bool on    = band.place != NO_PLACE; // Before the loop, it would need registers.
            if (on) {
                const uvec2 choices = uvec2(codes, next) & ONES;
                const uvec2 bends   = bends_of(band.bits);
                codes               = to_levels(codes, band.bits, bends, before.z, before.x, false);
                next                = to_levels(next, band.bits, bends, before.w, before.y, false);
                before              = uvec4(before.zw, choices);
            } else if (band.bits == 8) {
                codes ^= 128 * ONES;
                next ^= 128 * ONES;
            }
            const uint q = band.first / 2 + 4 * octet;
            add_products(sums, codes, rows, q);
            add_products(sums, next, rows, q + 2);
        }
    }
    [[unroll]] for (uint r = 0; r < ROWS; ++r) {
        // No overflow: 2 * 256 levels * 255 * 32639 fits 32 bits.
        const uint  at    = rows[r] + width / 2;
        const int   twice = int(2 * (256 * uint(sums.high[r]) + uint(sums.low[r])) - packed_queries[at + 1]);
        dot[r]            = 0.5 * uintBitsToFloat(packed_queries[at]) * float(twice);
        dot[r]            = s > 0.0 ? fma(s, dot[r], halves[r]) : 0.0;
    }
}
