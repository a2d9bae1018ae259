#version 450
// store_window.comp: copies fresh rows to the window's slots that have a token of this ubatch. A workgroup copies one
// or more rows.
#extension GL_GOOGLE_include_directive : require
layout(local_size_x = 128) in;

layout(std430, binding = 0) writeonly buffer Window { uint window[]; };
layout(std430, binding = 1) readonly buffer Fresh { uint fresh[]; };
layout(std430, binding = 2) readonly buffer Slots { int slots[]; };

layout(push_constant) uniform Push {
    uint window_at, fresh_at, slots_at, n_slots, width;
} p;

#include "slots.glsl"

void main() {
    for (uint slot = gl_WorkGroupID.x; slot < p.n_slots; slot += gl_NumWorkGroups.x) {
        const int t = slot_token(slot);
        for (uint j = gl_LocalInvocationID.x; t >= 0 && j < p.width; j += gl_WorkGroupSize.x) {
            window[p.window_at + slot * p.width + j] = fresh[p.fresh_at + uint(t) * p.width + j];
        }
    }
}
