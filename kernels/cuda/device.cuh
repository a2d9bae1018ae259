// device.cuh: functions for all kernels: launches, warp sums, halves, asynchronous copies.
//
// Kernels allocate their shared memory from one dynamic block (Carve), and use only the functions that
// tests/kernels/emulated declares, so that tests can run them on the CPU.
#pragma once

#include "ops.h"

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstddef>

namespace subkv::cuda {

constexpr int WARP    = 32;
constexpr int THREADS = 128; // threads per block
constexpr int WARPS   = THREADS / WARP;

extern __shared__ __align__(32) unsigned char block_memory[]; // tensor cores load from multiples of 32 bytes

// Hands out parts of the block's shared memory, each aligned to 32 bytes. On the host, where the base is nullptr, it
// counts their bytes.
struct Carve {
    unsigned char * base;
    size_t          used = 0;

    template <typename T> __host__ __device__ T * take(size_t n) {
        T * part = reinterpret_cast<T *>(base + used);
        used += (n * sizeof(T) + 31) / 32 * 32;
        return part;
    }
};

// Returns nullptr, or the message of an error. The runtime forgets the error, which a later check would take for its own.
inline const char * message_of(cudaError_t e) {
    if (e == cudaSuccess) {
        return nullptr;
    }
    (void) cudaGetLastError();
    return cudaGetErrorString(e);
}

// Returns an attribute of a device, or `usual` if it is unknown.
inline int attribute(cudaDeviceAttr of, int device, int usual) {
    int value = 0;
    return message_of(cudaDeviceGetAttribute(&value, of, device)) == nullptr ? value : usual;
}

inline int current_device() {
    int device = 0;
    return message_of(cudaGetDevice(&device)) == nullptr ? device : 0;
}

// Returns the maximum dynamic shared memory of a block.
inline size_t most_shared(int device) {
    return (size_t) attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device, 48 << 10);
}

inline size_t most_shared() {
    return most_shared(current_device());
}

inline int64_t multiprocessors(int device) {
    return attribute(cudaDevAttrMultiProcessorCount, device, 64);
}

template <typename Args>
const char * launch(void (*kernel)(Args), dim3 grid, size_t shared, void * stream, const Args & args,
                    int threads = THREADS) {
    if (shared > 48u << 10) { // The limit is the process's. Another thread may launch the kernel with more than this.
        const auto of = cudaFuncAttributeMaxDynamicSharedMemorySize;
        if (const char * error = message_of(cudaFuncSetAttribute(kernel, of, (int) most_shared()))) {
            return error;
        }
    }
    cudaLaunchConfig_t config = {};
    config.gridDim            = grid;
    config.blockDim           = dim3((unsigned) threads);
    config.dynamicSmemBytes   = shared;
    config.stream             = (cudaStream_t) stream;
    return message_of(cudaLaunchKernelEx(&config, kernel, args));
}

constexpr unsigned ALL = 0xffffffffu;

__device__ inline int64_t least(int64_t a, int64_t b) {
    return a < b ? a : b;
}

__device__ inline float warp_sum(float x) {
    for (int step = WARP / 2; step > 0; step /= 2) {
        x += __shfl_xor_sync(ALL, x, step);
    }
    return x;
}

__device__ inline float warp_max(float x) {
    for (int step = WARP / 2; step > 0; step /= 2) {
        x = fmaxf(x, __shfl_xor_sync(ALL, x, step));
    }
    return x;
}

// Sums each element of x over the lanes, in the order of warp_sum. Lane l gets the sum of x[l]. N is the lanes'
// distance in this step.
template <int N = WARP / 2> __device__ float sum_of_each(float (&x)[WARP]) {
    const bool upper = ((int) threadIdx.x & N) != 0;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const float other = __shfl_xor_sync(ALL, upper ? x[i] : x[i + N], N);
        x[i]              = (upper ? x[i + N] : x[i]) + other;
    }
    if constexpr (N > 1) {
        return sum_of_each<N / 2>(x);
    }
    return x[0];
}

