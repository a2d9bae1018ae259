// cache_hook.h: the functions that libllama calls of a cache of libsubkv. libllama uses llama.cpp's internals; libsubkv
// uses only ggml and the headers of this folder. Without libsubkv libllama behaves exactly as upstream.
//
// Words of these headers and of their users:
//   coded          stored as codes, the quantized coefficients of a basis; a coded layer has a basis, an ordinary layer
//                  has llama.cpp's rows
//   exact row      a token's K and V row in half precision or better, which the exact window stores
//   fresh rows     the exact rows of the tokens that a graph evaluates
//   lost           a cell inside the exact window whose exact row is not stored (any more): its code is read instead
//   reader, owner  a layer without own rows, and the layer whose rows it reads
//   selected       the cells that an indexer lets a token read (sparse attention)
//   slot           the place of one row in the exact window
#pragma once

#include "cache_desc.h"
#include "cell_reader.h"
#include "graph_build.h"
#include "state_identity.h"
#include "state_io.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace subkv {

// Constant properties of a cache.
struct CacheFacts {
    struct Layer {
        // bytes of a cell's row (for a reader, of its owner's row), or 0 if the layer stays ordinary
        size_t k        = 0;
        size_t v        = 0;
        bool   observed = false;
    };

    bool    coded      = false; // false if no layer has coefficients, an observer reads the rows
    bool    shifts     = true;  // positions may move
    bool    moves      = false; // rows may be appended at other positions (SUBKV_STORE_MOVED)
    int32_t n_rollback = -1;    // number of last tokens that a sequence of any length can remove, or -1 for all
    int64_t n_slots    = 0;     // of the exact window

    StateIdentity identity; // of states, which covers the layout and the window

    std::map<int32_t, Layer>                     layers;       // by il, without a sliding half
    std::map<ggml_backend_buffer_type_t, size_t> bytes_beside; // memory besides the cells, by type of buffer

    Layer  layer(int32_t il) const { return layers.count(il) ? layers.at(il) : Layer(); }
    size_t row_bytes(int32_t il, bool value) const { return value ? layer(il).v : layer(il).k; }
};

// Rows of a context's memory, without recurrent state.
struct RowSizes {
    size_t coded = 0, ordinary = 0; // bytes of K and V as allocated
    size_t ordinary_f16 = 0;        // of the ordinary layers in f16
    // layers with own rows; n_other counts ordinary ones that do not slide
    uint32_t n_coded = 0, n_sliding = 0, n_other = 0;
    uint32_t n_swa = 0; // tokens of the sliding layers' window, or 0 if they hold all cells
};

// One per K/V cache. Methods are called from the thread that drives the context.
class CacheHook {
public:
    virtual ~CacheHook() = default;

    const CacheFacts & facts() const { return facts_; }

    // The context's memory is complete.
    virtual void created(const RowSizes &) {}
    // Sets the reason that subkv_last_error returns, and returns false.
    virtual bool report(const std::string & reason) const = 0;

    //
    // cells
    //

    virtual void clear() = 0;
    // Checks the removal of [p0, p1) of a sequence (-1 for every sequence). Returns false if codes that are not made
    // yet need the rows, and reports it.
    virtual bool can_remove(int32_t seq, int32_t p0, int32_t p1, const CellReader & cells) const = 0;
    // The same, called before the cells are removed.
    virtual bool remove(int32_t seq, int32_t p0, int32_t p1, const CellReader & cells) = 0;
    // Called before cells are copied. Returns false if the copy is rejected, and then no cell may be copied.
    virtual bool copy_seq(int32_t src, int32_t dst, int32_t p0, int32_t p1, const CellReader & cells) = 0;
    // Removes the other sequences of the stream.
    virtual void keep(int32_t seq, const CellReader & cells) = 0;
    // Checks that each token of a batch has its own position, and that no exact row is missing. Otherwise reports it
    // and returns false.
    virtual bool ready(const std::vector<TokenDesc> & tokens, const CellReader & cells) const = 0;
    // The smallest next position after a removal of the sequence's tail, between 0 and last position + 1, or -1 if the
    // sequence is empty.
    virtual int32_t rollback_target(int32_t seq, const CellReader & cells) const = 0;
    // The position from which a program that has removed a tail evaluates again, if `pos` is the first removed one. Of
    // the last SUBKV_RESUME positions before `pos` it is the first whose exact row is not in the window, or `pos` if
    // there is none.
    virtual int32_t resume(int32_t seq, int32_t pos, const CellReader & cells) const = 0;

    //
    // shifts: changes of positions
    //

