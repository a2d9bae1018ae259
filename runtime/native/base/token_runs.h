// token_runs.h: finds the runs of tokens of an evaluated prompt that a new prompt has behind another beginning.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <unordered_map>
#include <utility>
#include <vector>

namespace subkv {

constexpr int64_t LEAST_RUN    = 256; // tokens
constexpr int64_t N_RUN_BEGINS = 16;  // the first tokens of a run are evaluated again
constexpr int64_t RUN_COST     = 48;  // they, and the last ones, as SUBKV_RESUME is by default

// Tokens [from, from + n) of one prompt are tokens [to, to + n) of the other one.
struct TokenRun {
    int64_t from, to, n;
};

// Tokens that need no evaluation if these runs move.
inline int64_t n_saved(const std::vector<TokenRun> & runs) {
    int64_t n = 0;
    for (const auto & run : runs) {
        n += run.n - RUN_COST;
    }
    return n;
}

// Runs of at least LEAST_RUN tokens behind the common beginning of both prompts, and behind the first n_first tokens of
// the new one. They are in the same order in both, so that each one only has other text before it. An index has the
// hashes of the evaluated prompt's blocks, and the new prompt is searched with a rolling hash.
inline std::vector<TokenRun> find_runs(const int32_t * held, int64_t n_held, const int32_t * asked, int64_t n_asked,
                                       int64_t n_first) {
    constexpr int64_t  BLOCK = LEAST_RUN / 4; // every run contains whole blocks
    constexpr int64_t  TRIED = 8;             // blocks with the same hash
    constexpr uint64_t BASE  = UINT64_C(0x9e3779b97f4a7c15);

    const auto hash = [](const int32_t * tokens) {
        uint64_t sum = 0;
        for (int64_t i = 0; i < BLOCK; ++i) {
            sum = sum * BASE + (uint32_t) tokens[i];
        }
        return sum;
    };
    uint64_t leaving = 1; // factor of a block's first token
    for (int64_t i = 1; i < BLOCK; ++i) {
        leaving *= BASE;
    }
    int64_t from = std::mismatch(held, held + std::min(n_held, n_asked), asked).first - held;
    int64_t to   = std::max(from, n_first);

    std::vector<TokenRun> runs;
    if (n_held - from < LEAST_RUN || n_asked - to < LEAST_RUN) {
        return runs;
    }
    std::unordered_map<uint64_t, std::vector<int64_t>> blocks; // ascending
    for (int64_t i = from; i + BLOCK <= n_held; i += BLOCK) {
        blocks[hash(held + i)].push_back(i);
    }
    uint64_t sum = hash(asked + to);
    for (int64_t at = to; at + BLOCK <= n_asked;) {
        TokenRun   best{ 0, 0, 0 };
        const auto known = blocks.find(sum);
        if (known != blocks.end()) {
            auto block = std::lower_bound(known->second.begin(), known->second.end(), from);
            for (int64_t i = 0; i < TRIED && block != known->second.end(); ++i, ++block) {
                int64_t before = 0, n = 0;
                while (*block + n < n_held && at + n < n_asked && held[*block + n] == asked[at + n]) {
                    ++n;
                }
                while (n >= BLOCK && *block - before > from && at - before > to &&
                       held[*block - before - 1] == asked[at - before - 1]) {
                    ++before;
                }
                if (before + n > best.n) {
                    best = { *block - before, at - before, before + n };
                }
            }
        }
        int64_t next = at + 1;
        if (best.n >= LEAST_RUN) {
            runs.push_back(best);
            from = best.from + best.n;
            to = next = best.to + best.n;
        }
        if (next + BLOCK <= n_asked) {
            sum = next == at + 1 ? (sum - leaving * (uint32_t) asked[at]) * BASE + (uint32_t) asked[at + BLOCK] :
                                   hash(asked + next);
        }
        at = next;
    }
    return runs;
}

} // namespace subkv
