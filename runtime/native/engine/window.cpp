#include "window.h"

#include "error.h"
#include "node_sources.h"
#include "subkv/format.h"
#include "subkv/recent.h"

#include <algorithm>
#include <cinttypes>
#include <map>
#include <set>

namespace subkv {

// Combines the hashes of two shift histories. An empty history (0) leaves the other one unchanged.
static uint64_t joined(uint64_t a, uint64_t b) {
    return a == b || b == 0 ? a : (a ^ b) * UINT64_C(0x100000001b3) + 1;
}

namespace {

// A range of positions.
struct Range {
    int32_t min = MAX_POSITION, max = -1;

    void add(int32_t pos) {
        min = std::min(min, pos);
        max = std::max(max, pos);
    }
};

} // namespace

Window::Window(int32_t n_sink, int32_t n_recent, int32_t n_rollback, uint32_t n_seq_max) :
    n_sink_(n_sink), n_recent_(n_recent), n_rollback_(n_recent > 0 ? n_rollback : 0),
    n_ring_(n_recent > 0 ? n_recent + n_rollback : 0), n_slot_(n_sink + n_ring_), n_seq_((int32_t) n_seq_max),
    pos_((size_t) n_slot_ * n_seq_max, -1), rotation_(pos_.size(), 0), origin_(n_seq_max, 0), moves_(n_seq_max, 0) {}

// The bytes of a layer's row in integers, where K's heads precede V's. `steps` receives where each head begins.
static size_t recent_row_bytes(const LayerDesc & layer, std::vector<size_t> & steps) {
    size_t at = 0;
    for (const bool value : { false, true }) {
        for (int32_t h = 0; h < (value && layer.latent ? 0 : layer.n_head_kv); ++h) {
            steps.push_back(at);
            at += (size_t) recent_bytes(value ? layer.d_v : layer.d_k);
        }
    }
    return at;
}

void Window::allocate(const std::vector<LayerDesc> & layers, const std::vector<bool> & integers, bool no_alloc) {
    if (n_slot_ == 0) {
        return;
    }
    std::map<ggml_backend_buffer_type_t, std::vector<const LayerDesc *>> by_buft;
    for (size_t i = 0; i < layers.size(); ++i) {
        const LayerDesc & layer = layers[i];
        by_buft[layer.buft].push_back(&layer);
        if ((size_t) layer.il >= rows_.size()) {
            rows_.resize((size_t) layer.il + 1);
        }
        WindowRows & rows = rows_[(size_t) layer.il];
        rows.n_sink       = n_sink_;
        rows.n_slot       = n_slot_;
        rows.integers     = integers[i];
        rows.sink         = (size_t) row_elements(layer) * sizeof(ggml_fp16_t);
        rows.recent       = rows.integers ? recent_row_bytes(layer, rows.steps) : rows.sink;
    }
    for (const auto & [buft, group] : by_buft) {
        ggml_context_ptr ctx(ggml_init({ (group.size() + 1) * ggml_tensor_overhead(), nullptr, true }));
        if (!ctx) {
            fail({ SUBKV_ERROR_MEMORY, "exact window", "out of memory" });
        }
        for (const auto * layer : group) {
            WindowRows &  rows = rows_[(size_t) layer->il];
            ggml_tensor * t = rows.integers ?
                                  ggml_new_tensor_2d(ctx.get(), GGML_TYPE_I8, (int64_t) rows.offset(n_slot_), n_seq_) :
                                  ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F16, row_elements(*layer), n_slots());
            ggml_format_name(t, "subkv_window_l%d", layer->il);
            rows.tensor = t;
            bytes_ += ggml_nbytes(t);
            bytes_by_type_[buft] += ggml_nbytes(t);
        }
        ggml_backend_buffer_ptr buf;
        if (no_alloc) {
            buf.reset(ggml_backend_buft_alloc_buffer(buft, 0));
            for (ggml_tensor * t = ggml_get_first_tensor(ctx.get()); t; t = ggml_get_next_tensor(ctx.get(), t)) {
                t->buffer = buf.get();
            }
        } else {
            buf.reset(ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), buft));
        }
        if (!buf) {
            fail({ SUBKV_ERROR_MEMORY, "exact window",
                   sentence("cannot allocate %zu bytes on %s", bytes_, ggml_backend_buft_name(buft)) });
        }
        ggml_backend_buffer_clear(buf.get(), 0);
        ctxs_.push_back(std::move(ctx));
        bufs_.push_back(std::move(buf));
    }
}

