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

extern const Shader ENCODE, PROJECT, QUANTIZE, ATTEND, ATTEND_DOT, ATTEND_LATENT, COMBINE, STORE_WINDOW, PROMPT_ROWS,
    PROMPT_EXACT, PROMPT_MASK, PROMPT_LOST;

} // namespace subkv::vulkan
