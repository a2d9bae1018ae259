// hook.h: the boundary between libllama (llama-subkv.cpp, which sees llama.cpp's internals) and libsubkv (which sees
// ggml and this file only). With nothing registered libllama behaves exactly as upstream.
#pragma once

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

constexpr int32_t MAX_POSITION = 1 << 30; // positions are below; sums of a few of a window's sizes then fit

struct LayerDesc {
    int32_t                    il;
    int32_t                    n_head;
    int32_t                    n_head_kv;
    int32_t                    d_k; // head sizes
    int32_t                    d_v;
    bool                       latent; // values are the first d_v elements of keys: one row for both
    bool                       chosen; // tokens read cells that an indexer chooses
    ggml_backend_buffer_type_t buft;
};

// Elements of a token's K and V rows, of all heads; Layer: a LayerDesc or its codec.
template <typename Layer> int64_t row_elements(const Layer & layer) {
    return (int64_t) layer.n_head_kv * (layer.d_k + (layer.latent ? 0 : layer.d_v));
}

// A layer without K and V rows of its own, which attends to those of another one, at its exact window, too.
struct ReaderDesc {
    int32_t il;
    int32_t owner; // whose rows
    int32_t n_head;
};

// What the constructor of a K/V cache knows before it allocates anything.
struct CacheDesc {
    std::string             arch;
    std::string             model_path;  // of its first file; empty: unknown, the model was read from a stream
    std::string             unsupported; // why this cache cannot hold coefficients; empty: it can
    std::string             unobserved;  // why its rows cannot be observed; empty: they can
    std::string             none;        // why there is no K/V cache, of which the rest would tell; empty: there is one
    int32_t                 n_layer;
    uint32_t                n_cells; // per stream
    uint32_t                n_stream;
    uint32_t                n_seq_max;
    bool                    sliding;  // the sliding-window half of an iswa cache
    bool                    no_alloc; // dry run: sizes only
    bool                    required; // llama_subkv_require
    ggml_type               type_k;
    ggml_type               type_v;
    std::vector<LayerDesc>  layers;
    std::vector<ReaderDesc> readers;
    std::vector<int32_t>    recurrent; // layers that have a state instead of rows, or beside them
};

struct PosCell {
    int32_t pos;
    int32_t cell; // within the stream
};

// Cells as llama.cpp sees them. With M-RoPE all tokens of a picture have one position in time, and others in height and
// width: cells whose three positions differ are a picture's. They are in no exact window, everybody reads their codes.
class CellReader {
public:
    virtual ~CellReader()                         = default;
    virtual uint32_t stream_of(int32_t seq) const = 0;
    // positions of cells 0 .. n-1 of a stream, -1 where empty, MAX_POSITION, which no window reaches, of a picture's
    virtual void positions(uint32_t stream, uint32_t n, int32_t * out) const = 0;
    // cells of a sequence with p0 <= pos < p1 but a picture's: at most one of a position
    virtual void find(int32_t seq, int32_t p0, int32_t p1, std::vector<PosCell> & out) const = 0;
    // all of them
    virtual void find_all(int32_t seq, int32_t p0, int32_t p1, std::vector<PosCell> & out) const = 0;
    // does a cell of this sequence belong to another one, too?
    virtual bool shared(int32_t seq, int32_t cell) const = 0;
    // largest position of a sequence outside [p0, p1), -1 when there is none
    virtual int32_t max_pos_outside(int32_t seq, int32_t p0, int32_t p1) const = 0;

