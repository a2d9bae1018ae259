// window.cpp: the exact window by order of writes. A backend receives cells, not positions. If one sequence only grows,
// the cells written last belong to its last tokens, and the first cells of a stream to its first tokens.
#include "backend.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace subkv::backend {

namespace {

size_t stream_bytes(const Coded & c) {
    const int64_t n_slots = layout()->n_recent + ROLLBACK;
    const int64_t halves  = (n_slots + layout()->n_sink) * c.width();
    return (size_t) (1 + 2 * n_slots) * sizeof(int64_t) + (size_t) (halves + 3) / 4 * 4 * sizeof(uint16_t);
}

} // namespace

size_t Window::bytes(const Coded & c) {
    return layout()->n_recent > 0 ? stream_bytes(c) * (size_t) c.root->ne[2] : 0;
}

Window::Window(const Coded & c, int64_t stream) : n_slots(0), n_sink(0), width(c.width()) {
    if (layout()->n_recent > 0) {
        n_slots = layout()->n_recent + ROLLBACK;
        n_sink  = layout()->n_sink;
        writes  = (int64_t *) ((uint8_t *) c.root->data + c.all_tile_bytes() + (size_t) stream * stream_bytes(c));
        age     = writes + 1;
        cell    = age + n_slots;
        rows    = (uint16_t *) (cell + n_slots);
        sinks   = rows + n_slots * width;
    }
}

uint16_t * Window::row(int64_t at) const {
    if (at < n_sink) {
        return sinks + at * width;
    }
    for (int64_t i = 0; i < n_slots; ++i) {
        if (age[i] != 0 && cell[i] == at) {
            return rows + i * width;
        }
    }
    return nullptr;
}

void Window::put(int64_t at, const uint16_t * x) {
    if (n_slots == 0) {
        return;
    }
    int64_t slot = 0;
    for (int64_t i = 0; i < n_slots; ++i) {
        if (age[i] != 0 && cell[i] == at) {
            slot = i;
            break;
        }
        slot = age[i] < age[slot] ? i : slot;
    }
    age[slot]  = ++*writes;
    cell[slot] = at;
    replace(at, x);
    std::memcpy(rows + slot * width, x, (size_t) width * sizeof(uint16_t));
}

void Window::replace(int64_t at, const uint16_t * x) {
    for (int64_t i = 0; i < n_slots; ++i) {
        if (age[i] != 0 && cell[i] == at) {
            std::memcpy(rows + i * width, x, (size_t) width * sizeof(uint16_t));
        }
    }
    if (at < n_sink) {
        std::memcpy(sinks + at * width, x, (size_t) width * sizeof(uint16_t));
    }
}

//
// the nodes
//

void commit_op(ggml_tensor *, int ith, int, void * userdata) {
    const auto & s = *(const Store *) userdata;
    for (int64_t i = 0; ith == 0 && i < s.n; ++i) {
        const int64_t cell = s.fresh->cells[(size_t) i];
        Window(s.c, cell / s.c.root->ne[1]).put(cell % s.c.root->ne[1], s.fresh->rows.data() + i * s.c.width());
    }
}

// Every thread makes its own list of a stream's keys, and fills the rows of some of its tokens.
void select_op(ggml_tensor *, int ith, int nth, void * userdata) {
    const auto &            a = *(const Attention *) userdata;
    std::vector<Exact::Key> keys;
    std::vector<int64_t>    slots;
    std::vector<char>       held;
    const int64_t           n_recent = layout()->n_recent;
    for (int64_t stream = 0; stream < a.n_stream; ++stream) {
        const int64_t s = a.first_stream + stream;
        const Window  k(a.k, s), v(a.v, s);
        keys.clear();
        held.assign((size_t) a.n_kv, 0);
        const auto add = [&](int64_t cell, const uint16_t * k_row, const uint16_t * v_row) {
            if (cell < a.n_kv && !held[(size_t) cell]) {
                held[(size_t) cell] = 1;
                keys.push_back({ cell, k_row, v_row });
            }
        };
        for (int64_t i = a.stored[0] && k.n_slots > 0 ? a.stored[0]->n - 1 : -1; i >= 0; --i) {
            const int64_t cell = a.stored[0]->fresh->cells[(size_t) i];
            if (cell / a.k.root->ne[1] == s) {
                add(cell % a.k.root->ne[1], a.stored[0]->fresh->rows.data() + i * k.width,
                    a.stored[1]->fresh->rows.data() + i * v.width);
            }
        }
        slots.clear();
        for (int64_t i = 0; i < k.n_slots; ++i) {
            if (k.age[i] != 0) {
                slots.push_back(i);
            }
        }
        std::sort(slots.begin(), slots.end(), [&](int64_t x, int64_t y) { return k.age[x] > k.age[y]; });
        for (const int64_t i : slots) {
            add(k.cell[i], k.rows + i * k.width, v.rows + i * v.width);
        }
        const size_t n_ordered = keys.size();
        for (int64_t cell = 0; cell < k.n_sink; ++cell) {
            add(cell, k.sinks + cell * k.width, v.sinks + cell * v.width);
        }
        auto & bias = a.exact->bias[(size_t) stream]; // as large as the largest list can be
        for (int64_t t = ith; t < a.n_tokens; t += nth) {
            int64_t rank = 0;
            for (size_t i = 0; i < keys.size(); ++i) {
                float value;
                a.bias(t, stream, keys[i].cell, 1, &value);
                const bool seen = value != -INFINITY;
                const bool last = i < n_ordered && rank < n_recent;
                rank += seen;
                bias[(size_t) t * keys.size() + i] = last || keys[i].cell < k.n_sink ? value : -INFINITY;
            }
        }
        if (ith == 0) {
            a.exact->keys[(size_t) stream] = std::move(keys);
        }
    }
}

} // namespace subkv::backend
