// llama-subkv-state.cpp: states of llama.cpp's K/V cache, whose coded cells are rows there and tiles in memory
// (llama-subkv.h). Part of libllama.
#include "llama-subkv-cells.h"

#include "llama-context.h"
#include "llama-impl.h"
#include "llama-io.h"
#include "llama-kv-cache-iswa.h"
#include "llama-memory-hybrid.h"
#include "llama-memory-recurrent.h"

#include <algorithm>
#include <cinttypes>
#include <cstring>
#include <set>
#include <stdexcept>
#include <unordered_map>

namespace {

// FNV-1a: any one byte that differs changes it.
uint64_t checksum(uint64_t sum, const uint8_t * bytes, size_t n) {
    for (size_t i = 0; i < n; ++i) {
        sum = (sum ^ bytes[i]) * UINT64_C(0x100000001b3);
    }
    return sum;
}

constexpr uint64_t CHECKSUM_OF_NOTHING = UINT64_C(0xcbf29ce484222325);

class state_writer : public subkv::StateWriter {
public:
    explicit state_writer(llama_io_write_i & io) : io(io) {}

    void write(const void * data, size_t size) override {
        sum = checksum(sum, (const uint8_t *) data, size);
        io.write(data, size);
    }

    void write_tensor(ggml_tensor * t, size_t offset, size_t size) override { io.write_tensor(t, offset, size); }

    uint64_t sum = CHECKSUM_OF_NOTHING; // of what is of no tensor

private:
    llama_io_write_i & io;
};

class state_reader : public subkv::StateReader {
public:
    explicit state_reader(llama_io_read_i & io) : io(io) {}

    void read(void * data, size_t size) override {
        io.read(data, size);
        sum = checksum(sum, (const uint8_t *) data, size);
    }

    void read_tensor(ggml_tensor * t, size_t offset, size_t size) override { io.read_tensor(t, offset, size); }

    uint64_t sum = CHECKSUM_OF_NOTHING; // of what is of no tensor

private:
    llama_io_read_i & io;
};

} // namespace

// Tensors of coded layers, of one stream each: their cells lie in tiles.
class llama_subkv::tiles {
public:
    struct side {
        int32_t il;
        bool    value;
    };

    explicit tiles(const llama_kv_cache & kv) {
        for (const auto & layer : kv.layers) {
            if (row_bytes(kv, layer.il, false) == 0) {
                continue;
            }
            for (const bool value : { false, true }) {
                for (const ggml_tensor * t : value ? layer.v_stream : layer.k_stream) {
                    if (t) { // values of a latent layer have none
                        found[t] = { (int32_t) layer.il, value };
                    }
                }
            }
        }
    }

    // nullptr: another tensor
    const side * of(const ggml_tensor * t) const {
        const auto it = found.find(t);
        return it == found.end() ? nullptr : &it->second;
    }

private:
    std::unordered_map<const ggml_tensor *, side> found;
};

namespace {

// Counts bytes.
class counter : public llama_io_write_i, public llama_subkv::counts_only {
public:
    void   write(const void *, size_t size) override { n += size; }
    void   write_tensor(ggml_tensor *, size_t, size_t size) override { n += size; }
    size_t n_bytes() override { return n; }

private:
    size_t n = 0;
};

// The bytes of a state, all of which are there.
class cursor {
public:
    explicit cursor(const std::vector<uint8_t> & bytes) : bytes(bytes) {}

    const uint8_t * take(size_t n) {
        if (n > bytes.size() - at) {
            throw std::runtime_error("state: " + std::to_string(n) + " more bytes expected, " +
                                     std::to_string(bytes.size() - at) + " found");
        }
        at += n;
        return bytes.data() + at - n;
    }

    template <typename T> T value() {
        T x;
        std::memcpy(&x, take(sizeof(x)), sizeof(x));
        return x;
    }

    size_t used() const { return at; }
    size_t left() const { return bytes.size() - at; }

private:
    const std::vector<uint8_t> & bytes;
    size_t                       at = 0;
};

} // namespace

