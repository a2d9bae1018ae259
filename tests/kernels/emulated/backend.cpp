// backend.cpp: every coded layer's nodes run kernels/cuda, on the CPU (cmake -DSUBKV_EMULATE_CUDA=ON).
#include "../../../runtime/native/cuda/backend.h"

namespace subkv {

int cuda_device(ggml_backend_buffer_type_t) {
    return 0;
}

void device_op(ggml_tensor * dst, int ith, int, void *) {
    if (const char * error = ith == 0 && cuda_supports(dst, 0) ? cuda_compute(dst, nullptr) : nullptr) {
        GGML_ABORT("%s: %s", dst->name, error);
    }
}

} // namespace subkv
