// combine.cu: merges the partial results of a query row. Those of attend's splits are sums of coefficients, which it
// multiplies by D_v, and the others are those of exact keys. Then it adds attention sinks and normalises. There is one
// block per query head and token, a large one, because blocks are few and each waits for memory.
#include "exact_part.cuh"

namespace subkv::cuda {

namespace {

constexpr int BLOCK       = 512; // threads, so that few blocks have many loads in flight
constexpr int BLOCK_WARPS = BLOCK / WARP;

struct Shared {
    int     pitch; // floats from one warp's sums to the next's
    float * sums;  // [BLOCK_WARPS][pitch] sums of the warps, first of coefficients, later of outputs
    float * room;  // [BLOCK_WARPS]
    size_t  bytes;

    __host__ __device__ Shared(unsigned char * base, const Layer & l) {
        Carve shared{ base };
        pitch = max((int) l.width_v, (int) l.d_v);
        sums  = shared.take<float>((size_t) BLOCK_WARPS * pitch);
        room  = shared.take<float>(BLOCK_WARPS);
        bytes = shared.used;
    }
};

// In the following, warp w sums every partial result and coefficient whose number modulo BLOCK_WARPS is w; a lane has
// COLUMNS elements of each of OUT parts of ROW elements. A step of a loop loads before it computes, and where nothing
// is left to load, it loads a valid row that it does not use, because a branch would wait for each load. Operands of
// the first steps are loaded as soon as their addresses are known.

// A query row's partial results, which are `stride` rows apart.
struct Partials {
    const float * m;
    const float * z;
    const float * rows; // [..][width]
    int64_t       stride;
    int           n, width;
};

// N partial results, with the numbers first, first + BLOCK_WARPS, …
template <int N, int OUT> struct SomePartials {
    float            m[N], z[N];
    Loaded<float, 2> row[N][OUT][2];

    __device__ void load(const Partials & p, int first) {
        const int column = COLUMNS * ((int) threadIdx.x % WARP);
#pragma unroll
        for (int r = 0; r < N; ++r) {
            const int     i  = first + r * BLOCK_WARPS;
            const int64_t at = min(i, p.n - 1) * p.stride;
            m[r]             = i < p.n ? p.m[at] : -INFINITY;
            z[r]             = p.z[at];
#pragma unroll
            for (int x = 0; x < OUT; ++x) { // Elements beyond the head's rank are not used.
                const auto * from = reinterpret_cast<const Loaded<float, 2> *>(
                    p.rows + at * p.width + min(column + x * ROW, p.width - COLUMNS));
                row[r][x][0] = from[0];
                row[r][x][1] = from[1];
            }
        }
    }

    __device__ float top() const {
        float top = m[0];
#pragma unroll
        for (int r = 1; r < N; ++r) {
            top = fmaxf(top, m[r]);
        }
        return top;
    }

    // Adds the results relative to the maximum `top`.
    __device__ void add(float top, float & sum_z, float (&sum)[OUT][COLUMNS]) const {
#pragma unroll
        for (int r = 0; r < N; ++r) {
            const float w = m[r] == -INFINITY ? 0.0f : expf(m[r] - top);
            sum_z         = fmaf(w, z[r], sum_z);
#pragma unroll
            for (int x = 0; x < OUT; ++x) {
#pragma unroll
                for (int y = 0; y < COLUMNS; ++y) {
                    sum[x][y] = fmaf(w, row[r][x][y / 2].of[y % 2], sum[x][y]);
                }
            }
        }
    }
};

// N rows of D_v, with the numbers first, first + BLOCK_WARPS, …
template <int N, int OUT> struct SomeBasis {
    FourHalves row[N][OUT];

    __device__ void load(const uint16_t * decode, int first, int rank, int d) {
        const int column = COLUMNS * ((int) threadIdx.x % WARP);
#pragma unroll
        for (int r = 0; r < N; ++r) {
            const uint16_t * from = decode + min(first + r * BLOCK_WARPS, rank - 1) * d;
#pragma unroll
            for (int x = 0; x < OUT; ++x) {
                row[r][x] = *reinterpret_cast<const FourHalves *>(from + min(column + x * ROW, d - COLUMNS));
            }
        }
    }

    __device__ void add(const float * coefficients, int first, int rank, float (&sum)[OUT][COLUMNS]) const {
#pragma unroll
        for (int r = 0; r < N; ++r) {
            const int   i = first + r * BLOCK_WARPS;
            const float c = i < rank ? coefficients[i] : 0.0f;
#pragma unroll
            for (int x = 0; x < OUT; ++x) {
#pragma unroll
                for (int y = 0; y < COLUMNS; ++y) {
                    sum[x][y] = fmaf(c, from_half(row[r][x].of[y]), sum[x][y]);
                }
            }
        }
    }
};

// Stores a warp's sums, which sum_of_warps then adds.
template <int OUT> __device__ void store_sums(const Shared & s, const float (&sum)[OUT][COLUMNS], int size) {
    const int column = COLUMNS * ((int) threadIdx.x % WARP);
    float *   mine   = s.sums + (int) threadIdx.x / WARP * s.pitch;
    for (int x = 0; x < OUT; ++x) {
        for (int y = 0; y < COLUMNS && column + x * ROW < size; ++y) {
            mine[column + x * ROW + y] = sum[x][y];
        }
    }
    __syncthreads();
}

__device__ float sum_of_warps(const Shared & s, int i) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < BLOCK_WARPS; ++w) {
        sum += s.sums[w * s.pitch + i];
    }
    return sum;
}

