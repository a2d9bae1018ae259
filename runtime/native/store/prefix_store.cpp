// prefix_store.cpp: see prefix_store.h. The folder's contents are prefix_index.h's.
#include "prefix_store.h"

#include "log_line.h"
#include "prefix_index.h"
#include "token_runs.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <new>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>

namespace subkv {

namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t   N_QUEUED      = 2; // prompts in the write queue; small prompts may exceed it
constexpr uint64_t QUEUED_BYTES  = 256 << 20;
constexpr size_t   N_TRIED       = 3;  // maximum prompts read per query
constexpr double   CLOSE_SECONDS = 30; // timeout of pending writes at the end
constexpr double   SMOOTHING     = 0.2;

std::chrono::duration<double> seconds_of(double seconds) {
    return std::chrono::duration<double>(seconds);
}

double since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

// Returns true if the process has no memory or no files left, now.
bool is_shortage(const std::exception & error) {
    const auto * of_system = dynamic_cast<const std::system_error *>(&error);
    if (!of_system) {
        return dynamic_cast<const std::bad_alloc *>(&error) != nullptr;
    }
    const auto & code = of_system->code();
    return code == std::errc::not_enough_memory || code == std::errc::too_many_files_open ||
           code == std::errc::too_many_files_open_in_system;
}

std::vector<Bytes> pieces_of(const std::vector<uint8_t> & state, const std::vector<Span> & spans) {
    std::vector<Bytes> pieces;
    for (const Span & span : spans) {
        pieces.push_back({ state.data() + span.offset, (size_t) span.size });
    }
    return pieces;
}

// Splits a prompt into pieces, which point into it.
PrefixIndex::Cut cut(const Prefix & prefix) {
    PrefixIndex::Cut out;
    out.head.identity = prefix.identity;
    out.head.tokens   = prefix.tokens;
    const auto stored = [&](std::vector<Bytes> bytes) {
        uint64_t size = 0;
        for (const Bytes & piece : bytes) {
            size += piece.size;
        }
        PieceRef ref{ size > 0 ? address(prefix.identity, bytes) : "", size };
        if (size > 0) {
            out.pieces[ref.name] = std::move(bytes);
        }
        return ref;
    };
    for (size_t i = 0; i < N_STATES; ++i) {
        const auto & state = prefix.states[i];
        auto &       refs  = out.head.states[i];
        refs.rows          = find_rows(state.data(), state.size(), prefix.tokens.size());
        refs.rest.size     = state.size();
        const uint64_t n   = refs.rows.regions.empty() ? 0 : prefix.tokens.size() / BLOCK_TOKENS;
        for (uint64_t block = 0; block < n; ++block) {
            refs.blocks.push_back(stored(pieces_of(state, refs.of_block(block))).name);
        }
        refs.rest.size -= n * refs.block_bytes();
        refs.rest = stored(pieces_of(state, refs.of_rest()));
    }
    for (const auto & point : prefix.points) {
        PointRefs & refs = out.head.points.emplace_back(PointRefs{ point.n_tokens, point.pos_min, point.pos_max, {} });
        for (size_t i = 0; i < N_POINT_DATA; ++i) {
            refs.data[i] = stored({ { point.data[i].data(), point.data[i].size() } });
        }
    }
    return out;
}

// Reads and checks all pieces of a prompt, several in parallel.
Prefix assemble(const PrefixIndex & index, const PrefixHead & head) {
    Prefix prefix;
    prefix.identity = head.identity;
    prefix.tokens   = head.tokens;
    std::vector<PrefixIndex::PieceRead> reads;
    for (size_t i = 0; i < N_STATES; ++i) {
        const auto & refs  = head.states[i];
        auto &       state = prefix.states[i];
        state.resize((size_t) refs.size());
        for (uint64_t block = 0; block < refs.blocks.size(); ++block) {
            reads.push_back({ refs.blocks[block], refs.block_bytes(), state.data(), refs.of_block(block) });
        }
        if (refs.rest.size > 0) {
            reads.push_back({ refs.rest.name, refs.rest.size, state.data(), refs.of_rest() });
        }
    }
    for (const auto & refs : head.points) {
        auto & point = prefix.points.emplace_back();
        point        = { refs.n_tokens, refs.pos_min, refs.pos_max, {} };
        for (size_t i = 0; i < N_POINT_DATA; ++i) {
            const auto & piece = refs.data[i];
            point.data[i].resize((size_t) piece.size);
            if (piece.size > 0) {
                reads.push_back({ piece.name, piece.size, point.data[i].data(), { { 0, piece.size } } });
            }
        }
    }
    index.read(head.identity, reads);
    return prefix;
}

// Tokens of the query's first n_usable that need no evaluation with this prompt.
int64_t reach_of(const PrefixHead & head, const PrefixQuery & query, int64_t n_usable) {
    const auto n_tokens = (int64_t) head.tokens.size();
    if (query.n_moved >= 0) {
        return query.n_held +
               n_saved(find_runs(head.tokens.data(), n_tokens, query.tokens.data(), n_usable, query.n_held));
    }
    const auto n = (int64_t) common_prefix(head.tokens, query.tokens.data(), (size_t) n_usable);
    return reach(n_tokens, n, head.points, query.n_removable);
}

} // namespace

