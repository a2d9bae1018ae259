// adapt_replay.h: an Adapter and its coded rows, like a cache of one head. Used by tests and the float32 evaluation; in
// the engine the cache has this role.
#pragma once

#include "adapt.h"
#include "layout.h"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace subkv {

class AdaptReplay {
public:
    // Keys or values of one KV head, positions from 0 on; positions below n_sink use the static basis and do not reach
    // the adapter. The layer must outlive the replay.
    AdaptReplay(const Ops & ops, const LayerCodec & layer, int32_t head, bool value, const AdaptParams & params,
                int64_t n_sink);

    // x [n][d] f32. Blocks are [jB, (j + 1)B), coded when complete.
    void push(const float * x, int64_t n);

    // x [size][d] as in read_rows, chunk_of, rho [size] of all rows so far; nullptr: skip. Pending rows use the current
    // basis.
    void read(float * x, int32_t * chunk_of, float * rho);

    int64_t         size() const { return (int64_t) slot_.size() + pending_size(); }
    const Adapter & adapter() const { return adapter_; }

    // The coder's state and position; an empty replay with the restored state continues at this position.
    std::vector<uint8_t> save() const;
    void                 restore(const uint8_t * bytes, size_t n); // throws Invalid

private:
    int64_t tile_bytes() const { return TILE * codec_.row_bytes; }
    size_t  bytes_of(int64_t n) const { return (size_t) ((n + TILE - 1) / TILE * tile_bytes()); } // of n cells
    int64_t pending_size() const { return (int64_t) pending_.size() / codec_.d; }

    void code_pending();

    const Ops &          ops_;
    const LayerCodec &   layer_;
    int32_t              head_;
    bool                 value_;
    const HeadCodec &    codec_;
    Adapter              adapter_;
    int64_t              n_sink_;
    int64_t              origin_ = 0; // position of the first stored row
    std::vector<uint8_t> tiles_;      // of cells [n], by position
    std::vector<int32_t> slot_;       // [n]
    std::vector<float>   rho_;        // [n]
    std::vector<float>   pending_;    // [< block][d]
};

} // namespace subkv
