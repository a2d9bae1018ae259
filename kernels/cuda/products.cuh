// products.cuh: products of bytes by tensor cores, m8n8k16 on sm_75, larger ones from sm_80 on.
//
// In a product of 8 rows and 8 columns with depth 16, lane l of the warp has
//   left    row l / 4, four depths from 4 * (l % 4) on, the signed bytes of a word
//   right   column l / 4, the same depths
//   sum     row l / 4, columns 2 * (l % 4) and 2 * (l % 4) + 1
// All lanes of a warp call these together. tests/kernels/emulated defines emulated::product for a CPU.
#pragma once

#include "device.cuh"

namespace subkv::cuda {

// Adds the products of 16 rows. The first half of `sum` and `left` are of row l / 4, and the second half of `sum` and
// left_8 of row 8 + l / 4. `right` is signed.
__device__ inline void add_product_16(int (&sum)[4], uint32_t left, uint32_t left_8, uint32_t right) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                 : "+r"(sum[0]), "+r"(sum[1]), "+r"(sum[2]), "+r"(sum[3])
                 : "r"(left), "r"(left_8), "r"(right));
#elif defined(__CUDA_ARCH__)
    asm volatile("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
                 : "+r"(sum[0]), "+r"(sum[1])
                 : "r"(left), "r"(right));
    asm volatile("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
                 : "+r"(sum[2]), "+r"(sum[3])
                 : "r"(left_8), "r"(right));
#elif !defined(__CUDACC__)
    emulated::product(sum, left, right, true);
    emulated::product(sum + 2, left_8, right, true);
#endif
}

// Does this with twice the depth. Words 0 have depths 0 to 15, and words 1 depths 16 to 31. Without ALL_ROWS, the
// second half of `sum` is not used. `right` is unsigned, except with SIGNED.
template <bool ALL_ROWS, bool SIGNED = false>
__device__ inline void add_deep_product(int (&sum)[4], const uint32_t (&left)[2], const uint32_t (&left_8)[2],
                                        const uint32_t (&right)[2]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#    define SUBKV_PRODUCT(type)                                                                                        \
        asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8." type ".s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "      \
                     "{%8, %9}, {%0, %1, %2, %3};"                                                                     \
                     : "+r"(sum[0]), "+r"(sum[1]), "+r"(sum[2]), "+r"(sum[3])                                          \
                     : "r"(left[0]), "r"(left_8[0]), "r"(left[1]), "r"(left_8[1]), "r"(right[0]), "r"(right[1]))
    if constexpr (SIGNED) {
        SUBKV_PRODUCT("s8");
    } else {
        SUBKV_PRODUCT("u8");
    }
#    undef SUBKV_PRODUCT
#elif defined(__CUDA_ARCH__)
    if constexpr (SIGNED) {
        add_product_16(sum, left[0], left_8[0], right[0]);
        add_product_16(sum, left[1], left_8[1], right[1]);
    } else {
#    pragma unroll
        for (int i = 0; i < 2; ++i) {
            asm volatile("mma.sync.aligned.m8n8k16.row.col.s32.s8.u8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
                         : "+r"(sum[0]), "+r"(sum[1])
                         : "r"(left[i]), "r"(right[i]));
            if (ALL_ROWS) {
                asm volatile("mma.sync.aligned.m8n8k16.row.col.s32.s8.u8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
                             : "+r"(sum[2]), "+r"(sum[3])
                             : "r"(left_8[i]), "r"(right[i]));
            }
        }
    }
#elif !defined(__CUDACC__)
    for (int i = 0; i < 2; ++i) {
        emulated::product(sum, left[i], right[i], SIGNED);
        if (ALL_ROWS) {
            emulated::product(sum + 2, left_8[i], right[i], SIGNED);
        }
    }
#endif
}

} // namespace subkv::cuda