uint64_t Prefix::n_bytes() const {
    uint64_t bytes = 0;
    for (const auto & state : states) {
        bytes += state.size();
    }
    for (const auto & point : points) {
        for (const auto & data : point.data) {
            bytes += data.size();
        }
    }
    return bytes;
}

class PrefixStore::Core {
public:
    Core(const std::string & folder, uint64_t max_bytes) : max_bytes(max_bytes), index(folder, max_bytes) {}

    std::unique_ptr<PrefixFound> find(const PrefixQuery & query);
    void                         report_removals(); // that failed
    void                         run();             // body of the writer thread
    void                         fails(std::atomic<bool> & logged, const std::exception & why, const char * then);
    bool                         room(uint64_t n_bytes) const; // in the queue; the caller has locked the mutex

    const uint64_t          max_bytes;
    PrefixIndex             index;
    mutable std::mutex      mutex;
    std::condition_variable changed;
    std::deque<Prefix>      queue;
    bool                    writing = false;
    bool                    ended   = false;
    std::atomic<bool>       unwritable{ false };
    std::atomic<bool>       read_failure_logged{ false };
    std::atomic<bool>       shortage_logged{ false };
    std::atomic<bool>       reading{ false };
    std::atomic<uint64_t>   n_hits{ 0 }, n_restored{ 0 }, n_written{ 0 }, n_dropped{ 0 }, n_failures{ 0 };
    std::mutex              failure_mutex;
    std::string             failure; // not asked for yet

private:
    void write(Prefix && prefix);
    void trim();

    std::atomic<bool> removal_logged{ false };

    std::mutex pace_mutex;
    double     pace = 0; // seconds to read a byte
};

void PrefixStore::Core::fails(std::atomic<bool> & logged, const std::exception & why, const char * then) {
    ++n_failures;
    if (logged.exchange(true)) {
        return;
    }
    try {
        const bool no_memory = dynamic_cast<const std::bad_alloc *>(&why) != nullptr;
        const auto line      = std::string(no_memory ? "not enough memory" : why.what()) + "; " + then;
        log_line("SUBKV_STORE: " + line);
        std::lock_guard<std::mutex> lock(failure_mutex);
        failure = line;
    } catch (const std::bad_alloc &) { // not even for the line
    }
}

bool PrefixStore::Core::room(uint64_t n_bytes) const {
    for (const auto & queued : queue) {
        n_bytes += queued.n_bytes();
    }
    return queue.size() < N_QUEUED || n_bytes < QUEUED_BYTES;
}

void PrefixStore::Core::write(Prefix && prefix) {
    try {
        if (index.has(prefix.identity, prefix.tokens, prefix.n_removable)) {
            return;
        }
        if (index.add(cut(prefix), prefix.n_removable)) {
            ++n_written;
        } else {
            ++n_dropped;
        }
    } catch (const std::exception & e) {
        if (is_shortage(e)) {
            fails(shortage_logged, e, "a prompt is not stored");
        } else {
            fails(unwritable, e, "prompts are no longer stored");
        }
    }
    report_removals();
}