bool finite_halves(const uint8_t * halves, int64_t n, bool nan) {
    bool all = true;
    for (int64_t i = 0; i < n; ++i) {
        const int32_t half = halves[2 * i] | halves[2 * i + 1] << 8;
        all                = all & ((half & 0x7c00) != 0x7c00 || (nan && half == HALF_NAN));
    }
    return all;
}

bool WindowRows::sound(int64_t first, int64_t last) const {
    constexpr int64_t    PIECE = 256; // in slots: large pieces, because on a GPU every call is a transfer
    std::vector<uint8_t> copy;
    for (int64_t end = first; first < last; first = end) {
        end             = std::min(last, first + PIECE);
        const size_t at = offset(first);
        copy.resize(offset(end) - at);
        ggml_backend_tensor_get(tensor, copy.data(), at, copy.size());
        for (int64_t slot = first; slot < end; ++slot) {
            const uint8_t * row = copy.data() + offset(slot) - at;
            if (!integers || is_sink(slot)) {
                if (!finite_halves(row, (int64_t) (bytes(slot) / sizeof(uint16_t)), true)) {
                    return false;
                }
                continue;
            }
            for (const size_t step : steps) {
                if (!finite_halves(row + step, 1, true)) {
                    return false;
                }
            }
        }
    }
    return true;
}

const WindowRows & Window::rows(int32_t il) const {
    static const WindowRows none;
    return (size_t) il < rows_.size() ? rows_[(size_t) il] : none;
}

uint64_t Window::kinds() const {
    uint64_t res = 0;
    for (const auto & rows : rows_) {
        res = (res ^ rows.recent) * UINT64_C(0x100000001b3) + 1;
    }
    return res;
}

int32_t Window::slot_of(int32_t seq, int32_t pos) const {
    if (pos < n_sink_) {
        return pos;
    }
    return n_ring_ > 0 ? n_sink_ + (pos + origin_[(size_t) seq]) % n_ring_ : -1;
}

std::vector<std::pair<int32_t, int32_t>> Window::runs(int32_t seq) const {
    const int32_t s = first_slot(seq), ring = s + n_sink_, at = ring + origin_[(size_t) seq];
    if (at == ring) {
        return { { s, s + n_slot_ } };
    }
    return { { s, ring }, { at, s + n_slot_ }, { ring, at } };
}

bool Window::holds(int32_t seq, int32_t pos) const {
    const int32_t slot = slot_of(seq, pos);
    return slot >= 0 && pos_[(size_t) (first_slot(seq) + slot)] == pos;
}

void Window::clear() {
    std::fill(pos_.begin(), pos_.end(), -1);
    std::fill(rotation_.begin(), rotation_.end(), 0);
    std::fill(origin_.begin(), origin_.end(), 0);
    std::fill(moves_.begin(), moves_.end(), 0);
    for (const auto & buf : bufs_) {
        ggml_backend_buffer_clear(buf.get(), 0);
    }
}

void Window::forget(int32_t seq) {
    forget(seq, 0, MAX_POSITION);
    origin_[(size_t) seq] = 0;
    moves_[(size_t) seq]  = 0;
}

