// shaders.cpp: the SPIR-V of the .comp files, which glslc writes as C initializers to the build folder.
#include "shaders.h"

namespace subkv::vulkan {

namespace {

const uint32_t encode[] =
#include "encode.inc"
    ;
const uint32_t project[] =
#include "project.inc"
    ;
const uint32_t quantize[] =
#include "quantize.inc"
    ;
const uint32_t attend[] =
#include "attend.inc"
    ;
const uint32_t attend_dot[] =
#include "attend_dot.inc"
    ;
const uint32_t attend_latent[] =
#include "attend_latent.inc"
    ;
const uint32_t combine[] =
#include "combine.inc"
    ;
const uint32_t store_window[] =
#include "store_window.inc"
    ;
const uint32_t prompt_rows[] =
#include "prompt_rows.inc"
    ;
const uint32_t prompt_exact[] =
#include "prompt_exact.inc"
    ;
const uint32_t prompt_mask[] =
#include "prompt_mask.inc"
    ;
const uint32_t prompt_lost[] =
#include "prompt_lost.inc"
    ;

} // namespace

const Shader ENCODE        = { "subkv_encode", encode, sizeof(encode) };
const Shader PROJECT       = { "subkv_project", project, sizeof(project) };
const Shader QUANTIZE      = { "subkv_quantize", quantize, sizeof(quantize) };
const Shader ATTEND        = { "subkv_attend", attend, sizeof(attend) };
const Shader ATTEND_DOT    = { "subkv_attend_dot", attend_dot, sizeof(attend_dot) };
const Shader ATTEND_LATENT = { "subkv_attend_latent", attend_latent, sizeof(attend_latent) };
const Shader COMBINE       = { "subkv_combine", combine, sizeof(combine) };
const Shader STORE_WINDOW  = { "subkv_store_window", store_window, sizeof(store_window) };
const Shader PROMPT_ROWS   = { "subkv_prompt_rows", prompt_rows, sizeof(prompt_rows) };
const Shader PROMPT_EXACT  = { "subkv_prompt_exact", prompt_exact, sizeof(prompt_exact) };
const Shader PROMPT_MASK   = { "subkv_prompt_mask", prompt_mask, sizeof(prompt_mask) };
const Shader PROMPT_LOST   = { "subkv_prompt_lost", prompt_lost, sizeof(prompt_lost) };

} // namespace subkv::vulkan
