// prefix_store.h: evaluated prompts in a folder that persists across processes and that several processes may share.
//
//   <identity>-<tokens>.prefix   head of a prompt: its tokens, the addresses of its pieces, a checksum
//   <content>.piece              a block of rows, the rest of a state, a checkpoint (prefix_blocks.h)
//
// Files never change. The store writes pieces before the head that names them, and checks every byte against its
// address when it reads. A removed, truncated or changed file, or a killed writer, therefore only costs an evaluation. It
// removes such files, but none that it cannot read for another reason (access, memory, the disk). There is no lock and no
// index on disk: the store reads every head once, when the folder's modification time shows new files.
#pragma once

#include "prefix_blocks.h"
#include "subkv_store.h"

#include <array>
#include <memory>
#include <string>
#include <vector>

namespace subkv {

constexpr int64_t LEAST_TOKENS = SUBKV_STORE_LEAST_TOKENS;

// An evaluated prompt: the states of one sequence with these tokens, and its checkpoints.
struct Prefix {
    std::string                                identity; // N_DIGEST hex digits
    std::vector<int32_t>                       tokens;
    std::array<std::vector<uint8_t>, N_STATES> states;
    std::vector<Point<std::vector<uint8_t>>>   points;
    int64_t                                    n_removable = -1; // as in PrefixQuery; not stored

    uint64_t n_bytes() const;
};

struct PrefixQuery {
    std::string          identity;
    std::vector<int32_t> tokens;
    int64_t              n_held            = 0;  // leading tokens that the sequence already has
    int64_t              n_max             = 0;  // maximum tokens of a prompt
    int64_t              n_removable       = -1; // longest tail that can be removed without a checkpoint, or -1 for any
    double               seconds_per_token = 0;  // evaluation time, or 0 if it is unknown
    double               seconds           = 60; // timeout
    int64_t              n_moved           = -1; // as in subkv_store_query
};

struct PrefixFound {
    Prefix      prefix;
    int64_t     n_reached = 0; // tokens that need no evaluation
    std::string name;
};

// Methods throw nothing but std::bad_alloc. The store logs a folder that is not writable once and stops writing to it;
// it logs a folder that is not readable once. If memory or files run out, it drops one prompt, or evaluates one.
class PrefixStore {
public:
    // All files together have at most max_bytes. Throws std::runtime_error if the folder cannot be used.
    PrefixStore(const std::string & folder, uint64_t max_bytes);
    ~PrefixStore(); // waits for pending writes, with a timeout

    // As subkv_store_room.
    int room(uint64_t n_bytes) const;

    // Stores a prompt in the background; `wait` blocks until it fits. Returns false if the store drops it.
    bool put(Prefix && prefix, bool wait);

    // The prompt that saves the most evaluation of these tokens, or nullptr.
    std::unique_ptr<PrefixFound> get(const PrefixQuery & query);

    // The longest common prefix with any stored prompt.
    int64_t common(const std::string & identity, const std::vector<int32_t> & tokens) const;

    // The cache rejected this prompt, which get() does not return until it is stored again. Its bytes are those that were
    // stored, so its files stay: the cache may lack memory or cells.
    void reject(const std::string & name);

    // Waits until all writes are complete. Returns false if they are not after these seconds.
    bool flush(double seconds);

    // The line that the store has logged about a failure, or "" if there was none since the last call.
    std::string failure() const;

    subkv_store_stats stats() const;

private:
    class Core;
    std::shared_ptr<Core> core; // shared with threads that may wait for a slow disk
};

} // namespace subkv
