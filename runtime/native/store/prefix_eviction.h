// prefix_eviction.h: the order in which a PrefixIndex removes prompts.
#pragma once

#include "prefix_blocks.h"
#include "store_folder.h"

#include <cstdint>
#include <map>
#include <memory>
#include <queue>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace subkv {

using StoredHeads = std::map<std::string, std::shared_ptr<const PrefixHead>>; // by name

// First the prompts with the most unshared bytes, unused for the longest time, that save the fewest tokens. Every piece
// of every prompt is visited a constant number of times, whatever number of prompts is removed.
class EvictionOrder {
public:
    struct Candidate {
        std::string                       name;
        std::shared_ptr<const PrefixHead> head;
        uint64_t                          file_bytes; // of the head's file
        int64_t                           used;       // StoredFile::used of that file
    };

    EvictionOrder(std::vector<Candidate> candidates, int64_t now);

    bool is_used(const std::string & piece) const {
        return pieces.count(piece) > 0;
    } // by a prompt that was not removed

    const Candidate * next(); // the prompt to remove first, or nullptr if none is left

    // Removes the result of next(); returns the pieces that no other prompt has.
    std::vector<std::string> remove();
    // Keeps the result of next(), whose file cannot be removed; next() does not return it again.
    void keep();

    int64_t oldest_use() const; // of all that next() may return, or the largest number

    uint64_t n_visits = 0; // of pieces

private:
    struct Piece {
        uint32_t n_users = 0;
        uint32_t users   = 0; // exclusive or of their indices: the index of the last one
        uint32_t last    = 0; // number of the last visit's prompt + 1
        uint64_t size    = 0;
    };

    struct State {
        uint64_t own   = 0; // bytes that no other prompt has
        double   cost  = 0;
        bool     taken = false;
    };

    void rank(uint32_t i);
    void take();
    // Calls use(piece) once for every piece of a prompt, also of one that it has twice.
    template <typename F> void each_piece(uint32_t i, F use);

    std::vector<Candidate>                           candidates;
    std::vector<State>                               states;
    std::unordered_map<std::string, Piece>           pieces;
    std::priority_queue<std::pair<double, uint32_t>> ranked; // also outdated costs
    std::vector<std::pair<int64_t, uint32_t>>        by_use; // the oldest one last
    int64_t                                          now;
    uint32_t                                         top = 0; // the result of next()
};

} // namespace subkv
