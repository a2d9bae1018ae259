// backend.h: passes a layer's nodes to the CUDA backend, or to the emulated GPUs of tests/kernels/emulated.
#pragma once

#include "../device.h"

namespace subkv {

// Number of the CUDA device of a type of buffer; registers our nodes with its backend first; -1: none.
int cuda_device(ggml_backend_buffer_type_t buft);

// Callbacks of the backend for a custom node. supports: it runs on that device; compute: launches it and returns
// nullptr, or an error message.
bool         cuda_supports(const ggml_tensor * node, int device);
const char * cuda_compute(ggml_tensor * node, void * stream);

} // namespace subkv