// The body of a state: what llama.cpp writes, coded cells as rows, and the window; or what it writes of another half.
// Everything is in the stream, of tensors on a device, too.
class llama_subkv::row_writer : public llama_io_write_i {
public:
    // sum: of what came before, whose checksum is to be one with the body's
    row_writer(const llama_kv_cache & kv, llama_io_write_i & io, uint64_t sum = CHECKSUM_OF_NOTHING) :
        sum(sum), kv(kv), io(io), coded(kv), counts(dynamic_cast<counts_only *>(&io) != nullptr) {}

    void write(const void * data, size_t size) override {
        if (!counts) {
            sum = checksum(sum, (const uint8_t *) data, size);
        }
        io.write(data, size);
    }

    void write_tensor(ggml_tensor * t, size_t offset, size_t size) override {
        if (!counts) {
            rows.resize(size);
            if (const auto * side = coded.of(t)) {
                kv.subkv_hook->get_rows(side->il, side->value, t, (int64_t) (offset / t->nb[1]),
                                        (int64_t) (size / t->nb[1]), rows.data());
            } else {
                ggml_backend_tensor_get(t, rows.data(), offset, size);
            }
        }
        write(rows.data(), size);
    }

    size_t   n_bytes() override { return io.n_bytes(); }
    uint64_t sum;

private:
    const llama_kv_cache & kv;
    llama_io_write_i &     io;
    const tiles            coded;
    const bool             counts;
    std::vector<uint8_t>   rows;
};

// Takes the body of a state from `io`, checks it, and is read in its place.
class llama_subkv::row_reader : public llama_io_read_i {
public:
    // sum: as row_writer's
    row_reader(llama_kv_cache & kv, llama_io_read_i & io, uint64_t sum = CHECKSUM_OF_NOTHING) :
        kv(kv), coded(kv), at(bytes) {
        constexpr uint64_t PIECE = 1 << 24; // a damaged size must not ask for memory that no state needs
        uint64_t           left, expected;
        io.read(&left, sizeof(left));
        while (left > 0) {
            const auto n = (size_t) std::min(left, PIECE);
            bytes.resize(bytes.size() + n);
            io.read(bytes.data() + bytes.size() - n, n);
            left -= n;
        }
        io.read(&expected, sizeof(expected));
        const uint64_t found = checksum(sum, bytes.data(), bytes.size());
        if (found != expected) {
            throw std::runtime_error(
                format("state: checksum %016" PRIx64 " expected, %016" PRIx64 " found", expected, found));
        }
    }

    // of: the cache whose cells these are to be, kv or its other half.
    void check(const llama_kv_cache & of, llama_seq_id seq) const;
    void check(const llama_memory_recurrent & of, llama_seq_id seq) const;

    void read(void * data, size_t size) override { std::memcpy(data, at.take(size), size); }

    void read_tensor(ggml_tensor * t, size_t offset, size_t size) override {
        const uint8_t * rows = at.take(size);
        if (const auto * side = coded.of(t)) {
            kv.subkv_hook->set_rows(side->il, side->value, t, (int64_t) (offset / t->nb[1]),
                                    (int64_t) (size / t->nb[1]), rows);
        } else {
            ggml_backend_tensor_set(t, rows, offset, size);
        }
    }

    size_t n_bytes() override { return at.used(); }

    // Throws unless all of it has been read.
    void end() const {
        if (at.left() > 0) {
            throw std::runtime_error("state: its end expected, " + std::to_string(at.left()) + " bytes found");
        }
    }

private:
    llama_kv_cache &     kv;
    const tiles          coded;
    std::vector<uint8_t> bytes;
    cursor               at;
};

static void demand(bool held, const std::string & expected, int64_t found) {
    if (!held) {
        throw std::runtime_error("state: " + expected + " expected, " + std::to_string(found) + " found");
    }
}

