// backend.h: the parts of libggml-subkv, a prototype: a ggml backend whose buffers hold K/V as coefficients.
//   backend.cpp  registration, the device, its operations and buffers
//   buffer.cpp   the buffer type: compact cache tensors, states, copies
//   window.cpp   the exact window, stored after the tiles of a cache tensor
//   compute.cpp  graphs: the CPU's, with the nodes that touch coded tensors replaced
//   attend.cpp   attention: splits of coded cells and the exact keys, then their sum
#pragma once

#include "ggml-backend-impl.h"
#include "ggml-cpp.h"
#include "layout.h"

#include <vector>

namespace subkv::backend {

constexpr int64_t ROLLBACK = 16; // the last writes, which can be removed without a gap in the window

ggml_backend_buffer_type_t buffer_type(); // of the only device
ggml_backend_dev_t         device();
ggml_backend_dev_t         cpu_device();
const Layout *             layout(); // nullptr: SUBKV is not set, cache tensors stay unchanged

// A cache tensor, or a view of one, that is held as tiles; codec: nullptr for every other tensor.
struct Coded {
    const LayerCodec *  codec = nullptr;
    bool                value = false;
    const ggml_tensor * root  = nullptr; // the cache tensor [n_embd, n_cells, n_stream]

    int64_t   d() const { return value ? codec->d_v : codec->d_k; }
    int64_t   width() const { return root->ne[0]; }
    int64_t   n_cells() const { return root->ne[1] * root->ne[2]; }
    int64_t   tile_bytes() const { return TILE * (int64_t) (value ? codec->v_row_bytes : codec->k_row_bytes); }
    int64_t   all_tile_bytes() const { return n_cells() / TILE * tile_bytes(); }
    uint8_t * tiles(int64_t h) const { return (uint8_t *) root->data + codec->tile_offset(h, value); }
};

Coded coded(const ggml_tensor * t);

// Rows [first, first + n) of all heads, in full width; exact where the window has them. They are written as new.
void read_rows(const Coded & c, int64_t first, int64_t n, float * x);
void write_rows(const Coded & c, int64_t first, int64_t n, const float * x);

// A cache tensor of values is written element by element (flash attention off), or not: so are its states.
void by_elements(const ggml_tensor * root, bool yes);

// The exact rows of one stream of a cache tensor: its first cells, and those written last. A cell that is written again
// keeps its slot. Nothing but zeros is an empty window.
struct Window {
    int64_t    n_slots, n_sink, width;
    int64_t *  writes; // so far
    int64_t *  age;    // [n_slots] number of the write, 0: none
    int64_t *  cell;   // [n_slots] within the stream
    uint16_t * rows;   // [n_slots][width]
    uint16_t * sinks;  // [n_sink][width]

    static size_t bytes(const Coded & c); // of all streams
    Window(const Coded & c, int64_t stream);

    uint16_t * row(int64_t cell) const;                   // nullptr: the cell is not in the window
    void       put(int64_t cell, const uint16_t * x);     // a new row
    void       replace(int64_t cell, const uint16_t * x); // the row of a cell, if it is held
};

// Rows that a graph has stored and not yet put into the window: the tokens of a batch attend to each other exactly.
struct Fresh {
    std::vector<uint16_t> rows; // [n][width]
    std::vector<int64_t>  cells;
};

// A node that stores n rows. Without flash attention it stores V element by element.
struct Store {
    const ggml_tensor * op;
    Coded               c;
    Fresh *             fresh;
    int64_t             n;

    const float * row(int64_t i) const {
        return (const float *) ((const char *) op->src[0]->data +
                                i * (op->src[0]->ne[1] / n) * (int64_t) op->src[0]->nb[1]);
    }
    int64_t cell(int64_t i) const {
        const auto *  to = (const int64_t *) op->src[1]->data;
        const int64_t at = to[i * (op->src[0]->ne[1] / n)], size = c.root->ne[1];
        return op->ne[0] == 1 ? at / (size * c.width()) * size + at % size : at;
    }
};

void encode_op(ggml_tensor * dst, int ith, int nth, void * store);
void commit_op(ggml_tensor * dst, int ith, int nth, void * store);

// The exact keys of a layer, newest first, sinks last, and their bias for every token.
struct Exact {
    struct Key {
        int64_t          cell; // within the stream
        const uint16_t * k;
        const uint16_t * v;
    };

    std::vector<std::vector<Key>>   keys; // [n_stream]
    std::vector<std::vector<float>> bias; // [n_stream] [n_tokens][keys], -INFINITY: coded or masked
};

// One FLASH_ATTN_EXT, or the equivalent nodes without flash attention: q F32 [d, n_tokens, n_head, n_stream], mask F16
// or F32 [n_kv, n_tokens, 1, n_stream].
struct Attention {
    const ggml_tensor *q, *mask, *sinks;
    Coded              k, v;
    bool               heads_first; // of the output: [d_v, n_head, n_tokens, n_stream], else tokens before heads
    float              scale, max_bias, softcap;
    int64_t            n_split, n_head_kv, n_group, n_tokens, n_stream, n_kv, width, first_stream;
    const Store *      stored[2] = { nullptr, nullptr }; // fresh rows of k and v
    Exact *            exact     = nullptr;
    float *            partial = nullptr; // per split, KV head, stream and token: m, z [n_group], acc [n_group][width]

    // keys, values: views of the cache
    Attention(const ggml_tensor * q, const ggml_tensor * keys, const ggml_tensor * values, const ggml_tensor * mask,
              const ggml_tensor * sinks);

    int64_t rows() const { return n_head_kv * n_stream * n_tokens * n_group; }
    int64_t size() const { return (n_split + 1) * rows() * (2 + width); } // the last split is that of exact keys
    int64_t row(int64_t split, int64_t h, int64_t stream, int64_t t) const {
        return split * rows() + ((h * n_stream + stream) * n_tokens + t) * n_group;
    }
    float *       m(int64_t row) const { return partial + row; }
    float *       z(int64_t row) const { return partial + (n_split + 1) * rows() + row; }
    float *       acc(int64_t row) const { return partial + 2 * (n_split + 1) * rows() + row * width; }
    float         slope(int64_t h) const; // ALiBi's
    const float * query(int64_t h, int64_t t, int64_t stream) const;
    void          bias(int64_t t, int64_t stream, int64_t first, int64_t n, float * out) const; // of cells, as masked
};

void select_op(ggml_tensor * dst, int ith, int nth, void * attention);
void attend_op(ggml_tensor * dst, int ith, int nth, void * attention);
void combine_op(ggml_tensor * dst, int ith, int nth, void * attention);

// What a backend keeps between graphs.
struct Context {
    ggml_backend_ptr     cpu;
    std::vector<uint8_t> memory;   // of the context that holds replaced nodes
    std::vector<float>   partial;  // softmax states between attend and combine
    std::vector<float>   turned;   // keys of a layer whose positions move
    Fresh                fresh[2]; // of K, V
    Exact                exact;
};

ggml_status compute(Context & context, ggml_cgraph * graph);

} // namespace subkv::backend
