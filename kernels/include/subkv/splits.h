// splits.h: over how many blocks of a GPU attention splits the cells of a sequence.
//
// A multiprocessor runs several blocks at once, which wait more than they compute. When they end, it runs the next ones:
// a wave. Estimated times are in units of the time that a multiprocessor issues instructions for a step of one block:
//
//   time of a wave = (SPLIT_START + steps of a block) * (STEP_WAIT + blocks of a multiprocessor)
#pragma once

#include "subkv/tiles.h"

#include <algorithm>
#include <cstdint>

namespace subkv {

constexpr int64_t SPLIT_START = 1; // A block starts in about the time of a step.
constexpr int64_t STEP_WAIT = 6; // Four blocks at once issue for 40% of the time (research/notes/kernels.md, "Splits").
constexpr int64_t PROMPT_TOKENS = 32; // Without a kernel for few tokens, decoding the cells for fewer may not pay.
constexpr int64_t DECODE_WAVES  = 8;  // With more waves, the last one would matter less, but results take more memory.

// How the blocks of an attention kernel work.
struct BlockSteps {
    int64_t n_processors; // multiprocessors
    int64_t resident;     // blocks of a multiprocessor that run at once
    int64_t cells;        // cells of a step, whole tiles
    int64_t steps;        // steps of a block that run at once, each in a warp of its own
    int64_t waves;        // maximum waves, if the splits do not fit in one
};

constexpr int64_t quotient_up(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

// Returns the tokens of a block of the kernels for many tokens: about 128 query rows share the unpacking of codes.
constexpr int64_t tokens_of_block(int64_t n_group) {
    return n_group < 128 ? 128 / n_group : 1;
}

// Returns the estimated time of attention with splits of `cells` cells. Each split has n_blocks blocks.
inline int64_t time_of_splits(const BlockSteps & of, int64_t n_kv, int64_t n_blocks, int64_t cells) {
    const int64_t all = quotient_up(n_kv, cells) * n_blocks, at_once = of.n_processors * of.resident;
    const int64_t last = quotient_up(all % at_once, of.n_processors); // blocks of a multiprocessor in the last wave
    const int64_t busy = all / at_once * (STEP_WAIT + of.resident) + (last > 0 ? STEP_WAIT + last : 0);
    return (SPLIT_START + quotient_up(quotient_up(cells, of.cells), of.steps)) * busy;
}

// Returns the cells of a split, whole steps: those of the shortest estimated time with at most `most` splits, and of the
// splits with that time the smallest, which use most multiprocessors.
inline int64_t cells_of_split(const BlockSteps & of, int64_t n_kv, int64_t n_blocks, int64_t most) {
    const int64_t n_steps = quotient_up(n_kv, of.cells);
    int64_t       best = n_steps * of.cells, least = time_of_splits(of, n_kv, n_blocks, best);
    for (int64_t waves = of.waves; waves > 0; --waves) {
        const int64_t n = std::min(waves * of.n_processors * of.resident / n_blocks, most);
        if (n < 1) {
            break;
        }
        const int64_t each = quotient_up(n_steps, n);
        for (const int64_t steps : { each, quotient_up(each, of.steps) * of.steps }) {
            const int64_t cells = steps * of.cells, time = time_of_splits(of, n_kv, n_blocks, cells);
            if (time < least || (time == least && cells < best)) {
                best  = cells;
                least = time;
            }
        }
    }
    return best;
}

} // namespace subkv
