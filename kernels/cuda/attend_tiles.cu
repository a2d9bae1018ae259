// attend_tiles.cu: many query rows, for prefill (and for decode with large groups): a tile of cells is reconstructed once
// in shared memory, as coefficients in half precision, and tensor cores multiply it with a tile of query rows.
//
// Coefficients are divided by a bound of the tile's largest, so that none overflows a half; query rows by their largest.
#include "rows.cuh"

#include <mma.h>

namespace subkv::cuda {

namespace {

namespace wmma = nvcuda::wmma;

constexpr int SIDE = 16; // of the matrices that tensor cores multiply
constexpr int PAD  = 8;  // halves between rows, against bank conflicts

using MatrixA  = wmma::fragment<wmma::matrix_a, SIDE, SIDE, SIDE, __half, wmma::row_major>;
using MatrixB  = wmma::fragment<wmma::matrix_b, SIDE, SIDE, SIDE, __half, wmma::row_major>;
using MatrixBt = wmma::fragment<wmma::matrix_b, SIDE, SIDE, SIDE, __half, wmma::col_major>;
using Sum      = wmma::fragment<wmma::accumulator, SIDE, SIDE, SIDE, float>;

__host__ __device__ inline int up_to_side(int n) {
    return (n + SIDE - 1) / SIDE * SIDE;
}

struct Tiles {
    Attend a;
    int    rows, cells; // of a tile, multiples of SIDE
};

struct Shared {
    Place *  places_k; // [rank]
    Place *  places_v;
    __half * q;      // [rows][k_pitch], divided by `top`
    __half * x;      // [cells][pitch]: K's coefficients, then V's
    __half * p;      // [rows][p_pitch] weights
    float *  logits; // [rows][s_pitch]
    float *  o;      // [rows][o_pitch] sums of value coefficients
    float *  top;    // [rows]
    float *  m;      // [rows]
    float *  z;      // [rows]
    int *    seen;   // [cells] by any row
    float *  room;   // [WARPS]
    int      k_width, v_width, k_pitch, v_pitch, p_pitch, s_pitch, o_pitch;
    size_t   bytes;

