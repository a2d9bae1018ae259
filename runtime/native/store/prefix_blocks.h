// prefix_blocks.h: splits an evaluated prompt into pieces: blocks of rows, which prompts with a common prefix share,
// and the rest.
//
// A llama.cpp state lists the rows of a tensor contiguously, tensor by tensor, in the order of the cells that hold the
// tokens. A block is the rows of BLOCK_TOKENS tokens in all tensors, in the order of their positions, so that prompts share
// it whatever cells held them. The name of a piece is a hash of its bytes and of the state's identity. A state without
// recognized rows is one piece, which no other prompt shares.
#pragma once

#include "store_folder.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace subkv {

constexpr uint64_t BLOCK_TOKENS = 256;
constexpr size_t   N_STATES     = 2;       // of the model, of a draft model
constexpr size_t   N_POINT_DATA = 3;       // of a checkpoint: model, draft model, its speculative decoding
constexpr size_t   MAX_POINTS   = 6;       // maximum checkpoints of a stored prompt
constexpr int64_t  SPACING      = 128;     // minimum tokens between checkpoints
constexpr size_t   N_DIGEST     = 64;      // hex digits
constexpr uint64_t MAX_TOKENS   = 1 << 20; // of a prompt
constexpr uint64_t MAX_HEAD     = 16 << 20;
constexpr uint64_t MAX_SPANS    = 1 << 22; // contiguous runs of rows in all tensors of a state

// A head whose checksum or format is wrong. Only these heads are removed, because a file that cannot be read now, or for
// which memory is missing, may be sound.
struct PrefixInvalid : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// The head has the format of another version of subkv: it is not damaged and must not be removed.
struct PrefixForeign : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct Region {
    uint64_t offset; // of one tensor's rows in a state
    uint32_t row;    // bytes of a row
};

// Tokens at consecutive positions whose rows are consecutive in a state.
struct Run {
    uint32_t token; // the first of them, by position
    uint32_t row;   // of this token
    uint32_t n;

    bool operator==(const Run & other) const { return token == other.token && row == other.row && n == other.n; }
};

// The rows of a state.
struct Rows {
    std::vector<Region> regions; // empty if none is recognized
    std::vector<Run>    order;   // of all tokens, by position; empty if the rows are in this order
};

struct PieceRef {
    std::string name; // without suffix
    uint64_t    size = 0;
};

struct Span {
    uint64_t offset, size;
};

// The pieces of a state.
struct StateRefs {
    Rows                     rows;
    std::vector<std::string> blocks;
    PieceRef                 rest;

    uint64_t          block_bytes() const;
    uint64_t          size() const { return rest.size + blocks.size() * block_bytes(); }
    std::vector<Span> of_block(uint64_t i) const; // spans of its bytes in the state
    std::vector<Span> of_rest() const;            // rows of tokens behind the last block included

private:
    std::vector<Run> runs_of(uint64_t first, uint64_t end) const; // of tokens first .. end - 1
};

// A checkpoint.
template <typename Data> struct Point {
    int64_t                        n_tokens = 0;
    int32_t                        pos_min = 0, pos_max = 0;
    std::array<Data, N_POINT_DATA> data;
};

using PointRefs = Point<PieceRef>;

// The metadata of a stored prompt, without its states.
struct PrefixHead {
    std::string                     identity; // of the states, N_DIGEST digits
    std::vector<int32_t>            tokens;
    std::array<StateRefs, N_STATES> states;
    std::vector<PointRefs>          points;

    std::string name() const;    // begins with prefix_of(identity)
    uint64_t    n_bytes() const; // of all pieces

    // Calls use(name, bytes) for every piece.
    template <typename F> void each_piece(F use) const {
        for (const auto & state : states) {
            for (const auto & block : state.blocks) {
                use(block, state.block_bytes());
            }
            if (state.rest.size > 0) {
                use(state.rest.name, state.rest.size);
            }
        }
        for (const auto & point : points) {
            for (const auto & piece : point.data) {
                if (piece.size > 0) {
                    use(piece.name, piece.size);
                }
            }
        }
    }

    std::vector<uint8_t> file() const;
    // Throws PrefixInvalid, PrefixForeign.
    static PrefixHead parse(const std::vector<uint8_t> & file);
};

std::string prefix_of(const std::string & identity); // common prefix of its prompts' names

// The address of a piece, N_DIGEST digits.
std::string address(const std::string & identity, const std::vector<Bytes> & pieces);

// The rows of n cells in a sequence's state.
Rows find_rows(const uint8_t * state, size_t size, uint64_t n);

size_t common_prefix(const std::vector<int32_t> & tokens, const int32_t * other, size_t n);

// Number of tokens that stay after a removal of tokens n .. n_held - 1. It is n if the tail has at most n_removable tokens
// (-1 for any number), else the tokens of the last checkpoint at or before n.
template <typename Points>
int64_t reach(int64_t n_held, int64_t n, const Points & points, int64_t n_removable) {
    if (n_removable < 0 || n_held - n <= n_removable) {
        return n;
    }
    int64_t most = 0;
    for (const auto & point : points) {
        if (point.n_tokens <= n && point.n_tokens > most) {
            most = point.n_tokens;
        }
    }
    return most;
}

// Sorts the checkpoints of a prompt of n tokens and leaves at most MAX_POINTS, at least SPACING tokens apart, and none
// inside the tail that the cache can remove without a checkpoint. It first removes the checkpoints whose loss
// re-evaluates the fewest tokens, but never the last one.
template <typename Points> void thin(Points & points, int64_t n, int64_t n_removable) {
    const auto end = n_removable > 0 ? n - n_removable : n + 1;
    points.erase(std::remove_if(points.begin(), points.end(), [&](auto & p) { return p.n_tokens >= end; }),
                 points.end());
    std::sort(points.begin(), points.end(), [](auto & a, auto & b) { return a.n_tokens < b.n_tokens; });
    while (points.size() > 1) {
        const auto gain  = [&](size_t i) { return points[i].n_tokens - (i > 0 ? points[i - 1].n_tokens : 0); };
        size_t     worst = 0;
        for (size_t i = 1; i + 1 < points.size(); ++i) {
            worst = gain(i) < gain(worst) ? i : worst;
        }
        if (points.size() <= MAX_POINTS) {
            if (gain(points.size() - 1) < SPACING) { // remove the one before the last
                worst = points.size() - 2;
            } else if (gain(worst) >= SPACING) {
                return;
            }
        }
        points.erase(points.begin() + (std::ptrdiff_t) worst);
    }
}

} // namespace subkv
