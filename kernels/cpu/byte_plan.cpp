// byte_plan.cpp: builds the plans of byte_plan.h. No ISA flags.
#include "byte_plan.h"

#include "fields.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace subkv::cpu {

namespace {

struct StoredPlan {
    BytePlan              plan;
    std::vector<BytePart> parts;
};

int32_t coefficient_at(int32_t place, Order order) {
    return order == Order::INTERLEAVED_512 ? 16 * (place / 4 % 4) + 4 * (place / 16) + place % 4 : place;
}

void add_parts(StoredPlan & stored, ByteGroup & group, std::vector<std::vector<Field>> & places, int32_t row_bytes) {
    const int32_t lanes = (int32_t) places.size();
    group.first_part    = (int32_t) stored.parts.size();
    group.n_parts       = 0;
    while (true) {
        int32_t first = -1;
        for (const auto & place : places) {
            for (const Field & field : place) {
                first = first < 0 ? field.byte : std::min(first, field.byte);
            }
        }
        if (first < 0 && group.n_parts > 0) {
            return; // every group has a part, if only an empty one (16-bit bands): it is read like the others
        }
        first = std::max(first, 0);
        first = std::min(first, std::max(0, row_bytes - lanes)); // inside the row, and one for all parts of a short row
        BytePart part;
        std::memset(&part, 0, sizeof(part));
        part.window          = first;
        const int32_t n_left = row_bytes - first;
        part.inside          = n_left >= 64 ? ~0ull : (1ull << n_left) - 1;
        for (int32_t p = 0; p < lanes; ++p) {
            auto &     place = places[(size_t) p];
            const auto at    = std::find_if(place.begin(), place.end(),
                                            [&](const Field & field) { return field.byte < first + lanes; });
            if (at == place.end()) {
                continue;
            }
            part.index[p]  = (uint8_t) (at->byte - first);
            part.left[p]   = (int8_t) (at->to - at->shift);
            part.rotate[p] = (uint8_t) ((8 * (p % 8) + at->shift - at->to) & 63); // within eight bytes
            part.mask[p]   = (uint8_t) (((1 << at->width) - 1) << at->to);
            place.erase(at);
        }
        stored.parts.push_back(part);
        ++group.n_parts;
    }
}

void build(const HeadCodec & codec, Order order, StoredPlan & stored) {
    const int32_t lanes = order == Order::NATURAL_128 ? LANES_128 : LANES_512;
    BytePlan &    plan  = stored.plan;
    std::memset(&plan, 0, sizeof(plan));
    plan.n_groups                                = (codec.rank + lanes - 1) / lanes;
    const std::vector<std::vector<Field>> fields = fields_of(codec);
    for (int32_t i = 0; i < codec.n_bands; ++i) {
        const Band & band = codec.bands[i];
        for (int32_t j = 0; band.bits != 16 && j < band.n; ++j) {
            plan.odd[band.first + j] = (1 << band.bits) - 1;
        }
    }
    for (int32_t g = 0; g < plan.n_groups; ++g) {
        std::vector<std::vector<Field>> places((size_t) lanes);
        for (int32_t p = 0; p < lanes; ++p) {
            const size_t c = (size_t) (g * lanes + coefficient_at(p, order));
            if (c < fields.size()) {
                places[(size_t) p] = fields[c];
            }
        }
        add_parts(stored, plan.groups[g], places, codec.row_bytes);
    }
    plan.parts = stored.parts.data();
}

} // namespace

const BytePlan & byte_plan_of(const HeadCodec & codec, Order order) {
    static thread_local PlanCache<StoredPlan> plans[3];
    return plans[(int) order].of(codec, [&](StoredPlan & stored) { build(codec, order, stored); }).plan;
}

} // namespace subkv::cpu
