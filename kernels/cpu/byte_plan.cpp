// byte_plan.cpp: builds the plans of byte_plan.h. No ISA flags.
#include "byte_plan.h"

#include "fields.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace subkv::cpu {

namespace {

template <typename Plan, typename Part> struct Stored {
    Plan              plan;
    std::vector<Part> parts;
};

using StoredBytes  = Stored<BytePlan, BytePart>;
using StoredDwords = Stored<DwordPlan, DwordPart>;

// Fills what all plans have.
void start(const HeadCodec & codec, int32_t lanes, CodePlan & plan) {
    plan.n_groups = (codec.rank + lanes - 1) / lanes;
    for (int32_t i = 0; i < codec.n_bands; ++i) {
        const Band & band = codec.bands[i];
        for (int32_t j = 0; band.bits != 16 && j < band.n; ++j) {
            plan.odd[band.first + j] = (1 << band.bits) - 1;
        }
    }
}

int32_t mask_of(const Field & field) {
    return ((1 << field.width) - 1) << field.to;
}

int32_t coefficient_at(int32_t place, Order order) {
    return order == Order::INTERLEAVED_512 ? 16 * (place / 4 % 4) + 4 * (place / 16) + place % 4 : place;
}

void add_parts(StoredBytes & stored, PartRange & group, std::vector<std::vector<Field>> & places, int32_t row_bytes) {
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
            part.mask[p]   = (uint8_t) mask_of(*at);
            place.erase(at);
        }
        stored.parts.push_back(part);
        ++group.n_parts;
    }
}

void build(const HeadCodec & codec, Order order, StoredBytes & stored) {
    const int32_t lanes = order == Order::NATURAL_128 ? LANES_128 : LANES_512;
    BytePlan &    plan  = stored.plan;
    start(codec, lanes, plan);
    const std::vector<std::vector<Field>> fields = fields_of(codec);
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

void add_dword_parts(StoredDwords & stored, PartRange & piece, std::vector<std::vector<Field>> & places) {
    piece.first_part = (int32_t) stored.parts.size();
    piece.n_parts    = 0;
    while (true) {
        DwordPart part;
        std::memset(&part, 0, sizeof(part));
        int32_t n_sources = 0;
        for (int32_t p = 0; p < PIECE; ++p) {
            auto & place = places[(size_t) p];
            for (auto field = place.begin(); field != place.end(); ++field) {
                const int32_t source = field->byte / PIECE;
                int32_t       which  = 0;
                while (which < n_sources && part.sources[which] != source) {
                    ++which;
                }
                if (which == 2) {
                    continue; // another part's
                }
                part.sources[which] = source;
                n_sources           = std::max(n_sources, which + 1);
                part.index[p]       = PIECE * which + field->byte % PIECE;
                part.rotate[p]      = (field->shift - field->to) & 31; // what leaves a byte is masked in the next
                part.mask[p]        = 0x01010101u * (uint32_t) mask_of(*field);
                place.erase(field);
                break;
            }
        }
        if (n_sources == 0) {
            return;
        }
        part.sources[1] = n_sources == 2 ? part.sources[1] : part.sources[0];
        stored.parts.push_back(part);
        ++piece.n_parts;
    }
}

void build_dwords(const HeadCodec & codec, StoredDwords & stored) {
    DwordPlan & plan = stored.plan;
    start(codec, LANES_512, plan);
    const std::vector<std::vector<Field>> fields    = fields_of(codec);
    int32_t                               last_byte = 0; // the scale, if there is no code
    for (int32_t i = 0; i < plan.n_groups * (LANES_512 / PIECE); ++i) {
        std::vector<std::vector<Field>> places((size_t) PIECE);
        for (size_t p = 0; p < places.size() && (size_t) i * PIECE + p < fields.size(); ++p) {
            places[p] = fields[(size_t) i * PIECE + p];
            for (const Field & field : places[p]) {
                last_byte = std::max(last_byte, field.byte);
            }
        }
        add_dword_parts(stored, plan.pieces[i], places);
    }
    plan.n_windows = last_byte / LANES_512 + 1;
    plan.parts     = stored.parts.data();
}

} // namespace

const BytePlan & byte_plan_of(const HeadCodec & codec, Order order) {
    static thread_local PlanCache<StoredBytes> plans[3];
    return plans[(int) order].of(codec, [&](StoredBytes & stored) { build(codec, order, stored); }).plan;
}

const DwordPlan & dword_plan_of(const HeadCodec & codec) {
    static thread_local PlanCache<StoredDwords> plans;
    return plans.of(codec, [&](StoredDwords & stored) { build_dwords(codec, stored); }).plan;
}

} // namespace subkv::cpu
