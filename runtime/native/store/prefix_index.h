// prefix_index.h: the index of a PrefixStore's folder, read from its files, and the eviction of prompts.
#pragma once

#include "prefix_blocks.h"
#include "store_folder.h"

#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

namespace subkv {

// These pieces of a prompt are missing, or their checksums differ.
struct PrefixDamaged {
    std::vector<std::string> pieces;
};

// Any thread may call the methods. They throw std::runtime_error if the folder cannot be read or written.
class PrefixIndex {
public:
    PrefixIndex(const std::string & folder, uint64_t max_bytes);

    // A prompt with its pieces in memory, by address.
    struct Cut {
        PrefixHead                                          head;
        std::unordered_map<std::string, std::vector<Bytes>> pieces;
    };

    // true: a stored prompt already serves these tokens as well; marks it as used. n_removable: as in reach().
    bool has(const std::string & identity, const std::vector<int32_t> & tokens, int64_t n_removable);

    // Writes the missing files. false: there is no room.
    bool add(const Cut & cut, int64_t n_removable);

    // The heads of all prompts with this identity.
    std::vector<std::shared_ptr<const PrefixHead>> heads(const std::string & identity);

    struct PieceRead {
        std::string       name;
        uint64_t          size;
        uint8_t *         data; // destination: the spans `to` of it
        std::vector<Span> to;
    };

    // Throws PrefixDamaged.
    void read(const std::string & identity, const std::vector<PieceRead> & reads) const;

    void used(const PrefixHead & head) const; // marks it as used now
    // Removes a prompt and its damaged pieces.
    void damaged(const std::string & name, const std::vector<std::string> & pieces);
    void skip(const std::string & name); // until it is added again

    struct Totals {
        uint64_t n_entries, n_bytes, n_damaged;
    };

    Totals totals() const; // never waits for the disk

private:
    using Files = std::map<std::string, StoredFile>;

    struct Usage;

    Files look() const; // files of a store, by name
    void  learn(const Files & files);
    bool  learn(const std::string & file, uint64_t size);
    bool  all_known(const Files & files) const;
    void  forget_beginnings(const PrefixHead & head, int64_t n_removable);
    void  drop_unused(Files & files, const std::set<std::string> & named);
    bool  make_room(Files & files, uint64_t n, const Cut & spared);

    const StoreFolder                                        folder;
    const uint64_t                                           max_bytes;
    mutable std::mutex                                       seen_mutex; // guards last_seen; locked after `mutex`
    mutable Totals                                           last_seen = {};
    mutable std::mutex                                       mutex;   // guards the members below
    std::map<std::string, std::shared_ptr<const PrefixHead>> known;   // by name
    std::set<std::string>                                    refused; // names of prompts that are not read again
    std::set<std::string>                                    unused;  // pieces of prompts that longer ones replaced
    int64_t                                                  looked = 0, changed = 0;
    size_t                                                   n_unread = 0; // heads that could not be read
    uint64_t                                                 n_bytes = 0, n_damaged = 0;
};

} // namespace subkv
