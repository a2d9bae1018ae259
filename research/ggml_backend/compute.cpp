// compute.cpp: the CPU backend computes a whole graph. Nodes that store to coded tensors, attend to them, or turn their
// keys are replaced by custom nodes that write where the original nodes would have written.
#include "backend.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>

namespace subkv::backend {

// SET_ROWS: src 0 rows F32 [n_embd, n_tokens], 1 cells, 2 the cache. A unit is a head and every n_parts-th tile, since
// no two threads may be in one tile; a run of tokens within one is coded at once.
void encode_op(ggml_tensor *, int ith, int nth, void * userdata) {
    const auto &         s       = *(const Store *) userdata;
    const int64_t        n_parts = (s.n + TILE - 2) / TILE + 1;
    const int64_t        ldx     = s.n > 1 ? s.row(1) - s.row(0) : s.c.width();
    std::vector<int64_t> cells((size_t) s.n);
    for (int64_t t = 0; t < s.n; ++t) {
        cells[(size_t) t] = s.cell(t);
    }
    for (int64_t unit = ith; unit < n_parts * s.c.codec->n_head_kv; unit += nth) {
        const int64_t h    = unit / n_parts;
        const int64_t part = unit % n_parts;
        for (int64_t t = 0, end = 0; t < s.n; t = end) {
            const int64_t tile = cells[(size_t) t] / TILE;
            for (end = t + 1; end < s.n && cells[(size_t) end] / TILE == tile;) {
                ++end;
            }
            if (tile % n_parts == part) {
                ops().encode(s.c.codec->head(h, s.c.value), s.row(t) + h * s.c.d(), ldx, end - t, cells.data() + t,
                             s.c.tiles(h), s.c.tile_bytes());
            }
        }
    }
    for (int64_t t = ith; t < s.n; t += nth) {
        s.fresh->cells[(size_t) t] = cells[(size_t) t];
        ops().to_half(s.row(t), s.fresh->rows.data() + t * s.c.width(), s.c.width());
    }
}

namespace {

// ROPE on the keys of all cells (context shift): src 0 a view of the cache, 1 by how many positions, I32 [n_cells].
// The keys that move are decoded, rotated by the CPU backend's node, and coded again.
struct Turn {
    const ggml_tensor * op;
    Coded               c;
    float *             rows; // [n_cells][width]

    template <typename F> void each(int ith, int nth, F f) const {
        const auto * by = (const int32_t *) op->src[1]->data;
        for (int64_t tile = ith; tile < c.n_cells() / TILE; tile += nth) {
            for (int64_t cell = tile * TILE; cell < (tile + 1) * TILE; ++cell) {
                if (by[cell] != 0) {
                    f(cell, rows + cell * c.width());
                }
            }
        }
    }
};

void decode_op(ggml_tensor *, int ith, int nth, void * userdata) {
    const auto & turn = *(const Turn *) userdata;
    turn.each(ith, nth, [&](int64_t cell, float * x) { read_rows(turn.c, cell, 1, x); });
}

void recode_op(ggml_tensor *, int ith, int nth, void * userdata) {
    const auto &          turn = *(const Turn *) userdata;
    const Coded &         c    = turn.c;
    std::vector<uint16_t> halves((size_t) c.width());
    turn.each(ith, nth, [&](int64_t cell, float * x) {
        for (int64_t h = 0; h < c.codec->n_head_kv; ++h) {
            ops().encode(c.codec->head(h, false), x + h * c.d(), c.width(), 1, &cell, c.tiles(h), c.tile_bytes());
        }
        ops().to_half(x, halves.data(), c.width());
        Window(c, cell / c.root->ne[1]).replace(cell % c.root->ne[1], halves.data());
    });
}

bool is_view(const ggml_tensor * t) {
    return t->op == GGML_OP_NONE || t->op == GGML_OP_VIEW || t->op == GGML_OP_RESHAPE || t->op == GGML_OP_PERMUTE ||
           t->op == GGML_OP_TRANSPOSE;
}

bool touches_coded(const ggml_tensor * t) {
    return coded(t).codec ||
           std::any_of(t->src, t->src + GGML_MAX_SRC, [](const ggml_tensor * src) { return src && coded(src).codec; });
}

class Replacement {
public:
    Replacement(Context & context, ggml_cgraph * graph) : context_(context), graph_(graph) {
        const size_t n = 4 * (size_t) ggml_graph_n_nodes(graph) + 16;
        context.memory.resize(n * ggml_tensor_overhead() + ggml_graph_overhead_custom(n, false));
        ctx_.reset(ggml_init({ context.memory.size(), context.memory.data(), true }));
        nodes_ = ggml_new_graph_custom(ctx_.get(), n, false);
    }

