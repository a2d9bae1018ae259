// hook.h: the boundary between libllama (which uses llama.cpp's internals) and libsubkv (which uses only ggml, this file,
// cache_request.h and calls.h). Without libsubkv libllama behaves exactly as upstream.
#pragma once

#include "cache_request.h"
#include "ggml-backend.h"
#include "ggml.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace subkv {

constexpr int32_t MAX_POSITION = 1 << 30; // exclusive; sums of a position and a few window sizes then fit an int32_t

struct LayerDesc {
    int32_t                    il;
    int32_t                    n_head;
    int32_t                    n_head_kv;
    int32_t                    d_k; // head sizes
    int32_t                    d_v;
    bool                       latent; // values are the first d_v elements of keys: one row stores both
    bool                       chosen; // an indexer chooses the cells that a token reads
    ggml_backend_buffer_type_t buft;
};

// Elements of a token's K and V rows, all heads; Layer: a LayerDesc or its codec.
template <typename Layer> int64_t row_elements(const Layer & layer) {
    return (int64_t) layer.n_head_kv * (layer.d_k + (layer.latent ? 0 : layer.d_v));
}

// A layer without own K and V rows: it attends to the rows and the exact window of another layer.
struct ReaderDesc {
    int32_t il;
    int32_t owner; // the layer that stores the rows
    int32_t n_head;
};

// Description of a K/V cache before its constructor allocates memory.
struct CacheDesc {
    std::string            arch;
    std::string            unsupported; // reason why this cache cannot store coefficients; empty: it can
    std::string            unobserved;  // reason why an observer cannot read its rows; empty: it can
    std::string            no_cache;    // reason why there is no K/V cache, other fields are unset; empty: there is one
    int32_t                n_layer;
    uint32_t               n_cells; // per stream
    uint32_t               n_stream;
    uint32_t               n_seq_max;
    bool                   sliding;  // the sliding-window half of an iswa cache
    bool                   no_alloc; // dry run: sizes only
    bool                   is_long; // than the model is trained for: the user chose the length, and nothing shortens it
    CacheRequest           request; // of the context's parameters, with the model's file
    ggml_type              type_k;  // of an ordinary cache
    ggml_type              type_v;
    std::vector<LayerDesc> layers;
    std::vector<ReaderDesc> readers;
    std::vector<int32_t>    recurrent; // layers with a recurrent state, with or without rows
};

struct PosCell {
    int32_t pos;
    int32_t cell; // within the stream
};

// Cells of llama.cpp's cache. With M-RoPE all tokens of an image share one position in time and differ in height and
// width: a cell belongs to an image if its three positions differ. No exact window has image cells; every token reads
// their codes.
class CellReader {
public:
    virtual ~CellReader()                         = default;
    virtual uint32_t stream_of(int32_t seq) const = 0;
    // positions of cells 0 .. n-1 of a stream; -1: empty; MAX_POSITION, which no window reaches: image cell
    virtual void positions(uint32_t stream, uint32_t n, int32_t * out) const = 0;
    // cells of a sequence with p0 <= pos < p1 except image cells: at most one per position
    virtual void find(int32_t seq, int32_t p0, int32_t p1, std::vector<PosCell> & out) const = 0;
    // the same with image cells
    virtual void find_all(int32_t seq, int32_t p0, int32_t p1, std::vector<PosCell> & out) const = 0;
    // true: the cell also belongs to another sequence
    virtual bool shared(int32_t seq, int32_t cell) const = 0;
    // largest position of a sequence outside [p0, p1); -1: none
    virtual int32_t max_pos_outside(int32_t seq, int32_t p0, int32_t p1) const = 0;

