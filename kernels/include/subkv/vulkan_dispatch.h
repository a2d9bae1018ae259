// vulkan_dispatch.h: one dispatch of a shader. The ops (kernels/vulkan/ops.h) pass it to the recorder of commands: the
// patched Vulkan backend, or a test. This header and the ops need no Vulkan header.
#pragma once

#include <cstddef>
#include <cstdint>

namespace subkv::vulkan {

constexpr int MAX_CONSTANTS = 2;
constexpr int MAX_BUFFERS   = 10;
constexpr int MAX_PUSH      = 32; // words, because every device supports 128 bytes

struct Dispatch {
    const char *     name;
    const uint32_t * spirv; // in static storage, because its address and the constants identify the pipeline
    size_t           spirv_bytes;
    uint32_t         n_constants; // number of specialization constants
    uint32_t         constants[MAX_CONSTANTS];
    uint32_t         n_buffers;            // number of bindings
    const void *     buffers[MAX_BUFFERS]; // whole ggml_tensors, not views; shaders add offsets from `push`
    uint32_t         n_push;               // words
    uint32_t         push[MAX_PUSH];
    uint32_t         groups[3];
};

// Records a dispatch that runs after all earlier ones. Returns nullptr, or an error message.
using Run = const char * (*)(void * recorder, const Dispatch & dispatch);

} // namespace subkv::vulkan
