// encode.cu: encodes rows of K and V (encode.cuh), also those of the window, and stores rows there.
#include "encode.cuh"

namespace subkv::cuda {

namespace {

template <bool LANES> __global__ void encode_kernel(Encode a) {
    const Layer & l     = a.layer;
    const int64_t token = blockIdx.x;
    const int     h     = (int) blockIdx.y;
    const bool    value = blockIdx.z == 1;
    const float * x     = value ? a.v + h * a.v_head + token * a.v_token : a.k + h * a.k_head + token * a.k_token;
    uint16_t *    fresh = a.fresh + token * exact_width(l) + (value ? exact_value(l, h) : h * l.d_k);
    encode_row<LANES>(a, x, fresh, a.cells[token], h, value);
}

__global__ void encode_window_kernel(EncodeWindow a) {
    const Layer &   l     = a.encode.layer;
    const WindowRow row   = a.rows[blockIdx.x];
    const int       h     = (int) blockIdx.y;
    const bool      value = blockIdx.z == 1;
    const int64_t   at    = row.slot * exact_width(l) + (value ? exact_value(l, h) : h * l.d_k);
    encode_row<false>(a.encode, nullptr, const_cast<uint16_t *>(a.window) + at, row.cell, h, value);
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

const char * encode_window(const EncodeWindow & args, void * stream) {
    const Encode & e = args.encode;
    if (e.layer.latent || e.n_tok < 1 || e.n_tok > WINDOW_ROWS) {
        return "encode_window: 1 to 128 rows of a layer with values expected";
    }
    return launch(encode_window_kernel, dim3((unsigned) e.n_tok, (unsigned) e.layer.n_head_kv, SIDES),
                  EncodeShared(nullptr, e.layer).bytes, stream, args);
}

const char * store_window(const Store & args, void * stream) {
    return args.n_slots == 0 ? nullptr : launch(store_kernel, dim3((unsigned) args.n_slots), 0, stream, args);
}

} // namespace subkv::cuda
