// graph.cpp: graphs in which the engine's nodes replace those on coded tensors.
//
// A layer stores K and V by two SET_ROWS and attends by FLASH_ATTN_EXT. encode runs in place of the later SET_ROWS,
// because llama.cpp may reuse the memory of K and V afterwards; attend, combine and store_window in place of
// FLASH_ATTN_EXT, whose memory receives the result.
#include "error.h"
#include "log_line.h"
#include "nodes.h"
#include "plugin.h"

#include "ggml-impl.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <map>

namespace subkv::plugin {

namespace {

bool is_view(const ggml_tensor * t) {
    const GgmlOps & ops = ggml_ops();
    return t->op == GGML_OP_NONE || t->op == ops.view || t->op == ops.reshape || t->op == ops.permute ||
           t->op == ops.transpose;
}

float number(const ggml_tensor * t, int i) {
    float x;
    std::memcpy(&x, t->op_params + i, sizeof(x));
    return x;
}

// The input from which a mask is cast, or nullptr if the graph computes the mask.
ggml_tensor * input_of(ggml_tensor * t) {
    while (t->op == ggml_ops().cpy || t->op == ggml_ops().cont) {
        t = t->src[0];
    }
    return t->op == GGML_OP_NONE && !t->view_src ? t : nullptr;
}

// Tensors of K and V that a node stores to or reads.
struct Touched {
    Store *     store = nullptr;
    CacheTensor of    = {};
};

Touched touched(const ggml_tensor * t) {
    Touched found;
    found.store = store_of(t, &found.of);
    for (int i = 0; !found.store && i < GGML_MAX_SRC && t->src[i]; ++i) {
        found.store = store_of(t->src[i], &found.of);
    }
    return found;
}

// ggml's number of a graph, by which it is known to be the same as before. It is 0 for a part of a graph, between two
// calls of a program's evaluation callback.
template <typename Graph> auto uid_of(const Graph * graph, int) -> decltype(uint64_t(graph->uid)) {
    return graph->uid;
}

template <typename Graph> uint64_t uid_of(const Graph *, long) { // a version without numbers
    return 0;
}

template <typename Graph> constexpr auto has_uid(const Graph * graph, int) -> decltype(graph->uid, true) {
    return true;
}

template <typename Graph> constexpr bool has_uid(const Graph *, long) {
    return false;
}

class Uses {
public:
    Uses(ggml_cgraph * graph, bool computes) : graph_(graph) {
        for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
            const ggml_tensor * t = ggml_graph_node(graph, i);
            if (is_view(t)) {
                continue;
            }
            if (const Touched found = touched(t); found.store) {
                use(i, t, found, of[found.store]);
            }
        }
        for (auto & [store, use] : of) {
            check(use);
            if (computes && has_uid(graph, 0) && uid_of(graph, 0) == 0) {
                use.unknown = "the program's evaluation callback computes graphs in parts, and the plug-in codes whole "
                              "graphs (SUBKV=off)";
            }
        }
    }

    std::map<Store *, GraphUse> of;

private:
    static LayerUse & layer(GraphUse & use, int32_t il) {
        const auto it =
            std::find_if(use.layers.begin(), use.layers.end(), [&](auto & layer) { return layer.il == il; });
        return it != use.layers.end() ? *it : use.layers.emplace_back(LayerUse{ il, -1, -1, {} });
    }

    static void use(int i, const ggml_tensor * t, const Touched & found, GraphUse & use) {
        const ggml_tensor * root = root_of(t);
        const GgmlOps &     ops  = ggml_ops();
        if (t->op == ops.set_rows && store_of(t) && t->ne[0] == root->ne[0] && t->src[1]->type == GGML_TYPE_I64 &&
            t->src[0]->type == GGML_TYPE_F32) {
            (found.of.value ? layer(use, found.of.il).set_v : layer(use, found.of.il).set_k) = i;
        } else if (t->op == ops.flash_attn_ext && t->src[3] && !found.of.value && store_of(t->src[2]) == found.store) {
            layer(use, found.of.il).attends.push_back(i);
        } else if (t->op == ops.rope && store_of(t) && !found.of.value && t->ne[2] == root->ne[1] * root->ne[2]) {
            use.rotates.push_back(i);
        } else if (t->op == ops.set_rows && found.of.value && t->ne[0] == 1) {
            use.unknown = "flash attention is off, and only with it can a backend code the cache (-fa on)";
        } else if (use.unknown.empty()) {
            use.unknown =
                std::string("this model's graph uses its K/V cache in a way that the plug-in does not know (") +
                ggml_op_desc(t) + " " + t->name + ")";
        }
    }

