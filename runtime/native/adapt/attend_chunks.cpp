#include "attend_chunks.h"

#include "nodes.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace subkv {

void ChunkedAttention::begin(const ChunkedLayer & layer, uint32_t stream, int64_t head) {
    k_unit_ = layer.unit(stream, head, false);
    v_unit_ = layer.unit(stream, head, true);
    n_sums_ = n_queries_ = 0;
}

// The item of a chunk among the first `n` items, and whether it is new.
template <typename T> static std::pair<T &, bool> item_of(std::vector<T> & items, size_t & n, int32_t slot) {
    for (size_t i = 0; i < n; ++i) {
        if (items[i].slot == slot) {
            return { items[i], false };
        }
    }
    if (n == items.size()) {
        items.emplace_back();
    }
    T & item  = items[n++];
    item.slot = slot;
    return { item, true };
}

const float * ChunkedAttention::queries(const AttendArgs & args, int32_t slot) {
    const auto [item, added] = item_of(queries_, n_queries_, slot);
    const int64_t rank = args.k->rank, n_rows = args.n_tok * args.n_group;
    if (added) {
        item.qt.resize((size_t) (n_rows * rank));
        for (int64_t r = 0; r < n_rows; ++r) {
            k_unit_->adapter.query(slot, args.qt + r * rank, item.qt.data() + r * rank);
        }
    }
    return item.qt.data();
}

ChunkedAttention::Sums & ChunkedAttention::sums(const AttendArgs & args, int32_t slot) {
    const auto [item, added] = item_of(sums_, n_sums_, slot);
    const size_t n_rows      = (size_t) (args.n_tok * args.n_group);
    if (added) {
        item.m.assign(n_rows, -INFINITY);
        item.z.assign(n_rows, 0.0f);
        item.acc.assign(n_rows * (size_t) args.v->rank, 0.0f);
    }
    return item;
}

void ChunkedAttention::attend(const Ops & ops, const AttendArgs & args, const uint8_t * k_chunks,
                              const uint8_t * v_chunks) {
    const auto open = [&](int64_t c) {
        for (int64_t t = 0; t < args.n_tok; ++t) {
            if (args.bias[t * args.bias_stride + c] != -INFINITY) {
                return true;
            }
        }
        return false;
    };
    // Only a cell that was never coded, and that every query masks, has a byte of an unused chunk.
    const auto slot = [](const ChunkUnit * unit, const uint8_t * chunks, int64_t stride, int64_t c) {
        const int32_t found = unit ? chunks[c / TILE * stride + c % TILE] : 0;
        return found > 0 && unit->adapter.chunk(found) ? found : 0;
    };
    // For both sides. A negative value means that every query masks the cell, or that it is done.
    constexpr int32_t SLOTS = MAX_ADAPT_CHUNKS + 1, CLOSED = -1, DONE = -2;
    chunk_.resize((size_t) args.n_cells);
    for (int64_t c = 0; c < args.n_cells; ++c) {
        chunk_[(size_t) c] =
            open(c) ? slot(k_unit_, k_chunks, args.k_stride, c) * SLOTS + slot(v_unit_, v_chunks, args.v_stride, c) :
                      CLOSED;
    }
    for (int64_t c = 0; c < args.n_cells; ++c) {
        const int32_t current = chunk_[(size_t) c];
        if (current < 0) {
            continue;
        }
        const auto tile = [&](int64_t at) { return chunk_.begin() + std::min(at, args.n_cells); };
        const auto from = c / TILE * TILE;
        auto       end  = from + TILE;
        while (std::find(tile(end), tile(end + TILE), current) != tile(end + TILE)) {
            end += TILE;
        }
        AttendArgs run = args;
        run.k_tiles += from / TILE * args.k_stride;
        run.v_tiles += from / TILE * args.v_stride;
        run.bias += from;
        run.n_cells = end - from;
        if (std::any_of(tile(from), tile(end), [&](int32_t other) { return other != current && other != CLOSED; })) {
            bias_.assign((size_t) (args.n_tok * run.n_cells), -INFINITY);
            for (int64_t i = 0; i < args.n_tok * run.n_cells; ++i) {
                const int64_t at = i % run.n_cells;
                if (chunk_[(size_t) (from + at)] == current) {
                    bias_[(size_t) i] = run.bias[i / run.n_cells * args.bias_stride + at];
                }
            }
            run.bias        = bias_.data();
            run.bias_stride = run.n_cells;
        }
        const int32_t k_slot = current / SLOTS, v_slot = current % SLOTS;
        if (k_slot > 0) {
            run.k  = &k_unit_->adapter.chunk(k_slot)->codec;
            run.qt = queries(args, k_slot);
        }
        if (v_slot > 0) {
            Sums & state   = sums(args, v_slot);
            run.v          = &v_unit_->adapter.chunk(v_slot)->codec;
            run.m          = state.m.data();
            run.z          = state.z.data();
            run.acc        = state.acc.data();
            run.acc_stride = args.v->rank;
        }
        ops.attend(run);
        std::replace(tile(from), tile(end), current, DONE);
    }
}

void ChunkedAttention::finish(const AttendArgs & args) {
    const int64_t rank = args.v->rank;
    float         lifted[MAX_HEAD_SIZE];
    for (size_t i = 0; i < n_sums_; ++i) {
        const Sums & state = sums_[i];
        for (int64_t r = 0; r < args.n_tok * args.n_group; ++r) {
            if (state.m[(size_t) r] == -INFINITY) {
                continue;
            }
            v_unit_->adapter.lift(state.slot, state.acc.data() + r * rank, lifted);
            merge_softmax(args.m[r], args.z[r], args.acc + r * args.acc_stride, state.m[(size_t) r],
                          state.z[(size_t) r], lifted, rank);
        }
    }
}

} // namespace subkv
