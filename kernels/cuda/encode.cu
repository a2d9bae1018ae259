// encode.cu: c = E x - offset, quantized as kernels/ref/encode.cpp defines, and the rows in half precision. One block per
// token, KV head and side (K or V).
//
// A byte of a tile can hold codes of four cells, which other blocks may write at the same time; no two cells share a bit.
// So bits are exchanged atomically, a word at a time. Scale codes and halves have bytes of their own.
#include "tiles.cuh"

namespace subkv::cuda {

namespace {

constexpr int CANDIDATES = SCALE_CANDIDATES_BELOW + 1;
static_assert(CANDIDATES * 8 <= THREADS, "one thread per candidate and lane");

__device__ float quantize(float c, float inverse, float zero) {
    return fminf(fmaxf(rintf(fmaf(c, inverse, zero)), 0.0f), 2.0f * zero);
}

// Lane `lane` of the squared error with scale s: coefficients j with j % 8 == lane, in ascending order.
__device__ float lane_error(const HeadCodec & codec, const float * c, float s, int lane) {
    float error = 0.0f;
    for (int i = 0; i < codec.n_bands; ++i) {
        const Band & band = codec.bands[i];
        if (band.bits == 16) {
            continue;
        }
        const float step    = __fmul_rn(s, band.ratio);
        const float inverse = __fdiv_rn(1.0f, step);
        const float zero    = half_range(band.bits);
        for (int j = lane; j < band.n; j += 8) {
            const float x = c[band.first + j];
            const float e = fmaf(-step, quantize(x, inverse, zero) - zero, x);
            error         = fmaf(e, e, error);
        }
    }
    return error;
}

// c [rank] in shared memory -> scale code, the same in all threads. room: [CANDIDATES * 8 + WARPS] floats.
__device__ int choose_scale(const HeadCodec & codec, const float * c, float * room) {
    float reach     = 0.0f;
    bool  quantized = false;
    for (int i = 0; i < codec.n_bands; ++i) {
        const Band & band = codec.bands[i];
        if (band.bits == 16) {
            continue;
        }
        quantized        = true;
        const float full = __fmul_rn(band.ratio, half_range(band.bits));
        for (int j = (int) threadIdx.x; j < band.n; j += THREADS) {
            reach = fmaxf(reach, __fdiv_rn(fabsf(c[band.first + j]), full));
        }
    }
    if (!quantized) {
        return SCALE_ONE;
    }
    reach  = block_max(reach, room + CANDIDATES * 8);
    int k0 = 1;
    while (k0 < 255 && row_scale((uint32_t) k0) < reach) {
        ++k0;
    }
    const int candidate = (int) threadIdx.x / 8;
    if (candidate < CANDIDATES && k0 - candidate >= 1) {
        room[threadIdx.x] = lane_error(codec, c, row_scale((uint32_t) (k0 - candidate)), (int) threadIdx.x % 8);
    }
    __syncthreads();
    int   best       = k0;
    float best_error = INFINITY;
    for (int i = 0; i < CANDIDATES && k0 - i >= 1; ++i) { // ties to the larger scale
        const float * l     = room + i * 8;
        const float   error = ((l[0] + l[4]) + (l[2] + l[6])) + ((l[1] + l[5]) + (l[3] + l[7]));
        if (i == 0 || error < best_error) {
            best       = k0 - i;
            best_error = error;
        }
    }
    return best;
}

// Of the word at `at` the bits of `mask`, which no other thread changes, become those of `bits`.
__device__ void put(uint8_t * at, uint32_t bits, uint32_t mask) {
    auto * word = reinterpret_cast<unsigned *>(at);
    atomicXor(word, (*const_cast<const volatile unsigned *>(word) ^ bits) & mask);
}

// Writes the codes [rank] of cell c to its tile.
__device__ void store_codes(const HeadCodec & codec, const uint8_t * codes, uint8_t * tile, int c) {
    // a word holds four coefficients of a key, but of one of a value
    const int each = codec.value != 0 ? 1 : 4, words = 8 / each;
    for (int b = 0; b < codec.n_bands; ++b) {
        const Band & band = codec.bands[b];
        for (int i = (int) threadIdx.x; band.bits != 16 && i < band.n / each; i += THREADS) {
            const uint8_t * u     = codes + band.first + i * each;
            const int       j     = i % words; // of the octet
            const int       rho   = codec.value != 0 ? c / 8 : 4 * j + c / 16;
            const int       at    = codec.value != 0 ? 8 * j + c % 8 / 4 * 4 : 4 * (c % 16);
            const uint32_t  ones  = codec.value != 0 ? 1u << 8 * (c % 4) : 0x01010101u;
            uint8_t *       lines = tile + TILE * (band.offset + i / words * band.bits);
            uint32_t        word  = 0;
            for (int x = 0; x < each; ++x) {
                word |= (uint32_t) u[x] << (codec.value != 0 ? 8 * (c % 4) : 8 * x);
            }
            const TileFields fields = tile_fields(band.bits, rho);
            for (int x = 0; x < fields.n; ++x) {
                const TileField f    = fields.field[x];
                const uint32_t  mask = ones * ((1u << f.width) - 1);
                put(lines + f.line * LINE + at, (word >> f.from & mask) << f.shift, mask << f.shift);
            }
        }
    }
}

__global__ void encode_kernel(Encode a) {
    const Layer &     l     = a.layer;
    const int64_t     token = blockIdx.x;
    const int         h     = (int) blockIdx.y;
    const bool        value = blockIdx.z == 1;
    const HeadCodec & codec = (value ? l.v : l.k)[h];
    const float *     x     = value ? a.v + h * a.v_head + token * a.v_token : a.k + h * a.k_head + token * a.k_token;
    const int         lane  = (int) threadIdx.x % WARP;
    const int64_t     cell  = a.cells[token];
    const int         in    = (int) (cell % TILE); // its tile
    uint8_t *         tile  = value ? a.v_tiles + cell / TILE * a.v_stride + l.v_offset[h] :
                                      a.k_tiles + cell / TILE * a.k_stride + l.k_offset[h];

    Carve   shared{ block_memory };
    float * xs    = shared.take<float>(MAX_HEAD);
    float * c     = shared.take<float>(MAX_HEAD);
    float * room  = shared.take<float>(CANDIDATES * 8 + WARPS);
    auto *  codes = shared.take<uint8_t>(MAX_HEAD);

    bool finite = true;
    for (int j = (int) threadIdx.x; j < codec.d; j += THREADS) {
        xs[j]  = x[j];
        finite = finite && isfinite(xs[j]);
    }
    const bool x_finite = __syncthreads_and(finite) != 0;

    finite    = true;
    bool zero = true;
    for (int i = (int) threadIdx.x / WARP; i < codec.rank; i += WARPS) {
        float total = 0.0f;
        for (int j = lane; j < codec.d; j += WARP) {
            total = fmaf(from_half(codec.encode.halves[i * codec.d + j]), xs[j], total);
        }
        total = warp_sum(total);
        if (codec.offset != nullptr) {
            total = __fsub_rn(total, codec.offset[i]);
        }
        if (lane == 0) {
            c[i] = total;
        }
        finite = finite && isfinite(total);
        zero   = zero && total == 0.0f;
    }
    finite = __syncthreads_and(finite) != 0;
    zero   = __syncthreads_and(zero) != 0;
    if (!finite && threadIdx.x == 0) {
        atomicAdd(l.n_bad, 1ull);
    }
    const bool  live = finite && !zero;
    const int   code = live ? choose_scale(codec, c, room) : 0;
    const float s    = row_scale((uint32_t) code);
    if (threadIdx.x == 0) {
        tile[in] = (uint8_t) code;
    }
    for (int i = 0; i < codec.n_bands; ++i) {
        const Band & band    = codec.bands[i];
        const float  inverse = live ? __fdiv_rn(1.0f, __fmul_rn(s, band.ratio)) : 0.0f;
        for (int j = (int) threadIdx.x; j < band.n; j += THREADS) {
            const float x = live ? c[band.first + j] : 0.0f;
            if (band.bits == 16) {
                uint8_t * half                      = tile + TILE * band.offset + 2 * (j * TILE + in);
                *reinterpret_cast<uint16_t *>(half) = to_half(fminf(fmaxf(x, -HALF_MAX), HALF_MAX));
            } else {
                codes[band.first + j] = live ? (uint8_t) quantize(x, inverse, half_range(band.bits)) : 0;
            }
        }
    }
    __syncthreads();
    store_codes(codec, codes, tile, in);

    const int64_t    width = (int64_t) l.n_head_kv * (l.d_k + l.d_v);
    uint16_t *       fresh = a.fresh + token * width + (value ? (int64_t) l.n_head_kv * l.d_k + h * l.d_v : h * l.d_k);
    const uint16_t * mean  = value ? nullptr : l.mean[h];
    for (int j = (int) threadIdx.x; j < codec.d; j += THREADS) {
        fresh[j] = x_finite ? to_half(fminf(fmaxf(xs[j], -HALF_MAX), HALF_MAX)) : mean != nullptr ? mean[j] : 0;
    }
}

__global__ void store_kernel(Store a) {
    const int32_t token = a.token[blockIdx.x];
    for (int64_t j = threadIdx.x; token >= 0 && j < a.width; j += THREADS) {
        a.window[blockIdx.x * a.width + j] = a.fresh[token * a.width + j];
    }
}

} // namespace

const char * encode(const Encode & args, void * stream) {
    if (args.n_tok == 0) {
        return nullptr;
    }
    Carve shared{ nullptr };
    shared.take<float>(MAX_HEAD);
    shared.take<float>(MAX_HEAD);
    shared.take<float>(CANDIDATES * 8 + WARPS);
    shared.take<uint8_t>(MAX_HEAD);
    return launch(encode_kernel, dim3((unsigned) args.n_tok, (unsigned) args.layer.n_head_kv, 2), shared.used, stream,
                  args);
}

const char * store_window(const Store & args, void * stream) {
    return args.n_slots == 0 ? nullptr : launch(store_kernel, dim3((unsigned) args.n_slots), 0, stream, args);
}

} // namespace subkv::cuda
