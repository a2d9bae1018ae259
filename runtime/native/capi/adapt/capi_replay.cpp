// capi_replay.cpp: subkv_adapt of subkv_adapt.h and subkv_adapt_test.h: an Adapter and its coded rows, like a cache of
// one head. In the engine the cache has this role.
#include "adapt.h"
#include "capi.h"
#include "subkv_adapt_test.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <vector>

using namespace subkv;

static std::vector<int64_t> cells_from(int64_t first, int64_t n) {
    std::vector<int64_t> cells((size_t) n);
    std::iota(cells.begin(), cells.end(), first);
    return cells;
}

// Keys or values of one KV head, from position 0 on. Positions below n_sink use the static basis and do not reach the
// adapter. Cells are in the order of positions, and a merge updates the chunk of every row.
struct subkv_adapt {
    subkv_adapt(std::shared_ptr<const Layout> layout, int32_t il, int32_t head, bool value,
                const AdaptParams & params) :
        layout(std::move(layout)), codes(*this->layout->layer(il)), head(head), value(value),
        codec(codes.head(head, value)), adapter(ops, codec, params) {}

    int64_t tile_bytes() const { return TILE * codec.row_bytes; }

    size_t bytes_of(int64_t n) const { return (size_t) ((n + TILE - 1) / TILE * tile_bytes()); } // of n cells

    int64_t pending_size() const { return (int64_t) pending.size() / codec.d; }

    int64_t size() const { return (int64_t) slot.size() + pending_size(); }

    // Blocks are [jB, (j + 1)B), coded when complete and `lookahead` more rows are known.
    void push(const float * x, int64_t n) {
        const int64_t d = codec.d, block = adapter.params().block, ahead = adapter.params().lookahead;
        for (int64_t t = 0; t < n; ++t) {
            const int64_t index    = size();
            const int64_t position = origin + index;
            if (position < layout->n_sink) {
                const int64_t cell = index;
                tiles.resize(bytes_of(index + 1));
                ops.encode(codec, x + t * d, d, 1, &cell, tiles.data(), tile_bytes());
                slot.push_back(0);
                rho.push_back(0.0f);
            } else {
                pending.insert(pending.end(), x + t * d, x + (t + 1) * d);
            }
            if (position + 1 >= block + ahead && (position + 1 - ahead) % block == 0) {
                code_pending(pending_size() - ahead);
            }
        }
    }

    void code_pending(int64_t n) { // the first n pending rows
        if (n < 1) {               // sinks only
            return;
        }
        const int64_t d     = codec.d;
        const auto    first = (int64_t) slot.size();
        tiles.resize(bytes_of(first + n));
        const auto merge = [&](int32_t from, int32_t to, const Adapter::Recode & recode) {
            for (int64_t i = 0; i < first; ++i) {
                if (slot[(size_t) i] == from) {
                    recode(tiles.data(), tile_bytes(), 1, &i);
                    slot[(size_t) i] = to;
                }
            }
        };
        const int32_t chunk = adapter.block(pending.data(), d, n, pending_size() - n, cells_from(first, n).data(),
                                            tiles.data(), tile_bytes(), merge);
        slot.insert(slot.end(), (size_t) n, chunk);
        rho.insert(rho.end(), (size_t) n, adapter.residual());
        pending.erase(pending.begin(), pending.begin() + n * d);
    }

    // Reads x [size][d] as in read_rows, and chunk_of and rho [size] of all rows so far, except those that are nullptr.
    // Pending rows use the current basis.
    void read(float * x, int32_t * chunk_of, float * rho_of) {
        const int64_t        d = codec.d, n = size(), n_pending = pending_size();
        const auto           n_coded = (int64_t) slot.size();
        std::vector<uint8_t> all     = tiles;
        std::vector<int32_t> slots   = slot;
        all.resize(bytes_of(n));
        const auto cells = cells_from(n_coded, n_pending);
        slots.resize((size_t) n, adapter.peek(pending.data(), d, n_pending, cells.data(), all.data(), tile_bytes()));
        if (x) {
            read_chunks(ops, codes, head, value, adapter, slots.data(), all.data(), tile_bytes(), n,
                        cells_from(0, n).data(), x);
        }
        if (chunk_of) {
            std::copy(slots.begin(), slots.end(), chunk_of);
        }
        if (rho_of) {
            std::copy(rho.begin(), rho.end(), rho_of);
            std::fill(rho_of + n_coded, rho_of + n, 0.0f);
        }
    }

    // The coder's state and position, which are the next position, the number of pending rows, these rows, and
    // Adapter::save.
    std::vector<uint8_t> save() const {
        const int64_t        at[2] = { origin + (int64_t) slot.size(), pending_size() };
        const size_t         n     = pending.size() * sizeof(float);
        std::vector<uint8_t> out(sizeof(at) + n);
        std::memcpy(out.data(), at, sizeof(at));
        std::copy_n(reinterpret_cast<const uint8_t *>(pending.data()), n, out.data() + sizeof(at));
        const std::vector<uint8_t> state = adapter.save();
        out.insert(out.end(), state.begin(), state.end());
        return out;
    }

