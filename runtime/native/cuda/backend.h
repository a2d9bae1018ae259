// backend.h: how a layer's nodes reach the CUDA backend, or the GPUs that tests/kernels/emulated registers in its place.
#pragma once

#include "../device.h"

namespace subkv {

// Number of the CUDA device that a type of buffer belongs to, after its backend has been told of our nodes; -1: none.
int cuda_device(ggml_backend_buffer_type_t buft);

// Of the backend, for a custom node: does it run on that device, and launch it. nullptr, or what went wrong.
bool         cuda_supports(const ggml_tensor * node, int device);
const char * cuda_compute(ggml_tensor * node, void * stream);

} // namespace subkv
