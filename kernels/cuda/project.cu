// project.cu: queries in the coefficients of the keys, qt = scale gamma D_k q, and shift = scale mean . q.
// One warp per coefficient (and one for the shift), all query heads of the group; one block row per token and KV head.
#include "device.cuh"

namespace subkv::cuda {

namespace {

constexpr int GROUP = 4; // query heads whose products are summed at a time

// A row of a basis, or the mean; a lane has the elements COLUMNS * lane to + COLUMNS - 1 of each part.
struct Row {
    static constexpr int PARTS = (MAX_HEAD_SIZE + ROW - 1) / ROW;

    FourHalves part[PARTS] = {};

    __device__ Row(const uint16_t * from, int d) {
#pragma unroll
        for (int x = 0; x < PARTS; ++x) {
            const int j = x * ROW + COLUMNS * ((int) threadIdx.x % WARP);
            if (j < d) {
                part[x] = *reinterpret_cast<const FourHalves *>(from + j);
            }
        }
    }

    // out[g * step] = factor * (row . query g)
    __device__ void project(const Attend & a, const float * q, float factor, float * out, int64_t step) const {
        const int lane = (int) threadIdx.x % WARP;
#pragma unroll 1
        for (int g0 = 0; g0 < a.layer.n_group; g0 += GROUP) {
            float total[GROUP] = {};
#pragma unroll
            for (int x = 0; x < PARTS; ++x) {
                const int j = x * ROW + COLUMNS * lane;
                if (j >= a.layer.d_k) {
                    continue;
                }
#pragma unroll
                for (int g = 0; g < GROUP; ++g) { // without a query head: the last one again
                    const float * of = q + min(g0 + g, a.layer.n_group - 1) * a.q_head + j;
#pragma unroll
                    for (int y = 0; y < COLUMNS; ++y) {
                        total[g] = fmaf(from_half(part[x].of[y]), of[y], total[g]);
                    }
                }
            }
#pragma unroll
            for (int g = 0; g < GROUP; ++g) {
                total[g] = warp_sum(total[g]);
                if (lane == 0 && g0 + g < a.layer.n_group) {
                    out[(g0 + g) * step] = factor * total[g];
                }
            }
        }
    }
};

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
        const Row basis(codec.decode.halves + (int64_t) i * codec.d, codec.d);
        basis.project(a, q, l.scale * l.gamma[h], a.qt + (h * n_rows + row) * l.width_k + i, l.width_k);
    } else if (i == l.width_k) { // not times gamma, since the mean is added back unscaled
        float * shift = a.shift + h * n_rows + row;
        if (l.mean[h] != nullptr) {
            Row(l.mean[h], codec.d).project(a, q, l.scale, shift, 1);
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
