// values_dot.glsl: sums of values of a tile by integer dot products. A thread processes 8 cells and one coefficient of
// each octet, in order, so the preceding codes of a path stay in its registers. Sums of threads are added in shared
// memory and become floats once per tile.

const float WEIGHT_STEP = 1.0 / 65535.0;

shared uint  room[RANKED * TILE]; // bits of floats, then weights, with bytes in bits 0 to 7 and 16 to 23
shared uvec2 pairs[ROWS * TILE / 4]; // upper and lower bytes of four cells' weights
shared uint  totals[ROWS];            // sums of weights
shared uint  sums[COEFFICIENTS * TILE * ROWS];

void put(uint i, float x) {
    room[i] = floatBitsToUint(x);
}

float get(uint i) {
    return uintBitsToFloat(room[i]);
}

// A thread's coefficients, me + x * TILE. It keeps their sums.
struct Values {
    uint  at[COEFFICIENTS];   // word of a coefficient of 16 bits
    uint  bits[COEFFICIENTS]; // 0 if there is none
    uint  zero[COEFFICIENTS]; // twice the zero of a level
    float step[COEFFICIENTS];
    bool  halves; // whether the head has a 16-bit band
};

void find_values(uint h, uint me, inout Values values) {
    const Head head = head_of(1, h);
    values.halves   = false;
    [[unroll]] for (uint x = 0; x < COEFFICIENTS; ++x) {
        values.bits[x] = 0;
        [[unroll]] for (uint r = 0; r < ROWS; ++r) {
            sums[(me + x * TILE) * ROWS + r] = 0;
        }
    }
    for (uint b = 0; b < head.n_bands; ++b) {
        const Band band = band_of(head, b);
        values.halves   = values.halves || band.bits == 16;
        [[unroll]] for (uint x = 0; x < COEFFICIENTS; ++x) {
            const uint j = me + x * TILE - band.first;
            if (j < band.n) { // It is false before the band, where j wraps around.
                values.at[x]   = band.at + j * (TILE / 2);
                values.bits[x] = band.bits;
                values.zero[x] = band.place != NO_PLACE ? 255 : (1u << band.bits) - 1u;
                values.step[x] = band.bits == 16 ? 1.0 : band.step;
            }
        }
    }
}

uvec2 v_codes(uint at, Term terms[MAX_FIELDS], uint n) {
    uvec2 codes = uvec2(v_tiles[at + terms[0].at], v_tiles[at + terms[0].at + 1]) >> terms[0].shift & terms[0].mask;
    [[unroll]] for (uint i = 1; i < MAX_FIELDS; ++i) {
        if (i < n) {
            const uvec2 line = uvec2(v_tiles[at + terms[i].at], v_tiles[at + terms[i].at + 1]);
            codes |= line >> terms[i].shift & terms[i].mask;
        }
    }
    return codes;
}

// Returns the choices at place n_path - x. They precede the first place, so lane j becomes j + 1.
uvec2 v_choices_before(Head head, uint tile, uint j, uint rho, uint x) {
    const Octet octet = octet_of(head, head.n_path - x);
    const Field f     = field_of(octet.bits, rho, 0); // the field with bit 0
    const uint  at    = tile + octet.at + f.line * LINE_WORDS + (j + 7) % 8 * 2;
    return uvec2(v_tiles[at], v_tiles[at + 1]) >> f.shift & ONES;
}