static void demand_position(llama_pos pos) {
    demand(pos >= 0 && pos < subkv::MAX_POSITION, "positions from 0 to " + std::to_string(subkv::MAX_POSITION - 1),
           pos);
}

// What llama.cpp takes on trust: positions and sequences of cells, one cell for each, and the widths of rows.
void llama_subkv::row_reader::check(const llama_kv_cache & of, llama_seq_id seq) const {
    cursor     in(bytes);
    const auto n_stream = in.value<uint32_t>();
    demand(n_stream == of.n_stream, std::to_string(of.n_stream) + " streams", n_stream);
    for (uint32_t s = 0; s < n_stream; ++s) {
        const auto n_cells = in.value<uint32_t>();
        demand(n_cells <= of.get_size(), "at most " + std::to_string(of.get_size()) + " cells", n_cells);
        if (n_cells == 0) {
            continue;
        }
        std::set<std::pair<llama_seq_id, llama_pos>> seen;
        for (uint32_t i = 0; i < n_cells; ++i) {
            const auto pos   = in.value<llama_pos>();
            const auto n_seq = in.value<uint32_t>();
            demand_position(pos);
            demand(n_seq >= 1 && n_seq <= (seq < 0 ? of.n_seq_max : 1), "a cell of its sequences", n_seq);
            in.take(of.has_cell_ext() ? sizeof(llama_kv_cell_ext) : 0);
            for (uint32_t j = 0; j < n_seq; ++j) {
                const auto id = in.value<llama_seq_id>();
                demand(seq >= 0 || (id >= 0 && (uint32_t) id < of.n_seq_max && of.seq_to_stream[id] == s),
                       "a sequence of stream " + std::to_string(s), id);
                demand(seen.insert({ seq < 0 ? id : seq, pos }).second, "one cell at a position", pos);
            }
        }
        const bool by_element = in.value<uint32_t>() != 0;
        demand(by_element == of.v_trans, of.v_trans ? "values by element" : "values by cell", by_element);
        const auto n_layer = in.value<uint32_t>();
        demand(n_layer == of.layers.size(), std::to_string(of.layers.size()) + " layers", n_layer);
        for (const bool value : { false, true }) {
            for (const auto & layer : of.layers) {
                const ggml_tensor * t = value ? layer.v : layer.k;
                if (!t) {
                    continue;
                }
                const auto type = in.value<int32_t>();
                demand(type == (int32_t) t->type, "tensors of type " + std::to_string(t->type), type);
                if (value && by_element) {
                    const uint32_t width = of.hparams.n_embd_v_gqa(layer.il), size = ggml_type_size(t->type);
                    const auto     found = in.value<uint32_t>();
                    demand(found == size, "elements of " + std::to_string(size) + " bytes", found);
                    const auto found_width = in.value<uint32_t>();
                    demand(found_width == width, std::to_string(width) + " values of a cell", found_width);
                    in.take((size_t) n_cells * width * size);
                    continue;
                }
                const auto row = in.value<uint64_t>();
                demand(row == t->nb[1], "rows of " + std::to_string(t->nb[1]) + " bytes", (int64_t) row);
                in.take(n_cells * t->nb[1]);
            }
        }
    }
}

// And of recurrent state: it ends the process over a second cell of a sequence.
void llama_subkv::row_reader::check(const llama_memory_recurrent &, llama_seq_id seq) const {
    cursor         in(bytes);
    const uint32_t most    = seq < 0 ? kv.n_seq_max : 1;
    const auto     n_cells = in.value<uint32_t>();
    demand(n_cells <= most, "recurrent state of at most " + std::to_string(most) + " sequences", n_cells);
    std::set<llama_seq_id> seen;
    for (uint32_t i = 0; i < n_cells; ++i) {
        demand_position(in.value<llama_pos>());
        const auto n_seq = in.value<uint32_t>();
        demand(seq < 0 ? n_seq >= 1 && n_seq <= most : n_seq == 0, "recurrent state of its sequences", n_seq);
        for (uint32_t j = 0; j < n_seq; ++j) {
            const auto id = in.value<llama_seq_id>();
            demand(id >= 0 && (uint32_t) id < most && seen.insert(id).second, "one recurrent state of a sequence", id);
        }
    }
}

