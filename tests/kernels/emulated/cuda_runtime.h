// cuda_runtime.h: the part of CUDA that kernels/cuda uses, on a CPU. The threads of a block are fibers that switch only
// at barriers, so results are the same in every run. Device memory is host memory.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __constant__ const
#define __shared__
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)

struct alignas(16) float4 {
    float x, y, z, w;
};

struct dim3 {
    unsigned x, y, z;

    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

namespace emulated {

extern dim3 thread_index, block_index;

// Runs launches: set by gpu.cpp, which makes its memory accessible to those outside a graph; nullptr: any memory is.
extern void (*around_launch)(void (*launch)(void *), void * data);

// Starts work on a stream, and waits for a stream: set by gpu.cpp, whose streams run when somebody waits for them;
// nullptr: work is done at once.
extern void (*on_stream)(void * stream, std::function<void()> work);
extern void (*wait_for)(void * stream);

// Called before a launch runs, with the blocks of its grid and the threads of a block; nullptr: nothing is.
extern void (*before_launch)(const void * kernel, const unsigned * grid, unsigned n_threads);

// true: launches are counted as on a device, but do not run (emulated_only_count).
extern bool   only_count;
extern size_t last_shared; // dynamic shared memory of the last launch's block

extern std::vector<unsigned char> last_args; // arguments of the last launch

void     run_grid(dim3 grid, unsigned n_threads, void (*body)(void *), void * data);
void     block_barrier();
void     warp_barrier();
bool     block_any(bool mine);
bool     block_all(bool mine);
uint32_t from_lane(uint32_t mine, unsigned lane);

// mma.sync m8n8k16 of bytes, with the fragments of the PTX ISA; left is signed.
void product(int * sum, uint32_t left, uint32_t right, bool right_signed);

} // namespace emulated

#define threadIdx emulated::thread_index
#define blockIdx  emulated::block_index

enum cudaError_t { cudaSuccess };
enum cudaDeviceAttr {
    cudaDevAttrMaxSharedMemoryPerBlockOptin,
    cudaDevAttrMaxSharedMemoryPerMultiprocessor,
    cudaDevAttrReservedSharedMemoryPerBlock,
    cudaDevAttrMultiProcessorCount,
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
using cudaStream_t = void *;

struct cudaLaunchConfig_t {
    dim3         gridDim, blockDim;
    size_t       dynamicSmemBytes;
    cudaStream_t stream;
};

cudaError_t cudaGetDevice(int * device);
cudaError_t cudaDeviceGetAttribute(int * value, cudaDeviceAttr attr, int device);

inline cudaError_t cudaSetDevice(int) {
    return cudaSuccess;
}

inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    if (emulated::wait_for) {
        emulated::wait_for(stream);
    }
    return cudaSuccess;
}

struct cudaPointerAttributes {
    int device;
};

inline cudaError_t cudaPointerGetAttributes(cudaPointerAttributes * of, const void *) {
    of->device = 0;
    return cudaSuccess;
}

inline cudaError_t cudaGetLastError() {
    return cudaSuccess;
}

inline const char * cudaGetErrorString(cudaError_t) {
    return "emulated error";
}

template <typename Kernel> cudaError_t cudaFuncSetAttribute(Kernel *, cudaFuncAttribute, int) {
    return cudaSuccess;
}

template <typename Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t * config, void (*kernel)(Args), const Args & args) {
    struct Call {
        void (*kernel)(Args);
        Args     args;
        dim3     grid;
        unsigned n_threads;

        void operator()() {
            emulated::run_grid(grid, n_threads, [](void * c) { ((Call *) c)->kernel(((Call *) c)->args); }, this);
        }
    } call{ kernel, args, config->gridDim, config->blockDim.x };

    emulated::last_shared = config->dynamicSmemBytes;
    const auto * bytes    = reinterpret_cast<const unsigned char *>(&args);
    emulated::last_args.assign(bytes, bytes + sizeof(args));
    if (emulated::only_count) {
        return cudaSuccess;
    }
    if (emulated::before_launch) {
        const unsigned grid[] = { config->gridDim.x, config->gridDim.y, config->gridDim.z };
        emulated::before_launch(reinterpret_cast<const void *>(kernel), grid, config->blockDim.x);
    }
    if (emulated::on_stream) {
        emulated::on_stream(config->stream, call);
    } else {
        call();
    }
    return cudaSuccess;
}

