// encode.cu: encodes rows of K and V (encode.cuh), and stores rows in the window.
#include "encode.cuh"

namespace subkv::cuda {

namespace {

template <bool LANES> __global__ void encode_kernel(Encode a) {
    encode_row<LANES>(a, blockIdx.x, (int) blockIdx.y, blockIdx.z == 1);
}

__global__ void store_kernel(Store a) {
    const int32_t token = a.slots[blockIdx.x].token;
    for (int64_t j = threadIdx.x; token >= 0 && j < a.width; j += THREADS) {
        a.window[blockIdx.x * a.width + j] = a.fresh[token * a.width + j];
    }
}

} // namespace

const char * encode(const Encode & args, void * stream) {
    if (args.n_tok == 0) {
        return nullptr;
    }
    const bool   latent = args.layer.latent; // paths of latent layers are lanes
    const dim3   grid((unsigned) args.n_tok, (unsigned) args.layer.n_head_kv, latent ? 1 : SIDES);
    const size_t bytes = EncodeShared(nullptr, args.layer).bytes;
    return latent ? launch(encode_kernel<true>, grid, bytes, stream, args) :
                    launch(encode_kernel<false>, grid, bytes, stream, args);
}

const char * store_window(const Store & args, void * stream) {
    return args.n_slots == 0 ? nullptr : launch(store_kernel, dim3((unsigned) args.n_slots), 0, stream, args);
}

} // namespace subkv::cuda
