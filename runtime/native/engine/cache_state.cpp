// cache_state.cpp: identity of a state, and its exact window and bases (cache_hook.h).
#include "cache.h"
#include "error.h"
#include "numbers.h"

#include <cstring>
#include <utility>

namespace subkv {

static constexpr char STATE_MAGIC[8] = { 's', 'u', 'b', 'k', 'v', 's', 't', '6' };

// Requirements of a state besides its layout. n_seq: sequences of a whole-context state, 0: state of one sequence.
// bases: BasisSource::identity(); kinds: Window::kinds().
struct StateWindow {
    int32_t  n_sink, n_recent, n_rollback, n_seq;
    uint64_t bases, kinds;
};

static StateWindow state_window(const Window & window, const BasisSource & bases, int32_t seq) {
    if (seq >= window.n_seq()) {
        fail("state: sequence 0 to %d expected, %d found", window.n_seq() - 1, seq);
    }
    return { window.n_sink(),  window.n_recent(), window.n_rollback(), seq < 0 ? window.n_seq() : 0,
             bases.identity(), window.kinds() };
}

std::string Cache::identity() const {
    if (!layout_) {
        return "observed";
    }
    const StateWindow s    = state_window(window_, *bases_, 0);
    std::string       text = std::string(STATE_MAGIC, sizeof(STATE_MAGIC)) + " " + layout_->fingerprint;
    const auto        low = (int32_t) s.bases, high = (int32_t) (s.bases >> 32);
    for (const int32_t number : { s.n_sink, s.n_recent, s.n_rollback, low, high }) {
        text += " " + std::to_string(number);
    }
    return text + " " + std::to_string(s.kinds);
}

void Cache::write_head(StateWriter & w, int32_t seq, bool partial) const {
    if (partial) {
        bases_->check_partial();
    }
    const StateWindow s = state_window(window_, *bases_, seq);
    w.write(STATE_MAGIC, sizeof(STATE_MAGIC));
    w.write(layout_->fingerprint.data(), layout_->fingerprint.size());
    w.write(&s, sizeof(s));
    const auto moves = window_.moves(seq);
    w.write(moves.data(), moves.size() * sizeof(uint64_t));
}

std::vector<uint64_t> Cache::read_head(StateReader & r, int32_t seq, bool partial) const {
    if (partial) {
        bases_->check_partial();
    }
    encode_uncoded(); // a window without cells may follow
    const StateWindow want = state_window(window_, *bases_, seq);
    char              magic[sizeof(STATE_MAGIC)];
    r.read(magic, sizeof(magic));
    if (std::memcmp(magic, STATE_MAGIC, sizeof(magic)) != 0) {
        fail("state: a state of a subkv cache as this version writes it expected, one of another cache type or "
             "version found; evaluate the prompt again");
    }
    std::string fingerprint(layout_->fingerprint.size(), '\0');
    r.read(fingerprint.data(), fingerprint.size());
    if (fingerprint != layout_->fingerprint) {
        if (const float budget = budget_of_fingerprint(*layout_, fingerprint); budget > 0.0f) {
            const std::string found = number(budget);
            fail("state: a state of a cache of %s bits per element expected, one of %s bits found; evaluate the prompt "
                 "again, or open the context with SUBKV_BITS=%s",
                 number(layout_->budget).c_str(), found.c_str(), found.c_str());
        }
        fail("state: layout fingerprint %s expected, %s found", layout_->fingerprint.c_str(), fingerprint.c_str());
    }
    StateWindow found;
    r.read(&found, sizeof(found));
    if (want.bases != found.bases) {
        fail("state: %s expected, a state of other bases found; evaluate the prompt again", bases_->describe().c_str());
    }
    if (want.kinds != found.kinds) {
        fail("state: exact rows held as here expected (in halves on a GPU, in integers on a CPU), others found; "
             "evaluate the prompt again");
    }
    if (std::memcmp(&want, &found, sizeof(want)) != 0) {
        fail("state: exact window n_sink %d, n_recent %d, n_rollback %d, sequences %d expected, %d, %d, %d, %d found",
             want.n_sink, want.n_recent, want.n_rollback, want.n_seq, found.n_sink, found.n_recent, found.n_rollback,
             found.n_seq);
    }
    const auto            here = window_.moves(seq);
    std::vector<uint64_t> moves(here.size());
    r.read(moves.data(), moves.size() * sizeof(uint64_t));
    if (partial && moves != here) {
        fail("state: a partial state of cells where they are now expected, one from before or after a shift found; "
             "restore a whole state, or remove the sequence and decode it again");
    }
    return moves;
}

// Streams of a state: that of one sequence, or all.
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