//
// A state: the head, the size of the body in bytes u64, the body, a checksum of head and body u64. The body of a partial
// one is the window. That of a sliding or recurrent half beside it follows in the same way, without a head.
//

template <typename Body> static void write_checked(llama_io_write_i & io, Body body) {
    counter all;
    body(all);
    const uint64_t size = all.n_bytes();
    io.write(&size, sizeof(size));
    const uint64_t sum = body(io);
    io.write(&sum, sizeof(sum));
}

static void check_partial(const subkv::CacheHook & hook) {
    if (!hook.goes_back()) {
        hook.report("state: cells whose bases followed the text cannot go back to a partial state; save a whole one");
        throw std::runtime_error("partial state of a cache with adaptive bases");
    }
}

// What the window is told of it, and its checksum.
static std::pair<std::vector<uint64_t>, uint64_t> read_head(subkv::CacheHook & hook, llama_io_read_i & io,
                                                            llama_seq_id seq, bool partial) {
    if (partial) {
        check_partial(hook);
    }
    state_reader head(io);
    auto         moves = hook.state_read_head(head, seq, partial);
    return { std::move(moves), head.sum };
}

bool llama_subkv::state_write(const llama_kv_cache & kv, llama_io_write_i & io, llama_seq_id seq,
                              llama_state_seq_flags flags) {
    if (!kv.subkv_hook || !kv.subkv_hook->coded() || dynamic_cast<row_writer *>(&io)) {
        return false;
    }
    const bool partial = flags & LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY;
    if (partial) {
        check_partial(*kv.subkv_hook);
    }
    state_writer w(io);
    kv.subkv_hook->state_write_head(w, seq);
    write_checked(io, [&](llama_io_write_i & to) {
        row_writer rows(kv, to, w.sum);
        if (!partial) {
            kv.state_write(rows, seq, 0);
        }
        state_writer window(rows);
        kv.subkv_hook->state_write_window(window, seq);
        return rows.sum;
    });
    return true;
}

bool llama_subkv::state_read(llama_kv_cache & kv, llama_io_read_i & io, llama_seq_id seq, llama_state_seq_flags flags,
                             llama_kv_cache::slot_info_vec_t *       sinfos_out,
                             const llama_kv_cache::slot_info_vec_t * sinfos_in) {
    if (!kv.subkv_hook || !kv.subkv_hook->coded() || dynamic_cast<row_reader *>(&io)) {
        return false;
    }
    const bool partial      = flags & LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY;
    const auto [moves, sum] = read_head(*kv.subkv_hook, io, seq, partial);
    row_reader body(kv, io, sum);
    if (!partial) {
        body.check(kv, seq);
        state_read_cells(kv, body, seq, flags, sinfos_out, sinfos_in);
    }
    state_read_rest(kv, body, seq, moves);
    return true;
}

void llama_subkv::state_read_cells(llama_kv_cache & kv, row_reader & body, llama_seq_id seq,
                                   llama_state_seq_flags flags, llama_kv_cache::slot_info_vec_t * sinfos_out,
                                   const llama_kv_cache::slot_info_vec_t * sinfos_in) {
    if (seq >= 0) {
        kv.seq_rm(seq, -1, -1); // llama.cpp leaves what was there where the state is of no cells
    }
    kv.state_read_sinfo(body, seq, flags, sinfos_out, sinfos_in);
}

void llama_subkv::state_read_rest(llama_kv_cache & kv, row_reader & body, llama_seq_id seq,
                                  const std::vector<uint64_t> & moves) {
    try {
        state_reader window(body);
        kv.subkv_hook->state_read_window(window, seq, moves, reader(kv));
        body.end();
    } catch (...) {
        kv.state_clear(seq);
        throw;
    }
}

