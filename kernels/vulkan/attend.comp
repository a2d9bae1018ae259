#version 450
// attend.comp: ROWS query rows of a KV head over the coded cells of a split. A workgroup takes a tile at a time:
// logits, one thread per cell; then sums of values, COEFFICIENTS of them per thread. Codes are read once for all rows,
// and nothing is rounded beyond f32.
//
// Loops over rows and coefficients are to be unrolled: what they index is registers, and a driver that keeps them as
// loops picks every register by a cascade of comparisons.
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#include "tables.glsl"

layout(local_size_x = 64) in; // TILE

layout(constant_id = 0) const uint ROWS         = 8; // at most 8: `tops` is found by as many threads of 8 cells each
layout(constant_id = 1) const uint COEFFICIENTS = 2;

layout(std430, binding = 1) writeonly buffer Partial { float partial[]; };
layout(std430, binding = 2) readonly buffer KTiles { uint k_tiles[]; };
layout(std430, binding = 3) readonly buffer VTiles { uint v_tiles[]; };
layout(std430, binding = 4) readonly buffer Mask { uint mask[]; };
layout(std430, binding = 5) readonly buffer CellPos { int cell_pos[]; };
layout(std430, binding = 6) readonly buffer Tokens { int tokens[]; };
layout(std430, binding = 7) readonly buffer Queries { float queries[]; }; // of the same buffer, other places

layout(push_constant) uniform Push {
    uint  qt_at, shift_at, m_at, z_at, acc_at, width_v;
    uint  k_tiles_at, k_stride, k_stream, v_tiles_at, v_stride, v_stream;
    uint  mask_at, mask_half, cell_pos_at, tokens_at; // of the mask in values
    uint  n_kv, n_tps, n_tokens, split;
    float softcap;
} p;

#include "mask.glsl"

const uint PARTS = 8;           // of a tile's cells
const uint ONES  = 0x01010101u; // a code's bit that chooses the levels of the next two places, of four codes

shared float logits[ROWS * TILE];
shared float tops[ROWS * PARTS];
shared float weights[ROWS * TILE]; // times the scale of the value
shared float plain[ROWS * TILE];   // of halves, which have none; 0 in zero rows

// Codes of register rho, a byte each, from word `at` of its octet's lines on.
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

// Only their bits that choose the levels of later places.
uvec2 choices_v(uint at, uint bits, uint rho) {
    const Field f    = field_of(bits, rho, 0); // which begins with bit 0
    const uint  line = at + f.line * LINE_WORDS;
    return uvec2(v_tiles[line], v_tiles[line + 1]) >> f.shift & ONES;
}

// By how much four magnitudes k, a byte each, are beyond `bend`; 0 where they are not.
uint beyond(uint k, uint bend) {
    const uint above = (k | 128 * ONES) - bend * ONES, is = above & 128 * ONES;
    return above & (is - (is >> 7));
}

// Levels plus 128, a byte each, of four codes of a place on the path, with the choices one and two places before.
uint to_levels(uint codes, uint bits, uvec2 bends, uint one, uint two) {
    const uint index = (codes ^ two) << 1 ^ one;
    const uint upper = (index >> bits & ONES) * 255; // half of the alphabet
    const uint k     = (index ^ ~upper) & ONES * ((1u << bits) - 1u);
    return k + beyond(k, bends.x) + beyond(k, bends.y) ^ upper ^ 127 * ONES;
}

// Choices of the last but x-th place of all of cell c of a tile, as those before the first place: lane j becomes j + 1.
uvec2 choices_before(Head head, uint tile, uint c, uint x) {
    const Octet octet = octet_of(head, head.n_path - x);
    uint        words[2];
    [[unroll]] for (uint half_ = 0; half_ < 2; ++half_) {
        const Field f = field_of(octet.bits, 4 * half_ + c / 16, 0);
        words[half_]  = k_tiles[tile + octet.at + f.line * LINE_WORDS + c % 16] >> f.shift & ONES;
    }
    return uvec2(words[0] << 8 | words[1] >> 24, words[1] << 8 | words[0] >> 24);
}