    // Encode needs K, V and Q at the later SET_ROWS.
    void check(GraphUse & use) const {
        const ggml_tensor * shared = nullptr;
        for (const LayerUse & layer : use.layers) {
            const int last = std::max(layer.set_k, layer.set_v);
            for (int i = std::min(layer.set_k, layer.set_v) + 1; layer.set_k >= 0 && layer.set_v >= 0 && i < last;
                 ++i) {
                if (!is_view(ggml_graph_node(graph_, i))) {
                    use.unknown = "this model's graph stores keys and values apart";
                }
            }
            for (const int attend : layer.attends) {
                const ggml_tensor * q     = root_of(ggml_graph_node(graph_, attend)->src[0]);
                ggml_tensor *       mask  = ggml_graph_node(graph_, attend)->src[3];
                const ggml_tensor * input = input_of(mask);
                shared                    = shared ? shared : input;
                bool ready                = attend > last && (q->op != GGML_OP_NONE);
                for (int i = std::max(last, 0); attend == layer.attends[0] && i < attend; ++i) {
                    ready = ready && ggml_graph_node(graph_, i) != q;
                }
                if (!ready) {
                    use.unknown = "this model's graph computes queries after it has stored keys";
                } else if (mask->ne[1] * mask->ne[3] != ggml_graph_node(graph_, attend)->src[0]->ne[1] *
                                                            ggml_graph_node(graph_, attend)->src[0]->ne[3]) {
                    use.unknown = "this model's graph has a mask of another shape";
                } else if (!input || !ggml_are_same_shape(input, mask) || input != shared) {
                    use.unknown = "this model's graph computes masks of its layers";
                }
            }
        }
    }

    ggml_cgraph * graph_;
};

} // namespace

// The nodes of one graph, and what to fill in before they run.
class GraphPlan {
public:
    GraphPlan(ggml_cgraph * graph, const Uses & uses) : graph_(graph), uid_(uid_of(graph, 0)), number_(++n_plans) {
        const size_t n = 8 * (size_t) ggml_graph_n_nodes(graph) + 64;
        ctx_.reset(ggml_init({ n * ggml_tensor_overhead() + 3 * ggml_graph_overhead_custom(n, false), nullptr, true }));
        nodes_           = ggml_new_graph_custom(ctx_.get(), n, false);
        made_            = ggml_new_graph_custom(ctx_.get(), n, false);
        rotations_graph_ = ggml_new_graph_custom(ctx_.get(), n, false);
        for (const auto & [store, use] : uses.of) {
            if (store->is_coded()) {
                add(*store, use);
            }
        }
        assign();
    }

    bool is_of(const ggml_cgraph * graph) const { return uid_ != 0 && uid_of(graph, 0) == uid_ && graph_ == graph; }

    ggml_status run(ggml_backend_t backend) {
        shift_data_.clear();
        ggml_graph_clear(rotations_graph_);
        for (Part & part : parts_) {
            if (part.by) {
                build_rotations(part);
            } else if (part.store->shifting().empty()) {
                fill(part);
            } else {
                fail("shift: the rotation of moved keys is incomplete (it was stopped, or memory was short); clear the "
                     "cache");
            }
        }
        // Rotations come before all ordinary layers, because llama.cpp computes the graph again if some of them lack
        // memory.
        const bool  rotates = ggml_graph_n_nodes(rotations_graph_) > 0;
        ggml_status status  = rotates ? done(place().rotate(backend, rotations_graph_)) : GGML_STATUS_SUCCESS;
        status = status == GGML_STATUS_SUCCESS ? done(place().run(backend, graph_, nodes_, number_)) : status;
        for (Part & part : parts_) {
            if (part.by && status == GGML_STATUS_SUCCESS) {
                part.store->cache().rotated();
                part.store->shifting().clear();
            }
        }
        return status;
    }

private:
    // The status of nodes that have run.
    ggml_status done(ggml_status status) {
        bool computed = true;
        for (Part & part : parts_) {
            computed = part.store->cache().computed() && computed;
        }
        return computed || status != GGML_STATUS_SUCCESS ? status : GGML_STATUS_FAILED;
    }

