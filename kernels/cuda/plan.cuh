// plan.cuh: what the decode kernel needs of a layer's head. The host makes it once, and a block copies it at its start:
// a lane that walks over the bands would wait for each.
#pragma once

#include "runs.cuh"

namespace subkv::cuda {

struct alignas(16) Plan {
    int64_t k_offset, v_offset; // of the head's tile among those of all heads, in bytes
    int32_t k_bytes, v_bytes;   // of a tile
    int32_t v_octets;
    int32_t v_halves; // 1: some bands of the values are halves
    Runs    keys;
    Runs    values[WARPS]; // a contiguous part of the octets for each warp

    Plan() = default;

    Plan(const HeadCodec & k, const HeadCodec & v, int64_t k_offset, int64_t v_offset) :
        k_offset(k_offset), v_offset(v_offset), k_bytes(TILE * k.row_bytes), v_bytes(TILE * v.row_bytes),
        v_octets(v.rank / 8), v_halves(0) {
        fill_runs(k, 0, k.rank / 8, keys);
        for (int w = 0; w < WARPS; ++w) {
            fill_runs(v, first_octet(w), first_octet(w + 1), values[w]);
            v_halves |= values[w].halves ? 1 : 0;
        }
    }

    __host__ __device__ int first_octet(int warp) const { return warp * v_octets / WARPS; }
};

} // namespace subkv::cuda