// Returns the maximum of all threads' x in all threads. `room` has N_WARPS floats.
template <int N_WARPS = WARPS> __device__ inline float block_max(float x, float * room) {
    x = warp_max(x);
    if (threadIdx.x % WARP == 0) {
        room[threadIdx.x / WARP] = x;
    }
    __syncthreads();
    x = room[0];
    for (int i = 1; i < N_WARPS; ++i) {
        x = fmaxf(x, room[i]);
    }
    __syncthreads();
    return x;
}

__device__ inline float from_half(uint16_t h) {
    return __half2float(__ushort_as_half(h));
}

__device__ inline uint16_t to_half(float x) {
    return __half_as_ushort(__float2half_rn(x));
}

// a copy of EIGHTHS that device code can index
static __constant__ float ROOTS[8] = { EIGHTHS[0], EIGHTHS[1], EIGHTHS[2], EIGHTHS[3],
                                       EIGHTHS[4], EIGHTHS[5], EIGHTHS[6], EIGHTHS[7] };

__device__ inline float not_a_number() {
    return __uint_as_float(0x7fc00000u);
}

__device__ inline bool is_nan(float x) {
    return x != x;
}

// Returns x, or NaN if it is infinite.
__device__ inline float finite_or_nan(float x) {
    return fmaf(x, 0.0f, x);
}

// Returns exp(x) for x <= 0, and 0 for -INFINITY.
__device__ inline float exponential(float x) {
    x *= 1.44269504f;
#if defined(__CUDA_ARCH__)
    float out;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
#else
    return exp2f(x);
#endif
}

// Returns the scale of a row, which is 2^((code - SCALE_ONE)/8) rounded to f32, 0 for code 0, or NaN for SCALE_NAN.
__device__ inline float row_scale(uint32_t code) {
    const float scale = __uint_as_float((code / 8 + 127 - SCALE_ONE / 8) << 23) * ROOTS[code % 8];
    return code == 0 ? 0.0f : code == SCALE_NAN ? not_a_number() : scale;
}

// N values that one instruction loads.
template <typename T, int N> struct alignas(N * sizeof(T)) Loaded {
    T of[N];
};

using Sixteen = Loaded<uint32_t, 4>;

// Adjacent elements of a row of halves that a lane loads at a time.
constexpr int COLUMNS = 4;
constexpr int ROW     = WARP * COLUMNS; // elements of a row that a warp loads at a time
using FourHalves      = Loaded<uint16_t, COLUMNS>;

// Copies `bytes` bytes to shared memory, 16 per thread at a time. All addresses and sizes are multiples of 16. The
// copies of a call are one group. If the device supports it, they are asynchronous, and copies_done() waits for all but
// the last `pending` groups.
__device__ inline void copy_part(uint8_t * to, const uint8_t * from, int bytes, int threads) {
    constexpr int N    = 4;
    const int     step = threads * (int) sizeof(Sixteen);
#pragma unroll 1
    for (; bytes > 0; to += N * step, from += N * step, bytes -= N * step) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
        const auto at = (uint32_t) __cvta_generic_to_shared(to);
#    pragma unroll
        for (int n = 0; n < N; ++n) {
            if (n * step < bytes) {
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at + n * step), "l"(from + n * step)
                             : "memory");
            }
        }
#else
        Sixteen x[N] = {};
#    pragma unroll
        for (int n = 0; n < N; ++n) {
            if (n * step < bytes) {
                x[n] = *reinterpret_cast<const Sixteen *>(from + n * step);
            }
        }
#    pragma unroll
        for (int n = 0; n < N; ++n) {
            if (n * step < bytes) {
                *reinterpret_cast<Sixteen *>(to + n * step) = x[n];
            }
        }
#endif
    }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

template <int pending> __device__ inline void copies_done() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
#endif
}

} // namespace subkv::cuda
