// state.cpp: states of llama.cpp's K/V cache. Coded cells are rows in a state and tiles in memory
// (llama-subkv.h). Part of libllama.
#include "llama-subkv-body.h"
#include "llama-subkv-cells.h"
#include "llama-subkv-sequences.h"

#include "llama-context.h"
#include "llama-memory-recurrent.h"

#include <stdexcept>

namespace {

// Reads the head of a state.
class head_reader : public subkv::StateReader {
public:
    explicit head_reader(llama_io_read_i & io) : io(io) {}

    void read(void * data, size_t size) override {
        io.read(data, size);
        sum = subkv::checksum(sum, (const uint8_t *) data, size);
    }

    void read_tensor(ggml_tensor * t, size_t offset, size_t size) override { io.read_tensor(t, offset, size); }

    uint64_t sum = subkv::CHECKSUM_OF_NOTHING;

private:
    llama_io_read_i & io;
};

// Counts bytes.
class counter : public llama_io_write_i, public llama_subkv::counts_only {
public:
    void   write(const void *, size_t size) override { n += size; }
    void   write_tensor(ggml_tensor *, size_t, size_t size) override { n += size; }
    size_t n_bytes() override { return n; }

private:
    size_t n = 0;
};

} // namespace

namespace llama_subkv {

// Writes the head of a state, or its body. The body is llama.cpp's data with coded cells as rows, followed by the
// window, or it is llama.cpp's data of another half. The stream includes the data of tensors on a device.
class row_writer : public llama_io_write_i, public subkv::StateWriter {
public:
    // `sum` is the checksum of the preceding bytes, which is continued.
    row_writer(const llama_kv_cache & kv, llama_io_write_i & io, uint64_t sum = subkv::CHECKSUM_OF_NOTHING) :
        sum(sum), io(io), coded(kv), counts(dynamic_cast<counts_only *>(&io) != nullptr) {}

    void write(const void * data, size_t size) override {
        if (!counts) {
            sum = subkv::checksum(sum, (const uint8_t *) data, size);
        }
        io.write(data, size);
    }

    void write_tensor(ggml_tensor * t, size_t offset, size_t size) override {
        if (!counts) {
            rows.resize(size);
            coded.get(t, offset, size, rows.data());
        }
        write(rows.data(), size);
    }

    size_t   n_bytes() override { return io.n_bytes(); }
    uint64_t sum;

private:
    llama_io_write_i &   io;
    const tiles          coded;
    const bool           counts;
    std::vector<uint8_t> rows;
};

} // namespace llama_subkv

//
// A state: the head, the size of the body in bytes u64, the body, a checksum of head and body u64. The body of a
// partial state is the window. The body of a sliding or recurrent half follows in the same form, without a head.
//

template <typename Body> static void write_checked(llama_io_write_i & io, Body body) {
    counter all;
    body(all);
    const uint64_t size = all.n_bytes();
    io.write(&size, sizeof(size));
    const uint64_t sum = body(io);
    io.write(&sum, sizeof(sum));
}

// Returns the shift history for the window, and the checksum.
static std::pair<std::vector<uint64_t>, uint64_t> read_head(const subkv::CacheHook & hook, llama_io_read_i & io,
                                                            llama_seq_id seq, bool partial) {
    head_reader head(io);
    auto        moves = hook.read_head(head, seq, partial);
    return { std::move(moves), head.sum };
}

void llama_subkv::write_cells(const llama_kv_cache & kv, llama_io_write_i & io, llama_seq_id seq,
                              llama_state_seq_flags flags) {
    const bool partial = flags & LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY;
    row_writer head(kv, io);
    access::hook(kv)->write_head(head, seq, partial);
    write_checked(io, [&](llama_io_write_i & to) {
        row_writer rows(kv, to, head.sum);
        if (!partial) {
            kv.state_write(rows, seq, 0);
        }
        access::hook(kv)->write_window(rows, seq);
        return rows.sum;
    });
}

