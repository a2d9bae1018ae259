// attend_sources.glsl: the buffers of attend and the offsets in them, for attend.glsl and attend_latent.comp. Include
// it after tables.glsl.
#ifndef PARTIAL_ACCESS
#    define PARTIAL_ACCESS writeonly
#endif
layout(std430, binding = 1) PARTIAL_ACCESS buffer Partial { float partial[]; };
layout(std430, binding = 2) readonly buffer KTiles { uint k_tiles[]; };
layout(std430, binding = 3) readonly buffer VTiles { uint v_tiles[]; };
layout(std430, binding = 4) readonly buffer Mask { uint mask[]; };
layout(std430, binding = 5) readonly buffer CellPos { int cell_pos[]; };
layout(std430, binding = 6) readonly buffer Tokens { int tokens[]; };
layout(std430, binding = 7) readonly buffer Queries { float queries[]; }; // the same buffer, at other places
#ifdef INTEGER_DOT
layout(std430, binding = 8) readonly buffer Packed { uint packed_queries[]; }; // the same buffer (quantize.comp)
#endif

layout(push_constant) uniform Push {
    uint  qt_at, packed_at, shift_at, m_at, z_at, acc_at, width_v;
    uint  k_tiles_at, k_stride, k_stream, v_tiles_at, v_stride, v_stream;
    uint  mask_at, mask_half, cell_pos_at, tokens_at; // mask_at counts values.
    uint  n_kv, n_tps, n_tokens, split;
    float softcap;
} p;

#include "tokens.glsl"
