// backend.h: how a layer's nodes reach the patched Vulkan backend.
#pragma once

#include "../device.h"
#include "subkv/vulkan_dispatch.h"

namespace subkv {

// The Vulkan device that a type of buffer belongs to, after its backend has been told of our nodes; nullptr: none.
ggml_backend_dev_t vulkan_device(ggml_backend_buffer_type_t buft);

// Bytes that a shader can reach of a tensor.
size_t vulkan_max_range(ggml_backend_dev_t device);

// Whether a shader may multiply four bytes at a time there, and that is fast.
bool vulkan_integer_dot(ggml_backend_dev_t device);

// Until the device has done all that it was given.
void vulkan_wait(ggml_backend_dev_t device);

// Of the backend, for a custom node: does it run on that device, and record its dispatches. nullptr, or what went
// wrong.
bool         vulkan_supports(const ggml_tensor * node, ggml_backend_dev_t device);
const char * vulkan_compute(ggml_tensor * node, vulkan::Run run, void * recorder);

} // namespace subkv
