#version 450
// prompt_mask.comp: the mask of a prompt's rows (prompt_rows.comp, prompt_exact.comp): of every visible key a token
// attends to either the coded row or the exact row.
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

const uint THREADS = 128, NO_VALUE = 0xfc00; // -infinity

uint value_of(uint token, uint row) {
    const uint stream = token / p.n_tps;
    const int  own    = token_pos(token);
    int        cell   = -1;
    if (row < p.n_kv) {
        cell = is_exact(cell_pos[p.cell_pos_at + stream * p.n_kv + row], own) ? -1 : int(row);
    } else if (row < p.n_kv + p.n_slots) {
        const uint first = token_first_slot(token); // first slot of its sequence
        const uint slot  = (p.n_stream > 1 ? token_first_slot(stream * p.n_tps) : 0) + row - p.n_kv;
        if (slot - first < p.slots_of_seq) {
            const int pos = slot_pos(slot);
            cell          = pos >= 0 && is_exact(pos, own) ? slot_cell(slot) : -1;
        }
    } else if (row < p.n_kv + p.n_slots + p.n_tps && p.slots_of_seq > 0) {
        const uint other = stream * p.n_tps + row - p.n_kv - p.n_slots;
        const int  pos   = token_pos(other);
        cell             = pos >= 0 && is_exact(pos, own) ? token_cell(other) : -1;
    }
    const float x = cell < 0 ? -INFINITY : mask_value(p.mask_at + token * p.n_kv + uint(cell), p.mask_half);
    return finite(x) ? to_half(x) : NO_VALUE;
}

void main() {
    const uint row = (gl_WorkGroupID.x * THREADS + gl_LocalInvocationID.x) * 2, token = gl_WorkGroupID.y;
    if (row < p.n_rows) {
        result[(p.out_at + token * p.n_rows + row) / 2] = value_of(token, row) | value_of(token, row + 1) << 16;
    }
}
