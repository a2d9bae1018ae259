#version 450
// quantize.comp: converts projected queries to pairs of signed bytes for attend_dot.comp. There is one workgroup per
// query row.
//
// A row's output has a word of upper bytes and a word of lower bytes for every four coefficients, times their band's
// step and in units of the row's step. Then come the row's step, and twice the products with the levels' zeros, modulo
// 2^32. Coefficients of 16 bits are skipped.
#extension GL_GOOGLE_include_directive : require
#include "tables.glsl"

layout(local_size_x = 64) in;

layout(std430, binding = 1) readonly buffer Queries { float queries[]; };
layout(std430, binding = 2) writeonly buffer Packed { uint pairs[]; }; // the same buffer, at other places

layout(push_constant) uniform Push {
    uint qt_at, packed_at, n_tokens;
} p;

const uint  THREADS    = 64;
const float QUERY_STEP = 1.0 / 32639.0; // The largest number of two signed bytes is 127 * 257.

shared float tops[THREADS];
shared uint  centres[THREADS];

void main() {
    const uint token = gl_WorkGroupID.x, h = gl_WorkGroupID.y, me = gl_LocalInvocationID.x;
    const uint width = tables[WIDTH_K];
    const uint row   = (h * p.n_tokens + token) * tables[N_GROUP] + gl_WorkGroupID.z;
    const uint from = p.qt_at + row * width, to = p.packed_at + row * (width / 2 + 2);
    const Head head = head_of(0, h);

    float top = 0.0;
    for (uint b = 0; b < head.n_bands; ++b) {
        const Band band = band_of(head, b);
        for (uint j = me; band.bits != 16 && j < band.n; j += THREADS) {
            const float x = queries[from + band.first + j] * band.step;
            top           = finite(x) ? max(top, abs(x)) : top; // project.comp marks other rows.
        }
    }
    tops[me] = top;
    barrier();
    for (uint i = 0; i < THREADS; ++i) {
        top = max(top, tops[i]);
    }
    const float step    = top * QUERY_STEP;
    const float inverse = step > 1e-30 ? 1.0 / step : 0.0;

    uint centre = 0;
    for (uint b = 0; b < head.n_bands; ++b) {
        const Band band = band_of(head, b);
        const int  zero = band.place != NO_PLACE || band.bits == 8 ? -1 : int((1u << band.bits) - 1u); // twice the zero
        for (uint four = me; band.bits != 16 && four < band.n / 4; four += THREADS) {
            uint high = 0, low = 0;
            for (uint i = 0; i < 4; ++i) {
                const float x     = queries[from + band.first + 4 * four + i] * band.step;
                const int   value = inverse > 0.0 && finite(x) ? int(roundEven(x * inverse)) : 0;
                high |= uint(value + 128 >> 8 & 255) << 8 * i; // Both bytes are signed.
                low |= uint(value & 255) << 8 * i;
                centre += uint(value * zero);
            }
            pairs[to + band.first / 2 + 2 * four]     = high;
            pairs[to + band.first / 2 + 2 * four + 1] = low;
        }
    }
    centres[me] = centre;
    barrier();
    if (me == 0) {
        for (uint i = 1; i < THREADS; ++i) {
            centre += centres[i];
        }
        pairs[to + width / 2]     = floatBitsToUint(step);
        pairs[to + width / 2 + 1] = centre;
    }
}
