// cell_reader.h: the cells of llama.cpp's K/V cache and the tokens of a batch, as libsubkv reads them.
#pragma once

#include <cstdint>
#include <set>
#include <vector>

namespace subkv {

// exclusive, so that the sum of a position and a few window sizes fits an int32_t
constexpr int32_t MAX_POSITION = 1 << 30;

struct PosCell {
    int32_t pos;
    int32_t cell; // within the stream
};

// Cells of llama.cpp's cache. With M-RoPE all tokens of an image share one position in time and differ in height and
// width, so a cell belongs to an image if its three positions differ. No exact window has image cells, and every token
// reads their codes.
class CellReader {
public:
    virtual ~CellReader()                         = default;
    virtual uint32_t stream_of(int32_t seq) const = 0;
    // Positions of cells 0 .. n-1 of a stream. An empty cell has -1, an image cell MAX_POSITION, which no window
    // reaches.
    virtual void positions(uint32_t stream, uint32_t n, int32_t * out) const = 0;
    // Cells of a sequence with p0 <= pos < p1 except image cells. There is at most one per position.
    virtual void find(int32_t seq, int32_t p0, int32_t p1, std::vector<PosCell> & out) const = 0;
    // The same with image cells.
    virtual void find_all(int32_t seq, int32_t p0, int32_t p1, std::vector<PosCell> & out) const = 0;
    // Does the cell also belong to another sequence?
    virtual bool shared(int32_t seq, int32_t cell) const = 0;
    // The largest position of a sequence outside [p0, p1), or -1 if there is none.
    virtual int32_t max_pos_outside(int32_t seq, int32_t p0, int32_t p1) const = 0;

    // First position in [p0, p1) at which dst has a cell that src does not share, so that a copy of src would add a
    // second cell, or -1 if there is none.
    int32_t doubled(int32_t src, int32_t dst, int32_t p0, int32_t p1) const {
        std::vector<PosCell> copied, there;
        find_all(src, p0, p1, copied);
        std::set<int32_t> cells;
        for (const auto & cell : copied) {
            cells.insert(cell.cell);
        }
        int32_t last = -1;
        for (const auto & cell : copied) {
            if (cell.pos == last) {
                continue;
            }
            last = cell.pos;
            find_all(dst, last, last + 1, there);
            for (const auto & own : there) {
                if (cells.count(own.cell) == 0) {
                    return last;
                }
            }
        }
        return -1;
    }
};

// A token of a batch, with its position and its sequences. `cell` is valid after llama.cpp has assigned cells.
struct TokenDesc {
    int32_t         pos;
    int32_t         n_seq;
    const int32_t * seq;
    int32_t         stream;             // index among the streams of this ubatch
    int32_t         cell;               // within its stream
    bool            in_picture = false; // image token, see CellReader
};

} // namespace subkv
