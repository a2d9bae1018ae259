// prefix_store.h: evaluated prompts in a folder, which outlive the process and which several processes may share.
//
//   <identity>-<tokens>.prefix   head of a prompt: its tokens, the addresses of its pieces, a checksum
//   <content>.piece              a block of rows, the rest of a state, a checkpoint (prefix_blocks.h)
//
// Files never change. Pieces are written before the head that names them, and every byte is checked against its address
// when it is read: whoever removes, cuts or changes a file, or is killed while it writes, costs an evaluation. There is no
// lock and no index on disk: heads are read once, when the time of the folder shows that there are others.
#pragma once

#include "prefix_blocks.h"

#include <array>
#include <memory>
#include <string>
#include <vector>

namespace subkv {

constexpr int64_t LEAST_TOKENS = 32; // nothing is stored of fewer, nor read for a gain of fewer

struct PrefixPoint {
    int64_t                                        n_tokens = 0;
    int32_t                                        pos_min = 0, pos_max = 0;
    std::array<std::vector<uint8_t>, N_POINT_DATA> data;
};

// An evaluated prompt: states of one sequence that holds these tokens, and of earlier moments what goes back to them.
struct Prefix {
    std::string                                identity; // N_DIGEST hex digits
    std::vector<int32_t>                       tokens;
    std::array<std::vector<uint8_t>, N_STATES> states;
    std::vector<PrefixPoint>                   points;
    int64_t                                    n_removable = -1; // as in a query; not stored

    uint64_t n_bytes() const;
};

struct PrefixQuery {
    std::string          identity;
    std::vector<int32_t> tokens;
    int64_t              n_held            = 0;  // tokens that need no evaluation anyway
    int64_t              n_max             = 0;  // tokens of a prompt that can be taken
    int64_t              n_removable       = -1; // the longest tail that can be removed without a checkpoint; -1: any
    double               seconds_per_token = 0;  // of an evaluation; 0: not known
    double               seconds           = 60; // that the answer is waited for
};

struct PrefixFound {
    Prefix      prefix;
    int64_t     n_reached = 0; // tokens that need no evaluation
    std::string name;
};

struct PrefixStats {
    uint64_t n_entries;  // of the folder, as last seen
    uint64_t n_bytes;    // of the folder's files, as last seen
    uint64_t n_hits;     // prompts that were found
    uint64_t n_restored; // tokens that need no evaluation since
    uint64_t n_written;  // prompts
    uint64_t n_dropped;  // prompts that came too fast, or are larger than everything may be
    uint64_t n_damaged;  // prompts that were not what they say
    uint64_t n_failures; // of the disk
};

// Methods throw nothing but std::bad_alloc: a folder that cannot be written is reported once in the log, and not written to
// any more; one that cannot be read is reported once, too.
class PrefixStore {
public:
    // max_bytes: of all files. Throws std::runtime_error: the folder cannot be used.
    PrefixStore(const std::string & folder, uint64_t max_bytes);
    ~PrefixStore(); // waits for what is still to be written, but not for ever

    enum class Room { NOW, LATER, NEVER }; // LATER: when others have been written

    // For a prompt of so many bytes.
    Room room(uint64_t n_bytes) const;

    // Stores a prompt in the background. false: it was dropped. wait: until there is room for it.
    bool put(Prefix && prefix, bool wait);

    // The prompt that saves most of the evaluation of these tokens, nullptr: none.
    std::unique_ptr<PrefixFound> get(const PrefixQuery & query);

    // A prompt that the cache does not take: it is removed.
    void reject(const std::string & name);

    // Waits until everything is written. false: not within these seconds.
    bool flush(double seconds);

    PrefixStats stats() const;

private:
    class Core;
    std::shared_ptr<Core> core; // threads that a disk holds up keep it
};

} // namespace subkv
