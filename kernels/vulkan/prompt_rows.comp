#version 450
// prompt_rows.comp: decodes cells for ggml's flash attention of a prompt. It writes D c of a tile's keys or values, for
// keys times gamma plus the mean, as halves. It decodes each cell once for all tokens of a batch. A workgroup computes
// 64 elements of all cells of a head's tile.
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

const uint THREADS = 128, COLUMNS = 64, CHUNK = 16; // CHUNK coefficients, an octet per half of the threads
const uint CELLS = 8, WIDE = 4; // a thread's part of the product

shared float coefficients[CHUNK * TILE];
shared float basis[CHUNK * COLUMNS];

uint word_of(bool value, uint at) {
    return value ? v_tiles[at] : k_tiles[at];
}

const bool PATH_LANES = false;
#include "octets.glsl"

// Returns a finite half, because masked cells have weight 0, and 0 * inf is NaN (prompt_lost.comp).
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
        const uint code = word_of(value, at + me / 4) >> 8 * (me % 4) & 255u;
        scale[me]       = me < n && code != SCALE_NAN ? row_scale(code) : 0.0;
    }
    const uint my_cell = me / (COLUMNS / WIDE) * CELLS, mine = me % (COLUMNS / WIDE) * WIDE;
    float      sums[CELLS * WIDE];
    [[unroll]] for (uint i = 0; i < CELLS * WIDE; ++i) {
        sums[i] = 0.0;
    }
    for (uint first = 0; first < head.rank; first += CHUNK) {
        barrier();
        float x[8];
        decode_octet(value, head, at, me % TILE, first / 8 + me / TILE, x);
        [[unroll]] for (uint i = 0; i < 8; ++i) {
            const uint c = me / TILE * 8 + (value ? me % 8 : i), cell = value ? me % TILE / 8 * 8 + i : me % TILE;
            coefficients[c * TILE + cell] = x[i];
        }
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
