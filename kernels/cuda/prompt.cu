// prompt.cu: computes the rows that ggml's flash attention reads for a prompt. A cell is decoded once for all tokens of
// the batch. One softmax covers all keys of a token, so queries need no projection and results no merge.
// research/notes/roofline.md counts the cost.
#include "coefficients.cuh"
#include "exact.cuh"

#include <mma.h>

#include <algorithm>

namespace subkv::cuda {

namespace {

namespace wmma = nvcuda::wmma;

using Matrix16 = wmma::fragment<wmma::matrix_b, SIDE, SIDE, SIDE, __half, wmma::row_major>;
using OfKeys   = wmma::fragment<wmma::matrix_a, SIDE, SIDE, SIDE, __half, wmma::row_major>;
using OfValues = wmma::fragment<wmma::matrix_a, SIDE, SIDE, SIDE, __half, wmma::col_major>;
using Sum      = wmma::fragment<wmma::accumulator, SIDE, SIDE, SIDE, float>;

static_assert(SIDE == MATRIX_ROWS);
constexpr int PARTS = TILE / SIDE; // parts of a tile

struct Shared {
    Octets   octets;
    __half * x;       // keys [TILE][width + PAD], values [width][TILE + PAD], times inverse
    float *  scale;   // [TILE] scales of the rows
    float *  bound;   // [TILE] a bound of their coefficients
    float *  inverse; // [TILE] 1 / bound
    float *  sums;    // [WARPS][SIDE][SIDE]
    int      width, pitch;
    size_t   bytes;

    __host__ __device__ Shared(unsigned char * base, int rank, bool value) {
        Carve shared{ base };
        width   = up_to_side(rank);
        pitch   = (value ? TILE : width) + PAD;
        octets  = Octets::take(shared, rank);
        x       = shared.take<__half>((size_t) (value ? width : TILE) * pitch);
        scale   = shared.take<float>(TILE);
        bound   = shared.take<float>(TILE);
        inverse = shared.take<float>(TILE);
        sums    = shared.take<float>(WARPS * SIDE * SIDE);
        bytes   = shared.used;
    }
};

// out [TILE][d] = gamma * x times D + mean for the first n cells of a head's tile. A warp computes 16 columns of all
// cells at a time.
template <typename Coefficients>
__device__ void decode_tile(const HeadCodec & codec, const Shared & s, bool value, float gamma, const uint16_t * mean,
                            int n, uint16_t * out) {
    const int    warp = (int) threadIdx.x / WARP, lane = (int) threadIdx.x % WARP;
    const int    d     = codec.d;
    float *      room  = s.sums + warp * SIDE * SIDE;
    const auto * basis = reinterpret_cast<const __half *>(codec.decode.halves);
    for (int j = warp * SIDE; j < d; j += WARPS * SIDE) {
        Sum sum[PARTS];
        for (int part = 0; part < PARTS; ++part) {
            wmma::fill_fragment(sum[part], 0.0f);
        }
        for (int i = 0; i < s.width; i += SIDE) {
            Matrix16 columns;
            wmma::load_matrix_sync(columns, basis + (int64_t) i * d + j, (unsigned) d);
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                Coefficients x;
                const int    at = value ? i * s.pitch + part * SIDE : part * SIDE * s.pitch + i;
                wmma::load_matrix_sync(x, s.x + at, (unsigned) s.pitch);
                wmma::mma_sync(sum[part], x, columns, sum[part]);
            }
        }
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            wmma::store_matrix_sync(room, sum[part], (unsigned) SIDE, wmma::mem_row_major);
            __syncwarp();
            const int c = part * SIDE + lane / 2, first = lane % 2 * (SIDE / 2); // Each lane writes half a row.
            if (c < n) {
                Halves halves;
                for (int e = 0; e < SIDE / 2; ++e) {
                    const float at = mean == nullptr ? 0.0f : from_half(mean[j + first + e]);
                    const float y  = fmaf(gamma * s.bound[c], room[lane / 2 * SIDE + first + e], at);
                    // The row must be finite, because masked cells have weight 0, and 0 * inf is NaN.
                    halves.x[e] = __float2half_rn(fminf(fmaxf(y, -65504.0f), 65504.0f));
                }
                *reinterpret_cast<Halves *>(out + (int64_t) c * d + j + first) = halves;
            }
            __syncwarp();
        }
    }
}