// Part of an eviction that is too long for one call: requests and new prompts do not wait for it.
void PrefixStore::Core::trim() {
    try {
        index.trim();
    } catch (const std::exception & e) {
        fails(read_failure_logged, e, "the folder stays larger than its limit");
    }
    report_removals();
}

void PrefixStore::Core::report_removals() {
    try {
        const std::string why = index.removal_failure();
        if (!why.empty()) {
            fails(removal_logged, std::runtime_error(why), "files that cannot be removed count toward the limit");
        }
    } catch (const std::bad_alloc &) { // not even for the line
    }
}

void PrefixStore::Core::run() {
    std::unique_lock<std::mutex> lock(mutex);
    while (true) {
        changed.wait(lock, [&] { return ended || index.has_excess() || !queue.empty(); });
        if (queue.empty() && ended) {
            return;
        }
        if (queue.empty()) {
            lock.unlock();
            trim();
            lock.lock();
            continue;
        }
        Prefix prefix = std::move(queue.front());
        queue.pop_front();
        writing = true;
        changed.notify_all();
        lock.unlock();
        if (!unwritable) {
            write(std::move(prefix));
        }
        lock.lock();
        writing = false;
        changed.notify_all();
    }
}

std::unique_ptr<PrefixFound> PrefixStore::Core::find(const PrefixQuery & query) {
    double per_byte = 0;
    {
        std::lock_guard<std::mutex> lock(pace_mutex);
        per_byte = pace;
    }
    const auto n_usable = (int64_t) query.tokens.size() - 1; // the last token is evaluated for its logits
    struct Choice {
        double                            gain; // in tokens, or in seconds
        int64_t                           n;
        std::shared_ptr<const PrefixHead> head;
    };
    std::vector<Choice> choices;
    for (const auto & head : index.heads(query.identity)) {
        if ((int64_t) head->tokens.size() > query.n_max || head->n_bytes() > max_bytes) {
            continue;
        }
        const auto   n_reached = reach_of(*head, query, n_usable);
        const auto   n_gained  = n_reached - query.n_held - std::max<int64_t>(0, query.n_moved);
        const double cost      = query.seconds_per_token > 0 ? (double) head->n_bytes() * per_byte : 0;
        const double gain      = (double) n_gained * (query.seconds_per_token > 0 ? query.seconds_per_token : 1) - cost;
        if (n_gained >= LEAST_TOKENS && gain > 0) {
            choices.push_back({ gain, n_reached, head });
        }
    }
    std::stable_sort(choices.begin(), choices.end(), [](auto & a, auto & b) { return a.gain > b.gain; });
    choices.resize(std::min(choices.size(), N_TRIED));
    for (const auto & choice : choices) {
        const auto start = Clock::now();
        auto       found = std::make_unique<PrefixFound>();
        try {
            found->prefix = assemble(index, *choice.head);
        } catch (const PrefixDamaged & e) {
            index.damaged(choice.head->name(), e.pieces);
            continue;
        } catch (const std::exception & e) { // other prompts may be readable, or smaller
            fails(read_failure_logged, e, "its prompt is evaluated");
            continue;
        }
        found->name      = choice.head->name();
        found->n_reached = choice.n;
        index.used(*choice.head);
        ++n_hits;
        n_restored += (uint64_t) (choice.n - query.n_held);
        const double                per = since(start) / (double) std::max<uint64_t>(1, found->prefix.n_bytes());
        std::lock_guard<std::mutex> lock(pace_mutex);
        pace = pace > 0 ? (1 - SMOOTHING) * pace + SMOOTHING * per : per;
        return found;
    }
    return nullptr;
}

PrefixStore::PrefixStore(const std::string & folder, uint64_t max_bytes) :
    core(std::make_shared<Core>(folder, max_bytes)) {
    std::thread([core = core] { core->run(); }).detach();
}

