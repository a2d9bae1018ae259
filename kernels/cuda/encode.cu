// encode.cu: c = E x - offset, quantized into rows as kernels/ref/encode.cpp defines, and the rows in half precision.
// One block per token, KV head and side (K or V).
#include "rows.cuh"

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

// Byte `at` of a band's planes: what its up to eight coefficients put there.
__device__ uint32_t plane_byte(const Band & band, const float * c, float inverse, int at) {
    if (band.bits == 16) {
        const float    x = fminf(fmaxf(c[band.first + at / 2], -HALF_MAX), HALF_MAX);
        const uint32_t h = to_half(x);
        return at % 2 == 0 ? h & 255 : h >> 8;
    }
    int w  = low_plane(band.bits);
    int up = 0;
    if (at >= band.n * w / 8) { // the second plane
        at -= band.n * w / 8;
        up = w;
        w  = band.bits - w;
    }
    const int m    = band.n * w / 8;
    uint32_t  byte = 0;
    for (int slot = 0; slot < 8 / w; ++slot) {
        const auto u = (uint32_t) quantize(c[band.first + at + slot * m], inverse, half_range(band.bits));
        byte |= (u >> up & ((1u << w) - 1)) << (w * slot);
    }
    return byte;
}

__global__ void encode_kernel(Encode a) {
    const Layer &     l     = a.layer;
    const int64_t     token = blockIdx.x;
    const int         h     = (int) blockIdx.y;
    const bool        value = blockIdx.z == 1;
    const HeadCodec & codec = (value ? l.v : l.k)[h];
    const float *     x     = value ? a.v + h * a.v_head + token * a.v_token : a.k + h * a.k_head + token * a.k_token;
    uint8_t *         row   = value ? a.v_rows + a.cells[token] * a.v_stride + l.v_offset[h] :
                                      a.k_rows + a.cells[token] * a.k_stride + l.k_offset[h];
    const int         lane  = (int) threadIdx.x % WARP;

    Carve   shared{ block_memory };
    float * xs   = shared.take<float>(MAX_HEAD_SIZE);
    float * c    = shared.take<float>(MAX_HEAD_SIZE);
    float * room = shared.take<float>(CANDIDATES * 8 + WARPS);

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
            total = fmaf(from_half(codec.encode[i * codec.d + j]), xs[j], total);
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
    if (finite && !zero) {
        const int   code = choose_scale(codec, c, room);
        const float s    = row_scale((uint32_t) code);
        if (threadIdx.x == 0) {
            row[0] = (uint8_t) code;
        }
        for (int i = 0; i < codec.n_bands; ++i) {
            const Band & band    = codec.bands[i];
            const float  inverse = __fdiv_rn(1.0f, __fmul_rn(s, band.ratio));
            for (int at = (int) threadIdx.x; at < band.n * band.bits / 8; at += THREADS) {
                row[band.offset + at] = (uint8_t) plane_byte(band, c, inverse, at);
            }
        }
    } else {
        for (int at = (int) threadIdx.x; at < codec.row_bytes; at += THREADS) {
            row[at] = 0;
        }
    }

    const int64_t    width = (int64_t) l.n_head_kv * (l.d_k + l.d_v);
    uint16_t *       fresh = a.fresh + token * width + (value ? (int64_t) l.n_head_kv * l.d_k + h * l.d_v : h * l.d_k);
    const uint16_t * mean  = value ? nullptr : l.mean[h];
    for (int j = (int) threadIdx.x; j < codec.d; j += THREADS) {
        fresh[j] = x_finite ? to_half(xs[j]) : mean != nullptr ? mean[j] : 0;
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
    shared.take<float>(MAX_HEAD_SIZE);
    shared.take<float>(MAX_HEAD_SIZE);
    shared.take<float>(CANDIDATES * 8 + WARPS);
    return launch(encode_kernel, dim3((unsigned) args.n_tok, (unsigned) args.layer.n_head_kv, 2), shared.used, stream,
                  args);
}

const char * store_window(const Store & args, void * stream) {
    return args.n_slots == 0 ? nullptr : launch(store_kernel, dim3((unsigned) args.n_slots), 0, stream, args);
}

} // namespace subkv::cuda