    // First position in [p0, p1) where a copy of src would give dst a second cell beside one of its own; -1: none.
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

// A token of a batch: its position and the sequences it belongs to. `cell` is known once cells are assigned.
struct TokenDesc {
    int32_t         pos;
    int32_t         n_seq;
    const int32_t * seq;
    int32_t         stream;             // index among the streams of this ubatch
    int32_t         cell;               // within its stream
    bool            in_picture = false; // as its cell, see CellReader
};

// What one coded layer's nodes leave to those of its readers, in one graph.
struct SharedRows {
    ggml_tensor * fresh     = nullptr; // half-precision rows of the graph's own tokens
    ggml_tensor * written   = nullptr; // codes are where attend reads them once this is there
    int32_t       n_readers = 0;       // yet to come; behind the last one fresh rows go to the window
};

// Input tensors of a graph that has coded or observed layers; filled before every run of the graph.
struct Inputs {
    ggml_tensor * cell_pos = nullptr; // I32 [n_kv, n_stream of the ubatch]: as CellReader::positions
    ggml_tensor * tokens   = nullptr; // I32 [4, n_tokens]: TokenRow (subkv/batch.h)
    ggml_tensor * slots    = nullptr; // I32 [3, n_slots]: SlotRow
    // No input, but what the first coded layer of a graph makes of its mask for all others: the node named mask.
    ggml_tensor * coded_mask = nullptr;
    // Nor is this, of a prompt on a GPU: the mask of its rows, and which GPU's.
    ggml_tensor *              prompt_mask = nullptr;
    ggml_backend_buffer_type_t prompt_buft = nullptr;
    // Nor are these: the mask of chosen cells, their list, and of which choice; layers that share one follow each other.
    ggml_tensor * chosen_mask  = nullptr;
    ggml_tensor * chosen_cells = nullptr;
    ggml_tensor * chosen       = nullptr;
    // No input either: by il, of coded layers that have readers.
    std::map<int32_t, SharedRows> shared;
};

struct AttnBuild {
    ggml_context * ctx;
    ggml_cgraph *  gf;
    int32_t        il;
    ggml_tensor *  q;       // F32 [d_k, n_head, n_tokens]
    ggml_tensor *  k;       // F32 [d_k, n_head_kv, n_tokens]; nullptr: il reads another layer's rows
    ggml_tensor *  v;       // F32 [d_v, n_head_kv, n_tokens]; nullptr: ditto, or a latent layer's
    ggml_tensor *  k_cache; // I8 [row_bytes, n_cells, n_stream], see get_rows
    ggml_tensor *  v_cache; // nullptr, as all of values: a latent layer's
    ggml_tensor *  k_view;  // I8 [row_bytes, n_kv, streams of the ubatch]
    ggml_tensor *  v_view;
    ggml_tensor *  k_idxs; // I64 [n_tokens]: stream * n_cells + cell
    ggml_tensor *  v_idxs;
    ggml_tensor *  mask; // F32 or F16 [n_kv, n_tokens / streams, n, streams], n: 1 or n_head_kv
    // I32 [n, n_tokens / streams, 1, streams]: cells that a token attends to, of those that the mask lets it see;
    // nullptr: all
    ggml_tensor * chosen;
    ggml_tensor * sinks; // F32 [n_head] or nullptr
    Inputs *      inputs;
    float         scale;
    float         softcap;        // 0: none
    float         max_alibi_bias; // 0: none
};

struct ShiftBuild {
    ggml_context * ctx;
    ggml_cgraph *  gf;
    int32_t        il;
    ggml_tensor *  k_cache;   // I8 [row_bytes, n_cells, n_stream]
    ggml_tensor *  of_cells;  // I32 [n_cells * n_stream] positions by which a key is still to be rotated
    ggml_tensor *  of_slots;  // I32 [n_slots], nullptr where there are none
    ggml_tensor *  distances; // I32 [n] the numbers in these, ascending; 0 only if it is the only one
    ggml_tensor *  pairs;     // F32 [n_rot, 1, n] what rotations by so many positions make of pairs (1, 0)
    int64_t        first;     // element of a head's key that is rotated first
    bool           apart;     // a pair's second element lies n_rot / 2 behind its first, else next to it
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

// What is true of a cache as long as it lives.
struct CacheFacts {
    struct Layer {
        size_t k = 0; // bytes of a cell's row, of another layer's for one that reads it; 0: the layer stays ordinary
        size_t v = 0;
        bool   observed = false;
    };

