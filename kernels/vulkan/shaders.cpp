// shaders.cpp: SPIR-V that glslc made of the .comp files, as C initializers in the build's folder.
#include "shaders.h"

namespace subkv::vulkan {

namespace {

const uint32_t encode[] =
#include "encode.inc"
    ;
const uint32_t project[] =
#include "project.inc"
    ;
const uint32_t attend[] =
#include "attend.inc"
    ;
const uint32_t combine[] =
#include "combine.inc"
    ;
const uint32_t store_window[] =
#include "store_window.inc"
    ;

} // namespace

const Shader ENCODE       = { "subkv_encode", encode, sizeof(encode) };
const Shader PROJECT      = { "subkv_project", project, sizeof(project) };
const Shader ATTEND       = { "subkv_attend", attend, sizeof(attend) };
const Shader COMBINE      = { "subkv_combine", combine, sizeof(combine) };
const Shader STORE_WINDOW = { "subkv_store_window", store_window, sizeof(store_window) };

} // namespace subkv::vulkan
