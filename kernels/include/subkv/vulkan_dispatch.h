// vulkan_dispatch.h: one dispatch of a shader. The ops (kernels/vulkan/ops.h) pass it to the recorder of commands: the
// patched Vulkan backend, or a test. This header and the ops need no Vulkan header.
#pragma once

#include <cstddef>
#include <cstdint>

namespace subkv::vulkan {

constexpr int MAX_CONSTANTS = 2;
constexpr int MAX_BUFFERS   = 10;
constexpr int MAX_PUSH      = 32; // words; every device supports 128 bytes

struct Dispatch {
    const char *     name;
    const uint32_t * spirv; // static storage: the address and the constants identify the pipeline
    size_t           spirv_bytes;
    uint32_t         n_constants; // of specialization
    uint32_t         constants[MAX_CONSTANTS];
    uint32_t         n_buffers;            // bindings 0 .. n_buffers - 1
    const void *     buffers[MAX_BUFFERS]; // whole buffers: ggml_tensor, no view; shaders add offsets from `push`
    uint32_t         n_push;               // words
    uint32_t         push[MAX_PUSH];
    uint32_t         groups[3];
};

// Records a dispatch that runs after all earlier ones. Returns nullptr, or an error message.
using Run = const char * (*)(void * recorder, const Dispatch & dispatch);

} // namespace subkv::vulkan
