// prefix_index.cpp: see prefix_index.h.
#include "prefix_index.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <system_error>
#include <thread>
#include <utility>

namespace subkv {

namespace {

constexpr const char * HEAD        = ".prefix";
constexpr const char * PIECE       = ".piece";
constexpr size_t       MAX_FILES   = 1 << 17; // maximum files read from a folder
constexpr size_t       MAX_ENTRIES = 1024;
constexpr uint64_t     MAX_INDEX   = 256 << 20; // bytes of heads in memory
constexpr size_t       N_READERS   = 4;
constexpr int64_t      SECOND      = 1000000000;    // ns
constexpr int64_t      COARSE      = 2 * SECOND;    // resolution of file times
constexpr int64_t      UNKNOWN     = -1;            // time of a folder that must be scanned again
constexpr int64_t      STALE       = 3600 * SECOND; // a file that a process still writes is younger
constexpr int64_t      UNUSED      = 60 * SECOND;   // a query that reads a file takes less
constexpr int64_t      RETRY       = 60 * SECOND;   // until a removal that failed is tried again
constexpr size_t       MAX_REMOVED = 1024;          // files per call, beyond those that make room for a prompt
constexpr int64_t      SERVES      = 512;           // tokens to re-evaluate at most if a longer prompt serves a query

bool hex(const std::string & text, size_t first, size_t n) {
    return text.size() >= first + n && text.find_first_not_of("0123456789abcdef", first) >= first + n;
}

bool ends(const std::string & text, size_t at, const char * tail) {
    return text.compare(at, std::string::npos, tail) == 0;
}

bool is_head(const std::string & file) {
    return hex(file, 0, 24) && file[24] == '-' && hex(file, 25, 32) && ends(file, 57, HEAD);
}

bool is_piece(const std::string & file) {
    return hex(file, 0, N_DIGEST) && ends(file, N_DIGEST, PIECE);
}

uint64_t size_of(const std::map<std::string, StoredFile> & files, const std::string & file) {
    const auto it = files.find(file);
    return it == files.end() ? 0 : it->second.size;
}

} // namespace

PrefixIndex::PrefixIndex(const std::string & folder, uint64_t max_bytes) : folder(folder), max_bytes(max_bytes) {}

void PrefixIndex::keep_ours(Files & files) {
    for (auto it = files.begin(); it != files.end();) {
        const std::string   whole = StoreFolder::of_temporary(it->first);
        const std::string & name  = whole.empty() ? it->first : whole;
        it                        = is_head(name) || is_piece(name) ? std::next(it) : files.erase(it);
    }
}

StoredHeads PrefixIndex::known_heads() const {
    std::lock_guard<std::mutex> lock(mutex);
    return known;
}

void PrefixIndex::refuse_head(const std::string & name) {
    std::lock_guard<std::mutex> lock(mutex);
    refused.insert(name);
}

// Reads the folder, and the heads that are new. Queries do not wait for it, unless new heads are being read.
PrefixIndex::Files PrefixIndex::scan() {
    const StoredHeads before = known_heads(); // first: prompts that are added meanwhile stay
    Files             files  = folder.list(MAX_FILES);
    keep_ours(files);
    std::lock_guard<std::mutex> lock(scan_mutex);
    learn(files, before);
    return files;
}

// The same for a query, of names only where the files are known. The caller has locked scan_mutex.
void PrefixIndex::look_again() {
    const StoredHeads before = known_heads();
    const int64_t     time   = folder.changed();
    const auto        n_gone = [&] {
        std::lock_guard<std::mutex> lock(mutex);
        return n_removed;
    };
    const uint64_t n = n_gone();
    changed          = UNKNOWN; // unless all heads can be read
    looked           = StoreFolder::now();
    listed           = folder.list(MAX_FILES, std::exchange(listed, {}), is_piece);
    keep_ours(listed);
    learn(listed, before);
    changed = n_unread == 0 && n == n_gone() ? time : UNKNOWN; // a prompt may have been read before its removal
}

// Updates `known` from the files, the most recently used first. before: `known` before the folder was read.
void PrefixIndex::learn(const Files & files, const StoredHeads & before) {
    std::vector<std::pair<int64_t, std::string>> order;
    uint64_t                                     total = 0;
    n_unread                                           = 0;
    for (const auto & [file, status] : files) {
        total += status.size;
        if (is_head(file)) {
            order.emplace_back(-status.used, file);
        }
    }
    std::sort(order.begin(), order.end());
    std::set<std::string> unread; // names
    {
        std::lock_guard<std::mutex> lock(mutex);
        unread = refused;
    }
    StoredHeads           learned;
    std::set<std::string> there;
    uint64_t              bytes = 0;
    for (const auto & [used, file] : order) {
        const uint64_t    size = files.at(file).size;
        const std::string name = file.substr(0, file.size() - std::strlen(HEAD));
        if (there.size() == MAX_ENTRIES || bytes + size > MAX_INDEX || unread.count(name) > 0) {
            continue;
        }
        if (before.count(name) > 0 || learn(name, size, learned)) {
            there.insert(name);
            bytes += size;
        }
    }
    std::lock_guard<std::mutex> lock(mutex);
    for (const auto & [name, head] : before) {
        if (there.count(name) == 0) {
            known.erase(name);
        }
    }
    for (const auto & [name, head] : learned) {
        if (refused.count(name) == 0) {
            known.emplace(name, head);
        }
    }
    n_bytes = total;
}

bool PrefixIndex::learn(const std::string & name, uint64_t size, StoredHeads & learned) {
    try {
        if (size > MAX_HEAD) {
            throw PrefixInvalid("it is too large");
        }
        std::vector<uint8_t> file((size_t) size);
        if (!folder.read(name + HEAD, size, { { file.data(), file.size() } })) { // removed or replaced meanwhile
            ++n_unread;
            return false;
        }
        auto head = std::make_shared<PrefixHead>(PrefixHead::parse(file));
        if (head->name() != name) {
            throw PrefixInvalid("its name belongs to other tokens");
        }
        learned[name] = head;
        return true;
    } catch (const PrefixForeign &) { // evicted when the folder is full
        refuse_head(name);
    } catch (const PrefixInvalid &) {
        {
            std::lock_guard<std::mutex> lock(mutex);
            ++n_damaged;
        }
        if (!remove(name + HEAD)) {
            refuse_head(name);
        }
    } catch (const std::exception &) { // this file may be read later
        ++n_unread;
    }
    return false;
}

// Returns false if the file is still there.
bool PrefixIndex::remove(const std::string & file) {
    try {
        folder.remove(file);
        return true;
    } catch (const std::system_error & e) {
        std::lock_guard<std::mutex> lock(mutex);
        failure = failure.empty() ? e.what() : failure;
        return false;
    }
}

std::string PrefixIndex::removal_failure() {
    std::lock_guard<std::mutex> lock(mutex);
    return std::exchange(failure, {});
}

// Whether every head is known; pieces without a prompt may belong to an unknown one.
bool PrefixIndex::all_known(const Files & files, const StoredHeads & heads) const {
    return std::all_of(files.begin(), files.end(), [&](auto & file) {
        return !is_head(file.first) || heads.count(file.first.substr(0, file.first.size() - std::strlen(HEAD))) > 0;
    });
}

std::vector<std::shared_ptr<const PrefixHead>> PrefixIndex::heads(const std::string & identity, bool wait) {
    std::unique_lock<std::mutex> reads(scan_mutex, std::defer_lock);
    if (wait) {
        reads.lock();
    }
    if (wait || reads.try_lock()) {
        // A file created within the resolution of file times after the last scan does not change the folder's time.
        const int64_t time = folder.changed();
        if (time != changed || looked - time < COARSE) {
            look_again();
        }
    }
    std::lock_guard<std::mutex>                    lock(mutex);
    std::vector<std::shared_ptr<const PrefixHead>> res;
    const std::string                              begin = prefix_of(identity);
    for (auto it = known.lower_bound(begin); it != known.end() && it->first.compare(0, begin.size(), begin) == 0;
         ++it) {
        if (it->second->identity == identity) {
            res.push_back(it->second);
        }
    }
    return res;
}

void PrefixIndex::read(const std::string & identity, const std::vector<PieceRead> & reads) const {
    std::atomic<size_t>      next{ 0 };
    std::mutex               first;
    std::exception_ptr       error;
    std::vector<std::string> damaged;
    const auto               work = [&] {
        try {
            for (size_t i = next++; i < reads.size(); i = next++) {
                const PieceRead &                      piece = reads[i];
                std::vector<StoreFolder::MutableBytes> parts;
                std::vector<Bytes>                     bytes;
                for (const Span & span : piece.to) {
                    parts.push_back({ piece.data + span.offset, (size_t) span.size });
                    bytes.push_back({ piece.data + span.offset, (size_t) span.size });
                }
                if (!folder.read(piece.name + PIECE, piece.size, parts) || address(identity, bytes) != piece.name) {
                    std::lock_guard<std::mutex> lock(first);
                    damaged.push_back(piece.name);
                }
            }
        } catch (...) {
            next = reads.size();
            std::lock_guard<std::mutex> lock(first);
            error = error ? error : std::current_exception();
        }
    };
    std::vector<std::thread> threads;
    const size_t n = std::min({ N_READERS, (size_t) std::max(1u, std::thread::hardware_concurrency()), reads.size() });
    try {
        threads.reserve(n);
        for (size_t i = 1; i < n; ++i) {
            threads.emplace_back(work);
        }
    } catch (const std::exception &) { // no threads or no memory left: continue with fewer
    }
    work();
    for (auto & thread : threads) {
        thread.join();
    }
    if (error) {
        std::rethrow_exception(error);
    }
    if (!damaged.empty()) {
        throw PrefixDamaged{ damaged };
    }
}

void PrefixIndex::used(const PrefixHead & head) const {
    folder.mark(head.name() + HEAD);
    head.each_piece([&](const std::string & piece, uint64_t) { folder.mark(piece + PIECE); });
}

void PrefixIndex::damaged(const std::string & name, const std::vector<std::string> & pieces) {
    const bool is_stored = folder.has(name + HEAD); // else it has been evicted since this process read its head
    {
        std::lock_guard<std::mutex> lock(mutex);
        n_damaged += is_stored;
        known.erase(name);
    }
    for (const auto & piece : pieces) {
        remove(piece + PIECE);
    }
    if (!remove(name + HEAD)) {
        refuse_head(name);
    }
}

void PrefixIndex::skip(const std::string & name) {
    std::lock_guard<std::mutex> lock(mutex);
    refused.insert(name);
    known.erase(name);
}

PrefixIndex::Totals PrefixIndex::totals() const {
    std::lock_guard<std::mutex> lock(mutex);
    return { known.size(), n_bytes, n_damaged };
}

//
// writing
//

bool PrefixIndex::has(const std::string & identity, const std::vector<int32_t> & tokens, int64_t n_removable) {
    const Files files = scan();
    const auto  n     = (int64_t) tokens.size();
    for (const auto & [name, other] : known_heads()) {
        const bool begins =
            other->identity == identity && common_prefix(other->tokens, tokens.data(), tokens.size()) == tokens.size();
        if (!begins || reach((int64_t) other->tokens.size(), n, other->points, n_removable) < n) {
            continue;
        }
        bool whole = true;
        other->each_piece(
            [&](const std::string & piece, uint64_t size) { whole = whole && size_of(files, piece + PIECE) == size; });
        if (whole) {
            used(*other);
            return true;
        }
    }
    return false;
}

// Marks prompts as unused that are prefixes of a new prompt and that it serves nearly as well (up to SERVES
// tokens, less than half).
void PrefixIndex::forget_beginnings(const PrefixHead & head, int64_t n_removable) {
    const auto            n_tokens = (int64_t) head.tokens.size();
    std::set<std::string> used_pieces;
    head.each_piece([&](const std::string & piece, uint64_t) { used_pieces.insert(piece); });
    for (const auto & [name, held] : known_heads()) {
        const auto & other = *held;
        const auto   n     = (int64_t) other.tokens.size();
        const bool begins = n < n_tokens && other.identity == head.identity &&
                            common_prefix(head.tokens, other.tokens.data(), other.tokens.size()) == other.tokens.size();
        const auto n_lost = n - reach(n_tokens, n, head.points, n_removable);
        if (!begins || n_lost >= SERVES || 2 * n_lost >= n || !remove(name + HEAD)) {
            continue;
        }
        other.each_piece([&](const std::string & piece, uint64_t) {
            if (used_pieces.count(piece) == 0) {
                folder.mark(piece + PIECE);
                unused.insert(piece);
            }
        });
        std::lock_guard<std::mutex> lock(mutex);
        known.erase(name);
        ++n_removed;
    }
}

// Removes pieces that only unused prompts had, after every reader has finished. A conversation leaves some at every turn.
void PrefixIndex::drop_unused(Files & files, const std::set<std::string> & named) {
    const int64_t now = StoreFolder::now();
    for (auto it = unused.begin(); it != unused.end();) {
        const auto file = files.find(*it + PIECE);
        if (file != files.end() && named.count(*it) == 0) {
            if (now - file->second.used < UNUSED) {
                ++it;
                continue;
            }
            if (remove(file->first)) {
                files.erase(file);
            }
        }
        it = unused.erase(it);
    }
}

bool PrefixIndex::add(const Cut & cut, int64_t n_removable) {
    const auto file = cut.head.file();
    if (file.size() > MAX_HEAD || cut.head.n_bytes() + file.size() > max_bytes) {
        return false;
    }
    if (StoreFolder::now() - stuck_since > RETRY) {
        stuck.clear();
        stuck_since = StoreFolder::now();
    }
    std::vector<std::string> missing;
    {
        Files                 files = scan();
        const StoredHeads     heads = known_heads();
        std::set<std::string> named;
        for (const auto & [name, head] : heads) {
            head->each_piece([&](const std::string & piece, uint64_t) { named.insert(piece); });
        }
        if (all_known(files, heads)) {
            drop_unused(files, named);
        }
        uint64_t n = file.size();
        cut.head.each_piece([&](const std::string & piece, uint64_t size) { // a piece without a prompt may be damaged
            if (size_of(files, piece + PIECE) == size && named.count(piece) > 0) {
                folder.mark(piece + PIECE);
            } else {
                missing.push_back(piece);
                n += size;
            }
        });
        if (!make_room(files, n, &cut)) {
            return false;
        }
    }
    for (const auto & piece : missing) {
        folder.write(piece + PIECE, cut.pieces.at(piece));
    }
    const std::string name = cut.head.name();
    folder.write(name + HEAD, { { file.data(), file.size() } });
    {
        std::lock_guard<std::mutex> lock(mutex);
        refused.erase(name);
        known[name] = std::make_shared<PrefixHead>(cut.head);
    }
    forget_beginnings(cut.head, n_removable);
    if (!excess) { // other processes may have written, too
        Files files = folder.list(MAX_FILES);
        keep_ours(files);
        make_room(files, 0, &cut);
    }
    return true;
}

void PrefixIndex::trim() {
    excess      = false; // also after a failure
    Files files = scan();
    make_room(files, 0, nullptr);
}

// Removes files of a folder and counts what is left.
class PrefixIndex::Removal {
public:
    Removal(PrefixIndex & index, Files & files) : index(index), files(files) {
        for (const auto & [file, status] : files) {
            total += status.size;
            n_heads += is_head(file);
        }
    }

