// exact.cu: attention to the exact keys of tokens whose cells another kernel than attend_decode reads.
#include "exact_part.cuh"

namespace subkv::cuda {

namespace {

template <bool ALONE> __global__ void __launch_bounds__(THREADS) exact_kernel(Combine b) {
    attend_exact<ALONE>(b, (int) blockIdx.y, blockIdx.z, (int) blockIdx.x);
}

} // namespace

const char * attend_exact_keys(const Combine & b, void * stream) {
    const Layer &    l = b.a.layer;
    const ExactParts parts(b);
    const dim3       grid((unsigned) parts.n_blocks(l), (unsigned) l.n_head_kv, (unsigned) (b.a.n_stream * b.a.n_tps));
    const auto       kernel = b.a.n_tps == 1 ? exact_kernel<true> : exact_kernel<false>;
    return parts.n == 0 ? nullptr : launch(kernel, grid, ExactShared(nullptr, l).bytes, stream, b);
}

int64_t exact_floats(const Layer & layer, int64_t n_rows, int64_t n_tps, int32_t slots_of_seq) {
    const ExactParts parts(layer, n_rows / (layer.n_head_kv * layer.n_group), n_tps, slots_of_seq, nullptr);
    return parts.n * parts.n_rows * (2 + layer.d_v);
}

} // namespace subkv::cuda
