// mma.h: matrix products of a warp. Every thread holds and computes all of every matrix, one of them stores it.
#pragma once

#include "cuda_fp16.h"
#include "cuda_runtime.h"

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

template <typename F> void fill_fragment(F & f, float value) {
    for (float & x : f.x) {
        x = value;
    }
}

template <typename Use> void load_matrix_sync(fragment<Use, 16, 16, 16, __half, row_major> & f, const __half * p,
                                              unsigned ld) {
    emulated::warp_barrier();
    for (unsigned i = 0; i < 256; ++i) {
        f.x[i] = __half2float(p[i / 16 * ld + i % 16]);
    }
}

template <typename Use> void load_matrix_sync(fragment<Use, 16, 16, 16, __half, col_major> & f, const __half * p,
                                              unsigned ld) {
    emulated::warp_barrier();
    for (unsigned i = 0; i < 256; ++i) {
        f.x[i] = __half2float(p[i % 16 * ld + i / 16]);
    }
}

inline void load_matrix_sync(fragment<accumulator, 16, 16, 16, float> & f, const float * p, unsigned ld, layout_t) {
    emulated::warp_barrier();
    for (unsigned i = 0; i < 256; ++i) {
        f.x[i] = p[i / 16 * ld + i % 16];
    }
}

inline void store_matrix_sync(float * p, const fragment<accumulator, 16, 16, 16, float> & f, unsigned ld, layout_t) {
    emulated::warp_barrier();
    for (unsigned i = threadIdx.x % 32; i < 256; i += 32) {
        p[i / 16 * ld + i % 16] = f.x[i];
    }
    emulated::warp_barrier();
}

template <typename A, typename B, typename C> void mma_sync(C & d, const A & a, const B & b, const C & c) {
    emulated::warp_barrier();
    C sum = c;
    for (int i = 0; i < 16; ++i) {
        for (int k = 0; k < 16; ++k) {
            for (int j = 0; j < 16; ++j) {
                sum.x[i * 16 + j] += a.x[i * 16 + k] * b.x[k * 16 + j];
            }
        }
    }
    d = sum;
}

} // namespace nvcuda::wmma
