// project.cu: queries in the coefficients of the keys, qt = scale gamma D_k q, and shift = scale mean . q.
// One warp per coefficient (and one for the shift), all query heads of the group; one block row per token and KV head.
#include "device.cuh"

namespace subkv::cuda {

namespace {

// out[g * step] = row [d] (half) . query g
__device__ void project_row(const Attend & a, const uint16_t * row, const float * q, float factor, float * out,
                            int64_t step) {
    const int lane = (int) threadIdx.x % WARP;
    for (int g = 0; g < a.layer.n_group; ++g) {
        float total = 0.0f;
        for (int j = lane; j < a.layer.d_k; j += WARP) {
            total = fmaf(from_half(row[j]), q[g * a.q_head + j], total);
        }
        total = warp_sum(total);
        if (lane == 0) {
            out[g * step] = factor * total;
        }
    }
}

__global__ void project_kernel(Attend a) {
    const Layer &     l      = a.layer;
    const int         h      = (int) blockIdx.y;
    const int64_t     token  = blockIdx.x;
    const int64_t     n_rows = a.n_stream * a.n_tps * l.n_group;
    const int64_t     row    = token * l.n_group; // row of this token's first query head
    const HeadCodec & codec  = l.k[h];
    const float *     q      = a.q + h * l.n_group * a.q_head + token * a.q_token;
    const int         i      = (int) (blockIdx.z * WARPS + threadIdx.x / WARP);
    if (i < codec.rank) {
        project_row(a, codec.decode.halves + (int64_t) i * codec.d, q, l.scale * l.gamma[h],
                    a.qt + (h * n_rows + row) * l.width_k + i, l.width_k);
    } else if (i == l.width_k) { // not times gamma, since the mean is added back unscaled
        float * shift = a.shift + h * n_rows + row;
        if (l.mean[h] != nullptr) {
            project_row(a, l.mean[h], q, l.scale, shift, 1);
        } else {
            for (int g = (int) threadIdx.x % WARP; g < l.n_group; g += WARP) {
                shift[g] = 0.0f;
            }
        }
    }
}

} // namespace

const char * project_queries(const Attend & args, void * stream) {
    const int64_t n_tok = args.n_stream * args.n_tps;
    if (n_tok == 0) {
        return nullptr;
    }
    const unsigned parts = (unsigned) (args.layer.width_k + 1 + WARPS - 1) / WARPS;
    return launch(project_kernel, dim3((unsigned) n_tok, (unsigned) args.layer.n_head_kv, parts), 0, stream, args);
}

const char * attend(const Attend & args, void * stream) {
    if (const char * error = project_queries(args, stream)) {
        return error;
    }
    return suits_decode(args) ? attend_decode(args, stream) : attend_tiles(args, stream);
}

} // namespace subkv::cuda