void Window::forget(int32_t seq, int32_t p0, int32_t p1) {
    const auto slots = pos_.begin() + first_slot(seq);
    const auto gone  = [&](int32_t pos) { return pos >= 0 && pos >= p0 && pos < p1; };
    for (auto from = slots, to = slots; from != slots + n_slot_; from = to) {
        const bool zero = gone(*from);
        to              = std::find_if(from, slots + n_slot_, [&](int32_t pos) { return gone(pos) != zero; });
        for (const auto & rows : rows_) { // a run of slots at once, because on a GPU every call is a transfer
            if (rows.tensor && zero) {
                const size_t at = rows.offset(from - pos_.begin());
                ggml_backend_tensor_memset(rows.tensor, 0, at, rows.offset(to - pos_.begin()) - at);
            }
        }
        if (zero) {
            std::fill(from, to, -1);
            std::fill_n(rotation_.begin() + (from - pos_.begin()), to - from, 0);
        }
    }
}

std::pair<int32_t, int32_t> Window::sequences(int32_t seq) const {
    return seq < 0 ? std::pair{ 0, n_seq_ } : std::pair{ std::min(n_seq_, seq), std::min(n_seq_, seq + 1) };
}

bool Window::stays_complete(int32_t seq, int32_t p0, int32_t p1, const CellReader & cells) const {
    std::vector<PosCell> there;
    const auto [s0, s1] = sequences(seq);
    for (int32_t s = s0; s < s1; ++s) {
        const int32_t last = cells.max_pos_outside(s, p0, p1);
        if (last < 0 || n_recent_ == 0) {
            continue;
        }
        const int32_t first = std::max(0, last + 2 - n_recent_);
        int32_t       lost  = 0;
        cells.find(s, first, last + 1, there);
        for (const auto & cell : there) {
            lost += (cell.pos < p0 || cell.pos >= p1) && !holds(s, cell.pos);
        }
        if (lost > 0) {
            return reject(
                "seq_rm: removing positions [%d, %d) of sequence %d needs the exact rows of positions %d to %d, of "
                "which %d are no longer held; remove the whole sequence and decode it again, or create the context "
                "with n_rollback larger than %d",
                p0, p1, s, first, last, lost, n_rollback_);
        }
    }
    return true;
}

void Window::remove(int32_t seq, int32_t p0, int32_t p1, const CellReader & cells) {
    forget(seq, p0, p1);
    const int32_t        next = cells.max_pos_outside(seq, p0, p1) + 1;
    std::vector<PosCell> there;
    for (const auto & cell : exact_cells(seq, next, next, cells)) {
        if ((cell.pos >= p0 && cell.pos < p1) || holds(seq, cell.pos) || !cells.shared(seq, cell.cell)) {
            continue;
        }
        for (int32_t other = 0; other < n_seq_; ++other) {
            if (other == seq || cells.stream_of(other) != cells.stream_of(seq) || !holds(other, cell.pos)) {
                continue;
            }
            cells.find(other, cell.pos, cell.pos + 1, there);
            if (!there.empty() && there[0].cell == cell.cell) {
                copy_row(first_slot(other) + slot_of(other, cell.pos), first_slot(seq) + slot_of(seq, cell.pos));
                break;
            }
        }
    }
}

int32_t Window::resume(int32_t seq, int32_t pos, int32_t n, const CellReader & cells) const {
    if (seq < 0 || seq >= n_seq_ || n_recent_ == 0) {
        return pos;
    }
    std::vector<PosCell> there;
    cells.find(seq, std::max(0, pos - std::min(n, n_recent_ - 1)), pos, there);
    const auto lost = std::find_if(there.begin(), there.end(), [&](auto & cell) { return !holds(seq, cell.pos); });
    return lost == there.end() ? pos : lost->pos;
}

int32_t Window::rollback_target(int32_t seq, const CellReader & cells) const {
    const int32_t last = seq < n_seq_ ? cells.max_pos_outside(seq, 0, 0) : -1;
    if (last < 0 || n_recent_ == 0) {
        return last < 0 ? -1 : 0;
    }
    // No ring slot stores a position before last - n_ring_, except after a removal of a tail, which changes nothing.
    std::vector<PosCell> there;
    cells.find(seq, std::max(n_sink_, last - n_ring_), last + 1, there);
    int32_t lost = -1;
    for (const auto & cell : there) {
        lost = holds(seq, cell.pos) ? lost : std::max(lost, cell.pos);
    }
    return lost < 0 ? 0 : std::min(last + 1, lost + n_recent_);
}