    // First position in [p0, p1) at which dst has a cell that src does not share, so that a copy of src would add a
    // second cell; -1: none.
    int32_t doubled(int32_t src, int32_t dst, int32_t p0, int32_t p1) const {
        std::vector<PosCell> copied, there;
        find_all(src, p0, p1, copied);
        std::set<int32_t> cells;
        for (const auto & cell : copied) {
            cells.insert(cell.cell);
        }
        int32_t last = -1;
        for (const auto & cell : copied) {
            if (cell.pos == last) {
                continue;
            }
            last = cell.pos;
            find_all(dst, last, last + 1, there);
            for (const auto & own : there) {
                if (cells.count(own.cell) == 0) {
                    return last;
                }
            }
        }
        return -1;
    }
};

// A token of a batch: its position and its sequences. `cell` is valid after llama.cpp has assigned cells.
struct TokenDesc {
    int32_t         pos;
    int32_t         n_seq;
    const int32_t * seq;
    int32_t         stream;             // index among the streams of this ubatch
    int32_t         cell;               // within its stream
    bool            in_picture = false; // image token, see CellReader
};

// Tensors that the nodes of a coded layer share with the nodes of its readers, in one graph.
struct SharedRows {
    ggml_tensor * fresh     = nullptr; // half-precision rows of the graph's own tokens
    ggml_tensor * written   = nullptr; // dependency: after this node the cache has the codes
    int32_t       n_readers = 0;       // readers not yet built; after the last one the window stores the fresh rows
    bool          in_window = false;   // the window has them already
};

// Input tensors of a graph with coded or observed layers; set_inputs fills them before every run of the graph.
struct Inputs {
    ggml_tensor * cell_pos = nullptr; // I32 [n_kv, n_stream of the ubatch]: as CellReader::positions
    ggml_tensor * tokens   = nullptr; // I32 [3, n_tokens]: TokenRow (subkv/batch.h)
    ggml_tensor * slots    = nullptr; // I32 [3, n_slots]: SlotRow
    // Intermediate results that later layers of a graph reuse. The node "mask": the mask of coded cells, computed by
    // the first coded layer.
    ggml_tensor * coded_mask = nullptr;
    // The mask of a prompt's rows on a GPU, and the GPU's buffer type.
    ggml_tensor *              prompt_mask = nullptr;
    ggml_backend_buffer_type_t prompt_buft = nullptr;
    // The mask of chosen cells, their list, and the choice that both belong to; layers with the same choice are
    // adjacent.
    ggml_tensor * chosen_mask  = nullptr;
    ggml_tensor * chosen_cells = nullptr;
    ggml_tensor * chosen       = nullptr;
    // By il, for coded layers with readers.
    std::map<int32_t, SharedRows> shared;
    // Layers on a GPU store this graph's tokens in the window, without codes.
    bool defers_codes = false;
};

struct AttnBuild {
    ggml_context * ctx;
    ggml_cgraph *  gf;
    int32_t        il;
    ggml_tensor *  q;       // F32 [d_k, n_head, n_tokens]
    ggml_tensor *  k;       // F32 [d_k, n_head_kv, n_tokens]; nullptr: il reads another layer's rows
    ggml_tensor *  v;       // F32 [d_v, n_head_kv, n_tokens]; nullptr: ditto, or a latent layer
    ggml_tensor *  k_cache; // I8 [row_bytes, n_cells, n_stream], see get_rows
    ggml_tensor *  v_cache; // nullptr, like v_view and v_idxs: a latent layer
    ggml_tensor *  k_view;  // I8 [row_bytes, n_kv, streams of the ubatch]
    ggml_tensor *  v_view;
    ggml_tensor *  k_idxs; // I64 [n_tokens]: stream * n_cells + cell
    ggml_tensor *  v_idxs;
    ggml_tensor *  mask; // F32 or F16 [n_kv, n_tokens / streams, n, streams], n: 1 or n_head_kv
    // I32 [n, n_tokens / streams, 1, streams]: cells that a token attends to if the mask permits; nullptr: all
    ggml_tensor * chosen;
    ggml_tensor * sinks; // F32 [n_head] or nullptr
    Inputs *      inputs;
    float         scale;
    float         softcap;        // 0: none
    float         max_alibi_bias; // 0: none
    bool          pictures;       // M-RoPE: tokens that share a position have no exact rows
};