    bool        coded      = false; // false: rows stay ordinary, the layers are only observed
    bool        shifts     = true;  // positions may move
    bool        goes_back  = true;  // an exact window of earlier fits the cells held now; false: bases follow the text
    int32_t     n_sink     = 0;     // first tokens of a sequence that no shift may move
    int32_t     n_rollback = -1;    // last tokens of a sequence that can be removed, whatever its length is; -1: all
    int64_t     n_slots    = 0;     // of the exact window
    std::string identity;           // of states: the layout and the window

    std::map<int32_t, Layer>                     layers;       // by il, none of a sliding half
    std::map<ggml_backend_buffer_type_t, size_t> bytes_beside; // the cells, by the type of buffer that holds them

    Layer  layer(int32_t il) const { return layers.count(il) ? layers.at(il) : Layer(); }
    size_t row_bytes(int32_t il, bool value) const { return value ? layer(il).v : layer(il).k; }
};

// Positions that move.
class CacheShift {
public:
    virtual ~CacheShift() = default;
    // Before positions [p0, p1) of a sequence move by `by`; false: refused, no cell may move. Nodes of build() rotate the
    // keys by what cells and window slots are still to be rotated before any token sees them.
    virtual bool add(int32_t seq, int32_t p0, int32_t p1, int32_t by, const CellReader & cells) = 0;
    virtual void rotations(int32_t * by) const = 0; // [n_slots] of keys
    virtual void rotated()                     = 0; // all of them have been rotated
    virtual void build(const ShiftBuild & b)   = 0;
};

// The parts of a state, and the rows of cells in it.
class CacheState {
public:
    virtual ~CacheState() = default;
    // The head comes before any cell is touched and throws when the state belongs to another layout, or, of a partial one,
    // to cells at other positions; it gives read_window() what tells such apart. The window comes after the cells and
    // throws when it is not theirs. seq -1: all.
    virtual void                  write_head(StateWriter & w, int32_t seq) const              = 0;
    virtual std::vector<uint64_t> read_head(StateReader & r, int32_t seq, bool partial) const = 0;
    virtual void                  write_window(StateWriter & w, int32_t seq) const            = 0;
    virtual void                  read_window(StateReader & r, int32_t seq, const std::vector<uint64_t> & moves,
                                              const CellReader & cells)                       = 0;
    // Cells of coded layers lie in tiles (subkv/tiles.h), which nobody else knows: what goes elsewhere, or comes from
    // there, are rows [n][row_bytes] of cells [first, first + n) of one stream's tensor, wherever its memory is.
    virtual void get_rows(int32_t il, bool value, const ggml_tensor * t, int64_t first, int64_t n,
                          uint8_t * rows) const                                                                    = 0;
    virtual void set_rows(int32_t il, bool value, ggml_tensor * t, int64_t first, int64_t n, const uint8_t * rows) = 0;
};

// One per K/V cache. Methods are called from the thread that drives the context.
class CacheHook {
public:
    virtual ~CacheHook() = default;

    const CacheFacts &   facts() const { return facts_; }
    virtual CacheShift & shift() = 0;
    virtual CacheState & state() = 0;
    // What subkv_last_error says: the reason of a refusal.
    virtual void report(const std::string & reason) const = 0;

    //
    // cells
    //

    virtual void clear() = 0;
    // May [p0, p1) of a sequence (-1: every sequence) be removed? false: it would lose what later tokens need; reports it.
    virtual bool can_remove(int32_t seq, int32_t p0, int32_t p1, const CellReader & cells) const = 0;
    // Before that happens. false: refused, as by can_remove.
    virtual bool remove(int32_t seq, int32_t p0, int32_t p1, const CellReader & cells) = 0;
    // false: refused, no cell may be copied
    virtual bool copy_seq(int32_t src, int32_t dst, int32_t p0, int32_t p1, const CellReader & cells) = 0;
    // The other sequences of its stream are removed.
    virtual void keep(int32_t seq, const CellReader & cells) = 0;
    // Are the exact rows that these tokens attend to complete? Reports why not.
    virtual bool ready(const std::vector<TokenDesc> & tokens, const CellReader & cells) const = 0;
    // The smallest position to which a sequence of cells can be cut back, so that its next token gets this position: 0 or
    // more, at most one above its last one; -1: it is empty.
    virtual int32_t goes_back_to(int32_t seq, const CellReader & cells) const = 0;

