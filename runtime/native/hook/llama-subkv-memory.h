// llama-subkv-memory.h: the caches of a context: which of them hold coded cells, their types and sizes. Part of
// libllama.
#pragma once

#include "cache_hook.h"
#include "llama-kv-cache.h"
#include "llama-subkv-access.h"

#include <array>
#include <memory>
#include <utility>
#include <vector>

struct llama_subkv_usage;

namespace llama_subkv {

using access = llama_subkv_access;

// The parts of a context's memory, or nullptr if it has none.
struct caches {
    llama_kv_cache * base;      // layers of full attention
    llama_kv_cache * swa;       // layers with a sliding window
    llama_kv_cache * index;     // keys of an indexer
    llama_memory_i * recurrent; // recurrent state

    std::array<const llama_kv_cache *, 3> all() const { return { base, swa, index }; }
    std::vector<subkv::CacheHook *>       hooks() const; // those of the caches that have one
};

using layer_filter = llama_kv_cache::layer_filter_cb;
using layer_reuse  = llama_kv_cache::layer_reuse_cb;

// The request of a context's parameters, while llama_init_from_model creates the context. The constructor replaces
// subkv's types in the parameters by ggml's, and the destructor ends requests of the C interface.
class request {
public:
    explicit request(llama_context_params & params);
    ~request();
    request(const request &)             = delete;
    request & operator=(const request &) = delete;

    // The function of libsubkv, which is loaded if the context or SUBKV requests its caches. Returns nullptr if the
    // context is ordinary. Throws if the request cannot be met.
    static subkv::cache_new_fn cache_new();
    static subkv::CacheRequest asked(const llama_model & model); // by the types of the parameters

    // llama.cpp creates a context's cache of full attention first, and then the cache of an indexer's keys or of
    // sliding layers, whose types depend on the first cache. These tell whether it has been created, and whether it
    // holds coded cells.
    static thread_local bool rows_coded, rows_created;
    static thread_local bool sliding_f16; // llama_subkv_keep_sliding_f16
};

// Called by the constructor of llama_kv_cache before any allocation. Changes the types of sliding layers beside coded
// ones, and type_k of an indexer's keys.
void init(llama_kv_cache & kv, ggml_type & type_k, ggml_type & type_v, bool offload, uint32_t kv_size,
          const layer_filter & filter, const layer_reuse & reuse, bool shares);
// Creates the memory of a context, and decorates it (class memory) if its cells have a hook. A request for a coded
// cache is refused here if the memory has no K/V cache.
std::unique_ptr<llama_memory_i> create_memory(llama_context & ctx, const llama_memory_params & params);
std::unique_ptr<llama_memory_i> decorate(std::unique_ptr<llama_memory_i> inner, llama_context & ctx);

class memory; // decorates llama.cpp's (memory.cpp)

// While it lives, a context (or nullptr) has llama.cpp's memory, which another context casts to its class.
class undecorated {
public:
    explicit undecorated(llama_context * ctx);
    ~undecorated();
    undecorated(const undecorated &)             = delete;
    undecorated & operator=(const undecorated &) = delete;

private:
    llama_context *  ctx;
    llama_memory_i * whole = nullptr;
};

caches             caches_of(const llama_memory_i * memory);
subkv::CacheHook * hook_of(const llama_memory_i * memory); // of the cache of full attention, or nullptr if it has none
// Returns true if the cache, or the full-attention half of an iswa cache, stores coefficients.
bool   coded(const llama_memory_i * memory);
bool   coded(const llama_kv_cache & kv);
size_t row_bytes(const llama_kv_cache & kv, uint32_t il, bool value); // 0 if the layer is ordinary
// The types of a layer's K and V tensors, which are bytes if the layer is coded, and else the given ones.
std::pair<ggml_type, ggml_type> types(const llama_kv_cache & kv, uint32_t il, ggml_type type_k, ggml_type type_v);
const char *                    type_name(const llama_kv_cache & kv, ggml_type type); // of K or V, for the log

// An indexer identifies a cell by the place of its key. is_index tells whether a cache holds such keys, same_cells
// whether every key is in the cell of its token, and same_slots whether a batch assigns each token the same cell in
// both caches.
bool      is_index(const llama_kv_cache & kv);
ggml_type index_type(const llama_kv_cache & kv, ggml_type type); // from SUBKV_INDEXER, else `type`
bool      same_cells(const llama_kv_cache & kv, const llama_kv_cache & index);
bool      same_slots(const llama_kv_cache_context & rows, const llama_kv_cache_context & index);

// The type of keys and values in sliding layers beside coded ones (SUBKV_SLIDING). It is q8_0 if flash attention is not
// off and llama.cpp can shift such keys, and else `type`. It is f16 if llama_subkv_keep_sliding_f16 was called. Throws
// if the variable demands q8_0 where it is impossible.
ggml_type sliding_type(const llama_kv_cache & kv, ggml_type type, bool offload, const layer_filter & filter);
// With quantized values in sliding layers, "auto" means that flash attention is on, as for llama.cpp's quantized
// caches.
void require_flash_attention(llama_context & ctx, const llama_memory_i & memory);

subkv::RowSizes   row_sizes(const llama_memory_i * memory);
llama_subkv_usage usage_of(llama_context & ctx); // memory use of its cache

// Runs the copies between streams and the shifts that llama.cpp has deferred to the next decode. It is called before
// cells are read or set. Throws on failure.
void apply_deferred(llama_context & ctx);

// As in subkv::LlamaCalls.
subkv::CacheHook * cache_of(llama_context * ctx, subkv::RowSizes * sizes);
bool               rows(llama_context * ctx, int32_t il, const subkv::rows_fn & use);

} // namespace llama_subkv
