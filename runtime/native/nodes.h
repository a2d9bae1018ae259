// nodes.h: shared by the graph nodes of a coded layer (nodes.cpp: store_window and the graph; node_*.cpp: the others).
#pragma once

#include "chunked.h"
#include "cache.h"
#include "subkv/recent.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace subkv {

// Cells of a segment: attended in one call, in a softmax state of its own; a token's segments are merged in order. On a CPU
// with static bases what a token gets is the same to the bit, then, however its text was cut into batches and its cells
// among threads.
constexpr int64_t SEGMENT = 4 * STEP;

// Tokens whose masks are worth a node, since all layers share them: of more, the mask's own size is.
constexpr int64_t FEW_TOKENS = 16;

// How attend cuts its work: by shapes only.
struct AttendShape {
    int64_t n_kv, n_stream, n_tokens, n_tps; // n_tps: tokens per stream
    int64_t n_head_kv, n_group;
    int64_t block, n_blocks; // tokens per block (within a stream), blocks of all streams
    int64_t split, n_split;  // cells per partial, whole segments; partials
    int64_t n_parts;         // of the heads, equal: one unit of work is a block, a part and a split of the cells
    int64_t n_rows;          // partial rows
    int64_t width;           // floats per partial row of value coefficients
    int64_t n_partial;       // floats of attend's result: m, z, rows, and what a GPU needs besides

    // row of (split, head, token): n_group rows follow each other
    int64_t row(int64_t s, int64_t h, int64_t t) const { return ((s * n_head_kv + h) * n_tokens + t) * n_group; }
};

// A query row's state takes in that of later cells: max m, sum z, values acc [n].
void merge_softmax(float & m, float & z, float * acc, float m_later, float z_later, const float * acc_later, int64_t n);

// cells: what is attended to, a view of the keys' tiles or a list of chosen cells for every token (build_chosen_cells).
AttendShape attend_shape(const LayerNodes & layer, const ggml_tensor * q, const ggml_tensor * cells);

inline const float * row_f32(const ggml_tensor * t, int64_t head, int64_t token) {
    return (const float *) ((const char *) t->data + head * t->nb[1] + token * t->nb[2]);
}

inline int64_t stride_f32(const ggml_tensor * t, int dim) {
    return (int64_t) (t->nb[dim] / sizeof(float));
}

// x [n], all finite, as half precision, at most +-65504: an infinity would reach queries that do not see it, times a
// weight of zero.
inline void to_half_saturated(const Ops & ops, const float * x, uint16_t * out, int64_t n) {
    ops.to_half(x, out, n);
    for (int64_t i = 0; i < n; ++i) {
        out[i] = (out[i] & 0x7fff) == 0x7c00 ? (uint16_t) (out[i] - 1) : out[i];
    }
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

// Queries in the coefficients of their KV head's static keys: the last rows of what encode or project gives, where every
// thread of attend reads them. Undefined for tokens of which the mask node says that they see no coded cell.
struct ProjectedQueries {
    float * qt;    // rows(h): [n_tokens * n_group][rank of the head]
    float * shift; // [n_head_kv][n_tokens * n_group]; written where keys are coded less their mean
    int64_t width; // largest rank of keys

    float * rows(const AttendShape & s, int64_t h) const { return qt + h * s.n_tokens * s.n_group * width; }
};

ProjectedQueries projected_queries(const LayerNodes & layer, const ggml_tensor * node, int64_t n_tokens);

// Where a head's integers are in a row of them (subkv/recent.h).
inline int64_t recent_offset(const LayerCodec & codec, int64_t head, bool value) {
    return head * recent_bytes(value ? codec.d_v : codec.d_k) + (value ? codec.n_head_kv * recent_bytes(codec.d_k) : 0);
}

// Halves of a fresh row, and how many rows of as many the projected queries fill.
int64_t fresh_width(const LayerNodes & layer);
int64_t query_rows(const LayerNodes & layer, int64_t n_tokens);

// slope [n] of query heads first_head .. first_head + n - 1; 1 without ALiBi
void alibi_slopes(const LayerNodes & layer, int64_t first_head, int64_t n, float * slope);

// Stores those of all query heads at an offset in bytes, unless they are there; known: the bias they are of, kept here.
void store_slopes(const LayerNodes & layer, ggml_tensor * memory, size_t at, float & known);

// Grows thread-local scratch; contents are undefined.
template <typename T> T * scratch(std::vector<T> & v, int64_t n) {
    if ((int64_t) v.size() < n) {
        v.resize((size_t) n);
    }
    return v.data();
}

// What attend adds to logits: mask values, -INFINITY at exact positions, which are left to combine. Rows of tokens.
struct MaskRows {
    float *   bias; // [n_kv]
    uint8_t * open; // [n_kv / TILE]: does the token see any cell of the tile?
    int64_t   bias_stride, open_stride;

    // from token t and cell c on, the first of a tile
    MaskRows of(int64_t t, int64_t c) const {
        return { bias + t * bias_stride + c, open + t * open_stride + c / TILE, bias_stride, open_stride };
    }
};

struct MaskInputs {
    const ggml_tensor *mask, *cell_pos, *tokens;
};

// Masks of a token: one, or one for each KV head; which of them is head h's, and where its values of a token begin.
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

// Cells [c0, c0 + n) of token t and KV head h: bias [n], open [n / TILE].
void fill_mask_row(const LayerNodes & layer, const MaskInputs & in, int64_t h, int64_t t, int64_t c0, int64_t n,
                   float * bias, uint8_t * open);

// I32 [n, n_tokens / streams, 1, streams]: chosen cells that a token sees through their codes, ascending, then -1; n a
// multiple of TILE. nullptr: reading all tiles under the mask `seen` is cheaper.
ggml_tensor * build_chosen_cells(LayerNodes & layer, const AttnBuild & b, ggml_tensor * seen);

// A mask as b.mask in which all but the chosen cells are hidden; b.mask itself where all are chosen.
ggml_tensor * build_chosen_mask(const AttnBuild & b);

// F32 [d_v * n_head, n_tokens] of a prompt on a GPU: its cells and exact rows as halves, for llama.cpp's own flash attention.
// rows: of the layer, whose codes are written. nullptr: attend and combine compute it.
ggml_tensor * build_prompt(LayerNodes & layer, const AttnBuild & b, ggml_tensor * q, const SharedRows & rows);

// A node with the rows of few tokens, of every mask in turn, which all coded layers of a graph share; nullptr: every
// attend fills its own.
ggml_tensor * build_mask_node(LayerNodes & layer, const AttnBuild & b, ggml_tensor * mask);
MaskRows      mask_rows(const ggml_tensor * node, int64_t n_kv);

void encode_blocks_op(ggml_tensor * dst, int ith, int nth, void * userdata); // LayerNodes with chunks
void attend_op(ggml_tensor * dst, int ith, int nth, void * userdata);        // LayerNodes
void combine_op(ggml_tensor * dst, int ith, int nth, void * userdata);       // LayerNodes
void encode_op(ggml_tensor * dst, int ith, int nth, void * userdata);        // LayerNodes
void project_op(ggml_tensor * dst, int ith, int nth, void * userdata);       // LayerNodes, without rows of their own

} // namespace subkv
