// attend_tiles.cu: attention of many query rows, for prefill and for decode with large groups. A tile of cells is
// dequantized once to halves in shared memory, and tensor cores multiply it with a tile of query rows.
//
// Coefficients are divided by a bound of the tile's largest one, and query rows by their largest element, so that no
// half overflows. Eight adjacent codes (of a key, or of one coefficient of values) become eight adjacent halves.
#include "coefficients.cuh"
#include "mask.cuh"

#include <mma.h>

namespace subkv::cuda {

namespace {

namespace wmma = nvcuda::wmma;

using MatrixA  = wmma::fragment<wmma::matrix_a, SIDE, SIDE, SIDE, __half, wmma::row_major>;
using MatrixB  = wmma::fragment<wmma::matrix_b, SIDE, SIDE, SIDE, __half, wmma::row_major>;
using MatrixBt = wmma::fragment<wmma::matrix_b, SIDE, SIDE, SIDE, __half, wmma::col_major>;
using Sum      = wmma::fragment<wmma::accumulator, SIDE, SIDE, SIDE, float>;

struct Tiles {
    Attend a;
    int    rows, cells; // query rows and cells of a tile; multiples of SIDE
};

struct Shared {
    Octets   octets_k;
    Octets   octets_v;
    __half * q;       // [rows][k_pitch], divided by `top`
    __half * x;       // [cells][k_pitch] keys, then [v_width][p_pitch] values, which a latent layer reads from its keys
    float *  scale;   // [cells] scales of x, 0 in masked cells, NaN in others that are not finite
    __half * p;       // [rows][p_pitch] weights
    float *  logits;  // [rows][s_pitch]
    float *  o;       // [rows][o_pitch] sums of value coefficients
    float *  top;     // [rows]
    float *  m;       // [rows]
    float *  z;       // [rows]
    int *    visible; // [cells] 1 if any row sees the cell
    float *  room;    // [WARPS]
    int      k_width, v_width, k_pitch, p_pitch, s_pitch, o_pitch;
    size_t   bytes;

    __host__ __device__ Shared(unsigned char * base, const Tiles & t) {
        const Layer & l = t.a.layer;
        k_width         = up_to_side(l.width_k);
        v_width         = up_to_side(l.width_v);
        k_pitch         = k_width + PAD;
        p_pitch         = t.cells + PAD;
        s_pitch         = t.cells + PAD / 2;
        o_pitch         = v_width + PAD / 2;
        Carve shared{ base };
        octets_k = Octets::take(shared, l.width_k);
        octets_v = Octets::take(shared, l.latent ? 0 : l.width_v);
        q        = shared.take<__half>((size_t) t.rows * k_pitch);
        x        = shared.take<__half>((size_t) max(t.cells * k_pitch, l.latent ? 0 : v_width * p_pitch));
        scale    = shared.take<float>((size_t) t.cells);
        p        = shared.take<__half>((size_t) t.rows * p_pitch);
        logits   = shared.take<float>((size_t) t.rows * s_pitch);
        o        = shared.take<float>((size_t) t.rows * o_pitch);
        top      = shared.take<float>((size_t) t.rows);
        m        = shared.take<float>((size_t) t.rows);
        z        = shared.take<float>((size_t) t.rows);
        visible  = shared.take<int>((size_t) t.cells);
        room     = shared.take<float>(WARPS);
        bytes    = shared.used;
    }
};

// Fills the scales of cells [c0, c0 + n) of a tile. Returns a bound of the coefficients of visible cells (CellScale).
__device__ float tile_bound(const HeadCodec & codec, const Shared & s, const uint8_t * tile, int c0, int n, int cells) {
    const float reach = reach_of(codec);
    float       bound = 1e-30f;
    for (int c = (int) threadIdx.x; c < cells; c += THREADS) {
        const CellScale cell = c < n && s.visible[c] != 0 ? cell_scale(codec, tile, c0 + c, reach) : CellScale{};
        s.scale[c]           = cell.scale;
        bound                = fmaxf(bound, cell.bound);
    }
    return block_max(bound, s.room);
}

// Returns a function that gives all cells the same factor.
__device__ auto alike(float inverse) {
    return [=](int) { return inverse; };
}

// A block's query rows, which belong to one stream and KV head, and its split of the cells.
struct Rows {
    int     h, n; // n rows exist
    int64_t stream, part;
    int64_t first; // number of the first row; those of all streams are contiguous
    int64_t all;   // rows of a KV head
    int64_t group;