bool Window::copy_seq(int32_t src, int32_t dst, int32_t p0, int32_t p1, bool replace) {
    if (src >= n_seq_ || dst >= n_seq_) {
        return reject("seq_cp: sequences 0 to %d expected, %d to %d found", n_seq_ - 1, src, dst);
    }
    if (src == dst) {
        return true;
    }
    const uint64_t moves = moves_[(size_t) dst];
    if (replace) {
        forget(dst);
        origin_[(size_t) dst] = origin_[(size_t) src];
    }
    moves_[(size_t) dst] = replace ? moves_[(size_t) src] : joined(moves, moves_[(size_t) src]);
    for (int32_t i = 0; i < n_slot_; ++i) {
        const size_t  from = (size_t) (first_slot(src) + i);
        const int32_t pos  = pos_[from];
        if (pos < 0 || pos < p0 || pos >= p1) {
            continue;
        }
        const int32_t to = first_slot(dst) + slot_of(dst, pos);
        if (pos_[(size_t) to] <= pos) { // a ring stores the latest position
            copy_row((int64_t) from, to);
        }
    }
    return true;
}

void Window::copy_row(int64_t from, int64_t to) {
    pos_[(size_t) to]      = pos_[(size_t) from];
    rotation_[(size_t) to] = rotation_[(size_t) from];
    std::vector<uint8_t> row;
    for (const auto & rows : rows_) {
        if (rows.tensor) {
            row.resize(rows.bytes(from));
            ggml_backend_tensor_get(rows.tensor, row.data(), rows.offset(from), row.size());
            ggml_backend_tensor_set(rows.tensor, row.data(), rows.offset(to), row.size());
        }
    }
}

std::vector<Window::Row> Window::take(int32_t seq, const std::vector<int32_t> & slots) {
    std::vector<Row> taken;
    size_t           size = 0;
    for (const auto & rows : rows_) {
        size += rows.tensor ? std::max(rows.sink, rows.recent) : 0;
    }
    for (const int32_t slot : slots) {
        const size_t at = (size_t) (first_slot(seq) + slot);
        Row          row{ pos_[at], rotation_[at], {} };
        try {
            row.data.reserve(size);
            for (const auto & rows : rows_) {
                if (rows.tensor) {
                    const size_t n = row.data.size(), bytes = rows.bytes((int64_t) at);
                    row.data.resize(n + bytes);
                    ggml_backend_tensor_get(rows.tensor, row.data.data() + n, rows.offset((int64_t) at), bytes);
                }
            }
        } catch (const std::bad_alloc &) { // attention then reads its codes
            row.data.clear();
        }
        taken.push_back(std::move(row));
    }
    for (const Row & row : taken) {
        forget(seq, row.pos, row.pos + 1);
    }
    return taken;
}

int64_t Window::enter(int32_t seq, int32_t pos) {
    const int64_t at = slot(seq, pos);
    if (slot_of(seq, pos) < 0 || pos_[(size_t) at] > pos) {
        return -1;
    }
    pos_[(size_t) at] = pos;
    return at;
}

void Window::put(int32_t seq, const Row & row) {
    const int64_t at = row.data.empty() ? -1 : enter(seq, row.pos);
    if (at < 0) {
        return;
    }
    rotation_[(size_t) at] = row.rotation;
    size_t n               = 0;
    for (const auto & rows : rows_) {
        if (rows.tensor) {
            ggml_backend_tensor_set(rows.tensor, row.data.data() + n, rows.offset(at), rows.bytes(at));
            n += rows.bytes(at);
        }
    }
}