struct ShiftBuild {
    ggml_context * ctx;
    ggml_cgraph *  gf;
    int32_t        il;
    ggml_tensor *  k_cache;   // I8 [row_bytes, n_cells, n_stream]
    ggml_tensor *  of_cells;  // I32 [n_cells * n_stream] pending rotation of a cell's key, in positions
    ggml_tensor *  of_slots;  // I32 [n_slots] the same of window slots; nullptr: none
    ggml_tensor *  distances; // I32 [n] distinct values of both, ascending; 0 only if it is the only one
    ggml_tensor *  pairs;     // F32 [n_rot, 1, n] pairs (1, 0) rotated by each distance
    int64_t        first;     // index of a key's first rotated element
    bool           apart;     // a pair's second element is n_rot / 2 behind its first; false: next to it
};

class StateWriter {
public:
    virtual ~StateWriter()                                                 = default;
    virtual void write(const void * data, size_t size)                     = 0;
    virtual void write_tensor(ggml_tensor * t, size_t offset, size_t size) = 0;
};

class StateReader {
public:
    virtual ~StateReader()                                                = default;
    virtual void read(void * data, size_t size)                           = 0;
    virtual void read_tensor(ggml_tensor * t, size_t offset, size_t size) = 0;
};

// Constant properties of a cache.
struct CacheFacts {
    struct Layer {
        size_t k        = 0; // bytes of a cell's row (for a reader: of its owner's row); 0: the layer stays ordinary
        size_t v        = 0;
        bool   observed = false;
    };

    bool        coded      = false; // false: rows stay ordinary, the layers are only observed
    bool        shifts     = true;  // positions may move
    bool        moves      = false; // SUBKV_STORE_MOVED is set
    int32_t     n_rollback = -1;    // number of last tokens that a sequence of any length can remove; -1: all
    int64_t     n_slots    = 0;     // of the exact window
    std::string identity;           // of states: the layout and the window

    std::map<int32_t, Layer>                     layers;       // by il, without a sliding half
    std::map<ggml_backend_buffer_type_t, size_t> bytes_beside; // memory besides the cells, by type of buffer

    Layer  layer(int32_t il) const { return layers.count(il) ? layers.at(il) : Layer(); }
    size_t row_bytes(int32_t il, bool value) const { return value ? layer(il).v : layer(il).k; }
};

// Rows of a context's memory, without recurrent state.
struct RowSizes {
    size_t   coded = 0, ordinary = 0;                 // bytes of K and V as allocated
    size_t   ordinary_f16 = 0;                        // of the ordinary layers in f16
    uint32_t n_coded = 0, n_sliding = 0, n_other = 0; // layers with own rows; other: ordinary ones that do not slide
    uint32_t n_swa = 0;                               // tokens of the sliding layers' window; 0: they hold all cells
};

// One per K/V cache. Methods are called from the thread that drives the context.
class CacheHook {
public:
    virtual ~CacheHook() = default;

    const CacheFacts & facts() const { return facts_; }

    // The context's memory is complete.
    virtual void created(const RowSizes &) {}
    // Sets the reason that subkv_last_error returns; returns false.
    virtual bool report(const std::string & reason) const = 0;

    //
    // cells
    //

    virtual void clear() = 0;
    // Checks the removal of [p0, p1) of a sequence (-1: every sequence). false: codes need the rows; reports it.
    virtual bool can_remove(int32_t seq, int32_t p0, int32_t p1, const CellReader & cells) const = 0;
    // Called before the removal. false: rejected, as by can_remove.
    virtual bool remove(int32_t seq, int32_t p0, int32_t p1, const CellReader & cells) = 0;
    // false: rejected, no cell may be copied
    virtual bool copy_seq(int32_t src, int32_t dst, int32_t p0, int32_t p1, const CellReader & cells) = 0;
    // Removes the other sequences of the stream.
    virtual void keep(int32_t seq, const CellReader & cells) = 0;
    // Checks that a batch's tokens have positions of their own and that no exact row is missing. Reports it.
    virtual bool ready(const std::vector<TokenDesc> & tokens, const CellReader & cells) const = 0;
    // The smallest next position after a removal of the sequence's tail: 0 .. last position + 1; -1: the sequence is
    // empty.
    virtual int32_t rollback_target(int32_t seq, const CellReader & cells) const = 0;
    // Where a program that keeps positions before `pos` resumes evaluation: at the first of the last SUBKV_RESUME of
    // them that has lost its exact row, or at `pos`.
    virtual int32_t resume(int32_t seq, int32_t pos, const CellReader & cells) const = 0;

