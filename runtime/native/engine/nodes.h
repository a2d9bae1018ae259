// nodes.h: shared by the graph nodes of a coded layer (nodes.cpp: store_window and the graph; node_*.cpp: the others).
#pragma once

#include "cache.h"
#include "node_sources.h"
#include "subkv/recent.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace subkv {

// Cells of a segment. One call attends to a segment with a separate softmax state, and a token's segments are merged in
// order. So on a CPU with static bases a token's result is bit-identical for any batches and any number of threads.
constexpr int64_t SEGMENT = 4 * STEP;

// Up to this many tokens, a mask node shared by all layers saves time. For more tokens it would be as large as the mask.
constexpr int64_t FEW_TOKENS = 16;

// How attend divides its work. It follows from shapes only.
struct AttendShape {
    int64_t n_kv, n_stream, n_tokens, n_tps; // n_tps is the number of tokens per stream
    int64_t n_head_kv, n_group;
    int64_t block, n_blocks; // tokens per block (within a stream), blocks of all streams
    int64_t split, n_split;  // the cells of a partial, in whole segments, and the number of partials
    int64_t n_parts;   // equal parts of the heads: a unit of work is a block of tokens, a part and a split of the cells
    int64_t n_rows;    // partial rows
    int64_t width;     // floats per partial row of value coefficients
    int64_t n_partial; // the floats of attend's result, which are m, z, rows, and a GPU's scratch

    // The first of the n_group rows of a split, head and token.
    int64_t row(int64_t s, int64_t h, int64_t t) const { return ((s * n_head_kv + h) * n_tokens + t) * n_group; }
};

// Bytes of the result of store_attend before the fresh rows, which follow attend's result.
inline size_t fresh_at(const AttendShape & s) {
    return GGML_PAD((size_t) s.n_partial * sizeof(float), (size_t) LINE);
}

// Merges the state of later cells (maximum m, sum z, values acc [n]) into a query row's state.
void merge_softmax(float & m, float & z, float * acc, float m_later, float z_later, const float * acc_later, int64_t n);

// `cells` is a view of the keys' tiles, or each token's list of selected cells (build_selected_cells).
AttendShape attend_shape(const LayerNodes & layer, const ggml_tensor * q, const ggml_tensor * cells);

inline const float * row_f32(const ggml_tensor * t, int64_t head, int64_t token) {
    return (const float *) ((const char *) t->data + head * t->nb[1] + token * t->nb[2]);
}

inline int64_t stride_f32(const ggml_tensor * t, int dim) {
    return (int64_t) (t->nb[dim] / sizeof(float));
}

inline bool is_finite_row(const float * x, int64_t n) {
    float sum = 0.0f; // zero times NaN or Inf is NaN
    for (int64_t i = 0; i < n; ++i) {
        sum += 0.0f * x[i];
    }
    return sum == 0.0f;
}

// Writes an exact row x [n] in half precision, at most +-65504. A row that is not finite becomes HALF_NAN, which is
// checked only if may_be_bad.
inline void exact_row(const Ops & ops, const float * x, uint16_t * out, int64_t n, bool may_be_bad) {
    if (may_be_bad && !is_finite_row(x, n)) {
        std::fill(out, out + n, HALF_NAN);
        return;
    }
    ops.to_half(x, out, n);
    for (int64_t i = 0; i < n; ++i) {
        out[i] = (out[i] & 0x7fff) == 0x7c00 ? (uint16_t) (out[i] - 1) : out[i];
    }
}

// A value of the mask, which is 0, -INFINITY or, with ALiBi, a negative distance.
inline float mask_value(const ggml_tensor * mask, int64_t i) {
    if (mask->type == GGML_TYPE_F32) {
        return ((const float *) mask->data)[i];
    }
    const ggml_fp16_t h = ((const ggml_fp16_t *) mask->data)[i];
    return h == 0 ? 0.0f : h == 0xFC00 ? -INFINITY : ggml_fp16_to_fp32(h);
}

// The tensor itself if the nodes can read it, else a contiguous F32 copy.
inline ggml_tensor * as_f32(ggml_context * ctx, ggml_tensor * t) {
    const bool readable = t->type == GGML_TYPE_F32 && t->nb[0] == sizeof(float);
    return readable ? t : ggml_cont(ctx, ggml_cast(ctx, t, GGML_TYPE_F32));
}

// Queries in the coefficients of their KV head's static keys. Undefined for tokens that see no coded cell, according to
// the mask node.
struct ProjectedQueries {
    float * qt;    // rows(h): [n_tokens * n_group][rank of the head]
    float * shift; // [n_head_kv][n_tokens * n_group], written only if the mean is subtracted from keys
    int64_t width; // largest rank of keys

    // `data` is that of an F32 tensor [query_width, n_head * n_tokens].
    ProjectedQueries(const LayerNodes & layer, void * data, int64_t n_tokens);