using std::isfinite;

inline int max(int a, int b) {
    return a > b ? a : b;
}

inline int min(int a, int b) {
    return a < b ? a : b;
}

inline void __syncthreads() {
    emulated::block_barrier();
}

inline void __syncwarp() {
    emulated::warp_barrier();
}

inline int __syncthreads_and(int mine) {
    return emulated::block_all(mine != 0);
}

inline int __syncthreads_or(int mine) {
    return emulated::block_any(mine != 0);
}

inline float __uint_as_float(uint32_t u) {
    float x;
    std::memcpy(&x, &u, sizeof(x));
    return x;
}

inline uint32_t __float_as_uint(float x) {
    uint32_t u;
    std::memcpy(&u, &x, sizeof(u));
    return u;
}

inline float __shfl_xor_sync(uint32_t, float x, int mask) {
    const unsigned lane = threadIdx.x % 32 ^ (unsigned) mask;
    return __uint_as_float(emulated::from_lane(__float_as_uint(x), lane));
}

inline uint32_t __shfl_xor_sync(uint32_t, uint32_t x, int mask) {
    return emulated::from_lane(x, threadIdx.x % 32 ^ (unsigned) mask);
}

inline uint32_t __shfl_sync(uint32_t, uint32_t x, int lane) {
    return emulated::from_lane(x, (unsigned) lane);
}

inline int __shfl_sync(uint32_t, int x, int lane) {
    return (int) emulated::from_lane((uint32_t) x, (unsigned) lane);
}

inline float __shfl_sync(uint32_t, float x, int lane) {
    return __uint_as_float(emulated::from_lane(__float_as_uint(x), (unsigned) lane));
}

inline uint32_t __ballot_sync(uint32_t all, int mine) {
    uint32_t bits = (mine != 0 ? 1u : 0u) << threadIdx.x % 32;
    for (int step = 1; step < 32; step *= 2) {
        bits |= __shfl_xor_sync(all, bits, step);
    }
    return bits;
}

inline int __ffs(int x) {
    return __builtin_ffs(x);
}

inline unsigned long long atomicAdd(unsigned long long * sum, unsigned long long x) {
    *sum += x;
    return *sum - x;
}

inline unsigned atomicAdd(unsigned * sum, unsigned x) {
    *sum += x;
    return *sum - x;
}

inline unsigned atomicAnd(unsigned * word, unsigned x) {
    const unsigned old = *word;
    *word &= x;
    return old;
}

inline unsigned atomicOr(unsigned * word, unsigned x) {
    const unsigned old = *word;
    *word |= x;
    return old;
}

inline float __fmul_rn(float a, float b) {
    return a * b;
}

inline float __fadd_rn(float a, float b) {
    return a + b;
}

inline float __fsub_rn(float a, float b) {
    return a - b;
}

inline int __float2int_rn(float x) { // NaN is 0
    return x >= 2147483648.0f ? 2147483647 :
           x > -2147483648.0f ? (int) std::nearbyint(x) :
           x == x             ? -2147483647 - 1 :
                                0;
}

inline float __fdividef(float a, float b) {
    return a / b;
}

inline float __fdiv_rn(float a, float b) {
    return a / b;
}

inline uint32_t __dp4a(uint32_t a, uint32_t b, uint32_t sum) {
    for (int i = 0; i < 4; ++i) {
        sum += (a >> 8 * i & 255) * (b >> 8 * i & 255);
    }
    return sum;
}
