// known_cells.h: positions and sequences of cells, as far as a backend can know them.
//
// A graph has its tokens' cells and positions, and a mask: the cells that a token sees belong to its sequence. Each of
// several streams is a sequence. In a cache of one stream, this class numbers the sequences: a token continues the one
// whose last cell it sees; if it sees another cell of it, it continues a copy, unless its own cell shows that the tail
// was removed. Cells of unknown position, and those that a token sees but its sequence does not hold, are read through
// their codes, so a wrong guess costs quality and nothing else.
//
// A sequence holds a cell only at the cell's position.
#pragma once

#include "cell_reader.h"
#include "graph_build.h"

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

namespace subkv {
class Cache;
}

namespace subkv::plugin {

// A token of a graph, whose cell is stream * n_cells + cell. If pos < 0, the graph has no positions.
struct GraphToken {
    int32_t pos;
    int64_t cell;
    bool    in_picture;
};

class KnownCells final : public CellReader {
public:
    KnownCells(uint32_t n_stream, uint32_t n_cells, int32_t n_seq);

    uint32_t stream_of(int32_t seq) const override { return n_stream_ > 1 ? (uint32_t) seq : 0; }
    int64_t  stream_of_cell(int64_t cell) const { return cell / n_cells_; }
    void     positions(uint32_t stream, uint32_t n, int32_t * out) const override;
    void     find(int32_t seq, int32_t p0, int32_t p1, std::vector<PosCell> & out) const override;
    void     find_all(int32_t seq, int32_t p0, int32_t p1, std::vector<PosCell> & out) const override {
        find(seq, p0, p1, out);
    }
    bool    shared(int32_t, int32_t) const override { return false; } // one owner each
    int32_t max_pos_outside(int32_t seq, int32_t p0, int32_t p1) const override;

    // Gives the tokens of a graph their sequences, and removes from the window of `cache` what they show to be removed.
    // `mask` is as in AttnBuild. The result is valid until the next call.
    const std::vector<TokenDesc> & enter(Cache & cache, const std::vector<GraphToken> & tokens,
                                         const ggml_tensor * mask);
    // Ranges of cells that states have set, in ascending order. Those that a token of the graph sees are its sequence's
    // last ones, in order, up to the last cell that it sees. If it does not see all of these, their positions stay
    // unknown. Returns for each range how many of its cells these are, their sequence and the first one's position.
    struct Range {
        int64_t first, n;
    };

    struct Adopted {
        int32_t seq, pos;
        int64_t n;
    };

    std::vector<Adopted> adopt(Cache & cache, const std::vector<Range> & ranges, const std::vector<GraphToken> & tokens,
                               const ggml_tensor * mask);
    // `by` [n_stream * n_cells] tells how far each cell's position moves. The window of `cache` moves, too.
    void shift(Cache & cache, const int32_t * by);
    // Stream dst becomes a copy of src.
    void copy_stream(Cache & cache, int32_t src, int32_t dst);
    // Notes that the rows of cells were set from outside, so that their positions are unknown.
    void forget(int64_t first, int64_t n);
    void clear();

    // The window's slot of a cell's row may be that of (sequence, position), or -1 if there is none
    std::pair<int32_t, int32_t> holder(int64_t cell) const {
        return { cells_[(size_t) cell].seq, cells_[(size_t) cell].pos };
    }

private:
    struct Cell {
        int32_t  pos   = -1; // MAX_POSITION if it is unknown
        int32_t  seq   = -1; // one of the sequences that hold it, or -1 if there is none
        uint64_t graph = 0;  // that has written it
    };

    using Positions = std::map<int32_t, int32_t>; // position -> cell within the stream

    struct Sight; // what the tokens of a graph see

    // Is this the sequence whose last cell the token sees, one position before its own?
    bool continues(const Sight & sight, size_t token, int32_t seq) const;
    // Returns a token's sequence, and sets `exact` if it may have a row in the window.
    int32_t sequence(Cache & cache, const Sight & sight, size_t token, int32_t previous, bool & exact);
    int32_t unused(Cache & cache); // the sequence that was used longest ago, now empty, or -1 if this graph uses all
    void    remove(Cache & cache, int32_t seq, int32_t p0, int32_t p1);
    void    check_held(const Cache & cache, const Sight & sight, size_t token, int32_t past);
    int64_t first_cell(int32_t seq) const { return (int64_t) stream_of(seq) * n_cells_; }
    // The sequences that can hold cells of this stream.
    std::pair<int32_t, int32_t> sequences(int64_t stream) const;

    int64_t n_cells_;
    int32_t n_stream_;

    std::vector<Cell>      cells_; // [n_stream * n_cells]
    std::vector<Positions> held_;  // by sequence
    std::vector<uint64_t>  used_;  // by sequence, the graph that used it last
    uint64_t               n_graphs_ = 0;
    std::vector<TokenDesc> tokens_;
    std::vector<int32_t>   seqs_; // of tokens_
};

} // namespace subkv::plugin
