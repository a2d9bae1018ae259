// window.h: the exact window. For every sequence, the K and V rows of its first n_sink and its last n_recent positions
// (plus n_rollback older ones, so that a short tail can be removed). Sinks come first, then a ring, in which the slot of a
// position depends on the position and on how far the sequence has been shifted: rows stay where they are when their
// positions move. Tokens that share a position, which are those of a picture with M-RoPE, are in no window. Rows are in half precision, those of a ring in integers where the layer says so (subkv/recent.h).
#pragma once

#include "ggml-cpp.h"
#include "hook.h"

#include <map>
#include <string>
#include <utility>
#include <vector>

namespace subkv {

// A key at position p is attended exactly by the query at position t when it is a sink or recent.
inline bool is_exact(int32_t p, int32_t t, int32_t n_sink, int32_t n_recent) {
    return (p < n_sink) | ((p <= t) & (p > t - n_recent)); // no branches: loops over all cells are to be vectorized
}

// Where one layer's rows are: of each sequence its sinks, then its ring.
struct WindowRows {
    ggml_tensor * tensor   = nullptr; // F16 [elements of a row, n_slots()]; integers: I8 [bytes of a sequence, n_seq()]
    bool          integers = false;   // of the ring's rows
    size_t        sink     = 0;       // bytes of a row
    size_t        recent   = 0;
    int32_t       n_sink   = 0;
    int32_t       n_slot   = 0; // of a sequence

    bool   is_sink(int64_t slot) const { return slot % n_slot < n_sink; }
    size_t bytes(int64_t slot) const { return is_sink(slot) ? sink : recent; }
    size_t offset(int64_t slot) const {
        const int64_t seq = slot / n_slot, at = slot % n_slot, first = at < n_sink ? at : n_sink;
        const size_t  ring = (size_t) (n_slot - n_sink) * recent;
        return (size_t) seq * ((size_t) n_sink * sink + ring) + (size_t) first * sink + (size_t) (at - first) * recent;
    }
};

class Window {
public:
    Window(int32_t n_sink, int32_t n_recent, int32_t n_rollback, uint32_t n_seq_max);

    // One tensor per layer in its buffer type; integers: by layer. A row has n_embd_k_gqa + n_embd_v_gqa elements, of a
    // latent layer without the latter. Throws std::runtime_error when memory is short.
    void allocate(const std::vector<LayerDesc> & layers, const std::vector<bool> & integers, bool no_alloc);

    int32_t            n_sink() const { return n_sink_; }
    int32_t            n_recent() const { return n_recent_; }
    int32_t            n_rollback() const { return n_rollback_; }
    int32_t            n_seq() const { return n_seq_; }
    int64_t            n_slots() const { return (int64_t) n_seq_ * n_slot_; }
    int32_t            first_slot(int32_t seq) const { return seq * n_slot_; }
    const WindowRows & rows(int32_t il) const; // without a tensor where there are none
    uint64_t           kinds() const;          // tells apart windows whose rows have other sizes
    size_t             bytes() const { return bytes_; }
    const auto &       bytes_by_type() const { return bytes_by_type_; } // std::map<ggml_backend_buffer_type_t, size_t>

    std::pair<int32_t, int32_t> sequences(int32_t seq) const; // [first, last) that a call for seq (-1: all) is about

    // Rows of a text that was removed must not leave in the next state, nor be taken for those of another one: both
    // overwrite them with zeros.
    void clear();
    void forget(int32_t seq);                         // it is as new
    void forget(int32_t seq, int32_t p0, int32_t p1); // positions [p0, p1)

    bool can_remove(int32_t seq, int32_t p0, int32_t p1, const CellReader & cells) const;
    // As CacheHook::goes_back_to.
    int32_t goes_back_to(int32_t seq, const CellReader & cells) const;
    // replace: dst has no other cells then, else it keeps them.
    bool copy_seq(int32_t src, int32_t dst, int32_t p0, int32_t p1, bool replace);
    bool ready(const std::vector<TokenDesc> & tokens, const CellReader & cells) const;

    // Does everything that later tokens attend to exactly stay held, and every sink where it is, when positions [p0, p1)
    // move by `by`? Reports why not. add() then follows, before the cells do; the keys are rotated later, by rotations().
    bool can_add(int32_t seq, int32_t p0, int32_t p1, int32_t by, const CellReader & cells) const;
    void add(int32_t seq, int32_t p0, int32_t p1, int32_t by, const CellReader & cells);
    void rotations(int32_t * by) const; // [n_slots()] by how many positions a slot's key is still to be rotated
    void rotated();                     // by none any more
    // What tells cells apart that were moved otherwise, by sequence (-1: all): 0 where none was.
    std::vector<uint64_t> moves(int32_t seq) const;

    // Fills Inputs::tokens and Inputs::slots for a ubatch of `tokens` and records that its rows are stored. Slots are those
    // that the tokens attend to exactly, and the one that left the window last: blocks are coded from there.
    void set_inputs(const Inputs & in, const std::vector<TokenDesc> & tokens, const CellReader & cells);
    bool holds(int32_t seq, int32_t pos) const; // its exact row

    void state_write(StateWriter & w, int32_t seq) const;
    // moves: what moves() gave when it was written. Throws std::runtime_error.
    void state_read(StateReader & r, int32_t seq, const std::vector<uint64_t> & moves, const CellReader & cells);

private:
    // slot of a position within its sequence, -1: never held
    int32_t slot_of(int32_t seq, int32_t pos) const;

    // Slots [first, last) of a sequence in the order that they have without any shift, as runs of such as lie together.
    std::vector<std::pair<int32_t, int32_t>> runs(int32_t seq) const;

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

    std::vector<int32_t>                 pos_;      // [n_slots] position held, -1: none
    std::vector<int32_t>                 rotation_; // [n_slots] positions by which the key is still to be rotated
    std::vector<int32_t>                 origin_;   // [n_seq] of the ring: where it holds positions that it divides
    std::vector<uint64_t>                moves_;    // [n_seq]
    std::vector<WindowRows>              rows_;     // by il, without a tensor where there are none
    std::vector<ggml_context_ptr>        ctxs_;
    std::vector<ggml_backend_buffer_ptr> bufs_;
};

} // namespace subkv
