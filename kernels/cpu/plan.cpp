// plan.cpp: builds unpacking plans and owns the scratch memory of each thread. No ISA flags.
#include "plan.h"

#include "fields.h"

#include <cstdlib>
#include <cstring>
#include <vector>

namespace subkv::cpu {

namespace {

struct StoredPlan {
    Plan              plan;
    std::vector<Part> parts;
};

// Position in the register of lane `coefficient` (see plan.h on the order).
int32_t lane_of(int32_t coefficient) {
    static const int32_t order[4] = { 0, 8, 4, 12 };
    return order[coefficient / 4] + coefficient % 4;
}

void add_parts(StoredPlan & stored, Group & group, const std::vector<std::vector<Field>> & lanes, int32_t row_bytes) {
    std::vector<std::vector<Field>> rest = lanes;
    group.first_part                     = (int32_t) stored.parts.size();
    group.n_parts                        = 0;
    while (true) {
        int32_t first = -1;
        for (const auto & lane : rest) {
            for (const Field & field : lane) {
                first = first < 0 || field.byte < first ? field.byte : first;
            }
        }
        if (first < 0 && group.n_parts > 0) {
            return;
        }
        Part part;
        std::memset(&part, 0, sizeof(part));
        std::memset(part.shuffle, 0x80, sizeof(part.shuffle)); // 0x80: a zero byte
        const int32_t last = row_bytes > 16 ? row_bytes - 16 : 0;
        part.window        = first < 0 ? 0 : first < last ? first : last;
        for (int32_t i = 0; i < GROUP; ++i) {
            std::vector<Field> later;
            for (const Field & field : rest[(size_t) i]) {
                if (field.byte >= part.window + 16) {
                    later.push_back(field);
                    continue;
                }
                const int32_t at = 2 * lane_of(i) + (field.to > 0 ? 1 : 0);
                part.shuffle[at] = (uint8_t) (field.byte - part.window);
                part.mask[at]    = (uint8_t) (((1 << field.width) - 1) << field.shift);
                part.weight[at]  = (int8_t) (2 << (lanes[(size_t) i][0].shift + field.to - field.shift));
            }
            rest[(size_t) i] = later;
        }
        stored.parts.push_back(part);
        ++group.n_parts;
    }
}

void build(const HeadCodec & codec, StoredPlan & stored) {
    Plan & plan = stored.plan;
    std::memset(&plan, 0, sizeof(plan));
    plan.n_groups                                = padded(codec.rank) / GROUP;
    plan.single                                  = true;
    const std::vector<std::vector<Field>> fields = fields_of(codec);
    std::vector<float>                    middle; // of every coefficient's codes
    for (int32_t i = 0; i < codec.n_bands; ++i) {
        plan.has_half = plan.has_half || codec.bands[i].bits == 16;
        middle.insert(middle.end(), (size_t) codec.bands[i].n, half_range(codec.bands[i].bits));
    }
    for (float & unit : plan.unit) {
        unit = 1.0f;
    }
    for (int32_t g = 0; g < plan.n_groups; ++g) {
        Group &                         group = plan.groups[g];
        std::vector<std::vector<Field>> lanes(GROUP);
        for (int32_t i = 0; i < GROUP; ++i) {
            group.offset[i] = 4194304.0f; // 2^22
            const size_t c  = (size_t) (g * GROUP + i);
            if (c >= fields.size() || fields[c].empty()) {
                continue; // beyond the rank or 16 bits: the lane gives 0
            }
            lanes[(size_t) i]     = fields[c];
            const float low_shift = (float) (1 << fields[c][0].shift);
            group.offset[i] += middle[c] * low_shift;
            plan.unit[c] = 1.0f / low_shift;
        }
        add_parts(stored, group, lanes, codec.row_bytes);
        plan.single = plan.single && group.n_parts == 1;
    }
    plan.parts = stored.parts.data();
}

struct Scratch {
    void * memory[MAX_SLOTS] = {};
    size_t bytes[MAX_SLOTS]  = {};
    ~Scratch() {
        for (void * p : memory) {
            std::free(p);
        }
    }
};

} // namespace

const Plan & plan_of(const HeadCodec & codec) {
    static thread_local PlanCache<StoredPlan> plans;
    return plans.of(codec, [&](StoredPlan & stored) { build(codec, stored); }).plan;
}

void * scratch(int slot, size_t bytes) {
    static thread_local Scratch s;
    if (s.bytes[slot] < bytes) {
        std::free(s.memory[slot]);
        const size_t size = (bytes + bytes / 4 + 4095) / 4096 * 4096;
        s.memory[slot]    = std::aligned_alloc(64, size);
        if (s.memory[slot] == nullptr) {
            s.bytes[slot] = 0;
            std::abort(); // a few hundred KiB: nothing sensible is left to do, and kernels cannot fail
        }
        std::memset(s.memory[slot], 0, size);
        s.bytes[slot] = size;
    }
    return s.memory[slot];
}

} // namespace subkv::cpu
