// vulkan_dispatch.h: one dispatch of a shader, as the ops (kernels/vulkan/ops.h) hand it to whoever records commands:
// the patched Vulkan backend, or a test. Neither this nor the ops need a Vulkan header.
#pragma once

#include <cstddef>
#include <cstdint>

namespace subkv::vulkan {

constexpr int MAX_CONSTANTS = 2;
constexpr int MAX_BUFFERS   = 10;
constexpr int MAX_PUSH      = 32; // words; 128 bytes are what every device has

struct Dispatch {
    const char *     name;
    const uint32_t * spirv; // stays where it is: with the constants it names the pipeline
    size_t           spirv_bytes;
    uint32_t         n_constants; // of specialization
    uint32_t         constants[MAX_CONSTANTS];
    uint32_t         n_buffers;            // bindings 0 .. n_buffers - 1
    const void *     buffers[MAX_BUFFERS]; // whole ones: ggml_tensor, no view; shaders add what is in `push`
    uint32_t         n_push;               // words
    uint32_t         push[MAX_PUSH];
    uint32_t         groups[3];
};

// Records a dispatch, which sees all that was recorded before. Returns nullptr, or what went wrong.
using Run = const char * (*)(void * recorder, const Dispatch & dispatch);

} // namespace subkv::vulkan
