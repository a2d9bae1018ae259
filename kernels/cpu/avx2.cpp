// avx2.cpp: the AVX2 table, and its kernels without tiles.
#include "versions.h"

#if defined(SUBKV_X86)

#    include "attend_tiles.h"
#    include "avx2_simd.h"
#    include "encode.h"
#    include "exact_keys.h"
#    include "linear.h"

namespace subkv::avx2 {

int64_t encode(const HeadCodec & codec, const float * x, int64_t ldx, int64_t n, const int64_t * cells, uint8_t * tiles,
               int64_t tile_stride) {
    return cpu::encode<Lanes>(codec, x, ldx, n, cells, tiles, tile_stride);
}

void dequantize(const HeadCodec & codec, const uint8_t * tiles, int64_t tile_stride, int64_t n, const int64_t * cells,
                float * c) {
    cpu::dequantize<Lanes>(codec, tiles, tile_stride, n, cells, c);
}

void project(const Matrix & m, int64_t r, int64_t d, const float * x, int64_t ldx, int64_t n, float scale, float * y,
             int64_t ldy) {
    cpu::project<Lanes>(m, r, d, x, ldx, n, scale, y, ldy);
}

void reconstruct(const Matrix & m, int64_t r, int64_t d, const float * e, float * o) {
    cpu::reconstruct<Lanes>(m, r, d, e, o);
}

void attend_exact(const ExactArgs & a) {
    cpu::attend_exact<Lanes>(a);
}

void moment(const float * x, int64_t ldx, int64_t n, int64_t d, double * s, double * sum) {
    cpu::moment<Lanes>(x, ldx, n, d, s, sum);
}

void to_half(const float * x, uint16_t * h, int64_t n) {
    cpu::to_half<Lanes>(x, h, n);
}

} // namespace subkv::avx2

namespace subkv {

const Ops ops_avx2 = { "avx2",
                       avx2::encode,
                       avx2::dequantize,
                       avx2::project,
                       avx2::reconstruct,
                       avx2::attend,
                       avx2::attend_exact,
                       avx2::moment,
                       avx2::to_half,
                       avx2::pack_recent,
                       avx2::unpack_recent,
                       1.0f / cpu::LARGEST };

} // namespace subkv

#endif
