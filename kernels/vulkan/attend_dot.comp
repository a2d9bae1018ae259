#version 450
// attend_dot.comp: attend.glsl for devices with integer dot products, which multiply levels by the queries of
// quantize.comp and by weights.
//
// glslc of 2023 has no name for the instructions; their numbers are those of SPV_KHR_integer_dot_product.
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#extension GL_EXT_spirv_intrinsics : require
#define INTEGER_DOT

// These functions return the sum of the products of four bytes each, signed or unsigned. `format` is PACKED.
spirv_instruction(extensions = ["SPV_KHR_integer_dot_product"], capabilities = [6018, 6019], id = 4450)
int dot_signed(uint a, uint b, spirv_literal int format);
spirv_instruction(extensions = ["SPV_KHR_integer_dot_product"], capabilities = [6018, 6019], id = 4451)
uint dot_unsigned(uint a, uint b, spirv_literal int format);
#define PACKED 0

#include "attend.glsl"