    // Returns false if the file is still there.
    bool gone(const std::string & file) {
        const auto it = files.find(file);
        if (it == files.end()) {
            return true;
        }
        if (index.stuck.count(file) > 0) {
            return false;
        }
        ++n_gone; // also removals that fail: they take as long
        if (!index.remove(file)) {
            index.stuck.insert(file);
            return false;
        }
        n_heads -= is_head(file);
        total -= it->second.size;
        freed += it->second.size;
        files.erase(it);
        return true;
    }

    bool fits(uint64_t n) const { return total + n <= index.max_bytes; }
    bool is_full(uint64_t n) const { return !fits(n) || n_heads > MAX_ENTRIES; }
    bool is_enough(uint64_t n) const { return n_gone >= MAX_REMOVED && freed >= n; }

    uint64_t total = 0, freed = 0; // bytes

private:
    PrefixIndex & index;
    Files &       files;
    size_t        n_heads = 0, n_gone = 0;
};

// Files of no known prompt. Leftovers of killed processes are removed after an hour, because a process may still use younger
// ones. Prompts of other versions or beyond the index are removed when the folder is full, the longest unused first. If a
// head is unknown, leftover pieces may belong to it: while a head cannot be read, nothing of unknown prompts is removed.
PrefixIndex::Unnamed PrefixIndex::unnamed(const Files & files, const StoredHeads & heads, const EvictionOrder & order,
                                          const Cut * spared) const {
    const int64_t now   = StoreFolder::now();
    const bool    whole = all_known(files, heads);
    Unnamed       out;
    for (const auto & [file, status] : files) {
        const std::string piece = is_piece(file) ? file.substr(0, N_DIGEST) : "";
        const std::string name  = is_head(file) ? file.substr(0, file.size() - std::strlen(HEAD)) : "";
        const bool named = order.is_used(piece) || (spared && spared->pieces.count(piece) > 0) || heads.count(name) > 0;
        const bool begun = piece.empty() && name.empty(); // a temporary file
        if (named) {
            continue;
        }
        if (now - status.used > STALE && (begun || (whole && name.empty()))) {
            out.stale.push_back(file);
        } else if (n_unread == 0) {
            out.others.emplace_back(status.used, file);
        }
    }
    std::sort(out.others.begin(), out.others.end());
    return out;
}

// Removes files until n bytes fit, and leftovers of killed processes. Returns false if they do not fit. If many more files
// must be removed, trim() removes the rest, and the folder has shrunk by n bytes at least.
bool PrefixIndex::make_room(Files & files, uint64_t n, const Cut * spared) {
    const StoredHeads                     heads = known_heads();
    std::vector<EvictionOrder::Candidate> candidates;
    for (const auto & [name, head] : heads) {
        const auto file = files.find(name + HEAD);
        if (file != files.end()) {
            candidates.push_back({ name, head, file->second.size, file->second.used });
        }
    }
    EvictionOrder order(std::move(candidates), StoreFolder::now());
    const Unnamed unnamed_files = unnamed(files, heads, order, spared);
    Removal       removal(*this, files);
    size_t        next = 0;
    while (next < unnamed_files.stale.size() && !removal.is_enough(n)) {
        removal.gone(unnamed_files.stale[next++]);
    }
    excess              = next < unnamed_files.stale.size();
    const auto & others = unnamed_files.others;
    for (next = 0; removal.is_full(n);) {
        if (removal.is_enough(n)) {
            excess = true;
            break;
        }
        const auto * worst = order.next();
        if (next < others.size() && (!worst || others[next].first <= order.oldest_use())) {
            removal.gone(others[next++].second);
            continue;
        }
        if (!worst) {
            break;
        }
        const std::string name = worst->name;
        if (!removal.gone(name + HEAD)) {
            order.keep();
            continue;
        }
        {
            std::lock_guard<std::mutex> lock(mutex);
            known.erase(name);
            ++n_removed;
        }
        for (const auto & piece : order.remove()) {
            if (!spared || spared->pieces.count(piece) == 0) {
                removal.gone(piece + PIECE);
            }
        }
    }
    std::lock_guard<std::mutex> lock(mutex);
    n_bytes = removal.total;
    return removal.fits(n) || (excess && removal.freed >= n);
}

} // namespace subkv