    __host__ __device__ Shared(unsigned char * base, const Tiles & t) {
        const Layer & l = t.a.layer;
        k_width         = up_to_side(l.width_k);
        v_width         = up_to_side(l.width_v);
        k_pitch         = k_width + PAD;
        v_pitch         = v_width + PAD;
        p_pitch         = t.cells + PAD;
        s_pitch         = t.cells + PAD / 2;
        o_pitch         = v_width + PAD / 2;
        Carve shared{ base };
        places_k = shared.take<Place>((size_t) l.width_k);
        places_v = shared.take<Place>((size_t) l.width_v);
        q        = shared.take<__half>((size_t) t.rows * k_pitch);
        x        = shared.take<__half>((size_t) t.cells * (k_pitch > v_pitch ? k_pitch : v_pitch));
        p        = shared.take<__half>((size_t) t.rows * p_pitch);
        logits   = shared.take<float>((size_t) t.rows * s_pitch);
        o        = shared.take<float>((size_t) t.rows * o_pitch);
        top      = shared.take<float>((size_t) t.rows);
        m        = shared.take<float>((size_t) t.rows);
        z        = shared.take<float>((size_t) t.rows);
        seen     = shared.take<int>((size_t) t.cells);
        room     = shared.take<float>(WARPS);
        bytes    = shared.used;
    }
};

// A bound of the coefficients of the tile's seen cells: scale times the largest band's reach, and of halves themselves.
__device__ float tile_bound(const HeadCodec & codec, const Place * places, const uint8_t * rows, int64_t stride, int n,
                            const int * seen, float * room) {
    float reach = 0.0f;
    for (int i = 0; i < codec.n_bands; ++i) {
        if (codec.bands[i].bits != 16) {
            reach = fmaxf(reach, codec.bands[i].ratio * half_range(codec.bands[i].bits));
        }
    }
    float bound = 1e-30f;
    for (int c = (int) threadIdx.x; c < n; c += THREADS) {
        const float s = seen[c] != 0 ? row_scale(rows[c * stride]) : 0.0f;
        bound         = fmaxf(bound, s * reach);
        for (int i = 0; s > 0.0f && i < codec.n_bands; ++i) {
            const Band & band = codec.bands[i];
            for (int j = band.first; band.bits == 16 && j < band.first + band.n; ++j) {
                bound = fmaxf(bound, fabsf(coefficient_at(rows + c * stride, places[j], s)));
            }
        }
    }
    return block_max(bound, room);
}

// x [cells][pitch] = coefficients / bound; zeros beyond the rank, beyond n, and in cells that nobody sees.
__device__ void fill_tile(const HeadCodec & codec, const Place * places, const uint8_t * rows, int64_t stride, int n,
                          const int * seen, float bound, int cells, int width, int pitch, __half * x) {
    for (int i = (int) threadIdx.x; i < cells * width; i += THREADS) {
        const int c = i / width, j = i % width;
        float     value = 0.0f;
        if (c < n && j < codec.rank && seen[c] != 0) {
            const float s = row_scale(rows[c * stride]);
            value         = s > 0.0f ? coefficient_at(rows + c * stride, places[j], s) / bound : 0.0f;
        }
        x[c * pitch + j] = __float2half_rn(value);
    }
}

__global__ void tiles_kernel(Tiles t) {
    const Attend &    a       = t.a;
    const Layer &     l       = a.layer;
    const int         h       = (int) blockIdx.x;    // heads first: their rows share sectors
    const int64_t     n_rows  = a.n_tps * l.n_group; // of a stream
    const int64_t     n_block = (n_rows + t.rows - 1) / t.rows;
    const int64_t     part    = blockIdx.y / n_block;
    const int64_t     r0      = blockIdx.y % n_block * t.rows; // first row of this block in its stream
    const int64_t     stream  = blockIdx.z;
    const int         rows    = (int) least(t.rows, n_rows - r0);
    const int64_t     first   = stream * n_rows + r0; // query rows of all streams follow each other
    const int64_t     all     = a.n_stream * n_rows;
    const HeadCodec & k       = l.k[h];
    const HeadCodec & v       = l.v[h];
    const int         me      = (int) threadIdx.x;
    const int         warp    = me / WARP;
    const int         lane    = me % WARP;
    const int64_t     c_end   = least(a.n_kv, (part + 1) * a.split);
    const auto        token   = [&](int r) { return (first + r) / l.n_group; };
    const auto        head    = [&](int r) { return h * l.n_group + (int) ((first + r) % l.n_group); };

    const Shared s(block_memory, t);
    for (int j = me; j < k.rank; j += THREADS) {
        s.places_k[j] = place_of(k, j);
    }
    for (int j = me; j < v.rank; j += THREADS) {
        s.places_v[j] = place_of(v, j);
    }
    for (int i = me; i < t.rows * s.o_pitch; i += THREADS) {
        s.o[i] = 0.0f;
    }
    for (int r = warp; r < t.rows; r += WARPS) {
        const float * q   = a.qt + (h * all + first + r) * l.width_k;
        float         top = 1e-30f;
        for (int j = lane; r < rows && j < k.rank; j += WARP) {
            top = fmaxf(top, fabsf(q[j]));
        }
        top = warp_max(top);
        for (int j = lane; j < s.k_width; j += WARP) {
            s.q[r * s.k_pitch + j] = __float2half_rn(r < rows && j < k.rank ? q[j] / top : 0.0f);
        }
        if (lane == 0) {
            s.top[r] = top;
            s.m[r]   = -INFINITY;
            s.z[r]   = 0.0f;
        }
    }

    for (int64_t c0 = part * a.split; c0 < c_end; c0 += t.cells) {
        const int n = (int) least(t.cells, c_end - c0);
        __syncthreads();
        int any = 0;
        for (int c = me; c < t.cells; c += THREADS) {
            int open = 0;
            for (int r = 0; r < rows && c < n && open == 0;) {
                open = coded_bias(a, token(r), c0 + c) != -INFINITY;
                r += l.n_group - (int) ((first + r) % l.n_group); // the next token
            }
            s.seen[c] = open;
            any |= open;
        }
        if (__syncthreads_or(any) == 0) {
            continue;
        }
        const uint8_t * k_rows  = a.k_rows + stream * a.k_stream + c0 * a.k_stride + l.k_offset[h];
        const float     k_bound = tile_bound(k, s.places_k, k_rows, a.k_stride, n, s.seen, s.room);
        fill_tile(k, s.places_k, k_rows, a.k_stride, n, s.seen, k_bound, t.cells, s.k_width, s.k_pitch, s.x);
        __syncthreads();
        for (int i = warp; i < t.rows / SIDE * (t.cells / SIDE); i += WARPS) {
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
        __syncthreads();

        for (int r = warp; r < t.rows; r += WARPS) {
            float * row = s.logits + r * s.s_pitch;
            float   top = s.m[r];
            for (int c = lane; c < t.cells; c += WARP) {
                const float bias = r < rows && c < n ? coded_bias(a, token(r), c0 + c) : -INFINITY;
                if (bias == -INFINITY) {
                    row[c] = -INFINITY;
                } else {
                    const float logit = row[c] * (s.top[r] * k_bound) + a.shift[h * all + first + r];
                    row[c]            = capped(logit, l.softcap) + l.slope[head(r)] * bias;
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
        const uint8_t * v_rows  = a.v_rows + stream * a.v_stream + c0 * a.v_stride + l.v_offset[h];
        const float     v_bound = tile_bound(v, s.places_v, v_rows, a.v_stride, n, s.seen, s.room);
        fill_tile(v, s.places_v, v_rows, a.v_stride, n, s.seen, v_bound, t.cells, s.v_width, s.v_pitch, s.x);
        __syncthreads();
        for (int i = warp; i < t.rows / SIDE * (s.v_width / SIDE); i += WARPS) {
            const int r = i / (s.v_width / SIDE) * SIDE, j = i % (s.v_width / SIDE) * SIDE;
            float *   o = s.o + r * s.o_pitch + j;
            Sum       sum, total;
            wmma::fill_fragment(sum, 0.0f);
            for (int c = 0; c < t.cells; c += SIDE) {
                MatrixA p;
                MatrixB x;
                wmma::load_matrix_sync(p, s.p + r * s.p_pitch + c, (unsigned) s.p_pitch);
                wmma::load_matrix_sync(x, s.x + c * s.v_pitch + j, (unsigned) s.v_pitch);
                wmma::mma_sync(sum, p, x, sum);
            }
            wmma::load_matrix_sync(total, o, (unsigned) s.o_pitch, wmma::mem_row_major);
            for (int e = 0; e < total.num_elements; ++e) {
                total.x[e] += v_bound * sum.x[e];
            }
            wmma::store_matrix_sync(o, total, (unsigned) s.o_pitch, wmma::mem_row_major);
        }
    }
    __syncthreads();
    const int64_t out = (part * l.n_head_kv + h) * all + first;
    for (int r = warp; r < rows; r += WARPS) {
        for (int j = lane; j < v.rank; j += WARP) {
            a.acc[(out + r) * l.width_v + j] = s.o[r * s.o_pitch + j];
        }
        if (lane == 0) {
            a.m[out + r] = s.m[r];
            a.z[out + r] = s.z[r];
        }
    }
}

} // namespace

const char * attend_tiles(const Attend & args, void * stream) {
    const int64_t n_rows = args.n_tps * args.layer.n_group;
    if (n_rows * args.n_stream == 0) {
        return nullptr;
    }
    Tiles t = { args, 64, 64 };
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
    return launch(tiles_kernel,
                  dim3((unsigned) args.layer.n_head_kv, (unsigned) args.n_split * n_block, (unsigned) args.n_stream),
                  bytes(), stream, t);
}

} // namespace subkv::cuda
