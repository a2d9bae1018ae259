// widths.h: the widths of codes, each with its constants in one line (converter/FORMAT.md §2, §3). All other code
// reads them from here: C++ and CUDA by the functions below and by these macros, shaders by the tables that
// vulkan/ops.cpp writes, Triton by subkv_triton/widths.py, which `python cmake/widths.py` writes. tiles.h has the
// fields of each width, and docs/development.md lists all places of a new one.
#pragma once

#include <cstdint>

// These functions also run on GPUs. They are static because ISA files include them, and the linker must not pick the
// copy of such a file.
#if defined(__CUDACC__)
#    define SUBKV_EVERYWHERE static __host__ __device__ constexpr
#else
#    define SUBKV_EVERYWHERE static constexpr
#endif

// OF(bits, low, double, triple, share, ...) for each width of a path. `low` is the bits of the low plane, `double` and
// `triple` are the magnitudes above which the distance of levels is twice and three times as large, and `share` is the
// best step for a unit Gaussian, divided by the best step of a uniform quantizer with the same bits, because a band's
// ratio is for the uniform quantizer.
#define SUBKV_PATH_WIDTHS(OF, ...)                                                                                     \
    OF(2, 2, 2, 4, 0.411522634f, __VA_ARGS__)                                                                          \
    OF(3, 2, 5, 6, 0.40290088f, __VA_ARGS__)                                                                           \
    OF(4, 4, 9, 12, 0.358166188f, __VA_ARGS__)                                                                         \
    OF(5, 4, 19, 25, 0.353481798f, __VA_ARGS__)                                                                        \
    OF(6, 4, 37, 50, 0.329380765f, __VA_ARGS__)

// OF(bits, low, ...) for the other widths of integer codes.
#define SUBKV_PLAIN_WIDTHS(OF, ...) OF(8, 8, __VA_ARGS__)

namespace subkv {

#define SUBKV_BITS(bits, ...) bits,

constexpr int32_t WIDTHS[] = { SUBKV_PATH_WIDTHS(SUBKV_BITS, ) SUBKV_PLAIN_WIDTHS(SUBKV_BITS, ) 16 }; // widths of bands
#undef SUBKV_BITS

static constexpr bool is_width(int32_t bits) {
    for (const int32_t width : WIDTHS) {
        if (bits == width) {
            return true;
        }
    }
    return false;
}

// Statements that return a column of the table above in the row of `bits`.
#define SUBKV_RETURN(width, value)                                                                                     \
    if (bits == width) {                                                                                               \
        return value;                                                                                                  \
    }
#define SUBKV_LOW(width, low, ...)                         SUBKV_RETURN(width, low)
#define SUBKV_DOUBLE(width, low, twice, ...)               SUBKV_RETURN(width, twice)
#define SUBKV_TRIPLE(width, low, twice, thrice, ...)       SUBKV_RETURN(width, thrice)
#define SUBKV_SHARE(width, low, twice, thrice, share, ...) SUBKV_RETURN(width, share)

// Codes of b bits are stored as one or two bit planes, the low low_plane(b) bits and then the other bits.
SUBKV_EVERYWHERE int32_t low_plane(int32_t bits) {
    SUBKV_PATH_WIDTHS(SUBKV_LOW, )
    SUBKV_PLAIN_WIDTHS(SUBKV_LOW, )
    return bits;
}

// The constants of a path (trellis.h), which are 0 for other widths.
SUBKV_EVERYWHERE int32_t trellis_double(int32_t bits) {
    SUBKV_PATH_WIDTHS(SUBKV_DOUBLE, )
    return 0;
}

SUBKV_EVERYWHERE int32_t trellis_triple(int32_t bits) {
    SUBKV_PATH_WIDTHS(SUBKV_TRIPLE, )
    return 0;
}

SUBKV_EVERYWHERE float trellis_share(int32_t bits) {
    SUBKV_PATH_WIDTHS(SUBKV_SHARE, )
    return 0.0f;
}

#undef SUBKV_SHARE
#undef SUBKV_TRIPLE
#undef SUBKV_DOUBLE
#undef SUBKV_LOW
#undef SUBKV_RETURN

} // namespace subkv
