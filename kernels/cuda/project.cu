// project.cu: computes queries in the coefficients of the keys, qt = scale gamma D_k q, and shift = scale mean . q.
//   for the tile kernel    A warp computes one coefficient, or the shift, for all query heads of a token and KV head.
//   for the decode kernel  A block computes a token and KV head, and quantizes the queries (queries.cuh). Another block
//                          may store the token's exact rows.
#include "exact.cuh"
#include "queries.cuh"

#include <algorithm>

namespace subkv::cuda {

namespace {

constexpr int GROUP = 4; // query heads whose products are summed at a time

// A row of a basis, or the mean. A lane has COLUMNS elements of each part, from COLUMNS * lane on.
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
                for (int g = 0; g < GROUP; ++g) { // Missing query heads repeat the last one.
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

// A block computes a token and KV head, for 4 * F query rows. A warp multiplies ROWS rows of the basis at a time. Lane
// l then has the product of row l / (4 * F) and query l % (4 * F).
constexpr int BLOCK       = 512;
constexpr int BLOCK_WARPS = BLOCK / WARP;

struct ProjectJob {
    Attend    a;
    StoreRows store;
};

template <int F> struct ProjectShared {
    KeysPlan * keys;
    Queries<F> queries;
    float *    q;  // [4 * F][d_k]
    float *    qt; // [4 * F][width_k + 1] products with the basis, and with the mean
    size_t     bytes;

    __host__ __device__ ProjectShared(unsigned char * base, const Layer & l) : queries(nullptr, l.width_k) {
        Carve shared{ base };
        keys    = shared.take<KeysPlan>(1);
        queries = Queries<F>(shared.take<uint32_t>((size_t) Queries<F>::size(l.width_k)), l.width_k);
        q       = shared.take<float>((size_t) 4 * F * l.d_k);
        qt      = shared.take<float>((size_t) 4 * F * (l.width_k + 1));
        bytes   = shared.used;
    }
};

// Stores the exact rows of a token and KV head, and sets the cell's scales to SCALE_NAN. A block calls this.
__device__ void store_rows(const Attend & a, const StoreRows & s, int64_t token, int h) {
    const Layer & l    = a.layer;
    const int     lane = (int) threadIdx.x % WARP, warp = (int) threadIdx.x / WARP;
    const float * k      = s.k + h * s.k_head + token * s.k_token;
    const float * v      = s.v + h * s.v_head + token * s.v_token;
    auto *        halves = reinterpret_cast<uint16_t *>(block_memory); // [d_k + d_v]
    bool          fine_k = true, fine_v = true;
#pragma unroll 1
    for (int j = (int) threadIdx.x; j < l.d_k + l.d_v; j += BLOCK) {
        const bool  value = j >= l.d_k;
        const float x     = value ? v[j - l.d_k] : k[j];
        halves[j]         = exact_half(x);
        fine_k            = fine_k && (value || isfinite(x));
        fine_v            = fine_v && (!value || isfinite(x));
    }
    fine_k          = __syncthreads_and(fine_k) != 0;
    fine_v          = __syncthreads_and(fine_v) != 0;
    const auto copy = [&](uint16_t * row, int first, int step) {
#pragma unroll 1
        for (int j = first; j < l.d_k + l.d_v; j += step) {
            const bool value = j >= l.d_k;
            const auto half  = (value ? fine_v : fine_k) ? halves[j] : HALF_NAN;
            row[value ? exact_value(l, h) + j - l.d_k : (int64_t) h * l.d_k + j] = half;
        }
    };
    copy(s.fresh + token * exact_width(l), (int) threadIdx.x, BLOCK);
#pragma unroll 2
    for (int64_t first = warp * WARP; first < s.n_slots; first += BLOCK) {
        const int64_t slot  = first + lane;
        uint32_t      found = __ballot_sync(ALL, slot < s.n_slots && s.slots[slot].token == token);
#pragma unroll 1
        for (; found != 0; found &= found - 1) { // A token of several sequences has several slots.
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

// Rows i0, i0 + BLOCK_WARPS, … of a basis, or one row of it. A lane has COLUMNS elements of each part of ROW elements.
template <int ROWS, int PARTS> struct BasisRows {
    FourHalves row[ROWS][PARTS];

    __device__ void load(const uint16_t * decode, int i0, int rank, int d) {
        const int column = COLUMNS * ((int) threadIdx.x % WARP);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const uint16_t * from = decode + (int64_t) min(i0 + r * BLOCK_WARPS, rank - 1) * d;
#pragma unroll
            for (int x = 0; x < PARTS; ++x) {
                row[r][x] = *reinterpret_cast<const FourHalves *>(from + min(x * ROW + column, d - COLUMNS));
            }
        }
    }

    // Returns the product of row lane / N and query lane % N. q is [N][d] in shared memory.
    template <int N> __device__ float project(const float * q, int d) const {
        const int column      = COLUMNS * ((int) threadIdx.x % WARP);
        float     total[WARP] = {};
#pragma unroll
        for (int x = 0; x < PARTS; ++x) {
            const int j = x * ROW + column;
            if (j >= d) {
                continue;
            }
#pragma unroll
            for (int g = 0; g < N; ++g) {
                const auto of_q = *reinterpret_cast<const Loaded<float, COLUMNS> *>(q + g * d + j);
#pragma unroll
                for (int r = 0; r < ROWS; ++r) {
#pragma unroll
                    for (int y = 0; y < COLUMNS; ++y) {
                        total[r * N + g] = fmaf(from_half(row[r][x].of[y]), of_q.of[y], total[r * N + g]);
                    }
                }
            }
        }
        return sum_of_each(total);
    }

    // Returns the product of the first row and one query in all lanes.
    __device__ float project_one(const float * q, int d) const {
        float sum = 0.0f;
#pragma unroll
        for (int x = 0; x < PARTS; ++x) {
            const int j = x * ROW + COLUMNS * ((int) threadIdx.x % WARP);
#pragma unroll
            for (int y = 0; y < COLUMNS; ++y) {
                sum = j < d ? fmaf(from_half(row[0][x].of[y]), q[j + y], sum) : sum;
            }
        }
        return warp_sum(sum);
    }
};

// Reads a token's queries and the plan of its keys, all at once, to shared memory. The words of missing rows are zeros.
template <int F> __device__ void read_queries(const ProjectShared<F> & s, const Attend & a, int64_t token, int h) {
    const int    G = a.layer.n_group, d = a.layer.d_k;
    const auto * keys = reinterpret_cast<const uint32_t *>(&((const Plan *) a.layer.plan + h)->keys);
#pragma unroll 1
    for (int i = (int) threadIdx.x; i < Queries<F>::size(a.layer.width_k); i += BLOCK) {
        s.queries.words[i] = 0;
    }
    static_assert(sizeof(KeysPlan) % sizeof(uint32_t) == 0 && sizeof(KeysPlan) <= BLOCK * sizeof(uint32_t));
    const int      word = min((int) threadIdx.x, (int) (sizeof(KeysPlan) / sizeof(uint32_t)) - 1);
    const uint32_t of   = keys[word];
#pragma unroll 1
    for (int i = (int) threadIdx.x; i < 4 * F * d; i += BLOCK) { // Missing query heads repeat the last one.
        s.q[i] = a.q[(h * G + min(i / d, G - 1)) * a.q_head + token * a.q_token + i % d];
    }
    if (word == (int) threadIdx.x) {
        reinterpret_cast<uint32_t *>(s.keys)[word] = of;
    }
}

// Stores the coefficients of a token's queries, and the queries' words. `row` is the number of the KV head and token.
template <int F>
__device__ void store_queries(const ProjectShared<F> & s, const Attend & a, int64_t row, int rank, int pitch) {
    const Layer & l = a.layer;
#pragma unroll 1
    for (int i = (int) threadIdx.x; i < l.n_group * rank; i += BLOCK) {
        a.qt[(row * l.n_group + i / rank) * l.width_k + i % rank] = s.qt[i / rank * pitch + i % rank];
    }
#pragma unroll 1
    for (int g = (int) threadIdx.x; g < l.n_group; g += BLOCK) {
        a.shift[row * l.n_group + g] = s.qt[g * pitch + rank];
    }
#pragma unroll 1
    for (int g = (int) threadIdx.x / WARP; g < l.n_group; g += BLOCK_WARPS) {
        quantize_row(s.queries, *s.keys, s.qt + g * pitch, g);
    }
    __syncthreads();
#pragma unroll 1
    for (int i = (int) threadIdx.x; i < Queries<F>::size(l.width_k); i += BLOCK) {
        a.words[row * Queries<F>::size(l.width_k) + i] = s.queries.words[i];
    }
}

// A row has PARTS parts of ROW elements.
template <int F, int PARTS> __global__ void __launch_bounds__(BLOCK, 1) project_decode_kernel(ProjectJob job) {
    constexpr int  N     = 4 * F; // query rows
    constexpr int  ROWS  = WARP / N;
    const Attend & a     = job.a;
    const Layer &  l     = a.layer;
    const int      h     = (int) blockIdx.y;
    const int64_t  token = blockIdx.x;
    if (blockIdx.z == 1) {
        store_rows(a, job.store, token, h);
        return;
    }
    // The operands of the first products are read at once, and then the basis, whose address is in the codec.
    const HeadCodec & codec = l.k[h];
    const int         d = l.d_k, rank = codec.rank, pitch = l.width_k + 1;
    const uint16_t *  decode = codec.decode.halves;
    const uint16_t *  mean   = l.mean[h];
    const float       gamma  = l.gamma[h];
    const int         warp = (int) threadIdx.x / WARP, lane = (int) threadIdx.x % WARP;

    const ProjectShared<F> s(block_memory, l);
    read_queries(s, a, token, h);
    BasisRows<ROWS, PARTS> basis;
    BasisRows<1, PARTS>    of_mean;
    basis.load(decode, warp, rank, d);
    // The last warp also multiplies the mean, without gamma, because the mean is added back unscaled.
    const bool adds_mean = warp == BLOCK_WARPS - 1 && mean != nullptr;
    of_mean.load(adds_mean ? mean : decode, 0, 1, d);
    __syncthreads();
#pragma unroll 1
    for (int i0 = warp; i0 < rank; i0 += ROWS * BLOCK_WARPS) {
        if (i0 > warp) {
            basis.load(decode, i0, rank, d);
        }
        const float sum = basis.template project<N>(s.q, d);
        const int   i   = i0 + lane / N * BLOCK_WARPS;
        if (i < rank) {
            s.qt[lane % N * pitch + i] = l.scale * gamma * sum;
        }
    }
#pragma unroll 1
    for (int g = 0; warp == BLOCK_WARPS - 1 && g < N; ++g) {
        const float sum = adds_mean ? of_mean.project_one(s.q + g * d, d) : 0.0f;
        if (lane == 0) {
            s.qt[g * pitch + rank] = l.scale * sum;
        }
    }
    __syncthreads();
    store_queries(s, a, h * a.n_stream * a.n_tps + token, rank, pitch);
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
        const Row basis(codec.decode.halves + (int64_t) i * codec.d, codec.d);
        basis.project(a, q, l.scale * l.gamma[h], a.qt + (h * n_rows + row) * l.width_k + i, l.width_k);
    } else if (i == l.width_k) { // This lacks gamma, because the mean is added back unscaled.
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

template <int F> const char * project_decode(const Attend & a, const StoreRows & store, void * stream) {
    const dim3   grid((unsigned) (a.n_stream * a.n_tps), (unsigned) a.layer.n_head_kv, store.k != nullptr ? 2 : 1);
    const size_t bytes =
        std::max(ProjectShared<F>(nullptr, a.layer).bytes, (size_t) (a.layer.d_k + a.layer.d_v) * sizeof(uint16_t));
    const auto kernel = a.layer.d_k <= ROW ? project_decode_kernel<F, 1> : project_decode_kernel<F, DECODE_HEAD / ROW>;
    return launch(kernel, grid, bytes, stream, ProjectJob{ a, store }, BLOCK);
}

const char * project(const Attend & a, const StoreRows & store, void * stream) {
    const int64_t n_tok = a.n_stream * a.n_tps;
    if (n_tok == 0) {
        return nullptr;
    }
    if (suits_decode(a)) {
        return a.layer.n_group <= FOUR ? project_decode<1>(a, store, stream) : project_decode<2>(a, store, stream);
    }
    const unsigned parts = (unsigned) (a.layer.width_k + 1 + WARPS - 1) / WARPS;
    return launch(project_kernel, dim3((unsigned) n_tok, (unsigned) a.layer.n_head_kv, parts), 0, stream, a);
}

} // namespace

int64_t query_words(const Layer & layer) {
    return layer.n_group <= FOUR ? Queries<1>::size(layer.width_k) : Queries<2>::size(layer.width_k);
}

const char * project_queries(const Attend & args, void * stream) {
    return project(args, {}, stream);
}

const char * store_and_attend(const StoreRows & store, const Combine & args, void * stream) {
    if (args.a.n_tps != 1 || !suits_decode(args.a)) {
        return "store_and_attend: one token per stream expected, and a layer that the decode kernel suits";
    }
    const char * error = project(args.a, store, stream);
    return error ? error : attend_decode(args, stream);
}

const char * attend(const Attend & args, void * stream) {
    if (const char * error = project_queries(args, stream)) {
        return error;
    }
    return suits_decode(args) ? attend_decode(without_exact_keys(args), stream) : attend_tiles(args, stream);
}

} // namespace subkv::cuda
