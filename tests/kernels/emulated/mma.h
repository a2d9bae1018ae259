// mma.h: matrix products of a warp. Every thread holds whole matrices.
#pragma once

#include "cuda_fp16.h"
#include "cuda_runtime.h"

#include <cstdlib>

namespace nvcuda::wmma {

struct matrix_a {};

struct matrix_b {};

struct accumulator {};

struct row_major {};

struct col_major {};

enum layout_t { mem_row_major };

template <typename Use, int M, int N, int K, typename T, typename Order = row_major> struct fragment {
    static constexpr int num_elements = 256;
    float                x[num_elements];
};

// load_matrix_sync and store_matrix_sync require addresses in multiples of 32 bytes, and rows in multiples of 16.
template <typename T> void check_address(const T * p, unsigned ld) {
    if ((uintptr_t) p % 32 != 0 || ld * sizeof(T) % 16 != 0) {
        std::abort();
    }
}

// x[i] = element(i): each thread computes a share, and all threads get all elements.
template <typename Element> void share(float (&x)[256], Element element) {
    static float  room[32][256]; // by warp
    float * const mine = room[threadIdx.x / 32];
    emulated::warp_barrier();
    for (unsigned i = threadIdx.x % 32; i < 256; i += 32) {
        mine[i] = element(i);
    }
    emulated::warp_barrier();
    std::memcpy(x, mine, sizeof(x));
    emulated::warp_barrier();
}

template <typename F> void fill_fragment(F & f, float value) {
    for (float & x : f.x) {
        x = value;
    }
}

template <typename Use>
void load_matrix_sync(fragment<Use, 16, 16, 16, __half, row_major> & f, const __half * p, unsigned ld) {
    check_address(p, ld);
    share(f.x, [&](unsigned i) { return __half2float(p[i / 16 * ld + i % 16]); });
}

template <typename Use>
void load_matrix_sync(fragment<Use, 16, 16, 16, __half, col_major> & f, const __half * p, unsigned ld) {
    check_address(p, ld);
    share(f.x, [&](unsigned i) { return __half2float(p[i % 16 * ld + i / 16]); });
}

inline void load_matrix_sync(fragment<accumulator, 16, 16, 16, float> & f, const float * p, unsigned ld, layout_t) {
    check_address(p, ld);
    share(f.x, [&](unsigned i) { return p[i / 16 * ld + i % 16]; });
}

inline void store_matrix_sync(float * p, const fragment<accumulator, 16, 16, 16, float> & f, unsigned ld, layout_t) {
    check_address(p, ld);
    emulated::warp_barrier();
    for (unsigned i = threadIdx.x % 32; i < 256; i += 32) {
        p[i / 16 * ld + i % 16] = f.x[i];
    }
    emulated::warp_barrier();
}

template <typename A, typename B, typename C> void mma_sync(C & d, const A & a, const B & b, const C & c) {
    share(d.x, [&](unsigned i) {
        float sum = c.x[i];
        for (unsigned k = 0; k < 16; ++k) {
            sum += a.x[i / 16 * 16 + k] * b.x[k * 16 + i % 16];
        }
        return sum;
    });
}

} // namespace nvcuda::wmma