//
// both halves: the coded one, and sliding windows or recurrent state
//

template <typename Half>
bool llama_subkv::halves_write(const llama_kv_cache & base, const Half & other, llama_io_write_i & io, llama_seq_id seq,
                               llama_state_seq_flags flags) {
    if (!base.subkv_hook || !base.subkv_hook->coded()) {
        return false;
    }
    base.state_write(io, seq, flags);
    write_checked(io, [&](llama_io_write_i & to) {
        row_writer rows(base, to);
        other.state_write(rows, seq, flags);
        return rows.sum;
    });
    return true;
}

template <typename Half>
bool llama_subkv::halves_read(llama_kv_cache & base, Half & other, llama_io_read_i & io, llama_seq_id seq,
                              llama_state_seq_flags flags) {
    if (!base.subkv_hook || !base.subkv_hook->coded()) {
        return false;
    }
    const bool partial      = flags & LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY;
    const auto [moves, sum] = read_head(*base.subkv_hook, io, seq, partial);
    row_reader of_base(base, io, sum);
    if (!partial) {
        of_base.check(base, seq);
    }
    row_reader of_other(base, io);
    of_other.check(other, seq);
    base.subkv_hook->snapshots.clear();
    try {
        if (!partial) {
            state_read_cells(base, of_base, seq, flags, nullptr, nullptr);
        }
        state_read_rest(base, of_base, seq, moves);
        if (seq >= 0) {
            other.seq_rm(seq, -1, -1);
        }
        other.state_read(of_other, seq, flags);
        of_other.end();
    } catch (...) {
        halves_lose(base, other, seq);
        throw;
    }
    return true;
}

template <typename Half> void llama_subkv::halves_lose(llama_kv_cache & base, Half & other, llama_seq_id seq) {
    base.state_clear(seq);
    if (seq >= 0) {
        other.seq_rm(seq, -1, -1);
    } else {
        other.clear(true);
    }
}

bool llama_subkv::state_write(const llama_kv_cache_iswa & kv, llama_io_write_i & io, llama_seq_id seq,
                              llama_state_seq_flags flags) {
    return halves_write(*kv.get_base(), *kv.get_swa(), io, seq, flags);
}

bool llama_subkv::state_read(llama_kv_cache_iswa & kv, llama_io_read_i & io, llama_seq_id seq,
                             llama_state_seq_flags flags) {
    return halves_read(*kv.get_base(), *kv.get_swa(), io, seq, flags);
}

bool llama_subkv::state_write(const llama_memory_hybrid & memory, llama_io_write_i & io, llama_seq_id seq,
                              llama_state_seq_flags flags) {
    return halves_write(*memory.get_mem_attn(), *memory.get_mem_recr(), io, seq, flags);
}

bool llama_subkv::state_read(llama_memory_hybrid & memory, llama_io_read_i & io, llama_seq_id seq,
                             llama_state_seq_flags flags) {
    return halves_read(*memory.get_mem_attn(), *memory.get_mem_recr(), io, seq, flags);
}

void llama_subkv::lose(llama_kv_cache_iswa & kv, llama_seq_id seq) {
    if (coded(&kv)) {
        halves_lose(*kv.get_base(), *kv.get_swa(), seq);
    }
}

bool llama_subkv::clear_cells(llama_kv_cache & kv, int32_t il, bool value, ggml_tensor * t,
                              const std::vector<uint32_t> & cells) {
    const size_t row = row_bytes(kv, (uint32_t) il, value);
    if (row == 0) {
        return false;
    }
    for (size_t first = 0, last = 0; first < cells.size(); first = last) {
        for (last = first + 1; last < cells.size() && cells[last] == cells[last - 1] + 1; ++last) {
        }
        const std::vector<uint8_t> zeros((last - first) * row);
        kv.subkv_hook->set_rows(il, value, t, cells[first], (int64_t) (last - first), zeros.data());
    }
    return true;
}