    // The use of one coded cache.
    struct Part {
        Store *             store;
        Inputs              inputs;
        const ggml_tensor * cells     = nullptr; // I64 [n_tokens], or nullptr for a shift
        const ggml_tensor * positions = nullptr; // I32 [n_tokens], or four times as many, or nullptr if there is none
        const ggml_tensor * mask      = nullptr;
        int64_t             n_tokens  = 0;
        const ggml_tensor * by        = nullptr; // I32 [n_cells * n_stream] distances of a shift
    };

    ggml_tensor * leaf(ggml_type type, std::array<int64_t, 3> ne, std::array<size_t, 2> nb, void * data) {
        ggml_tensor * t = ggml_new_tensor_3d(ctx_.get(), type, ne[0], ne[1], ne[2]);
        t->nb[1]        = nb[0];
        t->nb[2]        = nb[1];
        t->nb[3]        = nb[1] * (size_t) ne[2];
        t->data         = data;
        return t;
    }

    ggml_tensor * node(int i) const { return ggml_graph_node(graph_, i); }

    // Gives memory to a tensor until the next layer, or, if it is `kept`, until the graph is done.
    void allocate(ggml_tensor * t, bool kept) {
        size_t & size = kept ? n_kept_ : n_reused_;
        memory_.push_back({ t, kept, size });
        size += GGML_PAD(ggml_nbytes(t), (size_t) 128);
        most_reused_ = std::max(most_reused_, n_reused_);
    }

    void add(Store & store, const GraphUse & use) {
        if (!use.unknown.empty()) {
            fail("%s", use.unknown.c_str());
        }
        Part part{};
        part.store = &store;
        if (!use.rotates.empty()) {
            rotate(part, use);
            parts_.push_back(part);
            return;
        }
        for (const LayerUse & layer : use.layers) {
            if (store.codes(layer.il)) {
                if (layer.set_k < 0 || layer.attends.empty()) {
                    fail("layer %d: a graph that stores and reads its rows expected, another one found", layer.il);
                }
                attend(part, layer);
            }
        }
        if (part.cells) {
            parts_.push_back(part);
        }
    }

    // I32 positions of the tokens, as ROPE reads them.
    const ggml_tensor * positions(int64_t n_tokens) const {
        for (int i = 0; i < ggml_graph_n_nodes(graph_); ++i) {
            const ggml_tensor * t = node(i);
            if (t->op == ggml_ops().rope && t->src[1]->op == GGML_OP_NONE && !store_of(t) &&
                (t->src[1]->ne[0] == n_tokens || t->src[1]->ne[0] == 4 * n_tokens)) {
                return t->src[1];
            }
        }
        return nullptr;
    }

    // The attention nodes of one layer, and of the layers that read its rows.
    void attend(Part & part, const LayerUse & use) {
        int32_t reader = 0;
        for (const int index : use.attends) {
            const bool owner = index == use.attends[0];
            if (!part.cells) {
                start(part, node(use.set_k), node(index));
            }
            AttnBuild b = attention_of(part, use, node(index), owner);
            b.il        = owner ? use.il : MAX_LAYERS + n_readers_ + reader++;

            const int     first = ggml_graph_n_nodes(made_);
            ggml_tensor * out   = part.store->cache().build_attn(b);
            // For a prompt on a GPU, `out` is a view of the node that writes the result, and that node gets the place
            // of the program's result.
            ((ggml_tensor *) root_of(out))->data = node(index)->data;
            insert(part, use, b, first, index);
        }
        n_readers_ += reader;
        placed_[use.set_k];
        if (use.set_v >= 0) {
            placed_[use.set_v];
        }
    }

    // Sets what all layers of a part share, from the first one's nodes.
    void start(Part & part, const ggml_tensor * set_k, const ggml_tensor * attention) {
        const ggml_tensor * q = attention->src[0];
        part.n_tokens         = q->ne[1] * q->ne[3];
        part.cells            = set_k->src[1];
        part.mask             = input_of(attention->src[3]);
        part.positions        = positions(part.n_tokens);
        part.inputs = part.store->cache().build_inputs(ctx_.get(), attention->src[1]->ne[1], q->ne[3], part.n_tokens);
        for (ggml_tensor * t : { part.inputs.cell_pos, part.inputs.tokens, part.inputs.slots }) {
            allocate(t, true);
        }
    }

