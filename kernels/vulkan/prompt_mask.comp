#version 450
// prompt_mask.comp: writes the mask of a prompt's rows (prompt_rows.comp, prompt_exact.comp). A token attends either to
// the coded row or to the exact row of every visible key.
#extension GL_GOOGLE_include_directive : require
#include "tables.glsl"

layout(local_size_x = 128) in;

layout(std430, binding = 1) writeonly buffer Out { uint result[]; };
layout(std430, binding = 2) readonly buffer Mask { uint mask[]; };
layout(std430, binding = 3) readonly buffer CellPos { int cell_pos[]; };
layout(std430, binding = 4) readonly buffer Tokens { int tokens[]; };
layout(std430, binding = 5) readonly buffer Slots { int slots[]; };

layout(push_constant) uniform Push {
    uint out_at, n_rows, n_kv, n_slots, n_stream, n_tps;
    uint mask_at, mask_half, cell_pos_at, tokens_at, slots_at, slots_of_seq;
} p;

#include "mask.glsl"
#include "slots.glsl"
#include "tokens.glsl"
#include "prompt_bias.glsl"

const uint THREADS = 128, NO_VALUE = 0xfc00; // -infinity

uint value_of(uint token, uint row) {
    const float x = prompt_bias(token, row);
    return x == HIDDEN ? NO_VALUE : x == LOST ? HALF_NAN : to_half(clamp(x, -65504.0, 65504.0));
}

void main() {
    const uint row = (gl_WorkGroupID.x * THREADS + gl_LocalInvocationID.x) * 2, token = gl_WorkGroupID.y;
    if (row < p.n_rows) {
        result[(p.out_at + token * p.n_rows + row) / 2] = value_of(token, row) | value_of(token, row + 1) << 16;
    }
}
