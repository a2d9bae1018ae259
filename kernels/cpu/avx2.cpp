// avx2.cpp: the AVX2 table, and which of the two attention loops a call takes.
#include "versions.h"

#if defined(SUBKV_X86)

#    include "avx2_simd.h"

namespace subkv::avx2 {

// From this many query rows on, dequantizing a tile once is cheaper than unpacking it for every four rows.
constexpr int64_t TILED_FROM = 16;

static void attend(const AttendArgs & a) {
    const Call call = { a.n_cells, a.n_tok, a.n_group,     a.k->rank, a.v->rank, a.qt,
                        a.shift,   a.bias,  a.bias_stride, a.slope,   a.softcap, a.m,
                        a.z,       a.acc,   a.acc_stride,  &a,        nullptr };
    const bool half = cpu::plan_of(*a.k).has_half || cpu::plan_of(*a.v).has_half;
    if (half || a.n_tok * a.n_group >= TILED_FROM) {
        attend_tiled(call);
    } else {
        attend_small(call);
    }
}

static void attend_exact(const ExactArgs & a) {
    const Call call = { a.n_keys, a.n_tok,   a.n_group, a.d_k, a.d_v, a.q,          nullptr, a.bias, a.bias_stride,
                        a.slope,  a.softcap, a.m,       a.z,   a.acc, a.acc_stride, nullptr, &a };
    if (a.n_tok * a.n_group >= TILED_FROM) {
        attend_tiled(call);
    } else {
        attend_small(call);
    }
}

} // namespace subkv::avx2

namespace subkv {

const Ops ops_avx2 = { "avx2",       avx2::encode_rows,  avx2::dequantize_rows, avx2::project, avx2::reconstruct,
                       avx2::attend, avx2::attend_exact, avx2::moment,          avx2::to_half, 0.0f };

} // namespace subkv

#endif
