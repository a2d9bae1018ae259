// keys.glsl: dot products of a tile's keys with query rows in f32, one cell per thread. Include it after levels.glsl.

// Returns the codes of register rho, a byte each, at word `at` of its octet's lines.
uint read_k(uint at, uint bits, uint rho) {
    uint       codes = 0;
    const uint n     = n_fields(bits, rho);
    [[unroll]] for (uint i = 0; i < MAX_FIELDS; ++i) {
        if (i < n) {
            const Field f = field_of(bits, rho, i);
            codes |= (k_tiles[at + f.line * LINE_WORDS] >> f.shift & 0x01010101u * ((1u << f.width) - 1u)) << f.from;
        }
    }
    return codes;
}

// Computes the dot products of the key of cell c of the tile at word `tile` with n_rows query rows from `first` on.
// Elements of `dot` beyond n_rows repeat the last row, and their logits are hidden later.
void dots(uint h, uint tile, uint c, uint first, uint n_rows, out float dot[ROWS]) {
    const uint width = tables[WIDTH_K];
    float      halves[ROWS];
    uint       qt[ROWS]; // first word of each row
    [[unroll]] for (uint r = 0; r < ROWS; ++r) {
        qt[r]     = p.qt_at + (first + min(r, n_rows - 1)) * width;
        dot[r]    = 0.0;
        halves[r] = 0.0;
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
                    halves[r] = fma(queries[qt[r] + band.first + j], x, halves[r]);
                }
            }
            continue;
        }
        float       sums[ROWS];
        [[unroll]] for (uint r = 0; r < ROWS; ++r) {
            sums[r] = 0.0;
        }
        for (uint four = 0; four < band.n / 4; ++four) { // Four coefficients at a time.
            const uint at   = tile + band.at + four / 2 * band.bits * LINE_WORDS + c % 16;
            uint       code = read_k(at, band.bits, four % 2 * 4 + c / 16);
            const uint q    = band.first + 4 * four;
            const bool  on   = band.place != NO_PLACE; // Before the loop, it would need registers.
            const float zero = on ? 127.5 : half_range(band.bits);
            if (on) {
                const uint  choice = code & ONES;
                const uvec2 bends  = bends_of(band.bits);
                code               = to_levels(code, band.bits, bends, before.z, before.x, true);
                before             = uvec4(before.yzw, choice);
            }
            [[unroll]] for (uint j = 0; j < 4; ++j) {
                const float x = float(code >> 8 * j & 255u) - zero;
                [[unroll]] for (uint r = 0; r < ROWS; ++r) {
                    sums[r] = fma(queries[qt[r] + q + j], x, sums[r]);
                }
            }
        }
        [[unroll]] for (uint r = 0; r < ROWS; ++r) {
            dot[r] = fma(band.step, sums[r], dot[r]);
        }
    }
    [[unroll]] for (uint r = 0; r < ROWS; ++r) {
        dot[r] = s > 0.0 ? fma(s, dot[r], halves[r]) : 0.0;
    }
}