    //
    // shifts: changes of positions
    //

    // Checks a move of positions [p0, p1) of a sequence by `by`. false: rejected, reports it.
    virtual bool can_shift(int32_t seq, int32_t p0, int32_t p1, int32_t by, const CellReader & cells) const = 0;
    // The same, called before cells move, which no other sequence shares. Nodes of build_shift() apply the pending rotations of cells and window slots before any token reads their keys.
    virtual bool shift(int32_t seq, int32_t p0, int32_t p1, int32_t by, const CellReader & cells) = 0;
    virtual void rotations(int32_t * by) const     = 0; // [n_slots] pending rotations of keys
    virtual void rotated()                         = 0; // called after all keys are rotated
    virtual void build_shift(const ShiftBuild & b) = 0;

    //
    // states
    //

    // read_head runs before any cell changes. It throws if the state belongs to another layout, or a partial state to
    // cells at other positions, and returns the move history that read_window() compares. read_window runs after the
    // cells and throws if the window does not belong to them. seq -1: all.
    virtual void                  write_head(StateWriter & w, int32_t seq, bool partial) const = 0;
    virtual std::vector<uint64_t> read_head(StateReader & r, int32_t seq, bool partial) const  = 0;
    virtual void                  write_window(StateWriter & w, int32_t seq) const             = 0;
    virtual void                  read_window(StateReader & r, int32_t seq, const std::vector<uint64_t> & moves,
                                              const CellReader & cells)                        = 0;
    // Coded layers store cells in tiles (subkv/tiles.h); only the cache knows tiles. States contain rows [n][row_bytes]
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

    // Called after a graph has run. Logs the first row that could not be coded. false: nodes lacked memory, reports it;
    // the results of the graph are undefined.
    virtual bool computed() = 0;
    // While a graph runs: some of its nodes has lacked memory.
    virtual bool     lacks_memory() const = 0;
    virtual uint64_t n_bad_rows() const   = 0; // rows that could not be coded so far, on CPUs

    //
    // state that llama.cpp's side records
    //

    // Snapshots of the recurrent state beside the cells: while the sequence ends at `last`, it can remove its last n
    // tokens. Every snapshot belongs to a token of the last ubatch. Sequences of earlier ubatches have no entry,
    // because llama.cpp may have overwritten their snapshots.
    struct Snapshots {
        int32_t n    = -1;
        int32_t last = -1;
    };

    void note_snapshots(std::map<int32_t, Snapshots> snapshots) { snapshots_ = std::move(snapshots); } // by sequence
    void forget_snapshots(int32_t seq) { snapshots_.erase(seq); }
    Snapshots snapshots(int32_t seq) const { return snapshots_.count(seq) ? snapshots_.at(seq) : Snapshots(); }

    void set_causal(bool causal) { causal_ = causal; } // true: tokens attend to no later token

protected:
    bool causal() const { return causal_; }

    CacheFacts facts_; // set by the constructor

private:
    std::map<int32_t, Snapshots> snapshots_;
    bool                         causal_ = true;
};

// nullptr: an ordinary cache. Throws std::runtime_error with a sentence if the requested cache cannot be created.
using cache_new_fn = std::shared_ptr<CacheHook> (*)(const CacheDesc & desc);

// Receives one layer's K and V tensors, I8 [row_bytes, n_cells, n_stream], and the cells' positions.
using rows_fn = std::function<void(const CellReader & cells, const ggml_tensor * k, const ggml_tensor * v)>;

} // namespace subkv

struct llama_context;