    // nullptr: a node that is none of ours
    ggml_cgraph * make() {
        for (int i = 0; i < ggml_graph_n_nodes(graph_); ++i) {
            ggml_tensor * t = ggml_graph_node(graph_, i);
            if (const auto done = instead_.find(t); done != instead_.end()) {
                if (done->second) {
                    node(t, combine_op, done->second);
                }
            } else if (is_view(t) || !touches_coded(t)) {
                ggml_graph_add_node(nodes_, t);
            } else if (!store(t) && !attend(t) && !attend_plain(i) && !turn(t)) {
                std::fprintf(stderr, "subkv: %s (%s) on coded cells: not supported\n", ggml_op_desc(t), t->name);
                return nullptr;
            }
        }
        commit(0);
        commit(1);
        context_.partial.resize(std::max(context_.partial.size(), n_partial_));
        context_.turned.resize(n_turned_);
        for (Attention & a : attentions_) {
            a.partial = context_.partial.data();
        }
        for (Turn & turn : turns_) {
            turn.rows = context_.turned.data();
        }
        for (ggml_tensor * t : turned_) {
            t->data = (char *) context_.turned.data() + t->view_offs;
        }
        return nodes_;
    }

private:
    // A node that runs `function` in place of op and writes where it does.
    void node(ggml_tensor * op, ggml_custom_op_t function, void * userdata) {
        ggml_tensor * t = ggml_custom_4d(ctx_.get(), op->type, op->ne[0], op->ne[1], op->ne[2], op->ne[3], op->src, 3,
                                         function, GGML_N_TASKS_MAX, userdata);
        t->data         = op->data;
        t->buffer       = op->buffer;
        t->flags |= op->flags; // the CPU backend skips nodes without GGML_TENSOR_FLAG_COMPUTE
        ggml_graph_add_node(nodes_, t);
    }

    void commit(int side) {
        if (pending_[side]) {
            node(const_cast<ggml_tensor *>(pending_[side]->op), commit_op, pending_[side]);
            pending_[side] = nullptr;
        }
    }

    bool store(ggml_tensor * t) {
        const Coded c = coded(t);
        if (t->op != GGML_OP_SET_ROWS || !c.codec || t->src[1]->type != GGML_TYPE_I64 ||
            (t->ne[0] != c.width() && (t->ne[0] != 1 || !c.value))) {
            return false;
        }
        commit(c.value);
        Fresh &       fresh = context_.fresh[c.value];
        const int64_t n     = ggml_nelements(t->src[0]) / c.width();
        stores_.push_back({ t, c, &fresh, n });
        fresh.cells.resize(std::max(fresh.cells.size(), (size_t) n));
        fresh.rows.resize(std::max(fresh.rows.size(), (size_t) (n * c.width())));
        node(t, encode_op, pending_[c.value] = &stores_.back());
        return true;
    }

    // The first nodes of an attention; nullptr: not one of ours.
    Attention * attention(ggml_tensor * t, const ggml_tensor * q, const ggml_tensor * k, const ggml_tensor * v,
                          const ggml_tensor * mask, const ggml_tensor * sinks) {
        if (!coded(k).codec || coded(k).value || !coded(v).codec || !coded(v).value || !mask) {
            return nullptr;
        }
        Attention & a      = attentions_.emplace_back(q, k, v, mask, sinks);
        int64_t     n_keys = layout()->n_recent + ROLLBACK + layout()->n_sink;
        a.exact            = &context_.exact;
        if (pending_[0] && pending_[1] && pending_[0]->c.root == a.k.root && pending_[1]->c.root == a.v.root) {
            std::copy(pending_, pending_ + 2, a.stored);
            n_keys += pending_[0]->n;
        }
        a.exact->keys.resize(std::max(a.exact->keys.size(), (size_t) a.n_stream));
        a.exact->bias.resize(std::max(a.exact->bias.size(), (size_t) a.n_stream));
        for (auto & bias : a.exact->bias) {
            bias.resize(std::max(bias.size(), (size_t) (n_keys * a.n_tokens)));
        }
        n_partial_ = std::max(n_partial_, (size_t) a.size());
        node(t, select_op, &a);
        node(t, attend_op, &a);
        return &a;
    }

    static float number(const ggml_tensor * t, int i) {
        float x;
        std::memcpy(&x, t->op_params + i, sizeof(x));
        return x;
    }

    bool attend(ggml_tensor * t) {
        Attention * a = t->op == GGML_OP_FLASH_ATTN_EXT ?
                            attention(t, t->src[0], t->src[1], t->src[2], t->src[3], t->src[4]) :
                            nullptr;
        if (a) {
            a->heads_first = true;
            a->scale       = number(t, 0);
            a->max_bias    = number(t, 1);
            a->softcap     = number(t, 2);
            node(t, combine_op, a);
        }
        return a != nullptr;
    }

