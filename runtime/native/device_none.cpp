// device_none.cpp: a build without GPU kernels.
#include "cache.h"

namespace subkv {

bool has_device_kernels(ggml_backend_buffer_type_t) {
    return false;
}

std::unique_ptr<DeviceLayer> make_device_layer(const LayerNodes &, ggml_backend_buffer_type_t) {
    return nullptr;
}

void device_op(ggml_tensor *, int, int, void *) {}

} // namespace subkv
