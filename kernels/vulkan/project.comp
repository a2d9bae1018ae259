#version 450
// project.comp: queries in the coefficients of the keys, qt = scale gamma D_k q, and shift = scale mean . q.
// A workgroup computes 16 coefficients (the number after the last one is the shift) of all query heads of a token's KV
// head.
#extension GL_GOOGLE_include_directive : require
#include "tables.glsl"

layout(local_size_x = 128) in;

layout(std430, binding = 1) readonly buffer Q { float q[]; };
layout(std430, binding = 2) writeonly buffer Partial { float partial[]; };

layout(push_constant) uniform Push {
    uint  q_at, q_head, q_token, qt_at, shift_at, n_tokens;
    float scale;
} p;

const uint THREADS = 128, LANES = 8;

shared float room[THREADS];

void main() {
    const uint token = gl_WorkGroupID.x, h = gl_WorkGroupID.y, me = gl_LocalInvocationID.x;
    const uint i     = gl_WorkGroupID.z * (THREADS / LANES) + me / LANES;
    const Head head  = head_of(0, h);
    const uint group = tables[N_GROUP], width = tables[WIDTH_K];
    const uint row   = (h * p.n_tokens + token) * group;
    const bool shift = i == width; // not times gamma, since the mean is added back unscaled
    const uint matrix = shift ? head.mean : i < head.rank ? head.decode + i * (head.d / 2) : 0;
    for (uint g = 0; g < group; ++g) {
        const uint at    = p.q_at + (h * group + g) * p.q_head + token * p.q_token;
        float      total = 0.0;
        for (uint j = me % LANES; matrix != 0 && j < head.d / 2; j += LANES) {
            const vec2 pair = unpackHalf2x16(tables[matrix + j]);
            total           = fma(pair.y, q[at + 2 * j + 1], fma(pair.x, q[at + 2 * j], total));
        }
        barrier();
        room[me] = total;
        barrier();
        if (me % LANES == 0) {
            for (uint x = 1; x < LANES; ++x) {
                total += room[me + x];
            }
            if (shift) {
                partial[p.shift_at + row + g] = p.scale * total;
            } else if (i < head.rank) {
                partial[p.qt_at + (row + g) * width + i] = p.scale * head.gamma * total;
            }
        }
    }
}
