// uncoded.h: cells whose codes a GPU has not made yet. A decoded token is stored in the exact window only, since no token
// reads its codes while the window has its row. Before a token needs codes of the list, all its rows are encoded at
// once. A cell on the list belongs to one sequence, whose window holds the row.
#pragma once

#include "cell_reader.h"

#include <algorithm>
#include <cstdint>
#include <vector>

namespace subkv {

struct UncodedRow {
    int32_t seq, pos;
    int32_t slot; // of the window
    int32_t cell; // of all streams
};

class UncodedRows {
public:
    bool         empty() const { return rows_.empty(); }
    const auto & rows() const { return rows_; } // std::vector<UncodedRow>

    // Adds a token that the graph stores in the window without codes. If it has several sequences, it is to be encoded
    // before the next graph.
    void add(const TokenDesc & token, int32_t slot, int32_t cell) {
        rows_.push_back({ token.seq[0], token.pos, slot, cell });
        shared_ = shared_ || token.n_seq > 1;
    }

    // Is a cell of the list shared? Then its codes are needed before any change of a sequence.
    bool shared() const { return shared_; }

    // Returns whether the rows must be encoded before these tokens attend. exact(p, t) says that the token at t reads
    // position p exactly.
    template <typename Exact> bool needed(const std::vector<TokenDesc> & tokens, Exact exact) const {
        const auto reads = [&](const UncodedRow & row) {
            return std::any_of(tokens.begin(), tokens.end(), [&](const TokenDesc & token) {
                return token.n_seq > 1 || (token.seq[0] == row.seq && !exact(row.pos, token.pos));
            });
        };
        return shared_ || std::any_of(rows_.begin(), rows_.end(), reads);
    }

    // The cells of positions [p0, p1) are removed.
    void remove(int32_t seq, int32_t p0, int32_t p1) {
        const auto gone = [&](const UncodedRow & row) { return row.seq == seq && row.pos >= p0 && row.pos < p1; };
        rows_.erase(std::remove_if(rows_.begin(), rows_.end(), gone), rows_.end());
    }

    void clear() {
        rows_.clear();
        shared_ = false;
    }

private:
    std::vector<UncodedRow> rows_;
    bool                    shared_ = false;
};

} // namespace subkv