// Decodes cells, with a block per tile, head and side, and stream.
__global__ void cells_kernel(Prompt p) {
    const Attend &    a      = p.c.a;
    const Layer &     l      = a.layer;
    const int64_t     tile   = blockIdx.x;
    const bool        value  = blockIdx.y % 2 == 1;
    const int         i      = (int) blockIdx.y / 2;
    const int         h      = p.first + i;
    const int64_t     stream = blockIdx.z;
    const HeadCodec & codec  = value ? l.v[h] : l.k[h];
    const int         n      = (int) least(TILE, a.n_kv - tile * TILE);
    const int         d      = value ? l.d_v : l.d_k;

    const uint8_t * from = (value ? a.v_tiles + stream * a.v_stream + tile * a.v_stride + l.v_offset[h] :
                                    a.k_tiles + stream * a.k_stream + tile * a.k_stride + l.k_offset[h]);

    Shared s(block_memory, codec.rank, value);
    fill_octets(codec, s.octets);
    const float reach = reach_of(codec);
    for (int c = (int) threadIdx.x; c < TILE; c += THREADS) {
        const CellScale cell  = c < n ? cell_scale(codec, from, c, reach) : CellScale{};
        const float     bound = fmaxf(1e-30f, cell.bound);
        s.scale[c]            = cell.scale;
        s.bound[c]            = bound;
        s.inverse[c]          = 1.0f / bound;
    }
    __syncthreads();
    const auto inverse = [&](int c) { return s.inverse[c]; };
    if (value) {
        fill_values(codec, s.octets, from, 0, TILE, s.width, s.scale, inverse, s.x, s.pitch);
    } else {
        fill_keys(codec, s.octets, from, 0, TILE, s.width, s.scale, inverse, s.x, s.pitch);
    }
    __syncthreads();
    uint16_t * out = (value ? p.v : p.k) + ((stream * p.n_heads + i) * p.n_rows + tile * TILE) * d;
    if (value) {
        decode_tile<OfValues>(codec, s, value, 1.0f, nullptr, n, out);
    } else {
        decode_tile<OfKeys>(codec, s, value, l.gamma[h], l.mean[h], n, out);
    }
}

// Returns the first window slot of a stream.
__device__ int64_t first_slot(const Prompt & p, int64_t stream) {
    return p.c.a.n_stream > 1 ? p.c.a.tokens[stream * p.c.a.n_tps].first_slot : 0;
}

// Copies the rows behind those of the cells, with a block per row and stream.
__global__ void exact_rows_kernel(Prompt p) {
    const Attend &   a      = p.c.a;
    const Layer &    l      = a.layer;
    const int64_t    i      = blockIdx.x; // number of the row: slots, then tokens, then zeros
    const int64_t    stream = blockIdx.y;
    const int64_t    width  = exact_width(l);
    const uint16_t * row    = nullptr;
    if (i < p.n_slots) {
        row = p.c.window + (first_slot(p, stream) + i) * width;
    } else if (i < p.n_slots + a.n_tps) {
        row = p.c.fresh + (stream * a.n_tps + i - p.n_slots) * width;
    }
    for (int j = (int) threadIdx.x; j < p.n_heads * (l.d_k + l.d_v); j += THREADS) {
        const bool    value     = j >= p.n_heads * l.d_k;
        const int     d         = value ? l.d_v : l.d_k;
        const int     e         = value ? j - p.n_heads * l.d_k : j; // element of these heads' keys or values
        const int     from      = (value ? l.n_head_kv * l.d_k : 0) + p.first * d + e;
        const int64_t at        = ((stream * p.n_heads + e / d) * p.n_rows + a.n_kv + i) * d + e % d;
        const bool    bad       = row != nullptr && (row[from] & 0x7c00) == 0x7c00; // See lost_kernel.
        (value ? p.v : p.k)[at] = row == nullptr || bad ? (uint16_t) 0 : row[from];
    }
}

__device__ float prompt_bias(const Prompt & p, int64_t token, int64_t row) {
    const Attend & a = p.c.a;
    if (row < a.n_kv) {
        return coded_bias(a, token, row);
    }
    const int64_t stream = token / a.n_tps, i = row - a.n_kv;
    int32_t       cell = -1;
    if (i < p.n_slots) {
        const int64_t slot = first_slot(p, stream) + i, own = a.tokens[token].first_slot;
        cell = slot >= own && slot < own + p.c.slots_of_seq ? slot_cell(p.c, token, slot) : -1;
    } else if (i < p.n_slots + a.n_tps && p.c.slots_of_seq > 0) {
        cell = fresh_cell(p.c, token, stream * a.n_tps + i - p.n_slots);
    }
    return cell < 0 ? -INFINITY : mask_value(a, token * a.n_kv + cell);
}

