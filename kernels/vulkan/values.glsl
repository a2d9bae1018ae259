// values.glsl: sums of values of a tile in f32. A thread has some coefficients and reads their codes of all cells.

shared float logits[ROWS * TILE];
shared float weights[ROWS * TILE]; // weights times scales of values
shared float plain[ROWS * TILE];   // weights of halves, which have no scale; 0 in zero rows

void put(uint i, float x) {
    logits[i] = x;
}

float get(uint i) {
    return logits[i];
}

// A thread's coefficients, me + x * TILE.
struct Values {
    uint  at[COEFFICIENTS], bits[COEFFICIENTS]; // bits are 0 if there is none
    float step[COEFFICIENTS];
    uint  one_at[COEFFICIENTS], two_at[COEFFICIENTS]; // words of the two previous places on the path
    uint  path[COEFFICIENTS];                         // bits of these places and the bends, a byte each, or 0
};

void find_values(uint h, uint me, inout Values values) {
    const Head head = head_of(1, h);
    [[unroll]] for (uint x = 0; x < COEFFICIENTS; ++x) {
        values.bits[x] = 0;
        values.path[x] = 0;
    }
    for (uint b = 0; b < head.n_bands; ++b) {
        const Band band = band_of(head, b);
        [[unroll]] for (uint x = 0; x < COEFFICIENTS; ++x) {
            const uint j = me + x * TILE - band.first;
            if (j < band.n) { // It is false before the band, where j wraps around.
                values.bits[x] = band.bits;
                values.step[x] = band.bits == 16 ? 1.0 : band.step;
                values.at[x] = band.at + j / 8 * band.bits * LINE_WORDS + j % 8 * (band.bits == 16 ? TILE / 2 : 2);
                if (band.place != NO_PLACE) { // Place 0 of a lane follows the last place of the previous lane.
                    const uint  place = band.place + j / 8;
                    const Octet one   = octet_of(head, place < 1 ? head.n_path - 1 : place - 1);
                    const Octet two   = octet_of(head, place < 2 ? head.n_path + place - 2 : place - 2);
                    values.one_at[x]  = one.at + (place < 1 ? j + 7 : j) % 8 * 2;
                    values.two_at[x]  = two.at + (place < 2 ? j + 7 : j) % 8 * 2;
                    const uvec2 bends = bends_of(band.bits);
                    values.path[x]    = one.bits | two.bits << 8 | bends.x << 16 | bends.y << 24;
                }
            }
        }
    }
}

// Returns the codes of register rho, at word `at` of its octet's lines.
uvec2 read_v(uint at, uint bits, uint rho) {
    uvec2      codes = uvec2(0);
    const uint n     = n_fields(bits, rho);
    [[unroll]] for (uint i = 0; i < MAX_FIELDS; ++i) {
        if (i < n) {
            const Field f    = field_of(bits, rho, i);
            const uint  line = at + f.line * LINE_WORDS;
            const uvec2 both = uvec2(v_tiles[line], v_tiles[line + 1]);
            codes |= (both >> f.shift & 0x01010101u * ((1u << f.width) - 1u)) << f.from;
        }
    }
    return codes;
}

// Returns only the choices of these codes.
uvec2 choices_v(uint at, uint bits, uint rho) {
    const Field f    = field_of(bits, rho, 0); // the field with bit 0
    const uint  line = at + f.line * LINE_WORDS;
    return uvec2(v_tiles[line], v_tiles[line + 1]) >> f.shift & ONES;
}

void add_values(Values values, uint h, uint tile, uint me, float weight[ROWS], float rise[ROWS], float scale,
                inout float acc[N_ACC]) {
    [[unroll]] for (uint r = 0; r < ROWS; ++r) {
        weights[r * TILE + me] = weight[r] * scale;
        plain[r * TILE + me]   = scale > 0.0 ? weight[r] : 0.0;
    }
    barrier();
    bool halves = false;
    [[unroll]] for (uint x = 0; x < COEFFICIENTS; ++x) {
        halves = halves || values.bits[x] == 16;
    }
    for (uint c = 0; halves && c < TILE; ++c) {
        [[unroll]] for (uint x = 0; x < COEFFICIENTS; ++x) {
            if (values.bits[x] == 16) {
                const vec2  pair  = unpackHalf2x16(v_tiles[tile + values.at[x] + c / 2]);
                const float half_ = c % 2 == 0 ? pair.x : pair.y;
                [[unroll]] for (uint r = 0; r < ROWS; ++r) {
                    const float w = plain[r * TILE + c];
                    if (w > 0.0) { // Halves of masked cells may be infinite.
                        acc[r * COEFFICIENTS + x] = fma(w, half_, acc[r * COEFFICIENTS + x]);
                    }
                }
            }
        }
    }
    for (uint rho = 0; rho < 8; ++rho) {
        [[unroll]] for (uint x = 0; x < COEFFICIENTS; ++x) {
            if (values.bits[x] - 1u < 8u) {
                float zero  = half_range(values.bits[x]);
                uvec2 codes = read_v(tile + values.at[x], values.bits[x], rho);
                if (values.path[x] != 0) {
                    const uint  path  = values.path[x];
                    const uvec2 one   = choices_v(tile + values.one_at[x], path & 255u, rho);
                    const uvec2 two   = choices_v(tile + values.two_at[x], path >> 8 & 255u, rho);
                    const uvec2 bends = uvec2(path >> 16 & 255u, path >> 24);
                    codes             = uvec2(to_levels(codes.x, values.bits[x], bends, one.x, two.x, true),
                                              to_levels(codes.y, values.bits[x], bends, one.y, two.y, true));
                    zero              = 127.5;
                }
                [[unroll]] for (uint c = 0; c < 8; ++c) {
                    const float code = float((c < 4 ? codes.x : codes.y) >> 8 * (c % 4) & 255u) - zero;
                    [[unroll]] for (uint r = 0; r < ROWS; ++r) {
                        acc[r * COEFFICIENTS + x] =
                            fma(weights[r * TILE + 8 * rho + c], code, acc[r * COEFFICIENTS + x]);
                    }
                }
            }
        }
    }
}
