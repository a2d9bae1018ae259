// device_none.cpp: a build without GPU kernels.
#include "cache.h"

namespace subkv {

const char * device_kernels() {
    return nullptr;
}

bool has_device_kernels(ggml_backend_buffer_type_t) {
    return false;
}

size_t device_max_range(ggml_backend_buffer_type_t) {
    return 0;
}

std::unique_ptr<DeviceLayer> make_device_layer(const LayerNodes &, ggml_backend_buffer_type_t) {
    return nullptr;
}

} // namespace subkv
