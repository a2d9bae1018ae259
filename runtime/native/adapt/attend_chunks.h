// attend_chunks.h: attention over cells of several chunks, whose bases differ. Tiles with cells of one chunk are attended
// in that chunk's coefficients, the others' cells left out, with a softmax state of its own; at the end the states become
// one in the coefficients of the static basis (the blockwise softmax of papers/online-subspace-projection.md §6).
#pragma once

#include "chunked.h"

#include <vector>

namespace subkv {

class ChunkedAttention {
public:
    // One block of tokens, one segment of a stream's cells and one KV head.
    void begin(const ChunkedLayer & layer, uint32_t stream, int64_t head);

    // As Ops::attend(args), but the cells' last bytes say which chunks they belong to. args.k, args.v, args.qt: static;
    // args.n_cells: of whole tiles; k_chunks, v_chunks: those bytes of the first tile, not read if the side does not adapt.
    void attend(const Ops & ops, const AttendArgs & args, const uint8_t * k_chunks, const uint8_t * v_chunks);

    // Adds what chunks other than the static one have collected to args' state.
    void finish(const AttendArgs & args);

private:
    // Softmax state of the cells of one chunk: of values, n_rows rows.
    struct Sums {
        int32_t            slot;
        std::vector<float> m, z, acc;
    };

    // Queries in the coefficients of a chunk of keys.
    struct Queries {
        int32_t            slot;
        std::vector<float> qt;
    };

    const float * queries(const AttendArgs & args, int32_t slot);
    Sums &        sums(const AttendArgs & args, int32_t slot);

    const ChunkUnit *    k_unit_ = nullptr; // nullptr: the side does not adapt
    const ChunkUnit *    v_unit_ = nullptr;
    size_t               n_sums_ = 0, n_queries_ = 0; // in use; the rest is kept for its memory
    std::vector<Sums>    sums_;
    std::vector<Queries> queries_;
    std::vector<int32_t> chunk_; // [n_cells]; scratch, as the next
    std::vector<float>   bias_;
};

} // namespace subkv
