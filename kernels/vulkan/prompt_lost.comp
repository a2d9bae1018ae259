#version 450
// prompt_lost.comp: after flash attention, sets the output of a token to NaN if it sees a row that is not finite, for
// which prompt_rows.comp and prompt_exact.comp have written zeros. There is one workgroup per token, which ends at once
// in a layer without such rows.
#extension GL_GOOGLE_include_directive : require
#include "tables.glsl"

layout(local_size_x = 128) in;

layout(std430, binding = 1) writeonly buffer Out { float result[]; };
layout(std430, binding = 2) readonly buffer Mask { uint mask[]; };
layout(std430, binding = 3) readonly buffer CellPos { int cell_pos[]; };
layout(std430, binding = 4) readonly buffer Tokens { int tokens[]; };
layout(std430, binding = 5) readonly buffer Slots { int slots[]; };
layout(std430, binding = 6) readonly buffer KTiles { uint k_tiles[]; };
layout(std430, binding = 7) readonly buffer VTiles { uint v_tiles[]; };
layout(std430, binding = 8) readonly buffer Fresh { uint fresh[]; };
layout(std430, binding = 9) readonly buffer Window { uint window[]; };

layout(push_constant) uniform Push {
    uint out_at, out_stride, first, n_heads, n_kv, n_slots, n_stream, n_tps;
    uint mask_at, mask_half, cell_pos_at, tokens_at, slots_at, slots_of_seq;
    uint k_tiles_at, k_stride, k_stream, v_tiles_at, v_stride, v_stream;
    uint fresh_at, window_at;
} p;

#include "mask.glsl"
#include "slots.glsl"
#include "tokens.glsl"
#include "prompt_bias.glsl"

const uint THREADS = 128;

shared uint lost;

bool bad_scale(uint word, uint c) {
    return (word >> 8 * (c % 4) & 255u) == SCALE_NAN;
}

// Returns whether a row of these heads is not finite.
bool is_bad(uint stream, uint row) {
    bool bad = false;
    if (row < p.n_kv) {
        const uint tile = row / TILE, c = row % TILE;
        const uint k_at = p.k_tiles_at + stream * p.k_stream + tile * p.k_stride + c / 4;
        const uint v_at = p.v_tiles_at + stream * p.v_stream + tile * p.v_stride + c / 4;
        for (uint h = p.first; h < p.first + p.n_heads; ++h) {
            bad = bad || bad_scale(k_tiles[k_at + head_of(0, h).tile], c) ||
                  bad_scale(v_tiles[v_at + head_of(1, h).tile], c);
        }
        return bad;
    }
    const uint i = row - p.n_kv, width = exact_width();
    const uint slot = (p.n_stream > 1 ? token_first_slot(stream * p.n_tps) : 0) + i;
    for (uint side = 0; side < 2; ++side) {
        for (uint h = p.first; h < p.first + p.n_heads; ++h) {
            const uint at   = (side == 0 ? h * tables[D_K] : exact_value(h)) / 2;
            const uint word = i < p.n_slots ? window[p.window_at + slot * width + at] :
                                              fresh[p.fresh_at + (stream * p.n_tps + i - p.n_slots) * width + at];
            bad = bad || half_bits(word, 0) == HALF_NAN;
        }
    }
    return bad;
}

void main() {
    const uint token = gl_WorkGroupID.x, me = gl_LocalInvocationID.x;
    if (tables[N_BAD] == 0) {
        return;
    }
    if (me == 0) {
        lost = 0;
    }
    barrier();
    for (uint row = me; row < p.n_kv + p.n_slots + p.n_tps; row += THREADS) {
        if (prompt_bias(token, row) != HIDDEN && is_bad(token / p.n_tps, row)) {
            atomicOr(lost, 1u);
        }
    }
    barrier();
    for (uint i = me; lost != 0 && i < p.out_stride; i += THREADS) {
        result[p.out_at + token * p.out_stride + i] = NOT_A_NUMBER;
    }
}