// Writes the mask, with a block per THREADS rows and token.
__global__ void mask_kernel(Prompt p) {
    const int64_t row = (int64_t) blockIdx.x * THREADS + threadIdx.x, token = blockIdx.y;
    if (row < p.n_rows) {
        p.mask[token * p.n_rows + row] = to_half(prompt_bias(p, token, row));
    }
}

// Returns whether a row of these heads is not finite. The kernels above have stored zeros for such rows.
__device__ bool is_bad(const Prompt & p, int64_t stream, int64_t row) {
    const Attend & a   = p.c.a;
    const Layer &  l   = a.layer;
    bool           bad = false;
    if (row < a.n_kv) {
        const int64_t   tile = row / TILE, c = row % TILE;
        const uint8_t * k = a.k_tiles + stream * a.k_stream + tile * a.k_stride + c;
        const uint8_t * v = a.v_tiles + stream * a.v_stream + tile * a.v_stride + c;
        for (int h = p.first; h < p.first + p.n_heads; ++h) {
            bad = bad || k[l.k_offset[h]] == SCALE_NAN || v[l.v_offset[h]] == SCALE_NAN;
        }
        return bad;
    }
    const int64_t    i = row - a.n_kv, width = exact_width(l);
    const uint16_t * of = i < p.n_slots ? p.c.window + (first_slot(p, stream) + i) * width :
                                          p.c.fresh + (stream * a.n_tps + i - p.n_slots) * width;
    for (int h = p.first; h < p.first + p.n_heads; ++h) {
        bad = bad || of[h * l.d_k] == HALF_NAN || of[exact_value(l, h)] == HALF_NAN;
    }
    return bad;
}

// Sets a token's output to NaN if the token sees a row that is not finite, with a block per token. Layers without such
// rows take no time.
__global__ void lost_kernel(Prompt p) {
    const Attend & a     = p.c.a;
    const int64_t  token = blockIdx.x;
    if (*a.layer.n_bad == 0) {
        return;
    }
    int lost = 0;
    for (int64_t row = threadIdx.x; row < a.n_kv + p.n_slots + a.n_tps; row += THREADS) {
        lost |= prompt_bias(p, token, row) != -INFINITY && is_bad(p, token / a.n_tps, row);
    }
    if (__syncthreads_or(lost) != 0) {
        for (int64_t i = threadIdx.x; i < p.c.out_stride; i += THREADS) {
            p.c.out[token * p.c.out_stride + i] = not_a_number();
        }
    }
}

} // namespace

// Returns the bytes of shared memory for keys or values, the larger number.
static size_t shared_bytes(const Layer & layer) {
    return std::max(Shared(nullptr, layer.width_k, false).bytes, Shared(nullptr, layer.width_v, true).bytes);
}

bool suits_prompt(const Layer & layer, int device) {
    return !layer.latent && layer.d_k % SIDE == 0 && layer.d_v % SIDE == 0 &&
           shared_bytes(layer) <= most_shared(device);
}

const char * prompt_rows(const Prompt & args, void * stream) {
    const Attend & a = args.c.a;
    if (const char * error =
            launch(cells_kernel,
                   dim3((unsigned) ((a.n_kv + TILE - 1) / TILE), (unsigned) (2 * args.n_heads), (unsigned) a.n_stream),
                   shared_bytes(a.layer), stream, args)) {
        return error;
    }
    return launch(exact_rows_kernel, dim3((unsigned) (args.n_rows - a.n_kv), (unsigned) a.n_stream), 0, stream, args);
}

const char * prompt_lost(const Prompt & args, void * stream) {
    return launch(lost_kernel, dim3((unsigned) (args.c.a.n_stream * args.c.a.n_tps)), 0, stream, args);
}

const char * prompt_mask(const Prompt & args, void * stream) {
    const Attend & a = args.c.a;
    return launch(mask_kernel,
                  dim3((unsigned) ((args.n_rows + THREADS - 1) / THREADS), (unsigned) (a.n_stream * a.n_tps)), 0,
                  stream, args);
}

} // namespace subkv::cuda
