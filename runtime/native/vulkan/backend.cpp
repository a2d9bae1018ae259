#include "backend.h"

namespace subkv {

namespace {

// Looks up a function of our patch.
template <typename Function> Function function_of(ggml_backend_dev_t device, const char * name) {
    return (Function) ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(device), name);
}

} // namespace

ggml_backend_dev_t vulkan_device(ggml_backend_buffer_type_t buft) {
    using Supports = bool (*)(const ggml_tensor *, ggml_backend_dev_t);
    using Compute  = const char * (*)(ggml_tensor *, vulkan::Run, void *);
    using Set      = void (*)(Supports, Compute);

    ggml_backend_dev_t device = ggml_backend_buft_get_device(buft);
    if (!device || ggml_backend_buft_is_host(buft)) {
        return nullptr;
    }
    const auto set = function_of<Set>(device, "ggml_backend_vk_subkv_set");
    if (!set) {
        return nullptr;
    }
    set(vulkan_supports, vulkan_compute);
    return device;
}

size_t vulkan_max_range(ggml_backend_dev_t device) {
    return function_of<size_t (*)(ggml_backend_dev_t)>(device, "ggml_backend_vk_subkv_max_range")(device);
}

bool vulkan_integer_dot(ggml_backend_dev_t device) {
    return function_of<bool (*)(ggml_backend_dev_t)>(device, "ggml_backend_vk_subkv_integer_dot")(device);
}

void vulkan_wait(ggml_backend_dev_t device) {
    function_of<void (*)(ggml_backend_dev_t)>(device, "ggml_backend_vk_subkv_wait")(device);
}

void device_op(ggml_tensor * dst, int, int, void *) {
    GGML_ABORT("%s: a node of a cache on a GPU was placed on the CPU", dst->name);
}

} // namespace subkv