std::vector<PosCell> Window::exact_cells(int32_t seq, int32_t min, int32_t end, const CellReader & cells) const {
    // A position past the sinks and before `first` is attended through its codes.
    const int32_t        first = std::max(0, min - n_recent_ + 1);
    std::vector<PosCell> sinks, res;
    cells.find(seq, 0, std::min(n_sink_, first), sinks);
    cells.find(seq, first, end, res);
    res.insert(res.end(), sinks.begin(), sinks.end());
    return res;
}

bool Window::ready(const std::vector<TokenDesc> & tokens, const CellReader & cells) const {
    clear_error(); // an error after a failed decode then belongs to this decode
    for (const auto & token : tokens) {
        if (token.pos >= MAX_POSITION) {
            return reject("decode: positions below %d expected, %d found", MAX_POSITION, token.pos);
        }
    }
    std::map<int32_t, Range>              ranges;
    std::set<std::pair<int32_t, int32_t>> seen; // (sequence, position)
    const auto                            twice = [](int32_t seq, int32_t pos) {
        return reject("decode: one token per position expected, two of sequence %d at position %d found", seq, pos);
    };
    for (const auto & token : tokens) {
        for (int32_t i = 0; i < token.n_seq; ++i) {
            if (!token.in_picture && !seen.insert({ token.seq[i], token.pos }).second) {
                return twice(token.seq[i], token.pos);
            }
        }
        for (int32_t i = 0; i < token.n_seq; ++i) {
            ranges[token.seq[i]].add(token.pos);
        }
    }
    std::vector<PosCell> held;
    for (const auto & [seq, range] : ranges) {
        cells.find(seq, range.min, range.max + 1, held); // with M-RoPE a batch may begin at the last position
        for (const auto & cell : held) {
            if (seen.count({ seq, cell.pos })) {
                return twice(seq, cell.pos);
            }
        }
    }
    return true;
}

bool Window::is_complete(const std::vector<TokenDesc> & tokens, const CellReader & cells) const {
    std::map<int32_t, Range> ranges;
    for (const auto & token : tokens) {
        for (int32_t i = 0; i < token.n_seq; ++i) {
            ranges[token.seq[i]].add(token.pos);
        }
    }
    for (const auto & [seq, range] : ranges) {
        for (const auto & cell : exact_cells(seq, range.min, range.max, cells)) {
            if (!holds(seq, cell.pos)) {
                return reject(
                    "decode: sequence %d at position %d attends exactly to position %d, whose exact row is not "
                    "held (it was copied or removed past the window); remove the whole sequence and decode it "
                    "again",
                    seq, range.min, cell.pos);
            }
        }
    }
    return true;
}

void Window::set_inputs(const Inputs & in, const std::vector<TokenDesc> & tokens, const CellReader & cells) {
    TokenRow * const rows  = token_rows(in.tokens);
    SlotRow * const  slots = slot_rows(in.slots);
    std::fill(slots, slots + n_slots(), SlotRow{ -1, -1, -1 });

    std::map<int32_t, Range>              ranges; // by sequence
    std::map<int32_t, int32_t>            stream; // in the ubatch, by sequence
    std::set<std::pair<int32_t, int32_t>> fresh;  // (stream, cell) of the ubatch's own tokens
    for (size_t i = 0; i < tokens.size(); ++i) {
        const auto & token = tokens[i];
        rows[i]            = { token.in_picture ? -1 : token.pos, token.cell, first_slot(token.seq[0]) };
        ranges[token.seq[0]].add(token.pos);
        stream[token.seq[0]] = token.stream;
        fresh.insert({ token.stream, token.cell });
    }
    if (n_slots() == 0) {
        return;
    }
    // A cell without a row in one of the sequences that share it is read through its codes by all of them.
    std::set<std::pair<int32_t, int32_t>> lost; // (stream, cell)
    for (const auto & [seq, range] : ranges) {
        for (const auto & cell : exact_cells(seq, range.min, range.max + 1, cells)) {
            if (!holds(seq, cell.pos) && !fresh.count({ stream[seq], cell.cell })) {
                lost.insert({ stream[seq], cell.cell });
            }
        }
    }
    for (const auto & [s, cell] : lost) {
        if (in.cell_pos->data && cell < in.cell_pos->ne[0]) {
            ((int32_t *) in.cell_pos->data)[s * in.cell_pos->ne[0] + cell] = MAX_POSITION;
        }
    }
    for (const auto & [seq, range] : ranges) {
        for (const auto & cell : exact_cells(seq, range.min - 1, range.max + 1, cells)) {
            const std::pair<int32_t, int32_t> at{ stream[seq], cell.cell };
            if (holds(seq, cell.pos) && !fresh.count(at) && !lost.count(at)) {
                const int32_t slot = first_slot(seq) + slot_of(seq, cell.pos);
                slots[slot].pos    = cell.pos;
                slots[slot].cell   = cell.cell;
            }
        }
    }
    // After attention, a slot stores the row of its token with the largest position.
    for (size_t i = 0; i < tokens.size(); ++i) {
        const auto & token = tokens[i];
        for (int32_t j = 0; !token.in_picture && j < token.n_seq; ++j) {
            const int32_t held = slot_of(token.seq[j], token.pos);
            const int32_t slot = first_slot(token.seq[j]) + held;
            if (held >= 0 && (slots[slot].token < 0 || tokens[(size_t) slots[slot].token].pos <= token.pos)) {
                slots[slot].token   = (int32_t) i;
                pos_[(size_t) slot] = token.pos;
            }
        }
    }
}

