// llama-subkv-graph.h: the graph nodes of coded and of observed layers. Part of libllama.
#pragma once

#include "llama-subkv-memory.h"

class llm_graph_input_attn_k;
class llm_graph_input_attn_k_dsa;
class llm_graph_input_attn_kv;
class llm_graph_input_attn_kv_iswa;
class llm_graph_result;
struct llama_cparams;
struct llm_graph_context;

namespace llama_subkv {

struct batch_caches { // the parts of a batch's context: full attention, an indexer's keys (nullptr if there is none)
    const llama_kv_cache_context * base;
    const llama_kv_cache_context * index;
};

batch_caches caches_of(const llama_memory_context_i * mctx);
bool         coded(const llama_kv_cache_context * mctx, int il);
bool         coded(const llama_kv_cache_context * mctx); // any layer

// The tensors of llama.cpp's four kinds of inputs that read a K/V cache. With sliding layers, they are those of the
// full-attention half.
struct attn_input {
    attn_input(const llm_graph_input_attn_kv & inp);
    attn_input(const llm_graph_input_attn_kv_iswa & inp);
    attn_input(const llm_graph_input_attn_k & inp);
    attn_input(const llm_graph_input_attn_k_dsa & inp); // an indexer chooses cells

    const llama_kv_cache_context * mctx;
    ggml_tensor *                  k_idxs;
    ggml_tensor *                  v_idxs = nullptr;
    ggml_tensor *                  mask;
    ggml_tensor *                  k_rot  = nullptr;
    ggml_tensor *                  v_rot  = nullptr;
    bool                           iswa   = false;
    bool                           latent = false; // values are the first elements of keys, and v_mla is applied last
};

// Called by llm_graph_context::build_attn. Passes q, k and v to the observer, after RoPE and before the Hadamard
// rotation of quantized caches. Then builds the attention of a coded layer, including the output projection. Returns
// nullptr if the layer is not coded, and upstream's code continues. `selected` holds the cells that a token attends to,
// as in AttnBuild, or is a mask that hides the others, or nullptr if a token attends to all cells.
ggml_tensor * attend(const llm_graph_context & g, const attn_input & in, ggml_tensor * wo, ggml_tensor * wo_b,
                     ggml_tensor * wo_s, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v, ggml_tensor * kq_b,
                     ggml_tensor * sinks, ggml_tensor * v_mla, float scale, int il, ggml_tensor * selected = nullptr);

// For models whose graph computes the masks of its KV heads. observe_layer passes q, k and v to the observer, and
// returns true if the layer is coded. unused_rows returns a tensor with the shape of the ordinary cache, for views that
// are never computed.
bool observe_layer(const llm_graph_context & g, const llama_kv_cache_context * mctx, ggml_tensor * q, ggml_tensor * k,
                   ggml_tensor * v, int il);
ggml_tensor * unused_rows(const llm_graph_context & g, const ggml_tensor * rows, int64_t n_kv, int64_t n_stream);

void observe(const llm_graph_context & g, const llama_kv_cache_context * mctx, ggml_tensor * q, ggml_tensor * k,
             ggml_tensor * v, float scale, int il);
ggml_tensor * build_attn(const llm_graph_context & g, const llama_kv_cache_context * mctx, ggml_tensor * q,
                         ggml_tensor * k, ggml_tensor * v, ggml_tensor * k_idxs, ggml_tensor * v_idxs,
                         ggml_tensor * mask, ggml_tensor * selected, ggml_tensor * sinks, float scale, int il);

// Called by llama_kv_cache::build_graph_shift. Returns false if the layer is not coded.
bool build_shift(const llama_kv_cache & kv, const llama_cparams & cparams, llm_graph_result & res,
                 ggml_tensor * k_shift, uint32_t il);

// Called by llama_context::graph_compute. Returns the status of a graph that has run, or a failure if coded nodes
// lacked memory.
ggml_status computed(llama_context & ctx, ggml_status status);

} // namespace llama_subkv
