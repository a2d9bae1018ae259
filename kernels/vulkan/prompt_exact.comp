#version 450
// prompt_exact.comp: writes a prompt's rows behind those of cells (prompt_rows.comp): the exact keys and values of
// window slots, then those of the ubatch's own tokens, then zeros.
#extension GL_GOOGLE_include_directive : require
#include "tables.glsl"

layout(local_size_x = 128) in;

layout(std430, binding = 1) writeonly buffer KRows { uint k_rows[]; };
layout(std430, binding = 2) writeonly buffer VRows { uint v_rows[]; };
layout(std430, binding = 3) readonly buffer Fresh { uint fresh[]; };
layout(std430, binding = 4) readonly buffer Window { uint window[]; };
layout(std430, binding = 5) readonly buffer Tokens { int tokens[]; };

layout(push_constant) uniform Push {
    uint k_at, v_at, n_rows, first, n_heads, n_kv, n_slots, n_stream, n_tps;
    uint fresh_at, window_at, tokens_at;
} p;

#include "tokens.glsl"

const uint THREADS = 128;

void main() {
    const uint i = gl_WorkGroupID.x, stream = gl_WorkGroupID.y, me = gl_LocalInvocationID.x;
    const uint n_head = tables[N_HEAD_KV], d_k = tables[D_K], d_v = tables[D_V];
    const uint width  = exact_width();
    const uint slot   = (p.n_stream > 1 ? token_first_slot(stream * p.n_tps) : 0) + i;
    const uint keys   = p.n_heads * d_k / 2; // words of the row's keys
    for (uint j = me; j < p.n_heads * (d_k + d_v) / 2; j += THREADS) {
        const bool value = j >= keys;
        const uint d     = value ? d_v : d_k;
        const uint e     = value ? j - keys : j;
        const uint from  = (value ? n_head * d_k : 0) / 2 + p.first * d / 2 + e;
        const uint row   = (stream * p.n_heads + e / (d / 2)) * p.n_rows + p.n_kv + i;
        const uint to    = row * (d / 2) + e % (d / 2);
        uint       word  = 0;
        if (i < p.n_slots) {
            word = window[p.window_at + slot * width + from];
        } else if (i < p.n_slots + p.n_tps) {
            word = fresh[p.fresh_at + (stream * p.n_tps + i - p.n_slots) * width + from];
        }
        for (uint x = 0; x < 2; ++x) { // Rows are finite, as in prompt_rows.comp.
            word = finite_half(half_bits(word, x)) ? word : word & ~(0xffffu << 16 * x);
        }
        if (value) {
            v_rows[p.v_at + to] = word;
        } else {
            k_rows[p.k_at + to] = word;
        }
    }
}
