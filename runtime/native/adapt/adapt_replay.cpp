// adapt_replay.cpp: cells by position, blocks at multiples of B; merges update the chunk of every row.
#include "adapt_replay.h"

#include "error.h"
#include "read_rows.h"

#include <algorithm>
#include <cstring>

namespace subkv {

AdaptReplay::AdaptReplay(const Ops & ops, const LayerCodec & layer, int32_t head, bool value,
                         const AdaptParams & params, int64_t n_sink) :
    ops_(ops), layer_(layer), head_(head), value_(value), codec_((value ? layer.v : layer.k)[(size_t) head]),
    adapter_(ops, codec_, params), n_sink_(n_sink) {}

static std::vector<int64_t> cells_from(int64_t first, int64_t n) {
    std::vector<int64_t> cells((size_t) n);
    for (int64_t t = 0; t < n; ++t) {
        cells[(size_t) t] = first + t;
    }
    return cells;
}

void AdaptReplay::push(const float * x, int64_t n) {
    const int64_t d = codec_.d, block = adapter_.params().block;
    for (int64_t t = 0; t < n; ++t) {
        const int64_t index    = size();
        const int64_t position = origin_ + index;
        if (position < n_sink_) {
            const int64_t cell = index;
            tiles_.resize(bytes_of(index + 1));
            ops_.encode(codec_, x + t * d, d, 1, &cell, tiles_.data(), tile_bytes());
            slot_.push_back(0);
            rho_.push_back(0.0f);
        } else {
            pending_.insert(pending_.end(), x + t * d, x + (t + 1) * d);
        }
        if ((position + 1) % block == 0 && !pending_.empty()) {
            code_pending();
        }
    }
}

void AdaptReplay::code_pending() {
    const int64_t d = codec_.d, n = pending_size();
    const auto    first = (int64_t) slot_.size();
    tiles_.resize(bytes_of(first + n));
    const auto merge = [&](int32_t from, int32_t to, const Adapter::Recode & recode) {
        for (int64_t i = 0; i < first; ++i) {
            if (slot_[(size_t) i] == from) {
                recode(tiles_.data(), tile_bytes(), 1, &i);
                slot_[(size_t) i] = to;
            }
        }
    };
    const int32_t slot =
        adapter_.block(pending_.data(), d, n, cells_from(first, n).data(), tiles_.data(), tile_bytes(), merge);
    slot_.insert(slot_.end(), (size_t) n, slot);
    rho_.insert(rho_.end(), (size_t) n, adapter_.residual());
    pending_.clear();
}

void AdaptReplay::read(float * x, int32_t * chunk_of, float * rho) {
    const int64_t        d = codec_.d, n = size(), n_pending = pending_size();
    const auto           held  = (int64_t) slot_.size();
    std::vector<uint8_t> tiles = tiles_;
    std::vector<int32_t> slots = slot_;
    tiles.resize(bytes_of(n));
    const auto pending = cells_from(held, n_pending);
    slots.resize((size_t) n, adapter_.peek(pending_.data(), d, n_pending, pending.data(), tiles.data(), tile_bytes()));
    if (x != nullptr) {
        read_rows(ops_, layer_, head_, value_, &adapter_, slots.data(), tiles.data(), tile_bytes(), n,
                  cells_from(0, n).data(), x);
    }
    if (chunk_of != nullptr) {
        std::copy(slots.begin(), slots.end(), chunk_of);
    }
    if (rho != nullptr) {
        std::copy(rho_.begin(), rho_.end(), rho);
        std::fill(rho + held, rho + n, 0.0f);
    }
}

std::vector<uint8_t> AdaptReplay::save() const {
    const int64_t        at[2] = { origin_ + (int64_t) slot_.size(), pending_size() };
    const size_t         n     = pending_.size() * sizeof(float);
    std::vector<uint8_t> out(sizeof(at) + n);
    std::memcpy(out.data(), at, sizeof(at));
    std::copy_n(reinterpret_cast<const uint8_t *>(pending_.data()), n, out.data() + sizeof(at));
    const std::vector<uint8_t> state = adapter_.save();
    out.insert(out.end(), state.begin(), state.end());
    return out;
}

void AdaptReplay::restore(const uint8_t * bytes, size_t n) {
    int64_t at[2] = {};
    if (size() != 0) {
        refuse("adapt state", "to be restored before any row", std::to_string(size()));
    }
    if (n < sizeof(at)) {
        refuse("adapt state", "at least 16 bytes", std::to_string(n));
    }
    std::memcpy(at, bytes, sizeof(at));
    const auto row = (int64_t) (codec_.d * sizeof(float));
    if (at[0] < 0 || at[1] < 0 || at[1] >= adapter_.params().block ||
        at[1] * row > (int64_t) n - (int64_t) sizeof(at)) {
        refuse("adapt state", "less than a block of pending rows", std::to_string(at[1]));
    }
    const size_t skip = sizeof(at) + (size_t) (at[1] * row);
    adapter_.restore(bytes + skip, n - skip);
    origin_ = at[0];
    pending_.resize((size_t) (at[1] * codec_.d));
    std::copy_n(bytes + sizeof(at), (size_t) (at[1] * row), reinterpret_cast<uint8_t *>(pending_.data()));
}

} // namespace subkv