llama_subkv::row_reader llama_subkv::read_body(llama_kv_cache & kv, llama_io_read_i & io, llama_seq_id seq) {
    const auto head = read_head(*access::hook(kv), io, seq, false);
    return { kv, io, head.second };
}

void llama_subkv::remove_cells(llama_kv_cache & kv, llama_seq_id seq) {
    if (seq < 0) {
        access::hook(kv)->clear();
        kv.clear(true);
    } else if (seq_rm(kv, seq, -1, -1)) {
        kv.seq_rm(seq, -1, -1);
    }
}

//
// coded cells and the other parts of a memory: sliding windows, recurrent state, an indexer's keys
//

// The other parts of a memory, in the order of states.
llama_subkv::parts llama_subkv::other_parts(const caches & all) {
    parts res;
    for (llama_memory_i * part : { (llama_memory_i *) all.index, (llama_memory_i *) all.swa, all.recurrent }) {
        if (part) {
            res.push_back(part);
        }
    }
    return res;
}

// The parts in a state. A partial state does not include an indexer's keys, as they stay together with the cells.
llama_subkv::parts llama_subkv::in_state(const caches & all, llama_state_seq_flags flags) {
    const bool partial = flags & LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY;
    return other_parts({ all.base, all.swa, partial ? nullptr : all.index, all.recurrent });
}

void llama_subkv::state_write(const llama_memory_i & memory, llama_io_write_i & io, llama_seq_id seq,
                              llama_state_seq_flags flags) {
    const struct caches all  = caches_of(&memory);
    const auto &        base = *all.base;
    write_cells(base, io, seq, flags);
    for (const auto * other : in_state(all, flags)) {
        write_checked(io, [&](llama_io_write_i & to) {
            row_writer rows(base, to);
            other->state_write(rows, seq, flags);
            return rows.sum;
        });
    }
}

void llama_subkv::state_read(llama_memory_i & memory, llama_io_read_i & io, llama_seq_id seq,
                             llama_state_seq_flags flags) {
    const struct caches all     = caches_of(&memory);
    auto &              base    = *all.base;
    const bool          partial = flags & LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY;
    const auto [moves, sum]     = read_head(*access::hook(base), io, seq, partial);
    row_reader of_base(base, io, sum);
    if (!partial) {
        of_base.check(base, seq);
    }
    const auto              others = in_state(all, flags);
    std::vector<row_reader> bodies;
    bodies.reserve(others.size()); // a reader refers to its own bytes
    for (const auto * other : others) {
        bodies.emplace_back(base, io).check(*other, seq);
    }
    access::hook(base)->note_snapshots({});
    try {
        llama_kv_cache::slot_info_vec_t slots;
        if (!partial) {
            remove_cells(base, seq); // llama.cpp keeps old cells if the state has none
            read_cells(base, of_base, seq, flags, &slots, nullptr);
        }
        access::hook(base)->read_window(of_base, seq, moves, reader(base));
        of_base.end();
        for (size_t i = 0; i < others.size(); ++i) {
            if (seq >= 0) {
                others[i]->seq_rm(seq, -1, -1);
            }
            if (others[i] == all.index) { // its keys go to the places of the cells
                read_cells(*all.index, bodies[i], seq, flags, nullptr, &slots);
            } else {
                others[i]->state_read(bodies[i], seq, flags);
            }
            bodies[i].end();
        }
        if (all.index && !same_cells(base, *all.index)) {
            throw std::runtime_error("state: an indexer's keys in the cells of their tokens expected, others found");
        }
    } catch (...) {
        clear_parts(all, seq);
        throw;
    }
}

void llama_subkv::clear_parts(const caches & all, llama_seq_id seq) {
    remove_cells(*all.base, seq);
    for (auto * other : other_parts(all)) {
        if (seq >= 0) {
            other->seq_rm(seq, -1, -1);
        } else {
            other->clear(true);
        }
    }
}
