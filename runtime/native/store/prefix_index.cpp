// prefix_index.cpp: see prefix_index.h.
#include "prefix_index.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <limits>
#include <thread>

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

PrefixIndex::Files PrefixIndex::look() const {
    Files files = folder.list(MAX_FILES);
    for (auto it = files.begin(); it != files.end();) {
        const std::string   whole = StoreFolder::of_temporary(it->first);
        const std::string & name  = whole.empty() ? it->first : whole;
        it                        = is_head(name) || is_piece(name) ? std::next(it) : files.erase(it);
    }
    return files;
}

// Updates `known` from the files, the most recently used first.
void PrefixIndex::learn(const Files & files) {
    std::vector<std::pair<int64_t, std::string>> order;
    const int64_t                                before = changed;
    changed                                             = UNKNOWN; // unless all heads can be read
    n_bytes                                             = 0;
    n_unread                                            = 0;
    for (const auto & [file, status] : files) {
        n_bytes += status.size;
        if (is_head(file)) {
            order.emplace_back(-status.used, file);
        }
    }
    std::sort(order.begin(), order.end());
    std::set<std::string> there;
    uint64_t              bytes = 0;
    for (const auto & [used, file] : order) {
        const uint64_t    size = files.at(file).size;
        const std::string name = file.substr(0, file.size() - std::strlen(HEAD));
        if (there.size() == MAX_ENTRIES || bytes + size > MAX_INDEX || refused.count(name) > 0) {
            continue;
        }
        if (known.count(name) > 0 || learn(name, size)) {
            there.insert(name);
            bytes += size;
        }
    }
    for (auto it = known.begin(); it != known.end();) {
        it = there.count(it->first) > 0 ? std::next(it) : known.erase(it);
    }
    changed = n_unread == 0 ? before : UNKNOWN;
}

bool PrefixIndex::learn(const std::string & name, uint64_t size) {
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
        known[name] = head;
        return true;
    } catch (const PrefixForeign &) { // evicted when the folder is full
        refused.insert(name);
    } catch (const PrefixInvalid &) {
        ++n_damaged;
        if (!folder.remove(name + HEAD)) {
            refused.insert(name);
        }
    } catch (const std::exception &) { // this file may be read later
        ++n_unread;
    }
    return false;
}

// false: pieces without a prompt may belong to a head that this process does not know.
bool PrefixIndex::all_known(const Files & files) const {
    return std::all_of(files.begin(), files.end(), [&](auto & file) {
        return !is_head(file.first) || known.count(file.first.substr(0, file.first.size() - std::strlen(HEAD))) > 0;
    });
}

std::vector<std::shared_ptr<const PrefixHead>> PrefixIndex::heads(const std::string & identity) {
    std::lock_guard<std::mutex> lock(mutex);
    const int64_t               time = folder.changed();
    // A file created within the resolution of file times after the last scan does not change the folder's time.
    if (time != changed || looked - time < COARSE) {
        looked = StoreFolder::now();
        learn(look());
        changed = n_unread == 0 ? time : UNKNOWN;
    }
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
    std::lock_guard<std::mutex> lock(mutex);
    ++n_damaged;
    for (const auto & piece : pieces) {
        folder.remove(piece + PIECE);
    }
    if (!folder.remove(name + HEAD)) {
        refused.insert(name);
    }
    known.erase(name);
}

void PrefixIndex::skip(const std::string & name) {
    std::lock_guard<std::mutex> lock(mutex);
    refused.insert(name);
    known.erase(name);
}

PrefixIndex::Totals PrefixIndex::totals() const {
    std::unique_lock<std::mutex> lock(mutex, std::try_to_lock);
    std::lock_guard<std::mutex>  lock_seen(seen_mutex);
    if (lock) {
        last_seen = { known.size(), n_bytes, n_damaged };
    }
    return last_seen;
}

//
// writing
//