    // The tensors of the program's attention node. `owner` says that the layer stores its rows, and does not read
    // another layer's.
    AttnBuild attention_of(Part & part, const LayerUse & use, const ggml_tensor * attention, bool owner) {
        Store &             store = *part.store;
        const LayerCodec &  codec = *store.cache().layout()->layer(use.il);
        const ggml_tensor * set_k = node(use.set_k);
        const ggml_tensor * q     = attention->src[0];
        const ggml_tensor * keys  = attention->src[1];
        const int64_t       n_tps = q->ne[1], n_stream = q->ne[3], n = n_tps * n_stream;
        const size_t        stream = keys->view_offs / root_of(set_k)->nb[2];
        if (n_stream > 1 && q->nb[3] != q->nb[1] * (size_t) n_tps) {
            fail("layer %d: queries of adjacent streams expected", use.il);
        }
        const auto view = [&](ggml_tensor * rows) {
            return rows ? ggml_view_3d(ctx_.get(), rows, rows->ne[0], keys->ne[1], n_stream, rows->nb[1], rows->nb[2],
                                       stream * rows->nb[2]) :
                          nullptr;
        };
        const auto heads = [&](const ggml_tensor * set, int64_t d) {
            const ggml_tensor * x = set->src[0];
            return leaf(GGML_TYPE_F32, { d, codec.n_head_kv, n }, { (size_t) d * sizeof(float), x->nb[1] }, x->data);
        };
        AttnBuild b = {};
        b.ctx       = ctx_.get();
        b.gf        = made_;
        b.q         = leaf(GGML_TYPE_F32, { q->ne[0], q->ne[2], n }, { q->nb[2], q->nb[1] }, q->data);
        if (owner) {
            b.k = heads(set_k, codec.d_k);
            b.v = codec.latent ? nullptr : heads(node(use.set_v), codec.d_v);
        }
        b.k_cache        = store.rows(use.il, false);
        b.v_cache        = store.rows(use.il, true);
        b.k_view         = view(b.k_cache);
        b.v_view         = view(b.v_cache);
        b.k_idxs         = set_k->src[1];
        b.v_idxs         = set_k->src[1]; // the same numbers
        b.mask           = (ggml_tensor *) part.mask;
        b.sinks          = attention->src[4];
        b.inputs         = &part.inputs;
        b.scale          = number(attention, 0);
        b.max_alibi_bias = number(attention, 1);
        b.softcap        = number(attention, 2);
        return b;
    }

    // Gives memory to the nodes from `first` on, and inserts each of them into the program's graph. Nodes that read
    // keys or values go where the program stores them, the others to its attention node.
    void insert(Part & part, const LayerUse & use, const AttnBuild & b, int first, int index) {
        n_reused_ = 0;
        for (int i = first; i < ggml_graph_n_nodes(made_); ++i) {
            ggml_tensor * t     = ggml_graph_node(made_, i);
            const bool    mask  = t == part.inputs.coded_mask;
            const bool    early = index == use.attends[0] && (mask || (b.k && (t->src[0] == b.k || t->src[1] == b.k)));
            if (t->view_src && !t->data) {
                views_.push_back(t);
            } else if (!is_view(t) && !t->data) {
                allocate(t, mask || t == part.inputs.prompt_mask || (early && use.attends.size() > 1));
            }
            if (!is_view(t)) {
                placed_[early ? std::max(use.set_k, use.set_v) : index].push_back(t);
            }
        }
        placed_[index]; // the original node does not run
    }

    // ROPE on the cache. Its parameters turn pairs (1, 0) by each distance.
    void rotate(Part & part, const GraphUse & use) {
        part.by = node(use.rotates[0])->src[1];
        for (const int index : use.rotates) {
            ggml_tensor * t = node(index);
            CacheTensor   of;
            store_of(t, &of);
            if (!part.store->codes(of.il)) {
                continue;
            }
            rotations_.push_back({ part.store, index, of.il });
            placed_[index];
        }
    }