    //
    // graph
    //

    virtual Inputs        build_inputs(ggml_context * ctx, int64_t n_kv, int64_t n_stream, int64_t n_tokens) = 0;
    virtual void          set_inputs(const Inputs & in, const std::vector<TokenDesc> & tokens, uint32_t stream0,
                                     const CellReader & cells)                                               = 0;
    virtual ggml_tensor * build_attn(const AttnBuild & b) = 0; // F32 [d_v * n_head, n_tokens]
    // Of an observed layer: shows q, k and v (as in AttnBuild) to the observer. k and v are nullptr in a layer that reads
    // another one's rows.
    virtual void build_observe(ggml_context * ctx, ggml_cgraph * gf, int32_t il, ggml_tensor * q, ggml_tensor * k,
                               ggml_tensor * v, const Inputs & in, float scale) = 0;

    //
    // what llama.cpp notes down
    //

    // How many of the last tokens recurrent state beside the cells, if it has snapshots, can lose while a sequence ends at
    // `last`. A snapshot is of a token of the last ubatch, not before its first; sequences of other ubatches, which are not
    // here, may have lost theirs.
    struct Snapshots {
        int32_t n    = -1;
        int32_t last = -1;
    };

    void note_snapshots(std::map<int32_t, Snapshots> snapshots) { snapshots_ = std::move(snapshots); } // by sequence
    void forget_snapshots(int32_t seq) { snapshots_.erase(seq); }
    Snapshots snapshots(int32_t seq) const { return snapshots_.count(seq) ? snapshots_.at(seq) : Snapshots(); }

    void set_causal(bool causal) { causal_ = causal; } // tokens see no later ones

    // Was the last copy_seq, add or refused call carried out? llama.cpp's callers get no answer to these.
    bool carried_out() const { return carried_out_; }
    bool answer(bool done) { return carried_out_ = done; }
    // A call that cannot be carried out.
    void refuse(const std::string & reason) {
        carried_out_ = false;
        report(reason);
    }

protected:
    bool causal() const { return causal_; }

    CacheFacts facts_; // to be set by the constructor

private:
    std::map<int32_t, Snapshots> snapshots_;
    bool                         causal_      = true;
    bool                         carried_out_ = true;
};

// nullptr: an ordinary cache. Throws std::runtime_error with a sentence when a cache was asked for that cannot be made.
using cache_new_fn = std::shared_ptr<CacheHook> (*)(const CacheDesc & desc);

// Takes one layer's cache, I8 [row_bytes, n_cells, n_stream], and what its cells hold.
using rows_fn = std::function<void(const CellReader & cells, const ggml_tensor * k, const ggml_tensor * v)>;

} // namespace subkv

struct llama_context;

// Exported by libllama, as its own functions are: MinGW exports all of them unless one asks for it.
#if defined(_WIN32) && !defined(__MINGW32__)
#    if defined(LLAMA_BUILD)
#        define SUBKV_HOOK_API __declspec(dllexport)
#    else
#        define SUBKV_HOOK_API __declspec(dllimport)
#    endif
#else
#    define SUBKV_HOOK_API __attribute__((visibility("default")))
#endif
SUBKV_HOOK_API void llama_subkv_register(subkv::cache_new_fn fn);
// Writes a line to llama.cpp's log, with the level of warnings: at lower ones programs of llama.cpp hide it.
SUBKV_HOOK_API void llama_subkv_log(const std::string & line);
// The hook of a context's cache (of the full-attention half of an iswa cache), nullptr: none. `bytes_stock` receives
// the K/V bytes of the context's layers that stay ordinary, `bytes_coded` those of the coded ones.
SUBKV_HOOK_API subkv::CacheHook * llama_subkv_of(llama_context * ctx, size_t * bytes_stock, size_t * bytes_coded);

// Shows `use` one layer of that cache, when all that the context was asked for is done. false: it holds no coefficients.
SUBKV_HOOK_API bool llama_subkv_rows(llama_context * ctx, int32_t il, const subkv::rows_fn & use);
