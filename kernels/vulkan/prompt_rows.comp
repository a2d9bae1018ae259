#version 450
// prompt_rows.comp: what a prompt's flash attention, which is ggml's, reads of coded cells: D c of a tile of keys or
// values, times gamma plus the mean for keys, as halves. Each cell is decoded once for all tokens of a batch. A workgroup
// takes 64 elements of all cells of a head's tile.
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require // as in attend.glsl
#include "tables.glsl"
#include "levels.glsl"

layout(local_size_x = 128) in;

layout(std430, binding = 1) writeonly buffer KRows { uint k_rows[]; };
layout(std430, binding = 2) writeonly buffer VRows { uint v_rows[]; };
layout(std430, binding = 3) readonly buffer KTiles { uint k_tiles[]; };
layout(std430, binding = 4) readonly buffer VTiles { uint v_tiles[]; };

layout(push_constant) uniform Push {
    uint k_at, v_at, n_rows, first, n_heads, n_kv;
    uint k_tiles_at, k_stride, k_stream, v_tiles_at, v_stride, v_stream;
} p;

const uint THREADS = 128, COLUMNS = 64, CHUNK = 16; // coefficients at a time: an octet of every half of the threads
const uint CELLS = 8, WIDE = 4; // a thread's part of the product

shared float scale[TILE];
shared float coefficients[CHUNK * TILE];
shared float basis[CHUNK * COLUMNS];

uint word_of(bool value, uint at) {
    return value ? v_tiles[at] : k_tiles[at];
}

// Codes of register rho at word `at` of an octet's lines, of a dword's four or less.
uint read_codes(bool value, uint at, uint bits, uint rho) {
    uint codes = 0;
    for (uint i = 0; i < n_fields(bits, rho); ++i) {
        const Term t = term_of(bits, rho, i);
        codes |= word_of(value, at + t.at) >> t.shift & t.mask;
    }
    return codes;
}

// The two dwords of a thread's eight codes of an octet: keys, of a cell; values, of a coefficient and eight cells.
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

// Choices `back` places before a place on the path. Those before place 0 are the last ones, of the lane before.
uvec2 choices_back(bool value, Head head, uint tile, uint me, uint place, uint back) {
    const bool  turned = place < back;
    const Octet octet  = octet_of(head, turned ? head.n_path + place - back : place - back);
    const Where w      = where(value, me, value && turned ? (me + 7) % 8 : me % 8);
    const uvec2 words  = read_octet(value, tile + octet.at, octet.bits, w) & ONES;
    return !value && turned ? uvec2(words.x << 8 | words.y >> 24, words.y << 8 | words.x >> 24) : words;
}

// Puts this thread's eight coefficients of an octet to number `to` of the chunk.
void decode_octet(bool value, Head head, uint tile, uint me, uint octet, uint to) {
    float x[8];
    [[unroll]] for (uint i = 0; i < 8; ++i) {
        x[i] = 0.0;
    }
    const uint first_cell = value ? me / 8 * 8 : me;
    for (uint b = 0; b < head.n_bands; ++b) {
        const Band band = band_of(head, b);
        const uint j    = 8 * octet - band.first; // wraps around before the band
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
    [[unroll]] for (uint i = 0; i < 8; ++i) {
        coefficients[(to + (value ? me % 8 : i)) * TILE + first_cell + (value ? i : 0)] = x[i];
    }
}

// Finite, since a weight of zero multiplies it where nobody sees the cell.
uint half_of(float x) {
    return to_half(finite(x) ? clamp(x, -65504.0, 65504.0) : 0.0);
}

void main() {
    const uint me = gl_LocalInvocationID.x, tile = gl_WorkGroupID.x, stream = gl_WorkGroupID.z;
    const bool value  = gl_WorkGroupID.y % 2 == 1;
    const uint h      = gl_WorkGroupID.y / 2 % p.n_heads;
    const uint column = gl_WorkGroupID.y / 2 / p.n_heads * COLUMNS;
    const Head head   = head_of(value ? 1 : 0, p.first + h);
    const uint at     = head.tile + (value ? p.v_tiles_at + stream * p.v_stream + tile * p.v_stride :
                                             p.k_tiles_at + stream * p.k_stream + tile * p.k_stride);
    const uint n      = min(TILE, p.n_kv - tile * TILE);
    if (column >= head.d) {
        return;
    }
    if (me < TILE) {
        scale[me] = me < n ? row_scale(word_of(value, at + me / 4) >> 8 * (me % 4) & 255u) : 0.0;
    }
    const uint my_cell = me / (COLUMNS / WIDE) * CELLS, mine = me % (COLUMNS / WIDE) * WIDE;
    float      sums[CELLS * WIDE];
    [[unroll]] for (uint i = 0; i < CELLS * WIDE; ++i) {
        sums[i] = 0.0;
    }
    for (uint first = 0; first < head.rank; first += CHUNK) {
        barrier();
        decode_octet(value, head, at, me % TILE, first / 8 + me / TILE, me / TILE * 8);
        for (uint i = me; i < CHUNK * COLUMNS / 2; i += THREADS) {
            const uint c = first + i / (COLUMNS / 2), j = column + i % (COLUMNS / 2) * 2;
            const vec2 pair =
                c < head.rank && j < head.d ? unpackHalf2x16(tables[head.decode + (c * head.d + j) / 2]) : vec2(0.0);
            basis[2 * i]     = pair.x;
            basis[2 * i + 1] = pair.y;
        }
        barrier();
        for (uint i = 0; i < CHUNK; ++i) {
            float d[WIDE];
            [[unroll]] for (uint x = 0; x < WIDE; ++x) {
                d[x] = basis[i * COLUMNS + mine + x];
            }
            [[unroll]] for (uint c = 0; c < CELLS; ++c) {
                const float y = coefficients[i * TILE + my_cell + c];
                [[unroll]] for (uint x = 0; x < WIDE; ++x) {
                    sums[c * WIDE + x] = fma(y, d[x], sums[c * WIDE + x]);
                }
            }
        }
    }
    const float gamma = value ? 1.0 : head.gamma;
    [[unroll]] for (uint c = 0; c < CELLS; ++c) {
        [[unroll]] for (uint x = 0; x < WIDE; x += 2) {
            const uint j = column + mine + x;
            if (my_cell + c < n && j < head.d) {
                const vec2 mean = head.mean != 0 ? unpackHalf2x16(tables[head.mean + j / 2]) : vec2(0.0);
                const uint row  = (stream * p.n_heads + h) * p.n_rows + tile * TILE + my_cell + c;
                const uint word = half_of(fma(gamma, sums[c * WIDE + x], mean.x)) |
                                  half_of(fma(gamma, sums[c * WIDE + x + 1], mean.y)) << 16;
                if (value) {
                    v_rows[p.v_at + (row * head.d + j) / 2] = word;
                } else {
                    k_rows[p.k_at + (row * head.d + j) / 2] = word;
                }
            }
        }
    }
}
