// cache_state.cpp: the identity of a coded cache's states, and their head, exact window and bases (cache_hook.h).
#include "cache.h"
#include "error.h"
#include "numbers.h"

#include <cstring>
#include <utility>

namespace subkv {

namespace {

constexpr char STATE_MAGIC[8] = { 's', 'u', 'b', 'k', 'v', 's', 't', '6' };

// What a state requires of the cache that reads it, without the fingerprint of the layout, as the head has it.
struct StateNumbers {
    int32_t  n_sink, n_recent, n_rollback;
    int32_t  n_seq;      // sequences of a state of the whole context, or 0 for a state of one sequence
    uint64_t bases;      // BasisSource::identity()
    uint64_t exact_rows; // Window::kinds()
};

StateNumbers numbers_of(const Window & window, const BasisSource & bases, int32_t seq) {
    if (seq >= window.n_seq()) {
        fail("state: sequence 0 to %d expected, %d found", window.n_seq() - 1, seq);
    }
    return { window.n_sink(),  window.n_recent(), window.n_rollback(), seq < 0 ? window.n_seq() : 0,
             bases.identity(), window.kinds() };
}

// Throws Invalid if a state of one layout is found where another one's is expected.
void check_layout(const Layout & expected, const std::string & found) {
    if (found == expected.fingerprint) {
        return;
    }
    if (const float budget = budget_of_fingerprint(expected, found); budget > 0.0f) {
        const std::string bits = number(budget);
        fail("state: a state of a cache of %s bits per element expected, one of %s bits found; evaluate the prompt "
             "again, or open the context with SUBKV_BITS=%s",
             number(expected.budget).c_str(), bits.c_str(), bits.c_str());
    }
    fail("state: layout fingerprint %s expected, %s found", expected.fingerprint.c_str(), found.c_str());
}

void check_numbers(const StateNumbers & expected, const StateNumbers & found, const BasisSource & bases) {
    if (expected.bases != found.bases) {
        fail("state: %s expected, a state of other bases found; evaluate the prompt again", bases.describe().c_str());
    }
    if (expected.exact_rows != found.exact_rows) {
        fail("state: exact rows held as here expected (in halves on a GPU, in integers on a CPU), others found; "
             "evaluate the prompt again");
    }
    if (std::memcmp(&expected, &found, sizeof(found)) != 0) {
        fail("state: exact window n_sink %d, n_recent %d, n_rollback %d, sequences %d expected, %d, %d, %d, %d found",
             expected.n_sink, expected.n_recent, expected.n_rollback, expected.n_seq, found.n_sink, found.n_recent,
             found.n_rollback, found.n_seq);
    }
}

} // namespace

StateIdentity Cache::identity() const {
    StateIdentity identity;
    if (!layout_) {
        identity.add("fingerprint", "observed");
        return identity;
    }
    const StateNumbers numbers = numbers_of(window_, *bases_, 0);
    identity.add("kv_bits", number(layout_->budget));
    identity.add("fingerprint", layout_->fingerprint);
    identity.add("bases", bases_->describe());
    identity.add("n_sink", std::to_string(numbers.n_sink));
    identity.add("n_recent", std::to_string(numbers.n_recent));
    identity.add("n_rollback", std::to_string(numbers.n_rollback));
    identity.add("exact_rows", std::to_string(numbers.exact_rows));
    return identity;
}

void Cache::write_head(StateWriter & w, int32_t seq, bool partial) const {
    if (partial) {
        bases_->check_partial();
    }
    const StateNumbers numbers = numbers_of(window_, *bases_, seq);
    w.write(STATE_MAGIC, sizeof(STATE_MAGIC));
    w.write(layout_->fingerprint.data(), layout_->fingerprint.size());
    w.write(&numbers, sizeof(numbers));
    const auto moves = window_.moves(seq);
    w.write(moves.data(), moves.size() * sizeof(uint64_t));
}

std::vector<uint64_t> Cache::read_head(StateReader & r, int32_t seq, bool partial) const {
    if (partial) {
        bases_->check_partial();
    }
    encode_uncoded(); // a window without cells may follow
    const StateNumbers expected = numbers_of(window_, *bases_, seq);
    char               magic[sizeof(STATE_MAGIC)];
    r.read(magic, sizeof(magic));
    if (std::memcmp(magic, STATE_MAGIC, sizeof(magic)) != 0) {
        fail("state: a state of a subkv cache as this version writes it expected, one of another cache type or "
             "version found; evaluate the prompt again");
    }
    std::string fingerprint(layout_->fingerprint.size(), '\0');
    r.read(fingerprint.data(), fingerprint.size());
    check_layout(*layout_, fingerprint);
    StateNumbers found;
    r.read(&found, sizeof(found));
    check_numbers(expected, found, *bases_);
    const auto            here = window_.moves(seq);
    std::vector<uint64_t> moves(here.size());
    r.read(moves.data(), moves.size() * sizeof(uint64_t));
    if (partial && moves != here) {
        fail("state: a partial state of cells where they are now expected, one from before or after a shift found; "
             "restore a whole state, or remove the sequence and decode it again");
    }
    return moves;
}

// The streams of a state, which are that of one sequence, or all.
static std::pair<uint32_t, uint32_t> streams(int32_t seq, uint32_t n_stream) {
    return seq < 0 ? std::pair{ 0u, n_stream } : std::pair{ (uint32_t) seq, (uint32_t) seq + 1 };
}

void Cache::write_window(StateWriter & w, int32_t seq) const {
    window_.state_write(w, seq);
    const auto [first, last] = streams(seq, n_stream_);
    for (uint32_t stream = first; stream < last; ++stream) {
        bases_->state_write(w, stream);
    }
}

void Cache::read_window(StateReader & r, int32_t seq, const std::vector<uint64_t> & moves, const CellReader & cells) {
    try {
        window_.state_read(r, seq, moves, cells);
        const auto [first, last] = streams(seq, n_stream_);
        for (uint32_t stream = first; stream < last; ++stream) {
            bases_->state_read(r, stream, cells.max_pos_outside((int32_t) stream, 0, 0) + 1);
        }
    } catch (const Invalid & e) {
        fail(e.error);
    } catch (const std::exception & e) { // of the reader, or no memory
        fail("%s", e.what());
    }
}

} // namespace subkv