    // The nodes of a shift depend on the number of its distances.
    void build_rotations(Part & part) {
        Cache &                    cache = part.store->cache();
        std::vector<int32_t>       slots((size_t) cache.facts().n_slots), all;
        const auto *               by = host<int32_t>(part.by);
        const std::vector<int32_t> moved(by, by + ggml_nelements(part.by));
        if (part.store->shifting().empty()) {
            part.store->forget_restored();
            part.store->cells().shift(cache, by);
            part.store->shifting() = moved;
        } else if (part.store->shifting() != moved) {
            fail("shift: the rotation of keys that moved before is incomplete (it was stopped, or memory was short); "
                 "clear the cache");
        }
        cache.rotations(slots.data());
        all.assign(by, by + ggml_nelements(part.by));
        all.insert(all.end(), slots.begin(), slots.end());
        std::sort(all.begin(), all.end());
        all.erase(std::unique(all.begin(), all.end()), all.end());
        if (all.size() > 1) {
            all.erase(std::remove(all.begin(), all.end(), 0), all.end());
        }
        const auto data     = [&](size_t bytes) { return shift_data_.emplace_back(bytes).data(); };
        const auto integers = [&](const auto & values) {
            const auto    n = (int64_t) values.size();
            ggml_tensor * t = leaf(GGML_TYPE_I32, { n, 1, 1 }, { values.size() * 4, values.size() * 4 },
                                   data(values.size() * sizeof(int32_t)));
            std::copy(values.begin(), values.end(), (int32_t *) t->data);
            return t;
        };
        ggml_tensor * of_cells  = integers(moved);
        ggml_tensor * of_slots  = slots.empty() ? nullptr : integers(slots);
        const auto    n         = (int64_t) all.size();
        ggml_tensor * distances = integers(all);
        for (const Rotation & rotation : rotations_) {
            if (rotation.store != part.store) {
                continue;
            }
            ggml_tensor * t     = node(rotation.index);
            const int64_t n_rot = t->op_params[1];
            const bool    apart = t->op_params[2] != GGML_ROPE_TYPE_NORMAL;
            const size_t  row   = (size_t) n_rot * sizeof(float);
            const auto    pairs = [&] {
                return leaf(GGML_TYPE_F32, { n_rot, 1, n }, { row, row }, data(row * all.size()));
            };
            ggml_tensor * ones = pairs();
            for (int64_t i = 0; i < n_rot * n; ++i) {
                const int64_t at          = i % n_rot;
                ((float *) ones->data)[i] = (apart ? at < n_rot / 2 : at % 2 == 0) ? 1.0f : 0.0f;
            }
            // Stored keys are already scaled, as by YaRN and similar methods.
            const float   freq_scale = number(t, 6), ext_factor = number(t, 7);
            ggml_tensor * factors = t->src[2];
            if (factors && !ggml_backend_buffer_is_host(root_of(factors)->buffer)) {
                factors       = ggml_dup_tensor(ctx_.get(), t->src[2]);
                factors->data = data(ggml_nbytes(factors));
                ggml_backend_tensor_get(t->src[2], factors->data, 0, ggml_nbytes(factors));
            }
            ggml_tensor * turned = ggml_rope_ext(
                ctx_.get(), ones, distances, factors, (int) n_rot, t->op_params[2], t->op_params[4], number(t, 5),
                freq_scale, ext_factor, ext_factor != 0.0f ? 1.0f / (1.0f - 0.1f * std::log(freq_scale)) : 1.0f,
                number(t, 9), number(t, 10));
            turned->data    = data(row * all.size());
            const int first = ggml_graph_n_nodes(made_);
            part.store->cache().build_shift(
                { ctx_.get(), made_, rotation.il, part.store->rows(rotation.il, false), of_cells, of_slots, distances,
                  turned, (int64_t) (t->view_offs % root_of(t)->nb[1] / sizeof(ggml_fp16_t)), apart });
            for (int i = first; i < ggml_graph_n_nodes(made_); ++i) {
                ggml_tensor * made = ggml_graph_node(made_, i);
                if (!made->data) {
                    made->data = data(ggml_nbytes(made));
                }
                ggml_graph_add_node(rotations_graph_, made);
            }
        }
    }

    // Assigns memory, and enters all nodes in order.
    void assign() {
        arena_.reset(ggml_backend_buft_alloc_buffer(place().results(), n_kept_ + most_reused_ + 128));
        if (!arena_) {
            fail("graph: out of memory");
        }
        auto * base = (char *) ggml_backend_buffer_get_base(arena_.get());
        for (const auto & [t, kept, at] : memory_) {
            t->data = base + (kept ? at : n_kept_ + at);
        }
        for (ggml_tensor * view : views_) {
            view->data = (char *) view->view_src->data + view->view_offs;
        }
        for (int i = 0; i < ggml_graph_n_nodes(graph_); ++i) {
            const auto it = placed_.find(i);
            if (it == placed_.end()) {
                ggml_graph_add_node(nodes_, node(i));
                continue;
            }
            for (ggml_tensor * t : it->second) {
                ggml_graph_add_node(nodes_, t);
            }
        }
    }

    // An input of the graph.
    template <typename T> static const T * host(const ggml_tensor * t) {
        const void * data = place().input(t);
        if (!data) {
            fail("%s: the graph's input of this name expected, none found", t->name);
        }
        return (const T *) data;
    }