bool PrefixIndex::has(const std::string & identity, const std::vector<int32_t> & tokens, int64_t n_removable) {
    std::lock_guard<std::mutex> lock(mutex);
    const Files                 files = look();
    learn(files);
    const auto n = (int64_t) tokens.size();
    for (const auto & [name, other] : known) {
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
    for (auto it = known.begin(); it != known.end();) {
        const auto & other = *it->second;
        const auto   n     = (int64_t) other.tokens.size();
        const bool begins = n < n_tokens && other.identity == head.identity &&
                            common_prefix(head.tokens, other.tokens.data(), other.tokens.size()) == other.tokens.size();
        const auto n_lost = n - reach(n_tokens, n, head.points, n_removable);
        if (begins && n_lost < SERVES && 2 * n_lost < n) {
            folder.remove(it->first + HEAD);
            other.each_piece([&](const std::string & piece, uint64_t) {
                if (used_pieces.count(piece) == 0) {
                    folder.mark(piece + PIECE);
                    unused.insert(piece);
                }
            });
            it = known.erase(it);
        } else {
            ++it;
        }
    }
}

// Removes pieces that only unused prompts had, after every reader has finished: a conversation leaves some at every
// turn.
void PrefixIndex::drop_unused(Files & files, const std::set<std::string> & named) {
    const int64_t now = StoreFolder::now();
    for (auto it = unused.begin(); it != unused.end();) {
        const auto file = files.find(*it + PIECE);
        if (file != files.end() && named.count(*it) == 0) {
            if (now - file->second.used < UNUSED) {
                ++it;
                continue;
            }
            folder.remove(file->first);
            files.erase(file);
        }
        it = unused.erase(it);
    }
}

bool PrefixIndex::add(const Cut & cut, int64_t n_removable) {
    const auto file = cut.head.file();
    if (file.size() > MAX_HEAD || cut.head.n_bytes() + file.size() > max_bytes) {
        return false;
    }
    std::vector<std::string> missing;
    {
        std::lock_guard<std::mutex> lock(mutex);
        Files                       files = look();
        learn(files);
        std::set<std::string> named;
        for (const auto & [name, head] : known) {
            head->each_piece([&](const std::string & piece, uint64_t) { named.insert(piece); });
        }
        if (all_known(files)) {
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
        if (!make_room(files, n, cut)) {
            return false;
        }
    }
    for (const auto & piece : missing) {
        folder.write(piece + PIECE, cut.pieces.at(piece));
    }
    const std::string name = cut.head.name();
    folder.write(name + HEAD, { { file.data(), file.size() } });
    std::lock_guard<std::mutex> lock(mutex);
    refused.erase(name);
    forget_beginnings(cut.head, n_removable);
    known[name] = std::make_shared<PrefixHead>(cut.head);
    Files files = look();
    make_room(files, 0, cut);
    return true;
}

// Order of eviction: first the prompts with the most unshared bytes, unused for the longest time, that save the fewest
// tokens.
struct PrefixIndex::Usage {
    const Files &                             files;
    std::unordered_map<std::string, uint32_t> n_uses; // of pieces
    int64_t                                   now = StoreFolder::now();

    double cost(const std::string & name, const PrefixHead & head) const {
        const auto file = files.find(name + HEAD);
        uint64_t   own  = file->second.size;
        head.each_piece([&](const std::string & piece, uint64_t) {
            own += n_uses.at(piece) == 1 ? size_of(files, piece + PIECE) : 0;
        });
        const double seconds = (double) (now - file->second.used) / SECOND; // a clock may have been set back
        return std::max(seconds, 1.0) * (double) own / (double) std::max<size_t>(1, head.tokens.size());
    }
};

// Removes files until n bytes fit, and leftovers of killed processes. false: they do not fit.
bool PrefixIndex::make_room(Files & files, uint64_t n, const Cut & spared) {
    Usage usage{ files, {} };
    for (const auto & [name, head] : known) {
        head->each_piece([&](const std::string & piece, uint64_t) { ++usage.n_uses[piece]; });
    }
    uint64_t total   = 0;
    size_t   n_heads = 0;
    for (const auto & [file, status] : files) {
        total += status.size;
        n_heads += is_head(file);
    }
    const auto gone = [&](const std::string & file) {
        const auto it = files.find(file);
        if (it != files.end()) {
            folder.remove(file);
            n_heads -= is_head(file);
            total -= it->second.size;
            files.erase(it);
        }
    };
    // Files of no known prompt: leftovers of killed processes, which go after an hour (a process may still use younger
    // ones), and prompts of other versions or beyond the index, which go when the folder is full. If a head is unknown,
    // leftover pieces may belong to it; while a head cannot be read, nothing of unknown prompts is removed.
    std::vector<std::pair<int64_t, std::string>> others;
    std::vector<std::string>                     stale;
    const bool                                   whole = all_known(files);
    for (const auto & [file, status] : files) {
        const std::string piece = is_piece(file) ? file.substr(0, N_DIGEST) : "";
        const std::string name  = is_head(file) ? file.substr(0, file.size() - std::strlen(HEAD)) : "";
        const bool named = usage.n_uses.count(piece) > 0 || spared.pieces.count(piece) > 0 || known.count(name) > 0;
        const bool begun = piece.empty() && name.empty(); // a temporary file
        if (named) {
            continue;
        }
        if (usage.now - status.used > STALE && (begun || (whole && name.empty()))) {
            stale.push_back(file);
        } else if (n_unread == 0) {
            others.emplace_back(status.used, file);
        }
    }
    for (const auto & file : stale) {
        gone(file);
    }
    std::sort(others.begin(), others.end());
    size_t                                                   next = 0;
    std::map<std::string, std::shared_ptr<const PrefixHead>> held;
    for (const auto & [name, head] : known) {
        if (files.count(name + HEAD) > 0) {
            held[name] = head;
        }
    }
    while (total + n > max_bytes || n_heads > MAX_ENTRIES) {
        int64_t oldest = std::numeric_limits<int64_t>::max();
        for (const auto & [name, head] : held) {
            oldest = std::min(oldest, files.at(name + HEAD).used);
        }
        if (next < others.size() && (held.empty() || others[next].first <= oldest)) {
            gone(others[next++].second);
            continue;
        }
        if (held.empty()) {
            n_bytes = total;
            return false;
        }
        const auto worst = std::max_element(held.begin(), held.end(), [&](auto & a, auto & b) {
            return usage.cost(a.first, *a.second) < usage.cost(b.first, *b.second);
        });
        const auto head  = worst->second;
        gone(worst->first + HEAD);
        known.erase(worst->first);
        held.erase(worst);
        head->each_piece([&](const std::string & piece, uint64_t) {
            if (--usage.n_uses[piece] == 0 && spared.pieces.count(piece) == 0) {
                gone(piece + PIECE);
            }
        });
    }
    n_bytes = total;
    return true;
}

} // namespace subkv
