// window.h: the exact window. For every sequence it stores the K and V rows of the first n_sink and the last n_recent
// positions, and n_rollback older rows, so that the window is still complete after the removal of a short tail. The
// cache has the codes of these tokens too. Attention reads the row if the window has it; after a removal, a copy or a
// shift the window may lack the row, and attention reads the codes.
//
// Sinks come first, then a ring. The slot of a position in the ring depends on the position and on the sequence's total
// shift, so that the rows of a tail stay in place when their positions change. No window stores tokens that share a
// position (image tokens with M-RoPE). Rows are in half precision; in some layers, rows of the ring are integers
// (subkv/recent.h).
#pragma once

#include "cache_desc.h"
#include "cell_reader.h"
#include "ggml-cpp.h"
#include "graph_build.h"
#include "state_io.h"

#include <map>
#include <string>
#include <utility>
#include <vector>

namespace subkv {

// The query at position t attends exactly to the key at position p if the key is a sink or recent.
inline bool is_exact(int32_t p, int32_t t, int32_t n_sink, int32_t n_recent) {
    return (p < n_sink) | ((p <= t) & (p > t - n_recent)); // no branches, so that loops over all cells are vectorized
}

// The memory of one layer's rows, which has for each sequence its sinks and then its ring.
struct WindowRows {
    // F16 [elements of a row, n_slots()], or with integers I8 [bytes of a sequence, n_seq()]
    ggml_tensor * tensor   = nullptr;
    bool          integers = false; // of the ring's rows
    size_t        sink     = 0;     // bytes of a row
    size_t        recent   = 0;
    int32_t       n_sink   = 0;
    int32_t       n_slot   = 0; // of a sequence

    std::vector<size_t> steps; // with integers, the bytes of a row at which the steps of its heads are

    bool   is_sink(int64_t slot) const { return slot % n_slot < n_sink; }
    size_t bytes(int64_t slot) const { return is_sink(slot) ? sink : recent; }
    size_t offset(int64_t slot) const {
        const int64_t seq = slot / n_slot, at = slot % n_slot, first = at < n_sink ? at : n_sink;
        const size_t  ring = (size_t) (n_slot - n_sink) * recent;
        return (size_t) seq * ((size_t) n_sink * sink + ring) + (size_t) first * sink + (size_t) (at - first) * recent;
    }
    // Are all numbers in slots [first, last) finite, or the NaN that encode stores?
    bool sound(int64_t first, int64_t last) const;
};

// Are n halves finite, or (nan) HALF_NAN?
bool finite_halves(const uint8_t * halves, int64_t n, bool nan);

class Window {
public:
    Window(int32_t n_sink, int32_t n_recent, int32_t n_rollback, uint32_t n_seq_max);

    // Allocates one tensor per layer, in the layer's buffer type. `integers` is by layer. A row has n_embd_k_gqa +
    // n_embd_v_gqa elements, in a latent layer n_embd_k_gqa. Throws Invalid if memory is short.
    void allocate(const std::vector<LayerDesc> & layers, const std::vector<bool> & integers, bool no_alloc);

    int32_t            n_sink() const { return n_sink_; }
    int32_t            n_recent() const { return n_recent_; }
    int32_t            n_rollback() const { return n_rollback_; }
    int32_t            n_seq() const { return n_seq_; }
    int64_t            n_slots() const { return (int64_t) n_seq_ * n_slot_; }
    int32_t            first_slot(int32_t seq) const { return seq * n_slot_; }
    const WindowRows & rows(int32_t il) const; // without a tensor if the layer has none
    uint64_t           kinds() const;          // differs between windows whose rows have different sizes
    size_t             bytes() const { return bytes_; }
    const auto &       bytes_by_type() const { return bytes_by_type_; } // std::map<ggml_backend_buffer_type_t, size_t>

    std::pair<int32_t, int32_t> sequences(int32_t seq) const; // [first, last) for seq (-1 for all)

    // These functions overwrite rows of removed text with zeros, because the next state must not contain them, and
    // another text must not read them.
    void clear();
    void forget(int32_t seq);                         // all positions
    void forget(int32_t seq, int32_t p0, int32_t p1); // positions [p0, p1)

    // For bases that code tokens after they leave the window. Returns whether the window has all rows that the next
    // token attends to after a removal of [p0, p1), and all rows that these tokens attend to. Otherwise reports what is
    // missing.
    bool    stays_complete(int32_t seq, int32_t p0, int32_t p1, const CellReader & cells) const;
    bool    is_complete(const std::vector<TokenDesc> & tokens, const CellReader & cells) const;
    int32_t rollback_target(int32_t seq, const CellReader & cells) const; // as CacheHook's