    __device__ explicit Rows(const Tiles & t) : h((int) blockIdx.y), stream(blockIdx.z), group(t.a.layer.n_group) {
        const int64_t n_rows  = t.a.n_tps * group; // rows of a stream
        const int64_t n_block = (n_rows + t.rows - 1) / t.rows;
        const int64_t r0      = blockIdx.x % n_block * t.rows; // first row of this block in its stream

        part  = blockIdx.x / n_block;
        n     = (int) least(t.rows, n_rows - r0);
        first = stream * n_rows + r0;
        all   = t.a.n_stream * n_rows;
    }

    __device__ int64_t token(int r) const { return (first + r) / group; }

    __device__ int head(int r) const { return h * (int) group + (int) ((first + r) % group); } // query head
};

// Fills the tile of query rows, and starts their sums and softmax states.
__device__ void start_rows(const Tiles & t, const Shared & s, const Rows & rows) {
    const int me = (int) threadIdx.x, warp = me / WARP, lane = me % WARP;
    const int rank = t.a.layer.k[rows.h].rank;
    for (int i = me; i < t.rows * s.o_pitch; i += THREADS) {
        s.o[i] = 0.0f;
    }
    for (int r = warp; r < t.rows; r += WARPS) {
        const float * q   = t.a.qt + (rows.h * rows.all + rows.first + r) * t.a.layer.width_k;
        float         top = 1e-30f;
        for (int j = lane; r < rows.n && j < rank; j += WARP) {
            top = fmaxf(top, fabsf(q[j]));
        }
        top = warp_max(top);
        for (int j = lane; j < s.k_width; j += WARP) {
            s.q[r * s.k_pitch + j] = __float2half_rn(r < rows.n && j < rank ? q[j] / top : 0.0f);
        }
        if (lane == 0) {
            s.top[r] = top;
            s.m[r]   = -INFINITY;
            s.z[r]   = 0.0f;
        }
    }
}

// Finds the cells of [c0, c0 + n) that any row sees, and returns in all threads whether there are any.
__device__ bool find_visible(const Tiles & t, const Shared & s, const Rows & rows, int64_t c0, int n) {
    __syncthreads();
    int any = 0;
    for (int c = (int) threadIdx.x; c < t.cells; c += THREADS) {
        int open = 0;
        for (int r = 0; r < rows.n && c < n && open == 0;) {
            open = coded_bias(t.a, rows.token(r), c0 + c) != -INFINITY;
            r += (int) rows.group - (int) ((rows.first + r) % rows.group); // the next token
        }
        s.visible[c] = open;
        any |= open;
    }
    return __syncthreads_or(any) != 0;
}

// Computes the products of query rows and keys, which are divided by their bounds.
__device__ void multiply_keys(const Tiles & t, const Shared & s) {
    for (int i = (int) threadIdx.x / WARP; i < t.rows / SIDE * (t.cells / SIDE); i += WARPS) {
        const int r = i / (t.cells / SIDE) * SIDE, c = i % (t.cells / SIDE) * SIDE;
        Sum       sum;
        wmma::fill_fragment(sum, 0.0f);
        for (int j = 0; j < s.k_width; j += SIDE) {
            MatrixA  q;
            MatrixBt x;
            wmma::load_matrix_sync(q, s.q + r * s.k_pitch + j, (unsigned) s.k_pitch);
            wmma::load_matrix_sync(x, s.x + c * s.k_pitch + j, (unsigned) s.k_pitch);
            wmma::mma_sync(sum, q, x, sum);
        }
        wmma::store_matrix_sync(s.logits + r * s.s_pitch + c, sum, (unsigned) s.s_pitch, wmma::mem_row_major);
    }
}

// Converts the products of cells [c0, c0 + n) to logits and weights, and updates the rows' states and sums.
__device__ void move_rows(const Tiles & t, const Shared & s, const Rows & rows, int64_t c0, int n, float k_bound) {
    const Attend & a    = t.a;
    const Layer &  l    = a.layer;
    const int      lane = (int) threadIdx.x % WARP;
    for (int r = (int) threadIdx.x / WARP; r < t.rows; r += WARPS) {
        float * row = s.logits + r * s.s_pitch;
        float   top = s.m[r];
        for (int c = lane; c < t.cells; c += WARP) {
            const float bias = r < rows.n && c < n ? coded_bias(a, rows.token(r), c0 + c) : -INFINITY;
            if (bias == -INFINITY) {
                row[c] = -INFINITY;
            } else {
                const float logit = row[c] * (s.top[r] * k_bound) + a.shift[rows.h * rows.all + rows.first + r];
                const float bad   = s.scale[c] * 0.0f; // NaN, or 0
                row[c]            = capped(finite_or_nan(logit + bad), l.softcap) + l.slope[rows.head(r)] * bias;
            }
            top = fmaxf(top, row[c]);
        }
        top              = warp_max(top);
        const float keep = s.m[r] == -INFINITY ? 0.0f : expf(s.m[r] - top);
        float       sum  = 0.0f;
        for (int c = lane; c < t.cells; c += WARP) {
            const float p          = row[c] == -INFINITY ? 0.0f : expf(row[c] - top);
            s.p[r * s.p_pitch + c] = __float2half_rn(p);
            sum += p;
        }
        for (int j = lane; j < s.v_width; j += WARP) {
            s.o[r * s.o_pitch + j] *= keep;
        }
        sum = warp_sum(sum);
        __syncwarp();
        if (lane == 0) {
            s.z[r] = s.z[r] * keep + sum;
            s.m[r] = top;
        }
    }
}

// Fills the values of a tile, and returns their bound.
__device__ float load_values(const Tiles & t, const Shared & s, const Rows & rows, int64_t c0, int n) {
    __syncthreads(); // All warps have read the scales of keys.
    const Attend &    a       = t.a;
    const HeadCodec & v       = a.layer.v[rows.h];
    const int         in_tile = (int) (c0 % TILE);
    const uint8_t *   tile  = a.v_tiles + rows.stream * a.v_stream + c0 / TILE * a.v_stride + a.layer.v_offset[rows.h];
    const float       bound = tile_bound(v, s, tile, in_tile, n, t.cells);
    fill_values(v, s.octets_v, tile, in_tile, t.cells, s.v_width, s.scale, alike(1.0f / bound), s.x, s.p_pitch);
    return bound;
}

// Sets z to NaN in rows that give weight to a value that is not finite. The whole block calls this.
__device__ void lose_rows(const Tiles & t, const Shared & s) {
    const int lane = (int) threadIdx.x % WARP;
    int       bad  = 0;
    for (int c = (int) threadIdx.x; c < t.cells && !t.a.layer.latent; c += THREADS) {
        bad |= is_nan(s.scale[c]);
    }
    bad = __syncthreads_or(bad);
    for (int r = (int) threadIdx.x / WARP; bad != 0 && r < t.rows; r += WARPS) {
        float lost = 0.0f;
        for (int c = lane; c < t.cells; c += WARP) {
            lost += is_nan(s.scale[c]) && expf(s.logits[r * s.s_pitch + c] - s.m[r]) > 0.0f ? 1.0f : 0.0f;
        }
        lost = warp_sum(lost);
        if (lane == 0 && lost > 0.0f) {
            s.z[r] = not_a_number();
        }
    }
}

// Adds the products of weights and values to the rows' sums.
__device__ void add_values(const Tiles & t, const Shared & s, float v_bound) {
    for (int i = (int) threadIdx.x / WARP; i < t.rows / SIDE * (s.v_width / SIDE); i += WARPS) {
        const int r = i / (s.v_width / SIDE) * SIDE, j = i % (s.v_width / SIDE) * SIDE;
        float *   o = s.o + r * s.o_pitch + j;
        Sum       sum, total;
        wmma::fill_fragment(sum, 0.0f);
        for (int c = 0; c < t.cells; c += SIDE) {
            MatrixA p;
            wmma::load_matrix_sync(p, s.p + r * s.p_pitch + c, (unsigned) s.p_pitch);
            if (t.a.layer.latent) {
                MatrixB x;
                wmma::load_matrix_sync(x, s.x + c * s.k_pitch + j, (unsigned) s.k_pitch);
                wmma::mma_sync(sum, p, x, sum);
            } else {
                MatrixBt x;
                wmma::load_matrix_sync(x, s.x + j * s.p_pitch + c, (unsigned) s.p_pitch);
                wmma::mma_sync(sum, p, x, sum);
            }
        }
        wmma::load_matrix_sync(total, o, (unsigned) s.o_pitch, wmma::mem_row_major);
        for (int e = 0; e < total.num_elements; ++e) {
            total.x[e] += v_bound * sum.x[e];
        }
        wmma::store_matrix_sync(o, total, (unsigned) s.o_pitch, wmma::mem_row_major);
    }
}

// Writes the partial results of the split.
__device__ void store_rows(const Tiles & t, const Shared & s, const Rows & rows) {
    const Attend & a    = t.a;
    const int      lane = (int) threadIdx.x % WARP;
    const int64_t  out  = (rows.part * a.layer.n_head_kv + rows.h) * rows.all + rows.first;
    for (int r = (int) threadIdx.x / WARP; r < rows.n; r += WARPS) {
        for (int j = lane; j < a.layer.v[rows.h].rank; j += WARP) {
            a.acc[(out + r) * a.layer.width_v + j] = s.o[r * s.o_pitch + j];
        }
        if (lane == 0) {
            a.m[out + r] = state_top(s.m[r], s.z[r]);
            a.z[out + r] = s.z[r];
        }
    }
}

__global__ void tiles_kernel(Tiles t) {
    const Attend &    a = t.a;
    const Layer &     l = a.layer;
    const Rows        rows(t);
    const HeadCodec & k     = l.k[rows.h];
    const int64_t     c_end = least(a.n_kv, (rows.part + 1) * a.split);

    Shared s(block_memory, t);
    fill_octets(k, s.octets_k);
    if (!l.latent) {
        fill_octets(l.v[rows.h], s.octets_v);
    }
    start_rows(t, s, rows);
    for (int64_t c0 = rows.part * a.split; c0 < c_end; c0 += t.cells) {
        const int n = (int) least(t.cells, c_end - c0);
        if (!find_visible(t, s, rows, c0, n)) {
            continue;
        }
        const int       in_tile = (int) (c0 % TILE); // 0 unless t.cells < TILE
        const uint8_t * tile    = a.k_tiles + rows.stream * a.k_stream + c0 / TILE * a.k_stride + l.k_offset[rows.h];
        const float     k_bound = tile_bound(k, s, tile, in_tile, n, t.cells);
        fill_keys(k, s.octets_k, tile, in_tile, t.cells, s.k_width, s.scale, alike(1.0f / k_bound), s.x, s.k_pitch);
        __syncthreads();
        multiply_keys(t, s);
        __syncthreads();
        move_rows(t, s, rows, c0, n, k_bound);
        const float v_bound = l.latent ? k_bound : load_values(t, s, rows, c0, n);
        lose_rows(t, s);
        add_values(t, s, v_bound);
    }
    __syncthreads();
    store_rows(t, s, rows);
}

} // namespace

size_t lacks_shared(const Layer & layer, int device) {
    Tiles t   = {};
    t.a.layer = layer;
    t.rows = t.cells   = SIDE;
    const size_t bytes = Shared(nullptr, t).bytes, most = most_shared(device);
    return bytes > most ? bytes - most : 0;
}

const char * attend_tiles(const Attend & args, void * stream) {
    const int64_t n_rows = args.n_tps * args.layer.n_group;
    if (n_rows * args.n_stream == 0) {
        return nullptr;
    }
    Tiles t = { args, 64, TILE };
    while (t.rows > SIDE && t.rows / 2 >= n_rows) {
        t.rows /= 2;
    }
    const auto bytes = [&] { return Shared(nullptr, t).bytes; };
    while (bytes() > most_shared() && t.rows > SIDE) {
        t.rows /= 2;
    }
    while (bytes() > most_shared() && t.cells > SIDE) {
        t.cells /= 2;
    }
    const auto n_block = (unsigned) ((n_rows + t.rows - 1) / t.rows);
    const dim3 grid((unsigned) args.n_split * n_block, (unsigned) args.layer.n_head_kv, (unsigned) args.n_stream);
    return launch(tiles_kernel, grid, bytes(), stream, t);
}

} // namespace subkv::cuda
