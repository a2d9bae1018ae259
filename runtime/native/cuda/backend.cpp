#include "backend.h"

namespace subkv {

int cuda_device(ggml_backend_buffer_type_t buft) {
    using Supports = bool (*)(const ggml_tensor *, int);
    using Compute  = const char * (*)(ggml_tensor *, void *);
    using Set      = void (*)(Supports, Compute);

    ggml_backend_dev_t dev = ggml_backend_buft_get_device(buft);
    if (!dev || ggml_backend_buft_is_host(buft)) {
        return -1;
    }
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(dev);
    const auto set = (Set) ggml_backend_reg_get_proc_address(reg, "ggml_backend_cuda_subkv_set"); // from our patch
    if (!set) {
        return -1;
    }
    set(cuda_supports, cuda_compute);
    int index = 0;
    while (ggml_backend_reg_dev_get(reg, (size_t) index) != dev) {
        ++index;
    }
    return index;
}

void device_op(ggml_tensor * dst, int, int, void *) {
    GGML_ABORT("%s: a node of a cache on a GPU was placed on the CPU", dst->name);
}

} // namespace subkv