    // Removes the rows of positions [p0, p1). It is called before their cells are removed, if others remain. If the
    // next token attends exactly to a cell that the sequence shares with another one, and only the other one has its
    // row, the row is copied.
    void remove(int32_t seq, int32_t p0, int32_t p1, const CellReader & cells);
    // As CacheHook::resume, where n is the value of SUBKV_RESUME.
    int32_t resume(int32_t seq, int32_t pos, int32_t n, const CellReader & cells) const;
    // With `replace`, the other rows of dst are removed.
    bool copy_seq(int32_t src, int32_t dst, int32_t p0, int32_t p1, bool replace);
    // Checks that each position has one token.
    bool ready(const std::vector<TokenDesc> & tokens, const CellReader & cells) const;

    // A shift of positions [p0, p1) by `by`. can_add reports the reason if it is impossible. add() follows before the
    // cells change, and a graph later rotates the keys by rotations(). Rows whose positions move between sinks and ring
    // are dropped.
    bool can_add(int32_t seq, int32_t p0, int32_t p1, int32_t by, const CellReader & cells) const;
    void add(int32_t seq, int32_t p0, int32_t p1, int32_t by, const CellReader & cells);
    void rotations(int32_t * by) const; // [n_slots()] pending rotation of a slot's key, in positions
    void rotated();                     // called after all keys are rotated
    // A hash of the shifts of each sequence (of all sequences if seq is -1), which is 0 without a shift.
    std::vector<uint64_t> moves(int32_t seq) const;

    // Fills Inputs::tokens and Inputs::slots for a ubatch of `tokens`, and records its rows as stored. The slots list
    // the keys that the tokens attend to exactly, and the key that left the window last, because bases that code later
    // code up to it. Cells inside the window without a row get MAX_POSITION in Inputs::cell_pos, so that all tokens
    // read their codes.
    void set_inputs(const Inputs & in, const std::vector<TokenDesc> & tokens, const CellReader & cells);
    bool holds(int32_t seq, int32_t pos) const; // true if the window has the exact row

    // The slot where the window stores a position. After enter() it holds the position, and the caller writes the row,
    // or -1 if the slot has a later position, or the window never stores this one.
    int64_t slot(int32_t seq, int32_t pos) const { return first_slot(seq) + slot_of(seq, pos); }
    int64_t enter(int32_t seq, int32_t pos);

    void state_write(StateWriter & w, int32_t seq) const;
    // `moves` is what moves() returned at the time of state_write. Throws Invalid, or the reader's exception.
    void state_read(StateReader & r, int32_t seq, const std::vector<uint64_t> & moves, const CellReader & cells);

private:
    // The slot of a position within its sequence, or -1 if the window never stores this position.
    int32_t slot_of(int32_t seq, int32_t pos) const;

    // The slots of a sequence, ordered as without shifts, as runs [first, last) of adjacent slots.
    std::vector<std::pair<int32_t, int32_t>> runs(int32_t seq) const;

    // A slot's row in all layers, outside the window.
    struct Row {
        int32_t              pos;
        int32_t              rotation;
        std::vector<uint8_t> data; // empty if there was no memory for it
    };

    // The rows in slots of a sequence, which become empty.
    std::vector<Row> take(int32_t seq, const std::vector<int32_t> & slots);
    void             put(int32_t seq, const Row & row); // unless the slot has a later position
    void             copy_row(int64_t from, int64_t to);

    // Cells before position `end` that some query at a position >= `min` attends to exactly.
    std::vector<PosCell> exact_cells(int32_t seq, int32_t min, int32_t end, const CellReader & cells) const;

    int32_t n_sink_;
    int32_t n_recent_;
    int32_t n_rollback_;
    int32_t n_ring_; // ring slots of a sequence
    int32_t n_slot_; // all slots of a sequence
    int32_t n_seq_;
    size_t  bytes_ = 0;

    std::map<ggml_backend_buffer_type_t, size_t> bytes_by_type_;

    std::vector<int32_t>                 pos_;      // [n_slots] position of the stored row, or -1 if there is none
    std::vector<int32_t>                 rotation_; // [n_slots] pending rotation of the key, in positions
    std::vector<int32_t>                 origin_;   // [n_seq] ring slot of the positions that n_ring_ divides
    std::vector<uint64_t>                moves_;    // [n_seq]
    std::vector<WindowRows>              rows_;     // by il, without a tensor for layers without rows
    std::vector<ggml_context_ptr>        ctxs_;
    std::vector<ggml_backend_buffer_ptr> bufs_;
};

} // namespace subkv
