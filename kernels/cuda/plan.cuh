// plan.cuh: the data of a layer's head that the decode kernel needs. The host computes it once, and a block copies it
// at its start, because a lane that reads one band after the other would wait for each.
#pragma once

#include "runs.cuh"

namespace subkv::cuda {

// The plan of keys. `step` is the distance of a band's values, relative to the row's scale, or 1 for halves.
struct KeysPlan {
    Runs  runs;
    float step[MAX_BANDS];
};

inline void fill_steps(const HeadCodec & codec, float (&step)[MAX_BANDS]) {
    for (int b = 0; b < MAX_BANDS; ++b) {
        step[b] = b >= codec.n_bands ? 0.0f : codec.bands[b].bits == 16 ? 1.0f : level_step(codec, codec.bands[b]);
    }
}

struct alignas(16) Plan {
    KeysPlan keys;
    float    value_step[MAX_BANDS];
    Runs     values[WARPS]; // a contiguous part of the octets for each warp
    int32_t  v_halves;      // 1 if some bands of the values are halves

    Plan() = default;

    Plan(const HeadCodec & k, const HeadCodec & v) : v_halves(0) {
        fill_runs(k, 0, k.rank / 8, keys.runs);
        fill_steps(k, keys.step);
        fill_steps(v, value_step);
        for (int w = 0; w < WARPS; ++w) {
            fill_runs(v, w * (v.rank / 8) / WARPS, (w + 1) * (v.rank / 8) / WARPS, values[w]);
            v_halves |= values[w].halves ? 1 : 0;
        }
    }
};

} // namespace subkv::cuda
