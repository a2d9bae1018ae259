#include "layer_tables.h"

#include <algorithm>
#include <cstring>

namespace subkv {

size_t Blob::add(const void * data, size_t n_bytes) {
    const size_t at = (bytes_.size() + 31) / 32 * 32;
    bytes_.resize(at + n_bytes);
    put(at, data, n_bytes);
    return at;
}

void Blob::put(size_t at, const void * data, size_t n) {
    if (n > 0) {
        std::memcpy(bytes_.data() + at, data, n);
    }
}

LayerTables::LayerTables(const LayerCodec & codec, int32_t n_head) : k_{ codec.k }, v_{ codec.v } {
    const uint64_t no_bad_row = 0;
    n_bad_at_                 = blob_.add(&no_bad_row, sizeof(no_bad_row)); // offset 0, which no matrix has
    add_heads(k_);
    add_heads(v_);
    for (const KeyCentre & centre : codec.centre) {
        means_.push_back(centre.mean.empty() ? 0 : blob_.add(centre.mean));
    }
    means_at_ = blob_.add(means_);
    add_plans(codec);
    gamma_at_  = blob_.add(codec.gamma);
    slopes_at_ = blob_.add(std::vector<float>((size_t) n_head, 1.0f));
    n_bytes_   = blob_.size();
    set_sizes(codec);
}

void LayerTables::add_heads(Side & side) {
    for (HeadCodec & head : side.heads) {
        for (Matrix * m : { &head.encode, &head.decode }) {
            if (!present(*m)) { // latent values are only decoded
                continue;
            }
            const int32_t         rows = (head.rank + cuda::MATRIX_ROWS - 1) / cuda::MATRIX_ROWS * cuda::MATRIX_ROWS;
            std::vector<uint16_t> halves((size_t) rows * (size_t) head.d);
            to_halves(*m, head.rank, head.d, halves.data());
            *m = { (const uint16_t *) (uintptr_t) blob_.add(halves) };
        }
        if (head.offset) {
            head.offset = (const float *) (uintptr_t) blob_.add(head.offset, (size_t) head.rank * sizeof(float));
        }
    }
    side.at = blob_.add(side.heads);
}

// The plans are of the codecs as the host has them.
void LayerTables::add_plans(const LayerCodec & codec) {
    std::vector<int64_t> k_offset, v_offset;
    std::vector<uint8_t> plans;
    for (size_t h = 0; h < codec.k.size(); ++h) {
        k_offset.push_back(codec.tile_offset((int64_t) h, false));
        v_offset.push_back(codec.tile_offset((int64_t) h, true));
        plans.resize((h + 1) * cuda::plan_bytes());
        cuda::make_plan(codec.k[h], codec.v[h], plans.data() + h * cuda::plan_bytes());
        tiles_.push_back({ (int32_t) k_offset[h], (int32_t) v_offset[h], (int32_t) TILE * codec.k[h].row_bytes,
                           (int32_t) TILE * codec.v[h].row_bytes });
    }
    plans_at_    = blob_.add(plans);
    k_offset_at_ = blob_.add(k_offset);
    v_offset_at_ = blob_.add(v_offset);
}

void LayerTables::set_sizes(const LayerCodec & codec) {
    layer_.n_head_kv = codec.n_head_kv;
    layer_.d_k       = codec.d_k;
    layer_.d_v       = codec.d_v;
    layer_.latent    = codec.latent;
    layer_.tiles     = tiles_.data();
    for (size_t h = 0; h < codec.k.size(); ++h) {
        const HeadCodec &k = codec.k[h], &v = codec.v[h];
        layer_.width_k     = std::max(layer_.width_k, k.rank);
        layer_.width_v     = std::max(layer_.width_v, v.rank);
        layer_.row_bytes_k = std::max(layer_.row_bytes_k, k.row_bytes);
        layer_.row_bytes_v = std::max(layer_.row_bytes_v, v.row_bytes);
    }
}

template <typename T> static void move(const T *& at, const uint8_t * base) {
    at = at ? (const T *) (base + (uintptr_t) at) : nullptr;
}

std::vector<uint8_t> LayerTables::place(const uint8_t * base) {
    for (Side * side : { &k_, &v_ }) {
        for (HeadCodec & head : side->heads) {
            move(head.encode.halves, base);
            move(head.decode.halves, base);
            move(head.offset, base);
        }
        blob_.put(side->at, side->heads.data(), side->heads.size() * sizeof(HeadCodec));
    }
    for (uintptr_t & mean : means_) {
        mean = mean ? (uintptr_t) base + mean : 0;
    }
    blob_.put(means_at_, means_.data(), means_.size() * sizeof(uintptr_t));

    layer_.k        = (const HeadCodec *) (base + k_.at);
    layer_.v        = (const HeadCodec *) (base + v_.at);
    layer_.mean     = (const uint16_t * const *) (base + means_at_);
    layer_.plan     = base + plans_at_;
    layer_.k_offset = (const int64_t *) (base + k_offset_at_);
    layer_.v_offset = (const int64_t *) (base + v_offset_at_);
    layer_.gamma    = (const float *) (base + gamma_at_);
    layer_.slope    = (const float *) (base + slopes_at_);
    layer_.n_bad    = (unsigned long long *) (base + n_bad_at_);
    return blob_.take();
}

} // namespace subkv
