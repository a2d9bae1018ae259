// graph_build.h: the tensors from which the nodes of a layer's attention and of a shift are built.
#pragma once

#include "ggml-backend.h"
#include "ggml.h"

#include <cstdint>
#include <map>

namespace subkv {

// Tensors that the nodes of a coded layer share with the nodes of its readers, in one graph.
struct SharedRows {
    ggml_tensor * fresh     = nullptr; // half-precision rows of the graph's own tokens
    ggml_tensor * written   = nullptr; // the node after which the cache has their codes
    int32_t       n_readers = 0;     // readers not yet built, after the last of which the window stores the fresh rows
    bool          in_window = false; // the window has the fresh rows already
};

// Input tensors of a graph with coded or observed layers. set_inputs fills them before every run of the graph.
struct Inputs {
    ggml_tensor * cell_pos = nullptr; // I32 [n_kv, n_stream of the ubatch]: as CellReader::positions
    ggml_tensor * tokens   = nullptr; // I32 [3, n_tokens]: TokenRow (subkv/batch.h)
    ggml_tensor * slots    = nullptr; // I32 [3, n_slots]: SlotRow
    // The following are results that later layers of a graph reuse. This one is the mask of the coded cells, the node
    // "mask" that the first coded layer builds.
    ggml_tensor * coded_mask = nullptr;
    // The mask of a prompt's rows on a GPU, and the GPU's buffer type.
    ggml_tensor *              prompt_mask = nullptr;
    ggml_backend_buffer_type_t prompt_buft = nullptr;
    // The mask of the cells that an indexer has selected, their list, and the selection (AttnBuild) that both belong
    // to. Layers with the same selection are adjacent.
    ggml_tensor * selected_mask  = nullptr;
    ggml_tensor * selected_cells = nullptr;
    ggml_tensor * selected       = nullptr;
    // By il, for coded layers with readers.
    std::map<int32_t, SharedRows> shared;
    // Layers on a GPU store this graph's tokens in the window and make no codes.
    bool defers_codes = false;
};

struct AttnBuild {
    ggml_context * ctx;
    ggml_cgraph *  gf;
    int32_t        il;
    ggml_tensor *  q;       // F32 [d_k, n_head, n_tokens]
    ggml_tensor *  k;       // F32 [d_k, n_head_kv, n_tokens], or nullptr if il reads another layer's rows
    ggml_tensor *  v;       // F32 [d_v, n_head_kv, n_tokens], or nullptr if k is nullptr or the layer is latent
    ggml_tensor *  k_cache; // I8 [row_bytes, n_cells, n_stream], see get_rows
    ggml_tensor *  v_cache; // nullptr in a latent layer, like v_view and v_idxs
    ggml_tensor *  k_view;  // I8 [row_bytes, n_kv, streams of the ubatch]
    ggml_tensor *  v_view;
    ggml_tensor *  k_idxs; // I64 [n_tokens]: stream * n_cells + cell
    ggml_tensor *  v_idxs;
    ggml_tensor *  mask; // F32 or F16 [n_kv, n_tokens / streams, n, streams], n: 1 or n_head_kv
    // I32 [n, n_tokens / streams, 1, streams]: the cells that a token attends to if the mask permits, or nullptr if it
    // attends to all
    ggml_tensor * selected;
    ggml_tensor * sinks; // F32 [n_head] or nullptr
    Inputs *      inputs;
    float         scale;
    float         softcap;        // 0 if there is none
    float         max_alibi_bias; // 0 if there is none
    bool          pictures;       // the model has M-RoPE, and tokens that share a position have no exact rows
};

struct ShiftBuild {
    ggml_context * ctx;
    ggml_cgraph *  gf;
    int32_t        il;
    ggml_tensor *  k_cache;   // I8 [row_bytes, n_cells, n_stream]
    ggml_tensor *  of_cells;  // I32 [n_cells * n_stream] pending rotation of a cell's key, in positions
    ggml_tensor *  of_slots;  // I32 [n_slots] the same of window slots, or nullptr if there is none
    ggml_tensor *  distances; // I32 [n] the distinct values of both, ascending, with 0 only if it is the only one
    ggml_tensor *  pairs;     // F32 [n_rot, 1, n] pairs (1, 0) rotated by each distance
    int64_t        first;     // index of a key's first rotated element
    bool           apart;     // a pair's second element is n_rot / 2 behind its first one, else they are adjacent
};

} // namespace subkv
