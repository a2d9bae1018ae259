// fields.h: where the bits of every coefficient lie in a row, and a cache of what is derived from that.
#pragma once

#include "subkv/ops.h"

#include <cstring>
#include <memory>
#include <utility>
#include <vector>

namespace subkv::cpu {

struct Field {     // one plane's share of one coefficient's code
    int32_t byte;  // of the row
    int32_t shift; // bit of the byte where the field begins
    int32_t width; // bits
    int32_t to;    // bit of the code where it belongs
};

// Per coefficient its fields, low plane first; none in 16-bit bands.
std::vector<std::vector<Field>> fields_of(const HeadCodec & codec);

// Plans by the bands they are for, found in a few nanoseconds: kernels ask at every call.
template <typename Stored> class PlanCache {
public:
    template <typename Build> const Stored & of(const HeadCodec & codec, Build build) {
        int32_t  key[MAX_BANDS] = {};
        uint32_t hash           = 2166136261u; // FNV-1a
        for (int32_t i = 0; i < codec.n_bands; ++i) {
            key[i] = codec.bands[i].n << 8 | codec.bands[i].bits;
            hash   = (hash ^ (uint32_t) key[i]) * 16777619u;
        }
        if (2 * used_ >= slots_.size()) {
            grow();
        }
        Slot & slot = find(slots_, key, hash);
        if (!slot.stored) {
            std::memcpy(slot.key, key, sizeof(key));
            slot.hash   = hash;
            slot.stored = std::make_unique<Stored>();
            build(*slot.stored);
            ++used_;
        }
        return *slot.stored;
    }

private:
    struct Slot {
        int32_t                 key[MAX_BANDS];
        uint32_t                hash;
        std::unique_ptr<Stored> stored;
    };

    static Slot & find(std::vector<Slot> & slots, const int32_t * key, uint32_t hash) {
        for (size_t i = (hash ^ hash >> 15) % slots.size();; i = (i + 1) % slots.size()) {
            if (!slots[i].stored || std::memcmp(slots[i].key, key, sizeof(slots[i].key)) == 0) {
                return slots[i];
            }
        }
    }

    void grow() {
        std::vector<Slot> larger(slots_.empty() ? 512 : 2 * slots_.size());
        for (Slot & slot : slots_) {
            if (slot.stored) {
                find(larger, slot.key, slot.hash) = std::move(slot);
            }
        }
        slots_.swap(larger);
    }

    std::vector<Slot> slots_;
    size_t            used_ = 0;
};

} // namespace subkv::cpu
