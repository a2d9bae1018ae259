// nodes.h: shared by the graph nodes of a coded layer (nodes.cpp: encode, store_window and the graph; node_attend.cpp;
// node_combine.cpp).
#pragma once

#include "adaptive.h"
#include "cache.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace subkv {

// How attend cuts its work. Depends on shapes only: results are the same for any number of threads.
struct AttendShape {
    int64_t n_kv, n_stream, n_tokens, n_tps; // n_tps: tokens per stream
    int64_t n_head_kv, n_group;
    int64_t block, n_blocks; // tokens per block (within a stream), blocks of all streams
    int64_t split, n_split;  // cells per split, whole tiles; splits
    int64_t n_parts;         // of the heads, equal: one unit of work is a block, a part and a split
    int64_t n_rows;          // partial rows
    int64_t width;           // floats per partial row of value coefficients
    int64_t n_partial;       // floats of attend's result: m, z, rows, and what a GPU needs besides

    // row of (split, head, token): n_group rows follow each other
    int64_t row(int64_t s, int64_t h, int64_t t) const { return ((s * n_head_kv + h) * n_tokens + t) * n_group; }
};

AttendShape attend_shape(const LayerNodes & layer, const ggml_tensor * q, const ggml_tensor * k_view);

inline const float * row_f32(const ggml_tensor * t, int64_t head, int64_t token) {
    return (const float *) ((const char *) t->data + head * t->nb[1] + token * t->nb[2]);
}

inline int64_t stride_f32(const ggml_tensor * t, int dim) {
    return (int64_t) (t->nb[dim] / sizeof(float));
}

// Mask values are 0, -INFINITY or, with ALiBi, a negative distance.
inline float mask_value(const ggml_tensor * mask, int64_t i) {
    if (mask->type == GGML_TYPE_F32) {
        return ((const float *) mask->data)[i];
    }
    const ggml_fp16_t h = ((const ggml_fp16_t *) mask->data)[i];
    return h == 0 ? 0.0f : h == 0xFC00 ? -INFINITY : ggml_fp16_to_fp32(h);
}

// The tensor itself when the nodes can read it, else a contiguous F32 copy.
inline ggml_tensor * as_f32(ggml_context * ctx, ggml_tensor * t) {
    const bool readable = t->type == GGML_TYPE_F32 && t->nb[0] == sizeof(float);
    return readable ? t : ggml_cont(ctx, ggml_cast(ctx, t, GGML_TYPE_F32));
}

// slope [n] of query heads first_head .. first_head + n - 1; 1 without ALiBi
void alibi_slopes(const LayerNodes & layer, int64_t first_head, int64_t n, float * slope);

// Grows thread-local scratch; contents are undefined.
template <typename T> T * scratch(std::vector<T> & v, int64_t n) {
    if ((int64_t) v.size() < n) {
        v.resize((size_t) n);
    }
    return v.data();
}

void adapt_op(ggml_tensor * dst, int ith, int nth, void * userdata);   // LayerNodes, adaptive only
void attend_op(ggml_tensor * dst, int ith, int nth, void * userdata);  // LayerNodes
void combine_op(ggml_tensor * dst, int ith, int nth, void * userdata); // LayerNodes

} // namespace subkv