PrefixStore::~PrefixStore() {
    flush(CLOSE_SECONDS);
    std::lock_guard<std::mutex> lock(core->mutex);
    core->ended = true;
    core->queue.clear();
    core->changed.notify_all();
}

int PrefixStore::room(uint64_t n_bytes) const {
    if (core->unwritable || n_bytes > core->max_bytes) {
        return -1;
    }
    std::lock_guard<std::mutex> lock(core->mutex);
    return core->room(n_bytes) ? 1 : 0;
}

bool PrefixStore::put(Prefix && prefix, bool wait) {
    const size_t n = prefix.tokens.size();
    if (core->unwritable || n < (size_t) LEAST_TOKENS || n > MAX_TOKENS || prefix.n_bytes() > core->max_bytes) {
        ++core->n_dropped;
        return false;
    }
    std::unique_lock<std::mutex> lock(core->mutex);
    const auto                   room = [&] { return core->room(prefix.n_bytes()); };
    if (wait && !core->changed.wait_for(lock, seconds_of(CLOSE_SECONDS), room)) {
        core->fails(core->unwritable, std::runtime_error("the disk takes too long"), "prompts are no longer stored");
    }
    if (!room()) {
        ++core->n_dropped;
        return false;
    }
    core->queue.push_back(std::move(prefix));
    core->changed.notify_all();
    return true;
}

std::unique_ptr<PrefixFound> PrefixStore::get(const PrefixQuery & query) {
    if ((int64_t) query.tokens.size() - 1 - query.n_held < LEAST_TOKENS || core->reading) {
        return nullptr; // an earlier query still waits for the disk
    }
    struct Answer {
        std::mutex                   mutex;
        std::condition_variable      ready;
        bool                         there = false;
        std::unique_ptr<PrefixFound> found;
    };
    const auto answer = std::make_shared<Answer>();
    const auto read   = [answer, query, core = core] {
        std::unique_ptr<PrefixFound> found;
        try {
            found = core->find(query);
        } catch (const std::exception & e) {
            core->fails(core->read_failure_logged, e, "prompts are evaluated");
        }
        core->report_removals();
        core->reading = false;
        std::lock_guard<std::mutex> lock(answer->mutex);
        answer->found = std::move(found);
        answer->there = true;
        answer->ready.notify_all();
    };
    core->reading = true;
    try {
        std::thread(read).detach();
    } catch (const std::exception & e) { // no threads or no memory left
        core->reading = false;
        core->fails(core->read_failure_logged, e, "prompts are evaluated");
        return nullptr;
    }
    std::unique_lock<std::mutex> lock(answer->mutex);
    if (!answer->ready.wait_for(lock, seconds_of(query.seconds), [&] { return answer->there; })) {
        ++core->n_failures;
        return nullptr;
    }
    return std::move(answer->found);
}

int64_t PrefixStore::common(const std::string & identity, const std::vector<int32_t> & tokens) const {
    size_t most = 0;
    if (!core->reading) { // else a query still waits for the disk
        for (const auto & head : core->index.heads(identity, false)) {
            most = std::max(most, common_prefix(head->tokens, tokens.data(), tokens.size()));
        }
    }
    return (int64_t) most;
}

std::string PrefixStore::failure() const {
    std::lock_guard<std::mutex> lock(core->failure_mutex);
    return std::exchange(core->failure, {});
}

void PrefixStore::reject(const std::string & name) {
    ++core->n_failures;
    core->index.skip(name);
}

bool PrefixStore::flush(double seconds) {
    std::unique_lock<std::mutex> lock(core->mutex);
    return core->changed.wait_for(lock, seconds_of(seconds), [&] { return core->queue.empty() && !core->writing; });
}

subkv_store_stats PrefixStore::stats() const {
    const auto totals = core->index.totals();
    return { totals.n_entries, totals.n_bytes,  core->n_hits,     core->n_restored,
             core->n_written,  core->n_dropped, totals.n_damaged, core->n_failures };
}

} // namespace subkv