// Adds the products of this thread's 8 cells to the sums of all coefficients.
void multiply_values(uint h, uint tile, uint me) {
    const bool HELD = ROWS <= 4; // whether weights stay in registers; otherwise each use reads them
    const Head head = head_of(1, h);
    const uint j = me % 8, rho = me / 8;
    uvec2      w[ROWS * 2];
    if (HELD) {
        [[unroll]] for (uint i = 0; i < ROWS * 2; ++i) {
            w[i] = pairs[i / 2 * (TILE / 4) + 2 * rho + i % 2];
        }
    }
    uvec2 one = uvec2(0), two = uvec2(0); // choices one and two places before
    if (head.n_path > 0) {
        two = v_choices_before(head, tile, j, rho, 2);
        one = v_choices_before(head, tile, j, rho, 1);
    }
    for (uint b = 0; b < head.n_bands; ++b) {
        const Band band = band_of(head, b);
        if (band.bits == 16) {
            continue;
        }
        Term       terms[MAX_FIELDS];
        const uint n = n_terms(band.bits);
        [[unroll]] for (uint i = 0; i < MAX_FIELDS; ++i) {
            terms[i] = term_of(band.bits, rho, i);
        }
        for (uint octet = 0; octet < band.n / 8; ++octet) {
            uvec2 codes = v_codes(tile + band.at + octet * band.bits * LINE_WORDS + 2 * j, terms, n);
            if (band.place != NO_PLACE) {
                const uvec2 choices = codes & ONES, bends = bends_of(band.bits);
                codes = uvec2(to_levels(codes.x, band.bits, bends, one.x, two.x, true),
                              to_levels(codes.y, band.bits, bends, one.y, two.y, true));
                two   = one;
                one   = choices;
            }
            const uint to = (band.first + 8 * octet + j) * ROWS;
            [[unroll]] for (uint r = 0; r < ROWS; ++r) {
                const uvec2 a = HELD ? w[2 * r] : pairs[r * (TILE / 4) + 2 * rho];
                const uvec2 b = HELD ? w[2 * r + 1] : pairs[r * (TILE / 4) + 2 * rho + 1];
                const uint  high = dot_unsigned(codes.x, a.x, PACKED) + dot_unsigned(codes.y, b.x, PACKED);
                const uint  low  = dot_unsigned(codes.x, a.y, PACKED) + dot_unsigned(codes.y, b.y, PACKED);
                atomicAdd(sums[to + r], (high << 8) + low);
            }
        }
    }
}

void add_values(Values values, uint h, uint tile, uint me, float weight[ROWS], float rise[ROWS], float scale,
                inout float acc[N_ACC]) {
    if (values.halves) {
        [[unroll]] for (uint r = 0; r < ROWS; ++r) {
            put(r * TILE + me, scale > 0.0 ? weight[r] * rise[r] : 0.0);
        }
        barrier();
        for (uint c = 0; c < TILE; ++c) {
            [[unroll]] for (uint x = 0; x < COEFFICIENTS; ++x) {
                if (values.bits[x] == 16) {
                    const vec2  pair  = unpackHalf2x16(v_tiles[tile + values.at[x] + c / 2]);
                    const float half_ = c % 2 == 0 ? pair.x : pair.y;
                    [[unroll]] for (uint r = 0; r < ROWS; ++r) {
                        const float w = get(r * TILE + c);
                        if (w > 0.0) { // Halves of masked cells may be infinite.
                            acc[r * COEFFICIENTS + x] = fma(w, half_, acc[r * COEFFICIENTS + x]);
                        }
                    }
                }
            }
        }
        barrier();
    }
    const float weight_step = WEIGHT_STEP * top_of(ROWS); // unit of weights times scales
    const float by          = weight_step > 0.0 ? scale / weight_step : 0.0;
    [[unroll]] for (uint r = 0; r < ROWS; ++r) {
        const uint w        = uint(fma(weight[r], by, 0.5));
        room[r * TILE + me] = w & 255u | w >> 8 << 16;
    }
    if (me < ROWS) {
        totals[me] = 0;
    }
    barrier();
    for (uint i = me; i < ROWS * TILE / 4; i += TILE) {
        const uint a = room[4 * i] | room[4 * i + 1] << 8, b = room[4 * i + 2] | room[4 * i + 3] << 8;
        const uint high = a >> 16 | b & 0xffff0000u, low = a & 0xffffu | b << 16;
        pairs[i]       = uvec2(high, low);
        atomicAdd(totals[i / (TILE / 4)], 256 * dot_unsigned(high, ONES, PACKED) + dot_unsigned(low, ONES, PACKED));
    }
    barrier();
    multiply_values(h, tile, me);
    barrier();
    [[unroll]] for (uint x = 0; x < COEFFICIENTS; ++x) {
        [[unroll]] for (uint r = 0; r < ROWS; ++r) {
            const uint at = (me + x * TILE) * ROWS + r;
            if (values.bits[x] - 1u < 8u) { // No overflow: 2 * 64 levels * 65535 fits 32 bits.
                const int twice           = int(2 * sums[at] - values.zero[x] * totals[r]);
                acc[r * COEFFICIENTS + x] = fma(0.5 * weight_step * rise[r], float(twice), acc[r * COEFFICIENTS + x]);
            }
            sums[at] = 0;
        }
    }
}
