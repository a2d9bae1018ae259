// project.cu: queries in the coefficients of the keys, qt = scale gamma D_k q, and shift = scale mean . q.
// One warp per coefficient (and one for the shift), all query heads of the group; one block row per token and KV head.
// A further block of these may store the token's exact rows.
#include "exact.cuh"

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

struct ProjectJob {
    Attend    a;
    StoreRows store;
    unsigned  parts; // blocks that project a head's queries; one behind them stores
};

// Stores the exact rows of a token and KV head; the cell's scales become SCALE_NAN.
__device__ void store_rows(const Attend & a, const StoreRows & s, int64_t token, int h) {
    const Layer & l    = a.layer;
    const int     lane = (int) threadIdx.x % WARP, warp = (int) threadIdx.x / WARP;
    const float * k      = s.k + h * s.k_head + token * s.k_token;
    const float * v      = s.v + h * s.v_head + token * s.v_token;
    auto *        halves = reinterpret_cast<uint16_t *>(block_memory); // [d_k + d_v]
    bool          fine_k = true, fine_v = true;
    for (int j = (int) threadIdx.x; j < l.d_k + l.d_v; j += THREADS) {
        const bool  value = j >= l.d_k;
        const float x     = value ? v[j - l.d_k] : k[j];
        halves[j]         = exact_half(x);
        fine_k            = fine_k && (value || isfinite(x));
        fine_v            = fine_v && (!value || isfinite(x));
    }
    fine_k          = __syncthreads_and(fine_k) != 0;
    fine_v          = __syncthreads_and(fine_v) != 0;
    const auto copy = [&](uint16_t * row, int first, int step) {
        for (int j = first; j < l.d_k + l.d_v; j += step) {
            const bool value = j >= l.d_k;
            const auto half  = (value ? fine_v : fine_k) ? halves[j] : HALF_NAN;
            row[value ? exact_value(l, h) + j - l.d_k : (int64_t) h * l.d_k + j] = half;
        }
    };
    copy(s.fresh + token * exact_width(l), (int) threadIdx.x, THREADS);
#pragma unroll 2
    for (int64_t first = warp * WARP; first < s.n_slots; first += THREADS) {
        const int64_t slot  = first + lane;
        uint32_t      found = __ballot_sync(ALL, slot < s.n_slots && s.slots[slot].token == token);
        for (; found != 0; found &= found - 1) { // more than one if the token has several sequences
            copy(s.window + (first + __ffs((int) found) - 1) * exact_width(l), lane, WARP);
        }
    }
    if (threadIdx.x < SIDES) {
        const bool    value = threadIdx.x == 1;
        const int64_t cell  = a.tokens[token].cell;
        uint8_t *     tiles = value ? s.v_tiles + token * a.v_stream + cell / TILE * a.v_stride + l.v_offset[h] :
                                      s.k_tiles + token * a.k_stream + cell / TILE * a.k_stride + l.k_offset[h];
        tiles[cell % TILE]  = SCALE_NAN;
        if (!(value ? fine_v : fine_k)) {
            atomicAdd(l.n_bad, 1ull);
        }
    }
}

__global__ void project_kernel(ProjectJob job) {
    const Attend &    a      = job.a;
    const Layer &     l      = a.layer;
    const int         h      = (int) blockIdx.y;
    const int64_t     token  = blockIdx.x;
    const int64_t     n_rows = a.n_stream * a.n_tps * l.n_group;
    const int64_t     row    = token * l.n_group; // row of this token's first query head
    const HeadCodec & codec  = l.k[h];
    const float *     q      = a.q + h * l.n_group * a.q_head + token * a.q_token;
    const int         i      = (int) (blockIdx.z * WARPS + threadIdx.x / WARP);
    if (blockIdx.z == job.parts) {
        store_rows(a, job.store, token, h);
    } else if (i < codec.rank) {
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

const char * project(const Attend & a, const StoreRows & store, void * stream) {
    const int64_t n_tok = a.n_stream * a.n_tps;
    if (n_tok == 0) {
        return nullptr;
    }
    const bool     stores = store.k != nullptr;
    const unsigned parts  = (unsigned) (a.layer.width_k + 1 + WARPS - 1) / WARPS;
    const dim3     grid((unsigned) n_tok, (unsigned) a.layer.n_head_kv, parts + (stores ? 1 : 0));
    const size_t   bytes = stores ? (size_t) (a.layer.d_k + a.layer.d_v) * sizeof(uint16_t) : 0;
    return launch(project_kernel, grid, bytes, stream, ProjectJob{ a, store, parts });
}

} // namespace

const char * project_queries(const Attend & args, void * stream) {
    return project(args, {}, stream);
}

const char * store_and_attend(const StoreRows & store, const Attend & args, void * stream) {
    if (!suits_decode(args)) {
        return "store_and_attend: one token per stream expected, and a layer that the decode kernel suits";
    }
    const char * error = project(args, store, stream);
    return error ? error : attend_decode(args, stream);
}

const char * attend(const Attend & args, void * stream) {
    if (const char * error = project_queries(args, stream)) {
        return error;
    }
    return suits_decode(args) ? attend_decode(args, stream) : attend_tiles(args, stream);
}

} // namespace subkv::cuda
