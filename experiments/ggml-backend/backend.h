// backend.h: the parts of libggml-subkv, a prototype: a ggml backend whose buffers hold K/V as coefficients.
//   backend.cpp  registration, the device, which operations and buffers it takes
//   buffer.cpp   the buffer type: compact cache tensors, states, copies
//   compute.cpp  graphs: the CPU's, with SET_ROWS and FLASH_ATTN_EXT on coded tensors replaced
#pragma once

#include "ggml-backend-impl.h"
#include "ggml-cpp.h"
#include "layout.h"

#include <vector>

namespace subkv::backend {

ggml_backend_buffer_type_t buffer_type(); // of the only device
ggml_backend_dev_t         device();
ggml_backend_dev_t         cpu_device();
const Layout *             layout(); // nullptr: SUBKV is not set, cache tensors stay as they are

// A cache tensor, or a view of one, that is held as tiles; codec: nullptr for every other tensor.
struct Coded {
    const LayerCodec *  codec = nullptr;
    bool                value = false;
    const ggml_tensor * root  = nullptr; // the cache tensor [n_embd, n_cells, n_stream]

    size_t  row_bytes() const { return value ? codec->v_row_bytes : codec->k_row_bytes; }
    int64_t n_cells() const { return root->ne[1] * root->ne[2]; }
    int64_t tile_bytes() const { return (int64_t) row_bytes() * TILE; }
};

Coded coded(const ggml_tensor * t);

// Rows [first, first + n) of all heads, in full width.
void read_rows(const Coded & c, int64_t first, int64_t n, float * x);
void write_rows(const Coded & c, int64_t first, int64_t n, const float * x);

// What a backend keeps between graphs.
struct Context {
    ggml_backend_ptr     cpu;
    std::vector<uint8_t> memory;  // of the context that holds replaced nodes
    std::vector<float>   partial; // softmax states between attend and combine
    int                  n_threads = 1;
};

ggml_status compute(Context & context, ggml_cgraph * graph);

} // namespace subkv::backend
