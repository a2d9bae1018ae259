#version 450
// attend.comp: attend.glsl for every device.
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#include "attend.glsl"