    // An empty replay continues at the saved position. Throws Invalid.
    void restore(const uint8_t * bytes, size_t n) {
        int64_t at[2] = {};
        if (size() != 0) {
            refuse("adapt state", "to be restored before any row", std::to_string(size()));
        }
        if (n < sizeof(at)) {
            refuse("adapt state", "at least 16 bytes", std::to_string(n));
        }
        std::memcpy(at, bytes, sizeof(at));
        const auto row = (int64_t) (codec.d * sizeof(float));
        if (at[0] < 0 || at[1] < 0 || at[1] >= adapter.params().block + adapter.params().lookahead ||
            at[1] * row > (int64_t) n - (int64_t) sizeof(at)) {
            refuse("adapt state", "less than a block and its look-ahead of pending rows", std::to_string(at[1]));
        }
        const size_t skip = sizeof(at) + (size_t) (at[1] * row);
        adapter.restore(bytes + skip, n - skip);
        origin = at[0];
        pending.resize((size_t) (at[1] * codec.d));
        std::copy_n(bytes + sizeof(at), (size_t) (at[1] * row), reinterpret_cast<uint8_t *>(pending.data()));
    }

    const Ops &                   ops = usable_ops();
    std::shared_ptr<const Layout> layout;
    const LayerCodec &            codes;
    int32_t                       head;
    bool                          value;
    const HeadCodec &             codec;
    Adapter                       adapter;
    int64_t                       origin = 0; // position of the first stored row
    std::vector<uint8_t>          tiles;      // of cells [n], by position
    std::vector<int32_t>          slot;       // [n]
    std::vector<float>            rho;        // [n]
    std::vector<float>            pending;    // [< block + lookahead][d]
};

namespace {

std::unique_ptr<subkv_adapt> make(const subkv_layout * layout, const subkv_adapt_params * params, int32_t il,
                                  int32_t head_kv, bool value) {
    not_null(layout, "adapt: layout");
    not_null(params, "adapt: params");
    const HeadCodec & codec = encoding_head("adapt", layout, il, head_kv, value);
    return std::make_unique<subkv_adapt>(layout->p, il, head_kv, value, Adapter::checked(*params, codec.rank));
}

// Calls Adapter::query or ::lift of a chunk in use.
bool with_chunk(const subkv_adapt * adapt, void (Adapter::*turn)(int32_t, const float *, float *) const, int32_t slot,
                const float * x, float * out) {
    return guarded("adapt", [&] {
        const Adapter & adapter = not_null(adapt, "adapt").adapter;
        not_null(x, "adapt: input");
        not_null(out, "adapt: out");
        if (slot != 0 && adapter.chunk(slot) == nullptr) {
            fail("adapt: slot: expected 0 or a chunk in use, found %d", (int) slot);
        }
        (adapter.*turn)(slot, x, out);
    });
}

} // namespace

extern "C" {

subkv_adapt * subkv_adapt_new(const subkv_layout * layout, const subkv_adapt_params * params, int32_t il,
                              int32_t head_kv, bool value) {
    return guarded<subkv_adapt *>("adapt", nullptr, [&] { return make(layout, params, il, head_kv, value).release(); });
}

void subkv_adapt_free(subkv_adapt * adapt) {
    delete adapt;
}

bool subkv_adapt_push(subkv_adapt * adapt, const float * x, int64_t n) {
    return guarded("adapt", [&] {
        check_array(x, n, "subkv_adapt_push: x");
        not_null(adapt, "subkv_adapt_push: adapt").push(x, n);
    });
}

int64_t subkv_adapt_read(subkv_adapt * adapt, float * xhat, int32_t * chunk_of, float * rho) {
    return guarded<int64_t>("adapt", -1, [&] {
        not_null(adapt, "subkv_adapt_read: adapt").read(xhat, chunk_of, rho);
        return adapt->size();
    });
}

bool subkv_adapt_query(const subkv_adapt * adapt, int32_t slot, const float * qt, float * out) {
    return with_chunk(adapt, &Adapter::query, slot, qt, out);
}

bool subkv_adapt_lift(const subkv_adapt * adapt, int32_t slot, const float * e, float * out) {
    return with_chunk(adapt, &Adapter::lift, slot, e, out);
}

int64_t subkv_adapt_save(const subkv_adapt * adapt, void * state, int64_t n) {
    return guarded<int64_t>("adapt", -1, [&] {
        const std::vector<uint8_t> bytes = not_null(adapt, "subkv_adapt_save: adapt").save();
        if (state && n >= (int64_t) bytes.size()) {
            std::copy(bytes.begin(), bytes.end(), static_cast<uint8_t *>(state));
        }
        return (int64_t) bytes.size();
    });
}

bool subkv_adapt_restore(subkv_adapt * adapt, const void * state, int64_t n) {
    return guarded("adapt", [&] {
        check_array(state, n, "subkv_adapt_restore: state");
        not_null(adapt, "subkv_adapt_restore: adapt").restore(static_cast<const uint8_t *>(state), (size_t) n);
    });
}

bool subkv_adapt_replay(const subkv_layout * layout, const subkv_adapt_params * params, int32_t il, int32_t head_kv,
                        bool value, const float * x, int64_t n, float * xhat, int32_t * chunk_of, float * rho,
                        subkv_adapt_stats * stats) {
    return guarded("adapt", [&] {
        const auto adapt = make(layout, params, il, head_kv, value);
        check_array(x, n, "subkv_adapt_replay: x");
        adapt->push(x, n);
        adapt->read(xhat, chunk_of, rho);
        if (stats) {
            *stats = {};
            adapt->adapter.add_stats(*stats);
        }
    });
}

} // extern "C"
