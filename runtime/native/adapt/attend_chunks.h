// attend_chunks.h: attention over cells of several chunks with different bases. Every chunk has its own softmax state,
// in its own coefficients, over the tiles with its cells; other chunks' cells are masked. At the end the states are
// merged in the coefficients of the static basis (the blockwise softmax of papers/online-subspace-projection.md §6).
#pragma once

#include "chunked.h"

#include <vector>

namespace subkv {

class ChunkedAttention {
public:
    // One block of tokens, one segment of a stream's cells and one KV head.
    void begin(const ChunkedLayer & layer, uint32_t stream, int64_t head);

    // Like Ops::attend(args), with the chunk of every cell in its last bytes. args.k, args.v and args.qt are static,
    // and args.n_cells is a number of whole tiles. k_chunks and v_chunks are the chunk bytes of the first tile, unused
    // if the side does not adapt.
    void attend(const Ops & ops, const AttendArgs & args, const uint8_t * k_chunks, const uint8_t * v_chunks);

    // Merges the states of all other chunks into args' state.
    void finish(const AttendArgs & args);

private:
    // Softmax state of the cells of one chunk of values, n_rows rows.
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

    const ChunkUnit *    k_unit_ = nullptr; // nullptr if the side does not adapt
    const ChunkUnit *    v_unit_ = nullptr;
    size_t               n_sums_ = 0, n_queries_ = 0; // in use, while the vectors keep the memory of the rest
    std::vector<Sums>    sums_;
    std::vector<Queries> queries_;
    std::vector<int32_t> chunk_; // [n_cells], which like the next is scratch
    std::vector<float>   bias_;
};

} // namespace subkv
