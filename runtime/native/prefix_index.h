// prefix_index.h: what the folder of a PrefixStore holds, as its files say, and what goes when it is full.
#pragma once

#include "prefix_blocks.h"
#include "store_folder.h"

#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

namespace subkv {

// A prompt in the folder is not what it says. pieces: the damaged ones.
struct PrefixDamaged : std::runtime_error {
    explicit PrefixDamaged(const std::string & why, std::vector<std::string> pieces = {}) :
        std::runtime_error(why), pieces(std::move(pieces)) {}

    std::vector<std::string> pieces;
};

// Methods may be called from any thread, and throw std::runtime_error when the folder cannot be read or written.
class PrefixIndex {
public:
    PrefixIndex(const std::string & folder, uint64_t max_bytes);

    // A prompt whose pieces lie in memory, by address.
    struct Cut {
        PrefixHead                                          head;
        std::unordered_map<std::string, std::vector<Bytes>> pieces;
    };

    // Does a prompt that is there serve as well as one of these tokens would? It counts as used then. n_removable: of
    // reach().
    bool has(const std::string & identity, const std::vector<int32_t> & tokens, int64_t n_removable);

    // Writes what is not there yet. false: it is larger than everything may be.
    bool add(const Cut & cut, int64_t n_removable);

    // Of every prompt that is bound to `identity`.
    std::vector<std::shared_ptr<const PrefixHead>> heads(const std::string & identity);

    struct Wanted {
        std::string       name;
        uint64_t          size;
        uint8_t *         data; // to whose `to` it goes
        std::vector<Span> to;
    };

    // Throws PrefixDamaged.
    void read(const std::string & identity, const std::vector<Wanted> & wanted) const;

    void used(const PrefixHead & head) const; // now
    void damaged(const std::string & name, const PrefixDamaged & why);

    struct Seen {
        uint64_t n_entries, n_bytes, n_damaged;
    };

    Seen seen() const; // waits for no disk

private:
    using Files = std::map<std::string, StoredFile>;

    struct Usage;

    Files look() const; // files of a store, by name
    void  learn(const Files & files);
    bool  learn(const std::string & file, uint64_t size);
    void  forget_beginnings(const PrefixHead & head, int64_t n_removable);
    void  drop_unused(Files & files, const std::set<std::string> & named);
    void  make_room(Files & files, uint64_t n, const Cut & spared);
    void  drop(const std::string & file) const;

    const StoreFolder                                        folder;
    const uint64_t                                           max_bytes;
    mutable std::mutex                                       seen_mutex; // of last_seen; taken behind the other one
    mutable Seen                                             last_seen = {};
    mutable std::mutex                                       mutex;   // of what follows
    std::map<std::string, std::shared_ptr<const PrefixHead>> known;   // by name
    std::set<std::string>                                    refused; // names that are not to be read again
    std::set<std::string>                                    unused;  // pieces of prompts that longer ones replaced
    int64_t                                                  looked = 0, changed = 0;
    uint64_t                                                 n_bytes = 0, n_damaged = 0;
};

} // namespace subkv
