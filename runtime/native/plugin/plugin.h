// plugin.h: the parts of libggml-subkv: a ggml backend that gives the coefficient cache to a llama.cpp without our
// patch. It drives the engine (engine/cache.h), as runtime/native/hook does in the patched one, and knows what a backend
// can know: tensors, graphs and their inputs, but no files, positions and sequences.
//
//   plugin.cpp       registration; the device
//   abi.cpp          what the plug-in shares with the process's ggml
//   cpu_place.cpp    where caches are and graphs run
//   store.cpp        the buffers: K/V cache tensors, states, copies between streams
//   known_cells.cpp  positions and sequences of cells
//   model_bases.cpp  the bases of the model that a graph computes
//   graph.cpp        graphs, in which the engine's nodes replace those on coded tensors
#pragma once

#include "cache.h"
#include "ggml-backend-impl.h"
#include "ggml-cpp.h"
#include "known_cells.h"
#include "place.h"

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace subkv::plugin {

ggml_backend_buffer_type_t buffer_type(); // of the only device
ggml_backend_dev_t         device();
ggml_backend_dev_t         cpu_device();

// ggml's numbers of operations, which differ between versions.
struct GgmlOps {
    ggml_op view, reshape, permute, transpose, cpy, cont, set_rows, rope, flash_attn_ext, custom;
};

const GgmlOps & ggml_ops(); // after misfit()

// Binds ggml (ggml_calls.h), and compares its structures and functions with those that the plug-in knows. Returns "" if
// they fit, and else the end of a sentence about the ggml.
std::string misfit(const void * caller);

// The version of ggml's interface for backends, after misfit(). ggml's ggml_backend_buffer_type, which is an array of
// pointers, has functions in other places in other versions. The plug-in's types lack all that are optional.
int api_version();

using BufferType  = std::array<void *, 32>;
using AllocBuffer = ggml_backend_buffer_t(ggml_backend_buffer_type_t, size_t);
using IsHost      = bool(ggml_backend_buffer_type_t);

BufferType make_buffer_type(AllocBuffer * alloc_buffer, IsHost * is_host, ggml_backend_dev_t device);

inline const ggml_tensor * root_of(const ggml_tensor * t) {
    return t->view_src ? t->view_src : t;
}

// Weights that identify models and that nodes of a graph are computed from.
class GraphWeights {
public:
    void                add(const ggml_tensor * node);
    const ggml_tensor * find(const std::string & name) const; // nullptr if there is none

private:
    std::map<std::string, const ggml_tensor *> found_;
    std::unordered_set<const ggml_tensor *>    seen_;
};

// How much of a graph has been seen when bases are looked up, which is a part, as llama.cpp plans it, or all of it. In
// all of it other caches are known, and a model with sliding windows has one for the sliding layers, with fewer cells.
enum class Seen { PART, ALL_OF_SLIDING, ALL };

// The bases that SUBKV requests for a cache of the model with these weights. has_layer tells whether the cache has a
// layer's rows. The first model owns the file that SUBKV names, and others have those of the cache folder. Returns
// nullopt if only the whole graph can tell. Throws Invalid if SUBKV requires bases of this model (then the choice is
// not automatic) and there are none.
std::optional<CacheChoice> find_model_bases(const GraphWeights & weights, Seen seen,
                                            const std::function<bool(int32_t il)> & has_layer);

// Returns true if SUBKV requests no coded cache
bool is_off();

// Does some sidecar identify its model by this weight? Then it has to stay as it is in the file.
bool identifies_model(const char * weight);

// A cache tensor of llama.cpp, which is F16 [row, n_cells, n_stream].
struct CacheTensor {
    int32_t il;
    bool    value;
};

// A layer's attention in a graph. Numbers are indices of nodes, or -1 if there is no such node.
struct LayerUse {
    int32_t il;    // of the tensors
    int     set_k; // SET_ROWS
    int     set_v;
    // the nodes FLASH_ATTN_EXT, of which all but the first are of layers that read this layer's rows
    std::vector<int> attends;
};

// How a graph uses the tensors of a buffer.
struct GraphUse {
    std::vector<LayerUse> layers;  // in the order of their first node
    std::vector<int>      rotates; // the nodes ROPE of a shift, on the keys of all cells, in place
    std::string           unknown; // why the tensors cannot be coded, or "" if they can
};

// The K/V cache tensors of a buffer, which belong to one cache of llama.cpp. The buffer is reserved address space, as
// large as an f16 cache. The first graph that llama.cpp plans for a new context decides whether the cache is coded.
// Codes have memory of their own, and then no program can read or write the reserved pages, so that they never take
// memory.
class Store {
public:
    Store(uint8_t * base, size_t size); // address space, without memory
    ~Store();
    Store(const Store &)             = delete;
    Store & operator=(const Store &) = delete;

    static bool is_any_undecided(); // of this process

    uint8_t * base() const { return base_; }
    bool      add(const ggml_tensor * t); // false if no memory for a tensor that is not the K or V of a cache
    void      clear(uint8_t value);

    const CacheTensor * find(const ggml_tensor * root) const; // nullptr for another tensor

    // Called while llama.cpp plans a graph of a new context, for a node SET_ROWS. Throws Invalid if the user requires
    // bases of another model.
    void check(const ggml_tensor * node);
    // Called when the first graph is planned, or computes. `full` says that of the graph's caches this one is not for
    // sliding layers. Throws Invalid if a coded cache is required and cannot be, or if memory is short.
    void decide(ggml_cgraph * graph, const GraphUse & use, bool full);
    // Called before the first graph computes, which shows which cache this is. A use that only computing graphs show
    // (an evaluation callback) makes it an ordinary one, unless a coded cache is required.
    void begin(const GraphUse & use);
    // llama.cpp creates the cache of sliding layers after the other one, with fewer cells or with as many.
    std::pair<int64_t, int64_t> cells_and_age() const { return { tensors_.begin()->first->ne[1], -number_ }; }
    bool                        is_decided() const { return decided_; }
    bool                        is_coded() const { return cache_ != nullptr; }

    // The following are for a coded cache.
    bool          codes(int32_t il) const { return rows_.count(il) != 0; }
    Cache &       cache() const { return *cache_; }
    KnownCells &  cells() const { return *cells_; }
    ggml_tensor * rows(int32_t il, bool value) const; // I8 [row_bytes, n_cells, n_stream]
    // The exact rows of restored cells go to the window, as soon as tokens show the positions.
    void adopt_restored(const std::vector<GraphToken> & tokens, const ggml_tensor * mask);
    // Called before cells move, because restored ones are then read through their codes, which rotate.
    void forget_restored() { restored_.clear(); }
    // Distances by which cells have moved whose keys are not all rotated yet, or empty if there is none.
    std::vector<int32_t> & shifting() { return shifting_; }

    // Bytes of a tensor as llama.cpp sees them.
    void get(const ggml_tensor * t, void * data, size_t offset, size_t size) const;
    void set(ggml_tensor * t, const void * data, size_t offset, size_t size);
    // false if it is not a copy of a stream to another one
    bool copy(const ggml_tensor * src, const Store * from, ggml_tensor * dst);

private:
    // Rows [first, first + n) of a tensor.
    struct Part {
        const ggml_tensor * root;
        CacheTensor         of;
        int64_t             first, n;
    };

    // Rows that a state has set, until their positions are known.
    struct Restored {
        int64_t n;
        // The first and the last rows, by (il, value).
        std::map<std::pair<int32_t, bool>, std::pair<std::vector<uint16_t>, std::vector<uint16_t>>> rows;
    };

    bool open(); // gives memory to all pages, and returns false if there is none
    void decided();
    void stay_ordinary(const std::string & why);
    bool find_bases(Seen seen); // as find_model_bases; false if they are not known yet
    Part part(const ggml_tensor * t, size_t offset, size_t size) const;
    void set_rows(const Part & part, const uint16_t * rows);
    void code(ggml_cgraph * graph, const GraphUse & use);
    void uncode();       // as before code()
    void protect_rows(); // protects the f16 rows of coded layers, and opens those of the others
    void report() const;

    uint8_t *                                  base_;
    size_t                                     size_;
    int64_t                                    number_; // of all stores of this process
    std::map<const ggml_tensor *, CacheTensor> tensors_;
    GraphWeights                               weights_;         // until checked
    bool                                       asked_   = false; // while planned
    bool                                       checked_ = false;
    bool                                       decided_ = false;
    bool                                       begun_   = false;
    bool                                       opened_  = false; // all pages
    ggml_type                                  type_k_ = GGML_TYPE_F16, type_v_ = GGML_TYPE_F16;
    std::vector<int32_t>                       shifting_;
    CacheChoice                                bases_;
    std::unique_ptr<Cache>                     cache_;
    std::unique_ptr<KnownCells>                cells_;
    ggml_context_ptr                           ctx_; // of the codes
    ggml_backend_buffer_ptr                    memory_;
    std::vector<Part>                          early_;    // set before decide()
    std::map<int64_t, Restored>                restored_; // by first cell

    std::map<int32_t, std::pair<ggml_tensor *, ggml_tensor *>> rows_; // by il
};

constexpr size_t ALIGNMENT = 128;

// A buffer for the K/V tensors of a cache, or nullptr if there is no address space.
ggml_backend_buffer_t new_store(ggml_backend_buffer_type_t type, size_t size);
// Returns nullptr if the tensor is not in such a buffer.
Store * buffer_of(const ggml_tensor * t);
// Returns nullptr if the tensor is not in such a buffer, or is no cache tensor.
Store * store_of(const ggml_tensor * t, CacheTensor * which = nullptr);

// What a backend keeps between graphs.
class GraphPlan;

struct Context {
    ggml_backend_ptr           backend; // that computes
    std::unique_ptr<GraphPlan> plan;    // of the last graph

    Context();
    ~Context();
};

// Decides about caches while llama.cpp plans graphs. Throws Invalid, which ends the creation of the context.
void        plan(ggml_cgraph * graph);
ggml_status compute(Context & context, ggml_cgraph * graph);

} // namespace subkv::plugin