// Dot products of the key of cell c of the tile at word `tile` with the rows whose coefficients begin at `qt`.
void dots(uint h, uint tile, uint c, uint qt[ROWS], out float dot[ROWS]) {
    float halves[ROWS];
    [[unroll]] for (uint r = 0; r < ROWS; ++r) {
        dot[r]    = 0.0;
        halves[r] = 0.0;
    }
    const Head  head = head_of(0, h); // here, or it takes registers from one tile to the next
    const float s    = row_scale(k_tiles[tile + c / 4] >> 8 * (c % 4) & 255u);
    uvec4 before = uvec4(0); // choices: the words of two octets on the path
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
        for (uint four = 0; four < band.n / 4; ++four) { // coefficients
            const uint at   = tile + band.at + four / 2 * band.bits * LINE_WORDS + c % 16;
            uint       code = read_k(at, band.bits, four % 2 * 4 + c / 16);
            const uint q    = band.first + 4 * four;
            const bool  on   = band.place != NO_PLACE; // before the loop it would take registers from queries
            const float zero = on ? 127.5 : half_range(band.bits);
            if (on) {
                const uint  choice = code & ONES;
                const uvec2 bends  = bends_of(band.bits);
                code               = to_levels(code, band.bits, bends, before.z, before.x);
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

void main() {
    const uint me = gl_LocalInvocationID.x, h = gl_WorkGroupID.x, stream = gl_WorkGroupID.z;
    const uint group   = tables[N_GROUP], width_k = tables[WIDTH_K];
    const uint all     = p.n_tps * group; // rows of a stream
    const uint blocks  = (all + ROWS - 1) / ROWS;
    const uint part    = gl_WorkGroupID.y / blocks;
    const uint r0      = gl_WorkGroupID.y % blocks * ROWS;
    const uint n_rows  = min(ROWS, all - r0);
    const uint first   = h * p.n_tokens * group + stream * all + r0; // rows of all streams follow each other
    const uint c_end   = min(p.n_kv, (part + 1) * p.split);
    const Head key     = head_of(0, h), value = head_of(1, h);
    uint       qt[ROWS]; // without a row those of the last one, whose cells are hidden
    [[unroll]] for (uint r = 0; r < ROWS; ++r) {
        qt[r] = p.qt_at + (first + min(r, n_rows - 1)) * width_k;
    }

    // this thread's values
    uint  at[COEFFICIENTS], bits[COEFFICIENTS];
    float step[COEFFICIENTS];
    uint  one_at[COEFFICIENTS], two_at[COEFFICIENTS]; // of the places before, on the path
    uint  path[COEFFICIENTS];                         // their bits and the bends, a byte each; 0: not on it
    [[unroll]] for (uint x = 0; x < COEFFICIENTS; ++x) {
        bits[x] = 0;
        path[x] = 0;
    }
    for (uint b = 0; b < value.n_bands; ++b) {
        const Band band = band_of(value, b);
        [[unroll]] for (uint x = 0; x < COEFFICIENTS; ++x) {
            const uint j = me + x * TILE - band.first;
            if (j < band.n) { // wraps around before the band
                bits[x] = band.bits;
                step[x] = band.bits == 16 ? 1.0 : band.step;
                at[x]   = band.at + j / 8 * band.bits * LINE_WORDS + j % 8 * (band.bits == 16 ? TILE / 2 : 2);
                if (band.place != NO_PLACE) { // place 0 of a lane follows the last one of the lane before
                    const uint  place = band.place + j / 8;
                    const Octet one   = octet_of(value, place < 1 ? value.n_path - 1 : place - 1);
                    const Octet two   = octet_of(value, place < 2 ? value.n_path + place - 2 : place - 2);
                    one_at[x]         = one.at + (place < 1 ? j + 7 : j) % 8 * 2;
                    two_at[x]         = two.at + (place < 2 ? j + 7 : j) % 8 * 2;
                    const uvec2 bends = bends_of(band.bits);
                    path[x]           = one.bits | two.bits << 8 | bends.x << 16 | bends.y << 24;
                }
            }
        }
    }
    float m[ROWS], z[ROWS], acc[ROWS * COEFFICIENTS];
    [[unroll]] for (uint r = 0; r < ROWS; ++r) {
        m[r] = -INFINITY;
        z[r] = 0.0;
        [[unroll]] for (uint x = 0; x < COEFFICIENTS; ++x) {
            acc[r * COEFFICIENTS + x] = 0.0;
        }
    }

    for (uint c0 = part * p.split; c0 < c_end; c0 += TILE) {
        const uint cell  = c0 + me;
        const int  pos   = cell < c_end ? cell_pos[p.cell_pos_at + stream * p.n_kv + cell] : 0;
        bool       seen  = false;
        float      bias[ROWS];
        [[unroll]] for (uint r = 0; r < ROWS; ++r) {
            bias[r] = -INFINITY;
            if (cell < c_end && r < n_rows) {
                const uint token = stream * p.n_tps + (r0 + r) / group;
                if (!is_exact(pos, tokens[p.tokens_at + 4 * token])) {
                    bias[r] = mask_value(p.mask_at + token * p.n_kv + cell, p.mask_half);
                }
            }
            seen = seen || bias[r] != -INFINITY;
        }
        const uint k_tile = p.k_tiles_at + stream * p.k_stream + c0 / TILE * p.k_stride + key.tile;
        const uint v_tile = p.v_tiles_at + stream * p.v_stream + c0 / TILE * p.v_stride + value.tile;
        float      logit[ROWS];
        float      scale = 0.0;
        if (seen) {
            dots(h, k_tile, me, qt, logit);
            scale = row_scale(v_tiles[v_tile + me / 4] >> 8 * (me % 4) & 255u);
        }
        [[unroll]] for (uint r = 0; r < ROWS; ++r) {
            if (bias[r] == -INFINITY) {
                logit[r] = -INFINITY;
            } else {
                const float slope = slope_of(h * group + (r0 + r) % group);
                logit[r] = capped(logit[r] + queries[p.shift_at + first + r], p.softcap) + slope * bias[r];
            }
            logits[r * TILE + me] = logit[r];
        }
        barrier();
        if (me < ROWS * PARTS) {
            float top = -INFINITY;
            for (uint c = 0; c < TILE / PARTS; ++c) {
                top = max(top, logits[me * (TILE / PARTS) + c]);
            }
            tops[me] = top;
        }
        barrier();
        bool any = false;
        [[unroll]] for (uint r = 0; r < ROWS; ++r) {
            float top = m[r];
            bool  here = false;
            for (uint i = 0; i < PARTS; ++i) {
                top  = max(top, tops[r * PARTS + i]);
                here = here || tops[r * PARTS + i] != -INFINITY;
            }
            any = any || here;
            float weight = 0.0;
            if (here) {
                const float keep = m[r] == -INFINITY ? 0.0 : exp(m[r] - top);
                weight           = logit[r] == -INFINITY ? 0.0 : exp(logit[r] - top);
                m[r]             = top;
                z[r]             = fma(z[r], keep, weight);
                [[unroll]] for (uint x = 0; x < COEFFICIENTS; ++x) {
                    acc[r * COEFFICIENTS + x] *= keep;
                }
            }
            weights[r * TILE + me] = weight * scale;
            plain[r * TILE + me]   = scale > 0.0 ? weight : 0.0;
        }
        barrier();
        if (!any) {
            continue;
        }
        bool halves = false;
        [[unroll]] for (uint x = 0; x < COEFFICIENTS; ++x) {
            halves = halves || bits[x] == 16;
        }
        for (uint c = 0; halves && c < TILE; ++c) {
            [[unroll]] for (uint x = 0; x < COEFFICIENTS; ++x) {
                if (bits[x] == 16) {
                    const vec2  pair  = unpackHalf2x16(v_tiles[v_tile + at[x] + c / 2]);
                    const float half_ = c % 2 == 0 ? pair.x : pair.y;
                    [[unroll]] for (uint r = 0; r < ROWS; ++r) {
                        const float w = plain[r * TILE + c];
                        if (w > 0.0) { // a hidden cell's halves may be infinite
                            acc[r * COEFFICIENTS + x] = fma(w, half_, acc[r * COEFFICIENTS + x]);
                        }
                    }
                }
            }
        }
        for (uint rho = 0; rho < 8; ++rho) {
            [[unroll]] for (uint x = 0; x < COEFFICIENTS; ++x) {
                if (bits[x] - 1u < 8u) {
                    float zero  = half_range(bits[x]);
                    uvec2 codes = read_v(v_tile + at[x], bits[x], rho);
                    if (path[x] != 0) {
                        const uvec2 one   = choices_v(v_tile + one_at[x], path[x] & 255u, rho);
                        const uvec2 two   = choices_v(v_tile + two_at[x], path[x] >> 8 & 255u, rho);
                        const uvec2 bends = uvec2(path[x] >> 16 & 255u, path[x] >> 24);
                        codes             = uvec2(to_levels(codes.x, bits[x], bends, one.x, two.x),
                                                  to_levels(codes.y, bits[x], bends, one.y, two.y));
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

    const uint out_row = part * tables[N_HEAD_KV] * p.n_tokens * group + first;
    [[unroll]] for (uint x = 0; x < COEFFICIENTS; ++x) {
        [[unroll]] for (uint r = 0; r < ROWS; ++r) {
            if (bits[x] != 0 && r < n_rows) {
                partial[p.acc_at + (out_row + r) * p.width_v + me + x * TILE] = step[x] * acc[r * COEFFICIENTS + x];
            }
        }
    }
    barrier();
    [[unroll]] for (uint r = 0; r < ROWS; ++r) {
        logits[r * TILE + me] = z[r];
    }
    barrier();
    if (me < n_rows) {
        float sum = 0.0;
        for (uint c = 0; c < TILE; ++c) {
            sum += logits[me * TILE + c];
        }
        partial[p.z_at + out_row + me] = sum;
    }
    [[unroll]] for (uint r = 0; r < ROWS; ++r) {
        if (me == 0 && r < n_rows) {
            partial[p.m_at + out_row + r] = m[r];
        }
    }
}
