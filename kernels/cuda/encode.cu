// encode.cu: encodes rows of K and V (encode.cuh), also rows of the window, and stores rows in the window.
#include "encode.cuh"

namespace subkv::cuda {

namespace {

// Arguments of a kernel whose blocks have 1 << row_bits rows.
template <typename Args> struct InBlocks {
    Args    args;
    int32_t row_bits;
};

template <bool LANES> __global__ void __launch_bounds__(THREADS, 5) encode_kernel(InBlocks<Encode> blocks) {
    const Encode & a     = blocks.args;
    const Layer &  l     = a.layer;
    const int64_t  first = (int64_t) blockIdx.x << blocks.row_bits;
    const int      h     = (int) blockIdx.y;
    const bool     value = blockIdx.z == 1;
    const auto     row   = [&](int i) {
        const int64_t token = first + i;
        const float * x     = value ? a.v + h * a.v_head + token * a.v_token : a.k + h * a.k_head + token * a.k_token;
        uint16_t *    fresh = a.fresh + token * exact_width(l) + (value ? exact_value(l, h) : h * l.d_k);
        return EncodedRow{ x, fresh, a.cells[token] };
    };
    encode_rows<LANES>(a, row, blocks.row_bits, (int) least(1 << blocks.row_bits, a.n_tok - first), h, value);
}

__global__ void __launch_bounds__(THREADS, 5) encode_window_kernel(InBlocks<EncodeWindow> blocks) {
    const EncodeWindow & a     = blocks.args;
    const Layer &        l     = a.encode.layer;
    const int            first = (int) blockIdx.x << blocks.row_bits;
    const int            h     = (int) blockIdx.y;
    const bool           value = blockIdx.z == 1;
    const auto           row   = [&](int i) {
        const WindowRow of = a.rows[first + i];
        const int64_t   at = of.slot * exact_width(l) + (value ? exact_value(l, h) : h * l.d_k);
        return EncodedRow{ nullptr, const_cast<uint16_t *>(a.window) + at, of.cell };
    };
    const int n = min(1 << blocks.row_bits, (int) a.encode.n_tok - first);
    encode_rows<false>(a.encode, row, blocks.row_bits, n, h, value);
}

__global__ void store_kernel(Store a) {
    const int32_t token = a.slots[blockIdx.x].token;
    for (int64_t j = threadIdx.x; token >= 0 && j < a.width; j += THREADS) {
        a.window[blockIdx.x * a.width + j] = a.fresh[token * a.width + j];
    }
}

constexpr size_t MOST_SHARED = 31u << 10; // bytes of a block; two fit in the 64 KiB of the smallest multiprocessors

// Launches with as many rows in a block as leave two blocks for each multiprocessor.
template <typename Args>
const char * launch_rows(void (*kernel)(InBlocks<Args>), const Args & args, const Encode & e, void * stream) {
    const int     sides    = e.layer.latent ? 1 : SIDES;
    const int64_t n_blocks = 2 * multiprocessors(current_device());
    int32_t       row_bits = 0;
    while (2 << row_bits <= ROWS_MOST && EncodeShared(nullptr, e.layer, row_bits + 1).bytes <= MOST_SHARED &&
           (e.n_tok >> (row_bits + 1)) * e.layer.n_head_kv * sides >= n_blocks) {
        ++row_bits;
    }
    const auto n = (unsigned) ((e.n_tok + (1 << row_bits) - 1) >> row_bits);
    return launch(kernel, dim3(n, (unsigned) e.layer.n_head_kv, (unsigned) sides),
                  EncodeShared(nullptr, e.layer, row_bits).bytes, stream, InBlocks<Args>{ args, row_bits });
}

} // namespace

const char * encode(const Encode & args, void * stream) {
    if (args.n_tok == 0) {
        return nullptr;
    }
    // Paths of latent layers are PATH_LANES.
    return launch_rows(args.layer.latent ? encode_kernel<true> : encode_kernel<false>, args, args, stream);
}

const char * encode_window(const EncodeWindow & args, void * stream) {
    const Encode & e = args.encode;
    if (e.layer.latent || e.n_tok < 1 || e.n_tok > WINDOW_ROWS) {
        return "encode_window: 1 to 128 rows of a layer with values expected";
    }
    return launch_rows(encode_window_kernel, args, e, stream);
}

const char * store_window(const Store & args, void * stream) {
    return args.n_slots == 0 ? nullptr : launch(store_kernel, dim3((unsigned) args.n_slots), 0, stream, args);
}

} // namespace subkv::cuda