bool Window::can_add(int32_t seq, int32_t p0, int32_t p1, int32_t by, const CellReader & cells) const {
    std::vector<PosCell> all;
    cells.find(seq, 0, MAX_POSITION, all);
    const auto        moves = [&](int32_t pos) { return pos >= p0 && pos < p1; };
    std::set<int32_t> taken;
    for (const auto & cell : all) {
        const int64_t pos = (int64_t) cell.pos + (moves(cell.pos) ? by : 0);
        if (pos >= MAX_POSITION) {
            return reject("seq_add: positions below %d expected after a shift, %" PRId64 " found", MAX_POSITION, pos);
        }
        if (pos >= 0 && !taken.insert((int32_t) pos).second) { // llama.cpp removes cells that get a negative position
            return reject("seq_add: shifting positions [%d, %d) of sequence %d by %d would put two tokens at position "
                          "%" PRId64,
                          p0, p1, seq, by, pos);
        }
    }
    return true;
}

void Window::add(int32_t seq, int32_t p0, int32_t p1, int32_t by, const CellReader & cells) {
    std::vector<PosCell> moved;
    cells.find(seq, p0, p1, moved);
    if (moved.empty()) {
        return;
    }
    uint64_t & moves = moves_[(size_t) seq];
    moves            = joined(joined(moves, ((uint64_t) p0 << 32) | (uint32_t) p1), (uint32_t) by);

    // If the positions are the sequence's last ones, their rows stay in their slots of the ring, because its origin is
    // shifted too, and the other rows of the ring get new slots. Otherwise the rows of these positions get new slots.
    const bool           tail  = n_ring_ > 0 && cells.max_pos_outside(seq, p0, p1) < moved.back().pos;
    int32_t *            pos   = pos_.data() + first_slot(seq);
    const auto           in    = [&](int32_t slot) { return pos[slot] >= p0 && pos[slot] < p1; };
    const auto           stays = [&](int32_t slot) { return tail && slot >= n_sink_ && pos[slot] + by >= n_sink_; };
    std::vector<int32_t> slots;
    for (int32_t slot = 0; slot < n_slot_; ++slot) {
        const bool is_ring = slot >= n_sink_;
        if (pos[slot] >= 0 && (in(slot) ? !stays(slot) : tail && is_ring)) {
            slots.push_back(slot);
        }
    }
    std::vector<Row> rows = take(seq, slots);
    if (tail) {
        for (int32_t slot = n_sink_; slot < n_slot_; ++slot) {
            if (pos[slot] >= 0) {
                pos[slot] += by;
                rotation_[(size_t) (first_slot(seq) + slot)] += by;
            }
        }
        int32_t & origin = origin_[(size_t) seq];
        origin           = (origin - by % n_ring_ + n_ring_) % n_ring_;
    }
    for (Row & row : rows) {
        const bool was_sink = row.pos < n_sink_;
        if (row.pos >= p0 && row.pos < p1) {
            row.pos += by;
            row.rotation += by;
        }
        const bool is_sink = row.pos >= 0 && row.pos < n_sink_;
        if (row.pos >= 0 && is_sink == was_sink && (is_sink || n_ring_ > 0)) {
            put(seq, row);
        }
    }
}

