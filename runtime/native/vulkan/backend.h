// backend.h: passes a layer's nodes to the patched Vulkan backend.
#pragma once

#include "../device.h"
#include "subkv/vulkan_dispatch.h"

namespace subkv {

// The Vulkan device of a type of buffer; registers our nodes with its backend first; nullptr: none.
ggml_backend_dev_t vulkan_device(ggml_backend_buffer_type_t buft);

// Maximum bytes of a tensor that a shader can address.
size_t vulkan_max_range(ggml_backend_dev_t device);

// true: the device has fast dot products of four bytes.
bool vulkan_integer_dot(ggml_backend_dev_t device);

// Waits until the device has finished all work.
void vulkan_wait(ggml_backend_dev_t device);

// Callbacks of the backend for a custom node. supports: it runs on that device; compute: records its dispatches and
// returns nullptr, or an error message.
bool         vulkan_supports(const ggml_tensor * node, ggml_backend_dev_t device);
const char * vulkan_compute(ggml_tensor * node, vulkan::Run run, void * recorder);

} // namespace subkv