    void fill(Part & part) {
        tokens_.resize((size_t) part.n_tokens);
        const auto * cells = host<int64_t>(part.cells);
        const auto * pos   = part.positions ? host<int32_t>(part.positions) : nullptr;
        const bool   three = pos && part.positions->ne[0] == 4 * part.n_tokens; // M-RoPE has time, height and width
        for (int64_t i = 0; i < part.n_tokens; ++i) {
            const int64_t n     = part.n_tokens;
            tokens_[(size_t) i] = { pos ? pos[i] : -1, cells[i],
                                    three && (pos[i] != pos[n + i] || pos[i] != pos[2 * n + i]) };
        }
        ggml_tensor mask = *part.mask;
        mask.data        = (void *) host<uint8_t>(part.mask);
        part.store->adopt_restored(tokens_, &mask);
        const auto & entered = part.store->cells().enter(part.store->cache(), tokens_, &mask);
        const auto   stream  = (uint32_t) part.store->cells().stream_of_cell(cells[0]);

        const std::array<ggml_tensor *, 3> inputs = { part.inputs.cell_pos, part.inputs.tokens, part.inputs.slots };
        std::array<void *, 3>              data   = {};
        for (size_t i = 0; i < inputs.size(); ++i) {
            data[i]         = inputs[i]->data;
            inputs[i]->data = place().stage(inputs[i]);
        }
        part.store->cache().set_inputs(part.inputs, entered, stream, part.store->cells());
        for (size_t i = 0; i < inputs.size(); ++i) {
            place().write(data[i], inputs[i]->data, ggml_nbytes(inputs[i]));
            inputs[i]->data = data[i];
        }
    }

    // ROPE on the keys of a coded layer.
    struct Rotation {
        const Store * store;
        int           index;
        int32_t       il;
    };

    struct Memory {
        ggml_tensor * t;
        bool          kept;
        size_t        at;
    };

    static inline std::atomic<uint64_t> n_plans{ 0 };

    ggml_cgraph *    graph_;
    uint64_t         uid_;
    uint64_t         number_; // of all plans of this process
    ggml_context_ptr ctx_;
    ggml_cgraph *    nodes_; // to compute
    ggml_cgraph *    made_;  // the engine's nodes, as it builds them
    ggml_cgraph *    rotations_graph_;

    std::vector<Part>                         parts_;
    std::vector<Rotation>                     rotations_;
    std::map<int, std::vector<ggml_tensor *>> placed_; // by the index of the node that they replace
    std::vector<Memory>                       memory_;
    std::vector<ggml_tensor *>                views_;
    std::vector<GraphToken>                   tokens_;
    std::vector<std::vector<uint8_t>>         shift_data_;
    ggml_backend_buffer_ptr                   arena_;
    size_t                                    n_kept_ = 0, n_reused_ = 0, most_reused_ = 0;
    int32_t                                   n_readers_ = 0;
};

Context::Context()  = default;
Context::~Context() = default;

// Decides about the graph's caches.
static void decide(ggml_cgraph * graph, const Uses & uses) {
    const auto full = std::max_element(uses.of.begin(), uses.of.end(), [](const auto & a, const auto & b) {
        return a.first->cells_and_age() < b.first->cells_and_age();
    });
    for (const auto & [store, use] : uses.of) {
        if (!store->is_decided()) {
            store->decide(graph, use, store == full->first);
        }
    }
}

void plan(ggml_cgraph * graph) {
    if (Store::is_any_undecided()) {
        decide(graph, Uses(graph, false));
    }
}

ggml_status compute(Context & context, ggml_cgraph * graph) {
    try {
        if (context.plan && context.plan->is_of(graph)) {
            return context.plan->run(context.backend.get());
        }
        context.plan.reset();
        const Uses uses(graph, true);
        decide(graph, uses);
        bool any = false;
        for (const auto & [store, use] : uses.of) {
            store->begin(use);
            any = any || store->is_coded();
        }
        if (!any) {
            return ggml_backend_graph_compute(context.backend.get(), graph);
        }
        context.plan = std::make_unique<GraphPlan>(graph, uses);
        return context.plan->run(context.backend.get());
    } catch (const std::bad_alloc &) {
        log_line("graph: out of memory");
        return GGML_STATUS_ALLOC_FAILED;
    } catch (const std::exception & e) {
        log_line(e.what());
        return GGML_STATUS_FAILED;
    }
}

} // namespace subkv::plugin