    // Flash attention off: MUL_MAT k q, perhaps SCALE, TANH, SCALE, then SOFT_MAX, MUL_MAT v p. All is computed at the
    // place of the first, where q is still there, and summed at that of the last.
    bool attend_plain(int first) {
        ggml_tensor *                    t    = ggml_graph_node(graph_, first);
        const ggml_tensor *              last = t;
        std::vector<const ggml_tensor *> between, scales;
        const ggml_tensor *              soft = nullptr;
        if (t->op != GGML_OP_MUL_MAT) {
            return false;
        }
        for (int i = first + 1; i < ggml_graph_n_nodes(graph_); ++i) {
            const ggml_tensor * next = ggml_graph_node(graph_, i);
            if (is_view(next)) {
                continue;
            }
            if (soft && next->op == GGML_OP_MUL_MAT && next->src[1] == soft && scales.size() % 2 == 0) {
                const float scale = number(soft, 0);
                if (!scales.empty() && scale != 1.0f) {
                    return false;
                }
                Attention * a = attention(t, t->src[1], t->src[0], next->src[0], soft->src[1], soft->src[2]);
                if (a) {
                    a->heads_first = false;
                    a->scale       = scales.empty() ? scale : number(scales[0], 0) * number(scales[1], 0);
                    a->max_bias    = number(soft, 1);
                    a->softcap     = scales.empty() ? 0.0f : number(scales[1], 0);
                    instead_[next] = a;
                    for (const ggml_tensor * other : between) {
                        instead_[other] = nullptr;
                    }
                }
                return a != nullptr;
            }
            if (next->src[0] != last ||
                (next->op != GGML_OP_SCALE && next->op != GGML_OP_SOFT_MAX &&
                 !(next->op == GGML_OP_UNARY && ggml_get_unary_op(next) == GGML_UNARY_OP_TANH))) {
                return false;
            }
            if (next->op == GGML_OP_SCALE) {
                scales.push_back(next);
            }
            soft = next->op == GGML_OP_SOFT_MAX ? next : soft;
            between.push_back(last = next);
        }
        return false;
    }

    bool turn(ggml_tensor * t) {
        const Coded c = coded(t);
        if (t->op != GGML_OP_ROPE || !c.codec || c.value || t->ne[2] != c.n_cells()) {
            return false;
        }
        Turn & turn = turns_.emplace_back(Turn{ t, c, nullptr });
        n_turned_   = std::max(n_turned_, (size_t) (c.n_cells() * c.width()));
        node(t, decode_op, &turn);
        ggml_tensor * rope = ggml_dup_tensor(ctx_.get(), t);
        rope->op           = GGML_OP_ROPE;
        rope->type         = GGML_TYPE_F32;
        rope->view_offs    = 2 * t->view_offs; // of halves
        for (int i = 0; i < GGML_MAX_DIMS; ++i) {
            rope->nb[i] = 2 * t->nb[i];
        }
        std::memcpy(rope->op_params, t->op_params, sizeof(t->op_params));
        std::copy(t->src, t->src + GGML_MAX_SRC, rope->src);
        rope->src[0] = rope; // in place
        rope->flags |= t->flags;
        turned_.push_back(rope);
        ggml_graph_add_node(nodes_, rope);
        node(t, recode_op, &turn);
        return true;
    }

    Context &                                  context_;
    ggml_cgraph *                              graph_;
    ggml_context_ptr                           ctx_;
    ggml_cgraph *                              nodes_;
    std::deque<Store>                          stores_;
    std::deque<Attention>                      attentions_;
    std::deque<Turn>                           turns_;
    std::vector<ggml_tensor *>                 turned_;
    std::map<const ggml_tensor *, Attention *> instead_; // nodes whose attention is computed: sums, or nothing is left
    Store *                                    pending_[2] = { nullptr, nullptr }; // stored, to be put into the window
    size_t                                     n_partial_  = 0;
    size_t                                     n_turned_   = 0;
};

} // namespace

ggml_status compute(Context & context, ggml_cgraph * graph) {
    bool any = false;
    for (int i = 0; layout() && i < ggml_graph_n_nodes(graph) && !any; ++i) {
        any = !is_view(ggml_graph_node(graph, i)) && touches_coded(ggml_graph_node(graph, i));
    }
    if (!any) {
        return ggml_backend_graph_compute(context.cpu.get(), graph);
    }
    Replacement   replacement(context, graph);
    ggml_cgraph * nodes = replacement.make();
    return nodes ? ggml_backend_graph_compute(context.cpu.get(), nodes) : GGML_STATUS_FAILED;
}

} // namespace subkv::backend
