// layer_tables.h: a coded layer's tables for kernels/cuda, made on the host. Their owner copies them to a device.
#pragma once

#include "../../../kernels/cuda/ops.h"
#include "layout.h"

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace subkv {

// Contiguous arrays for one copy to the device.
class Blob {
public:
    // The array's offset in the blob, a multiple of 32 bytes, as matrices need it.
    size_t add(const void * data, size_t n_bytes);

    template <typename T> size_t add(const std::vector<T> & data) { return add(data.data(), data.size() * sizeof(T)); }

    void put(size_t at, const void * data, size_t n);

    size_t size() const { return bytes_.size(); }

    std::vector<uint8_t> take() { return std::move(bytes_); }

private:
    std::vector<uint8_t> bytes_;
};

class LayerTables {
public:
    // n_head: slopes, one per query head.
    LayerTables(const LayerCodec & codec, int32_t n_head);

    // Returns the tables for a copy at `base`, a multiple of 32 bytes on the device. Called once.
    std::vector<uint8_t> place(const uint8_t * base);

    // With addresses from place() on, without n_group, scale and softcap.
    const cuda::Layer & layer() const { return layer_; }

    size_t n_bytes() const { return n_bytes_; }
    size_t slopes_at() const { return slopes_at_; } // bytes
    size_t n_bad_at() const { return n_bad_at_; }

private:
    struct Side {
        std::vector<HeadCodec> heads; // addresses are offsets in the blob, and 0 means "none"
        size_t                 at = 0;
    };

    void add_heads(Side & side);
    void add_plans(const LayerCodec & codec);
    void set_sizes(const LayerCodec & codec);

    Blob                         blob_;
    Side                         k_, v_;
    std::vector<uintptr_t>       means_; // offsets in the blob
    std::vector<cuda::HeadTiles> tiles_; // by head
    size_t                       means_at_ = 0, plans_at_ = 0, k_offset_at_ = 0, v_offset_at_ = 0, gamma_at_ = 0;
    size_t                       slopes_at_ = 0, n_bad_at_ = 0, n_bytes_ = 0;
    cuda::Layer                  layer_ = {};
};

} // namespace subkv
