// chunked.h: adaptive bases in the cache of a context: one Adapter (adapt.h) for every stream, layer, KV head and
// adapted side. A position is coded when it leaves the exact window, in blocks of consecutive positions that start at
// multiples of B: then all rows of the block are known, and the adapter never sees a tail that can still be removed.
// Each cell's row ends with the chunk slot of every head, one byte each (in a tile: 64 bytes, cell by cell), so copies
// and states include it.
#pragma once

#include "adapt.h"
#include "cache_desc.h"
#include "cell_reader.h"
#include "layout.h"
#include "state_io.h"

#include <memory>
#include <string>
#include <vector>

namespace subkv {

class Window;

// The requested adaptation of a context.
struct ChunkRequest {
    bool        k      = false; // sides that adapt
    bool        v      = false;
    AdaptParams params = {};

    bool        any() const { return k || v; }
    std::string text() const; // all options, as --adapt
};

// Parses a request, as in --adapt. `key` is as in bases_of (basis_source.h). Throws Invalid.
ChunkRequest requested_chunks(const std::string & text, const char * key);

// One head and side within one stream.
struct ChunkUnit {
    Adapter adapter;
    int32_t coded = 0; // positions below are coded, a multiple of B, or LOST if memory was short and this is unknown

    static constexpr int32_t LOST = INT32_MAX / 2;
};

class ChunkedLayer {
public:
    ChunkedLayer(const LayerCodec & codec, const ChunkRequest & request, uint32_t n_stream);

    bool covers(bool value) const { return value ? request_.v : request_.k; } // this side adapts
    // Returns nullptr if this side does not adapt
    ChunkUnit * unit(uint32_t stream, int64_t head, bool value) const;
    // The offset of the head's chunk byte in a cell's row.
    int64_t chunk_offset(int64_t head, bool value) const {
        return (int64_t) (value ? codec_.v_row_bytes : codec_.k_row_bytes) + head;
    }
    void    reset(uint32_t stream);
    int64_t n_head_kv() const { return codec_.n_head_kv; }

private:
    size_t index(uint32_t stream, int64_t head, bool value) const {
        return ((size_t) stream * (size_t) codec_.n_head_kv + (size_t) head) * 2 + (value ? 1 : 0);
    }

    const LayerCodec &                      codec_;
    const ChunkRequest &                    request_;
    std::vector<std::unique_ptr<ChunkUnit>> units_; // [n_stream][n_head_kv][2]
};

class ChunkedBases {
public:
    // The request has passed check(). Throws Invalid if a head cannot adapt.
    ChunkedBases(const Layout & layout, const ChunkRequest & request, uint32_t n_stream);

    // Checks the request against the context's window, streams and devices, without heads. Throws Invalid.
    static void check(const ChunkRequest & request, const Layout & layout, int32_t n_recent, int32_t n_rollback,
                      const CacheDesc & desc);

    ChunkedLayer * layer(int32_t il) const;

    void    clear(uint32_t stream); // returns to the static basis; if memory is short, the stream's codes are lost
    int32_t coded(uint32_t stream) const; // positions below are coded by some head, or by each
    int32_t coded_by_each(uint32_t stream) const;
    int32_t fixed(uint32_t stream) const; // positions below are coded, or were looked ahead at
    void    copy(uint32_t src, uint32_t dst);

    // As CacheHook's, for what chunks add to the exact window's conditions.
    bool can_remove(int32_t seq, int32_t p0, int32_t p1, const CellReader & cells) const;
    bool ready(const std::vector<TokenDesc> & tokens, bool causal, const Window & window,
               const CellReader & cells) const;

    struct Total {
        size_t bytes    = 0; // bases and sketches, current size
        size_t n_chunks = 0; // in use, all heads
    };

    Total total() const;
    // Adds the statistics of a head and side over all streams. Returns false if it does not adapt.
    bool stats(int32_t il, int64_t head, bool value, subkv_adapt_stats & sum) const;

    void state_write(StateWriter & w, uint32_t stream) const;
    // n_pos is the number of positions with cells. Throws std::runtime_error, after which the stream is empty.
    void state_read(StateReader & r, uint32_t stream, int32_t n_pos);

    const ChunkRequest & request() const { return request_; }

private:
    void                       reset(uint32_t stream);
    template <typename F> void for_each(uint32_t stream, F use) const; // units of all layers

    ChunkRequest                               request_;
    uint32_t                                   n_stream_;
    std::vector<std::unique_ptr<ChunkedLayer>> layers_; // by il
};

} // namespace subkv
