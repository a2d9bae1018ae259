#version 450
// project.comp: computes queries in the coefficients of the keys, qt = scale gamma D_k q, and shift = scale mean . q,
// which is NaN if the query is not finite. A workgroup computes 16 coefficients of all query heads of a token's KV
// head. The shift follows the last coefficient.
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
    const bool shift = i == width; // It lacks gamma, because the mean is added back unscaled.
    const uint matrix = shift ? head.mean : i < head.rank ? head.decode + i * (head.d / 2) : 0;
    for (uint g = 0; g < group; ++g) {
        const uint at    = p.q_at + (h * group + g) * p.q_head + token * p.q_token;
        float      total = 0.0;
        bool       fine  = true;
        for (uint j = me % LANES; (matrix != 0 || shift) && j < head.d / 2; j += LANES) {
            const vec2 pair = matrix != 0 ? unpackHalf2x16(tables[matrix + j]) : vec2(0.0);
            const vec2 x    = vec2(q[at + 2 * j], q[at + 2 * j + 1]);
            fine            = fine && finite(x.x) && finite(x.y);
            total           = fma(pair.y, x.y, fma(pair.x, x.x, total));
        }
        barrier();
        room[me] = fine ? total : NOT_A_NUMBER;
        barrier();
        if (me % LANES == 0) {
            for (uint x = 1; x < LANES; ++x) {
                fine = fine && finite(room[me + x]);
                total += room[me + x];
            }
            if (shift) {
                partial[p.shift_at + row + g] = fine ? p.scale * total : NOT_A_NUMBER;
            } else if (i < head.rank) {
                partial[p.qt_at + (row + g) * width + i] = p.scale * head.gamma * total;
            }
        }
    }
}