    // Checks a move of positions [p0, p1) of a sequence by `by`. Returns false if it is rejected, and reports it.
    virtual bool can_shift(int32_t seq, int32_t p0, int32_t p1, int32_t by, const CellReader & cells) const = 0;
    // The same, called before the cells change, which no other sequence shares. Nodes of build_shift() apply the
    // pending rotations of cells and window slots before any token reads their keys.
    virtual bool shift(int32_t seq, int32_t p0, int32_t p1, int32_t by, const CellReader & cells) = 0;
    virtual void rotations(int32_t * by) const     = 0; // [n_slots] pending rotations of keys
    virtual void rotated()                         = 0; // called after all keys are rotated
    virtual void build_shift(const ShiftBuild & b) = 0;

    //
    // states
    //

    // read_head runs before any cell changes. It throws if the state belongs to another layout, or a partial state to
    // cells at other positions, and returns the move history that read_window() compares. read_window runs after the
    // cells and throws if the window does not belong to them. A `seq` of -1 means all.
    virtual void                  write_head(StateWriter & w, int32_t seq, bool partial) const = 0;
    virtual std::vector<uint64_t> read_head(StateReader & r, int32_t seq, bool partial) const  = 0;
    virtual void                  write_window(StateWriter & w, int32_t seq) const             = 0;
    virtual void                  read_window(StateReader & r, int32_t seq, const std::vector<uint64_t> & moves,
                                              const CellReader & cells)                        = 0;
    // Coded layers store cells in tiles (subkv/tiles.h), which only the cache knows. States contain rows [n][row_bytes]
    // of cells [first, first + n) of one stream's tensor, on CPU and GPU.
    virtual void get_rows(int32_t il, bool value, const ggml_tensor * t, int64_t first, int64_t n,
                          uint8_t * rows) const                                                                    = 0;
    virtual void set_rows(int32_t il, bool value, ggml_tensor * t, int64_t first, int64_t n, const uint8_t * rows) = 0;
    // Throws unless all numbers of these rows are finite.
    virtual void check_rows(int32_t il, bool value, int64_t n, const uint8_t * rows) const = 0;

    //
    // graph
    //

    virtual Inputs        build_inputs(ggml_context * ctx, int64_t n_kv, int64_t n_stream, int64_t n_tokens) = 0;
    virtual void          set_inputs(const Inputs & in, const std::vector<TokenDesc> & tokens, uint32_t stream0,
                                     const CellReader & cells)                                               = 0;
    virtual ggml_tensor * build_attn(const AttnBuild & b) = 0; // F32 [d_v * n_head, n_tokens]
    // Passes q, k and v (as in AttnBuild) of an observed layer to the observer. k and v are nullptr if the layer reads
    // another layer's rows.
    virtual void build_observe(ggml_context * ctx, ggml_cgraph * gf, int32_t il, ggml_tensor * q, ggml_tensor * k,
                               ggml_tensor * v, const Inputs & in, float scale) = 0;

    // Called after a graph has run. Logs the first row that could not be coded. Returns false if nodes lacked memory,
    // and the results of the graph are undefined, and reports it.
    virtual bool computed() = 0;
    // Called while a graph runs, to ask whether one of its nodes has lacked memory.
    virtual bool     lacks_memory() const = 0;
    virtual uint64_t n_bad_rows() const   = 0; // rows that could not be coded so far, on CPUs

    //
    // state that llama.cpp's side records
    //

    // Snapshots of the recurrent state beside the cells. While the sequence ends at `last`, it can remove its last n
    // tokens. Every snapshot belongs to a token of the last ubatch. Sequences of earlier ubatches have no entry,
    // because llama.cpp may have overwritten their snapshots.
    struct Snapshots {
        int32_t n    = -1;
        int32_t last = -1;
    };

    void note_snapshots(std::map<int32_t, Snapshots> snapshots) { snapshots_ = std::move(snapshots); } // by sequence
    void forget_snapshots(int32_t seq) { snapshots_.erase(seq); }
    Snapshots snapshots(int32_t seq) const { return snapshots_.count(seq) ? snapshots_.at(seq) : Snapshots(); }

    void set_causal(bool causal) { causal_ = causal; } // true if tokens attend to no later token

protected:
    bool causal() const { return causal_; }

    CacheFacts facts_; // set by the constructor

private:
    std::map<int32_t, Snapshots> snapshots_;
    bool                         causal_ = true;
};

// Returns nullptr for an ordinary cache. Throws std::runtime_error with a sentence if the requested cache cannot be
// created.
using cache_new_fn = std::shared_ptr<CacheHook> (*)(const CacheDesc & desc);

// Receives one layer's K and V tensors, I8 [row_bytes, n_cells, n_stream], and the cells' positions.
using rows_fn = std::function<void(const CellReader & cells, const ggml_tensor * k, const ggml_tensor * v)>;

} // namespace subkv
