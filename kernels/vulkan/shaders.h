// shaders.h: the compiled shaders.
#pragma once

#include <cstddef>
#include <cstdint>

namespace subkv::vulkan {

struct Shader {
    const char *     name;
    const uint32_t * spirv;
    size_t           bytes;
};

extern const Shader ENCODE, PROJECT, ATTEND, COMBINE, STORE_WINDOW;

} // namespace subkv::vulkan
