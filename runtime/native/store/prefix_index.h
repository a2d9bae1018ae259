// prefix_index.h: the index of a PrefixStore's folder, read from its files, and the eviction of prompts.
#pragma once

#include "prefix_blocks.h"
#include "prefix_eviction.h"
#include "store_folder.h"

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace subkv {

// These pieces of a prompt are missing, or their checksums differ.
struct PrefixDamaged {
    std::vector<std::string> pieces;
};

// Any thread may call the methods; one thread writes (has, add, trim). They throw std::runtime_error if the folder cannot
// be read or written.
class PrefixIndex {
public:
    PrefixIndex(const std::string & folder, uint64_t max_bytes);

    // A prompt with its pieces in memory, by address.
    struct Cut {
        PrefixHead                                          head;
        std::unordered_map<std::string, std::vector<Bytes>> pieces;
    };

    // Whether a stored prompt already serves these tokens as well; marks it as used. n_removable is that of reach().
    bool has(const std::string & identity, const std::vector<int32_t> & tokens, int64_t n_removable);

    // Writes the missing files. Returns false if there is no room.
    bool add(const Cut & cut, int64_t n_removable);

    // The heads of all prompts with this identity. Reads the folder if it has changed, but without `wait` only if no other
    // thread reads it now.
    std::vector<std::shared_ptr<const PrefixHead>> heads(const std::string & identity, bool wait = true);

    struct PieceRead {
        std::string       name;
        uint64_t          size;
        uint8_t *         data; // whose spans `to` receive the bytes
        std::vector<Span> to;
    };

    // Throws PrefixDamaged.
    void read(const std::string & identity, const std::vector<PieceRead> & reads) const;

    void used(const PrefixHead & head) const; // marks it as used now
    // Removes a prompt and its damaged pieces.
    void damaged(const std::string & name, const std::vector<std::string> & pieces);
    void skip(const std::string & name); // until it is added again

    // Removes files of a folder that is larger than its limit, a bounded number per call.
    void trim();
    bool has_excess() const { return excess; } // trim() has more to remove

    // Why a file could not be removed since the last call, or "".
    std::string removal_failure();

    struct Totals {
        uint64_t n_entries, n_bytes, n_damaged;
    };

    Totals totals() const;

private:
    using Files = StoreFolder::Files;
    class Removal;

    // Files of no known prompt.
    struct Unnamed {
        std::vector<std::string>                     stale;  // leftovers of killed processes
        std::vector<std::pair<int64_t, std::string>> others; // and when they were last used, in this order
    };

    Files       scan();
    void        look_again();
    static void keep_ours(Files & files); // leaves the files of a store
    void        learn(const Files & files, const StoredHeads & before);
    bool        learn(const std::string & name, uint64_t size, StoredHeads & learned);
    StoredHeads known_heads() const;
    void        refuse_head(const std::string & name); // it is not read again
    bool        remove(const std::string & file);
    bool        all_known(const Files & files, const StoredHeads & heads) const;
    void        forget_beginnings(const PrefixHead & head, int64_t n_removable);
    void        drop_unused(Files & files, const std::set<std::string> & named);
    Unnamed     unnamed(const Files & files, const StoredHeads & heads, const EvictionOrder & order,
                        const Cut * spared) const;
    bool        make_room(Files & files, uint64_t n, const Cut * spared);

    const StoreFolder folder;
    const uint64_t    max_bytes;

    // One thread at a time reads the folder. Eviction does not lock this, so that no query waits for it.
    std::mutex          scan_mutex; // locked before `mutex`; guards the next three
    int64_t             looked = 0, changed = 0;
    Files               listed;        // by the last query that read the folder
    std::atomic<size_t> n_unread{ 0 }; // heads that could not be read

    // Never locked during an operation on a file.
    mutable std::mutex    mutex; // guards the members below
    StoredHeads           known;
    std::set<std::string> refused; // names of prompts that are not read again
    uint64_t              n_bytes = 0, n_damaged = 0;
    uint64_t              n_removed = 0; // prompts
    std::string           failure;       // removal_failure()

    // used only by the thread that writes
    std::set<std::string> unused; // pieces of prompts that longer ones replaced
    std::set<std::string> stuck;  // files that could not be removed
    int64_t               stuck_since = 0;
    bool                  excess      = false; // has_excess()
};

} // namespace subkv