void Window::rotations(int32_t * by) const {
    std::copy(rotation_.begin(), rotation_.end(), by);
}

std::vector<uint64_t> Window::moves(int32_t seq) const {
    const auto [s0, s1] = sequences(seq);
    return { moves_.begin() + s0, moves_.begin() + s1 };
}

void Window::rotated() {
    std::fill(rotation_.begin(), rotation_.end(), 0);
}

void Window::state_write(StateWriter & w, int32_t seq) const {
    const auto [s0, s1] = sequences(seq);
    const int32_t n     = (s1 - s0) * n_slot_;
    w.write(&n, sizeof(n));
    for (int32_t s = s0; s < s1; ++s) {
        for (const auto & [first, last] : runs(s)) {
            w.write(pos_.data() + first, (size_t) (last - first) * sizeof(int32_t));
        }
    }
    for (const auto & rows : rows_) {
        for (int32_t s = s0; rows.tensor && s < s1; ++s) {
            for (const auto & [first, last] : runs(s)) {
                if (first < last) {
                    w.write_tensor(rows.tensor, rows.offset(first), rows.offset(last) - rows.offset(first));
                }
            }
        }
    }
}

void Window::state_read(StateReader & r, int32_t seq, const std::vector<uint64_t> & moves, const CellReader & cells) {
    const auto [s0, s1] = sequences(seq);
    int32_t n           = 0;
    r.read(&n, sizeof(n));
    if (n != (s1 - s0) * n_slot_) {
        fail("state: exact window of %d rows expected, %d found (n_seq_max differs)", (s1 - s0) * n_slot_, n);
    }
    std::vector<int32_t> pos((size_t) n);
    r.read(pos.data(), (size_t) n * sizeof(int32_t));
    for (int32_t s = s0; s < s1; ++s) { // the old rows are lost in any case
        forget(s);
        moves_[(size_t) s] = moves[(size_t) (s - s0)];
    }
    std::vector<PosCell> cell;
    for (size_t i = 0; i < pos.size(); ++i) {
        if (pos[i] == -1) {
            continue;
        }
        const int32_t slot = (int32_t) i % n_slot_;
        const int32_t of   = s0 + (int32_t) i / n_slot_;
        if (pos[i] < 0 || pos[i] >= MAX_POSITION || slot_of(of, pos[i]) != slot) {
            fail("state: damaged exact window, position %d in slot %d", pos[i], slot);
        }
        cells.find(of, pos[i], pos[i] + 1, cell);
        if (cell.empty()) {
            fail("state: exact rows of sequence %d's cells expected, one of position %d found", of, pos[i]);
        }
    }
    for (const auto & rows : rows_) {
        if (rows.tensor && n > 0) {
            const size_t at = rows.offset(first_slot(s0));
            r.read_tensor(rows.tensor, at, rows.offset(first_slot(s0) + n) - at);
        }
    }
    std::copy(pos.begin(), pos.end(), pos_.begin() + first_slot(s0));
    for (const auto & rows : rows_) {
        if (rows.tensor && !rows.sound(first_slot(s0), first_slot(s0) + n)) {
            for (int32_t s = s0; s < s1; ++s) {
                forget(s);
            }
            fail("state: finite numbers expected, NaN or infinity found in the exact window");
        }
    }
}

} // namespace subkv
