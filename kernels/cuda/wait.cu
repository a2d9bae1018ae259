// wait.cu: work that the host starts outside a graph, and waiting for it.
#include "device.cuh"

#include <algorithm>

namespace subkv::cuda {

const char * use_device(int device) {
    int          current = 0;
    const char * error   = message_of(cudaGetDevice(&current));
    return error || current == device ? error : message_of(cudaSetDevice(device));
}

int device_of(const void * memory, int usual) {
    cudaPointerAttributes of = {};
    return message_of(cudaPointerGetAttributes(&of, memory)) == nullptr ? of.device : usual;
}

const char * wait(void * stream) {
    return message_of(cudaStreamSynchronize((cudaStream_t) stream));
}

const char * encode_window(EncodeWindow args, const WindowRow * rows, size_t n, int device, void * stream) {
    const char * error = use_device(device);
    for (size_t first = 0; !error && first < n; first += WINDOW_ROWS) {
        const size_t count = std::min(n - first, (size_t) WINDOW_ROWS);
        std::copy_n(rows + first, count, args.rows);
        args.encode.n_tok = (int64_t) count;
        error             = encode_window(args, stream);
    }
    return error;
}

} // namespace subkv::cuda
