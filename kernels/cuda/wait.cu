// wait.cu: work that the host starts outside a graph, and waiting for a device.
#include "device.cuh"

#include <algorithm>

namespace subkv::cuda {

namespace {

// Calls work() while `device` is the current one.
template <typename Work> const char * on_device(int device, const Work & work) {
    int  current = 0;
    auto e       = cudaGetDevice(&current);
    e            = e == cudaSuccess ? cudaSetDevice(device) : e;
    if (e != cudaSuccess) {
        return cudaGetErrorString(e);
    }
    const char * error = work();
    e                  = cudaSetDevice(current);
    return error || e == cudaSuccess ? error : cudaGetErrorString(e);
}

} // namespace

const char * wait(int device) {
    return on_device(device, [] {
        const auto e = cudaDeviceSynchronize();
        return e == cudaSuccess ? nullptr : cudaGetErrorString(e);
    });
}

const char * encode_window(EncodeWindow args, const WindowRow * rows, size_t n, int device) {
    return on_device(device, [&] {
        const char * error = nullptr;
        for (size_t first = 0; !error && first < n; first += WINDOW_ROWS) {
            const size_t count = std::min(n - first, (size_t) WINDOW_ROWS);
            std::copy_n(rows + first, count, args.rows);
            args.encode.n_tok = (int64_t) count;
            error             = encode_window(args, nullptr);
        }
        return error;
    });
}

} // namespace subkv::cuda