    float * rows(const AttendShape & s, int64_t h) const { return qt + h * s.n_tokens * s.n_group * width; }
};

// The two results of encode on a CPU, in one I8 tensor of which the graph has views with their types: fresh rows F16
// [fresh_width, n_tokens] and projected queries F32 [query_width, n_head * n_tokens]. One node computes both, since
// another node would cost a barrier of all threads in every layer (kernels/NOTES.md).
struct EncodeResult {
    size_t fresh_stride; // bytes of a fresh row
    size_t queries_at;   // byte where the queries begin
    size_t bytes;

    EncodeResult(const LayerNodes & layer, int64_t n_tokens);
};

// Offset of a head's integers in a row of integers (subkv/recent.h).
inline int64_t recent_offset(const LayerCodec & codec, int64_t head, bool value) {
    return head * recent_bytes(value ? codec.d_v : codec.d_k) + (value ? codec.n_head_kv * recent_bytes(codec.d_k) : 0);
}

int64_t fresh_width(const LayerNodes & layer); // halves
int64_t query_width(const LayerNodes & layer); // in floats: the largest rank of keys, and one for the shift

// The slopes [n] of query heads first_head .. first_head + n - 1, which are 1 without ALiBi.
void alibi_slopes(const LayerNodes & layer, int64_t first_head, int64_t n, float * slope);

// Stores the slopes of all query heads at an offset in bytes, and updates `known`. Does nothing if `known` equals their
// bias.
void store_slopes(const LayerNodes & layer, ggml_tensor * memory, size_t at, float & known);

// Grows thread-local scratch. The contents are undefined.
template <typename T> T * scratch(std::vector<T> & v, int64_t n) {
    if ((int64_t) v.size() < n) {
        v.resize((size_t) n);
    }
    return v.data();
}

// The values that attend adds to logits, in a row per token. They are those of the mask, but -INFINITY at exact
// positions, to which combine attends.
struct MaskRows {
    float *   bias; // [n_kv]
    uint8_t * open; // [n_kv / TILE]: whether the token sees any cell of the tile
    int64_t   bias_stride, open_stride;

    // The values from token t and cell c on, where c is the first cell of a tile.
    MaskRows of(int64_t t, int64_t c) const {
        return { bias + t * bias_stride + c, open + t * open_stride + c / TILE, bias_stride, open_stride };
    }
};

// A token has one mask, or one per KV head. Their number, the index of head h's, and where its values for a token
// begin.
inline int64_t n_masks(const ggml_tensor * mask) {
    return mask->ne[2];
}

inline int64_t mask_of(const ggml_tensor * mask, int64_t h) {
    return mask->ne[2] > 1 ? h : 0;
}

inline int64_t mask_row(const ggml_tensor * mask, int64_t h, int64_t t) {
    const int64_t n_tps = mask->ne[1];
    return ((t / n_tps * mask->ne[2] + mask_of(mask, h)) * n_tps + t % n_tps) * mask->ne[0];
}

// Fills bias [n] and open [n / TILE] for cells [c0, c0 + n) of token t and KV head h.
void fill_mask_row(const LayerNodes & layer, const MaskSources & in, int64_t h, int64_t t, int64_t c0, int64_t n,
                   float * bias, uint8_t * open);

// I32 [n, n_tokens / streams, 1, streams]: the selected cells whose codes a token sees, in ascending order and followed
// by -1, where n is a multiple of TILE. Returns nullptr if it is cheaper to read all tiles under `mask`.
ggml_tensor * build_selected_cells(LayerNodes & layer, const AttnBuild & b, ggml_tensor * mask);

// b.mask with all cells hidden except the selected ones, or b.mask itself if no cells are selected.
ggml_tensor * build_selected_mask(LayerNodes & layer, const AttnBuild & b);

// F32 [d_v * n_head, n_tokens]: a prompt's attention on a GPU, by llama.cpp's flash attention, which reads cells and
// exact rows as halves. `rows` are the layer's, after their codes are written. Returns nullptr if attend and combine
// compute the attention.
ggml_tensor * build_prompt(LayerNodes & layer, const AttnBuild & b, ggml_tensor * q, const SharedRows & rows);

// A node with the MaskRows of few tokens, one mask after the other, which all coded layers of a graph share. Returns
// nullptr if each attend node computes them.
ggml_tensor * build_mask_node(LayerNodes & layer, const AttnBuild & b, ggml_tensor * mask);
MaskRows      mask_rows(const ggml_tensor * node, int64_t n_kv);

void attend_op(ggml_tensor * dst, int ith, int nth, const LayerNodes & layer);
void combine_op(ggml_tensor * dst, int ith, int nth, const LayerNodes & layer);
void encode_op(ggml_tensor * dst, int ith, int nth, const LayerNodes & layer);
void project_op(ggml_tensor * dst, int ith, int nth, const LayerNodes & layer); // of a layer without rows of its own

} // namespace subkv