// Adds the attention sink, normalises and writes the output, when the sums and z of all warps are in shared memory.
__device__ void store_output(const Combine & b, const Shared & s, float m, float sink, int hq, int64_t token) {
    float z = 0.0f;
    for (int w = 0; w < BLOCK_WARPS; ++w) {
        z += s.room[w];
    }
    float w = 1.0f;
    if (b.sinks != nullptr) { // A sink is a logit without a value.
        w = move_top(m, sink);
        z = z * w + expf(sink - m);
    }
    w             = z == 0.0f ? 0.0f : w / z; // zeros without visible keys, NaN for a lost row
    const int d_v = b.a.layer.d_v;
#pragma unroll 1
    for (int j = (int) threadIdx.x; j < d_v; j += BLOCK) {
        b.out[token * b.out_stride + hq * d_v + j] = w * sum_of_warps(s, j);
    }
}

template <int OUT> __global__ void __launch_bounds__(BLOCK) combine_kernel(Combine b) {
    constexpr int    ROWS  = OUT == 1 ? 8 : OUT == 2 ? 2 : 1; // splits or coefficients that a warp loads at a time
    const Attend &   a     = b.a;
    const Layer &    l     = a.layer;
    const int        hq    = (int) blockIdx.x;
    const int        h     = hq / l.n_group;
    const int64_t    token = blockIdx.y;
    const ExactParts parts(b);
    const int64_t    row    = (h * a.n_stream * a.n_tps + token) * l.n_group + hq % l.n_group; // row of split 0
    const int        rank   = l.v[h].rank;
    const uint16_t * decode = l.v[h].decode.halves;
    const float      sink   = b.sinks == nullptr ? 0.0f : b.sinks[hq];
    const int        warp   = (int) threadIdx.x / WARP;
    const Shared     s(block_memory, l);
    const Partials   splits{
        a.m + row, a.z + row, a.acc + row * l.width_v, parts.n_rows, (int) a.n_split, (int) l.width_v
    };
    const Partials exact{ parts.m + row, parts.z + row, parts.sums + row * l.d_v, parts.n_rows, parts.n, (int) l.d_v };

    SomePartials<ROWS, OUT> of_splits;
    SomePartials<1, OUT>    of_exact = {};
    SomeBasis<ROWS, OUT>    basis;
    of_splits.load(splits, warp);
    if (parts.n > 0) {
        of_exact.load(exact, warp);
    }
    basis.load(decode, warp, rank, l.d_v);

    float m = parts.n > 0 ? fmaxf(of_splits.top(), of_exact.top()) : of_splits.top();
#pragma unroll 1
    for (int i = warp + ROWS * BLOCK_WARPS; i < splits.n; i += BLOCK_WARPS) {
        m = fmaxf(m, splits.m[i * splits.stride]);
    }
#pragma unroll 1
    for (int i = warp + BLOCK_WARPS; i < exact.n; i += BLOCK_WARPS) {
        m = fmaxf(m, exact.m[i * exact.stride]);
    }
    m = block_max<BLOCK_WARPS>(m, s.room);

    float z = 0.0f, sum[OUT][COLUMNS] = {}; // sums of this warp
#pragma unroll 1
    for (int i = warp; i < splits.n; i += ROWS * BLOCK_WARPS) {
        if (i > warp) {
            of_splits.load(splits, i);
        }
        of_splits.add(m, z, sum);
    }
    store_sums(s, sum, rank);
#pragma unroll 1
    for (int i = (int) threadIdx.x; i < rank; i += BLOCK) {
        s.sums[i] = sum_of_warps(s, i);
    }
    __syncthreads();
    float out[OUT][COLUMNS] = {};
#pragma unroll 1
    for (int i = warp; i < rank; i += ROWS * BLOCK_WARPS) {
        if (i > warp) {
            basis.load(decode, i, rank, l.d_v);
        }
        basis.add(s.sums, i, rank, out);
    }
#pragma unroll 1
    for (int i = warp; i < exact.n; i += BLOCK_WARPS) {
        if (i > warp) {
            of_exact.load(exact, i);
        }
        of_exact.add(m, z, out);
    }
    if (threadIdx.x % WARP == 0) {
        s.room[warp] = z;
    }
    __syncthreads(); // all reads of coefficients are done
    store_sums(s, out, l.d_v);
    store_output(b, s, m, sink, hq, token);
}

} // namespace

const char * combine(const Combine & args, void * stream) {
    const int64_t n_tok = args.a.n_stream * args.a.n_tps;
    if (n_tok == 0) {
        return nullptr;
    }
    const char * error = args.has_exact ? nullptr : attend_exact_keys(args, stream);
    if (error) {
        return error;
    }
    const Layer & l = args.a.layer;
    const dim3    grid((unsigned) (l.n_head_kv * l.n_group), (unsigned) n_tok);
    const size_t  bytes = Shared(nullptr, l).bytes;
    constexpr int FEW   = DECODE_HEAD / ROW;
    constexpr int MOST  = (MAX_HEAD_SIZE + ROW - 1) / ROW;
    const auto    size  = [&](auto n) { return max((int) l.d_v, (int) l.width_v) <= n * ROW; };
    return size(1)   ? launch(combine_kernel<1>, grid, bytes, stream, args, BLOCK) :
           size(FEW) ? launch(combine_kernel<FEW>, grid, bytes, stream, args, BLOCK) :
                       launch(combine_kernel<MOST>, grid, bytes, stream, args, BLOCK);
}

} // namespace subkv::cuda
