// nodes.cpp: the graph nodes of a coded layer. Per layer and run of the graph:
//
//   encode        k, v -> codes at their cells; also rounds k, v to half precision ("fresh" rows) and projects q
//   mask          once for all layers, if the batch has few tokens: the values that attend adds to logits
//   (encode)      of sides that code later, the node of LayerBases::build_encode
//   attend        query x coded cells -> partial (m, z, sum of value coefficients) per split of the cells
//   combine       merges the splits, multiplies by D_v, adds the exact window (fresh and stored rows) and attention
//                 sinks, normalises
//   store_window  fresh rows -> window slots; after combine, because it overwrites rows that combine reads
//
// On a GPU, one token per stream has this node instead of encode, attend and store_window; Cache::encode_uncoded makes
// the codes later:
//
//   store_attend  rounds k, v to half precision ("fresh" rows) and stores them in their window slots, which no token of
//                 the graph reads, because the keys there have left the exact window; projects q; attends to cells and
//                 exact keys
//
// On a GPU, a prompt has these nodes instead of attend and combine (node_prompt.cpp):
//
//   prompt_mask   once for all layers: which of the following rows a token sees
//   prompt_rows   cells and exact rows of some heads as halves; ggml's flash attention follows
//   prompt_lost   in flash attention's output: NaN for tokens that see a row that is not finite
//
// A layer that reads another layer's rows has attend and combine only, and before them on a CPU:
//
//   project       projects its queries
//
// The last such reader has the owner's store_window.
//
// node_sources.h lists the sources of each node. Shapes follow from tensor shapes alone, because llama.cpp keeps and
// reuses graphs.
#include "nodes.h"

#include "error.h"

#include <algorithm>
#include <cstring>

namespace subkv {

AttendShape attend_shape(const LayerNodes & layer, const ggml_tensor * q, const ggml_tensor * cells) {
    const bool  listed = cells->type == GGML_TYPE_I32;
    AttendShape s;
    s.n_kv      = cells->ne[listed ? 0 : 1];
    s.n_stream  = cells->ne[listed ? 3 : 2];
    s.n_tokens  = q->ne[2];
    s.n_tps     = s.n_tokens / s.n_stream;
    s.n_head_kv = layer.codec->n_head_kv;
    s.n_group   = layer.n_head / s.n_head_kv;
    s.width     = 8;
    for (const auto & head : layer.codec->v) {
        s.width = std::max<int64_t>(s.width, head.rank);
    }
    s.block               = listed ? 1 : std::min(s.n_tps, tokens_of_block(s.n_group));
    s.n_blocks            = (s.n_tps + s.block - 1) / s.block * s.n_stream;
    const int64_t n_head  = s.n_head_kv * s.n_group;
    const int64_t scratch = layer.device ? layer.device->scratch(n_head * s.n_tokens, s.n_tps) : 0;
    if (layer.device) {
        const int64_t most    = (int64_t) (layer.device->max_range() / sizeof(float)) - scratch;
        const int64_t each    = n_head * s.n_tokens * (2 + s.width);
        const bool    few     = s.n_tps <= layer.device->n_decoded();
        const int64_t n_block = few ? s.n_tokens : s.n_blocks;
        BlockSteps    steps   = layer.device->block_steps();
        steps.waves           = few ? steps.waves : 1;
        s.split               = cells_of_split(steps, s.n_kv, n_block * s.n_head_kv, most / each);
        s.n_split             = (s.n_kv + s.split - 1) / s.split;
        s.n_parts             = s.n_head_kv;
    } else {
        // Every thread needs work. If heads and blocks are too few, combine merges the segments, as long as their
        // partial results fit in the processor's caches. The heads of a unit share its bias.
        const int64_t n_segments = (s.n_kv + SEGMENT - 1) / SEGMENT;
        const bool    apart = s.n_blocks * s.n_head_kv < 16 && n_segments * s.n_tokens * n_head * s.width < 1 << 22;
        s.split             = apart ? SEGMENT : n_segments * SEGMENT;
        s.n_split           = apart ? n_segments : 1;
        s.n_parts           = s.n_tokens <= FEW_TOKENS ? s.n_head_kv : 1;
        while (s.n_parts < s.n_head_kv && (s.n_blocks * s.n_split * s.n_parts < 8 || s.n_head_kv % s.n_parts != 0)) {
            ++s.n_parts;
        }
    }
    s.n_rows    = s.n_split * s.n_head_kv * s.n_tokens * s.n_group;
    s.n_partial = s.n_rows * (2 + s.width) + scratch;
    return s;
}

// This function is not in a caller's file, because it would be inlined there and might be rounded differently from one
// caller to the next.
void merge_softmax(float & m, float & z, float * acc, float m_later, float z_later, const float * acc_later,
                   int64_t n) {
    if (m_later == -INFINITY) {
        return;
    }
    const float top   = std::max(m, m_later);
    const float keep  = m == -INFINITY ? 0.0f : std::exp(m - top);
    const float share = std::exp(m_later - top);
    for (int64_t i = 0; i < n; ++i) {
        acc[i] = keep * acc[i] + share * acc_later[i];
    }
    z = keep * z + share * z_later;
    m = top;
}

void alibi_slopes(const LayerNodes & layer, int64_t first_head, int64_t n, float * slope) {
    if (layer.max_alibi_bias <= 0.0f) {
        std::fill(slope, slope + n, 1.0f);
        return;
    }
    // Press et al., arXiv:2108.12409, for any head count, not only powers of two
    const int   n_log2 = 1 << (int) std::floor(std::log2((float) layer.n_head));
    const float m0     = std::pow(2.0f, -layer.max_alibi_bias / (float) n_log2);
    const float m1     = std::pow(2.0f, -layer.max_alibi_bias / 2.0f / (float) n_log2);
    for (int64_t i = 0; i < n; ++i) {
        const int64_t h = first_head + i;
        slope[i]        = h < n_log2 ? std::pow(m0, (float) (h + 1)) : std::pow(m1, (float) (2 * (h - n_log2) + 1));
    }
}

void store_slopes(const LayerNodes & layer, ggml_tensor * memory, size_t at, float & known) {
    if (known == layer.max_alibi_bias) {
        return;
    }
    std::vector<float> slopes((size_t) layer.n_head);
    alibi_slopes(layer, 0, layer.n_head, slopes.data());
    ggml_backend_tensor_set(memory, slopes.data(), at, slopes.size() * sizeof(float));
    known = layer.max_alibi_bias;
}

void device_op(ggml_tensor * dst, int, int, void *) {
    GGML_ABORT("%s: a node of a cache on a GPU was placed on the CPU", dst->name);
}

namespace {

//
// store_window: in place on the window rows | StoreWindowSources
//

void store_window_op(ggml_tensor * dst, int ith, int nth, const LayerNodes & layer) {
    const auto         in   = sources_of<StoreWindowSources>(dst);
    const WindowRows & rows = layer.window_rows();
    for (int64_t i = ith; i < in.slots->ne[1]; i += nth) {
        const int32_t token = slot_rows(in.slots)[i].token;
        if (token >= 0) {
            const bool packed = rows.integers && !rows.is_sink(i);
            std::memcpy((char *) dst->data + rows.offset(i),
                        (const char *) in.fresh->data + token * in.fresh->nb[1] + (packed ? rows.sink : 0),
                        rows.bytes(i));
        }
    }
}

// Checks that the device can bind the tensors of a node on a GPU, and that the kernels run for so many tokens at once.
// An error for the largest batch occurs here, when llama.cpp reserves the first graph.
void check_node(const DeviceLayer & device, NodeKind kind, ggml_tensor * node, int64_t n_tokens) {
    const size_t most  = device.max_range();
    const auto   check = [most](const ggml_tensor * t) {
        if (t && ggml_nbytes(t) > most) {
            fail("n_ubatch, n_ctx: tensors of at most %zu bytes expected on the GPU, which binds no more at once, %zu "
                 "of %s found; take smaller batches (-ub) or a smaller context, or keep the cache on the CPU (-ngl 0, "
                 "or offload_kqv off)",
                 most, ggml_nbytes(t), t->name);
        }
    };
    check(node);
    for (const ggml_tensor * t : node->src) {
        check(t && t->view_src ? t->view_src : t);
    }
    if (const char * expected = device.refusal(kind, node)) {
        fail("n_ubatch: %s expected of %s on the GPU, a batch of %lld tokens found; take smaller batches (-ub), or "
             "keep the cache on the CPU (-ngl 0, or offload_kqv off)",
             expected, node->name, (long long) n_tokens);
    }
}

// The nodes of one layer in one graph.
class AttnNodes {
public:
    AttnNodes(LayerNodes & layer, const AttnBuild & b) :
        layer_(layer), b_(b), inputs_(*b.inputs), q_(as_f32(b.ctx, b.q)), mask_(build_selected_mask(layer, b)) {
        if (layer.device && n_masks(mask_) > 1) {
            fail({ SUBKV_ERROR_UNSUPPORTED, "",
                   "this model's KV heads attend to cells of their own, or with a bias of their own: its cache on the "
                   "CPU expected (-ngl 0, or offload_kqv off), a GPU found" });
        }
        selected_cells_ = build_selected_cells(layer, b, mask_);
        mask_node_      = selected_cells_ ? nullptr : build_mask_node(layer, b, mask_);
        shape_          = attend_shape(layer, q_, cells());
    }

    ggml_tensor * build() {
        ggml_tensor * partial = nullptr; // of attend
        SharedRows    rows;
        if (defers_codes()) {
            partial = store_attend(rows);
        } else {
            rows = b_.k ? encode() : rows_of_owner();
        }
        if (layer_.n_readers > 0 || !b_.k) {
            inputs_.shared[layer_.owner] = rows;
        }
        ggml_tensor * out = layer_.device && !partial ? build_prompt(layer_, b_, q_, rows) : nullptr;
        if (!out) {
            out = combine(partial ? partial : attend(rows), rows);
        }
        ggml_build_forward_expand(b_.gf, out);
        if (window() && rows.n_readers == 0 && !rows.in_window) {
            store_window(rows, out);
        }
        return out;
    }

private:
    ggml_tensor * window() const { return layer_.window_rows().tensor; }
    ggml_tensor * cells() const { return selected_cells_ ? selected_cells_ : b_.k_view; }
    int64_t       n_queries() const { return layer_.n_head * shape_.n_tokens; }

    // Returns whether the GPU makes the codes of these tokens later. It does so if the window has their rows, which it
    // has of no picture's tokens.
    bool defers_codes() const { return b_.k && layer_.defers && shape_.n_tps == 1 && !b_.pictures; }

    // What computes a node of this kind, a function of the CPU or the kernels of the layer's GPU.
    NodeWork work(NodeKind kind) {
        if (layer_.device) {
            return NodeWork::on_device(*layer_.device, kind);
        }
        switch (kind) {
            case NodeKind::ENCODE: return NodeWork::on_cpu<encode_op>(layer_);
            case NodeKind::ATTEND: return NodeWork::on_cpu<attend_op>(layer_);
            case NodeKind::COMBINE: return NodeWork::on_cpu<combine_op>(layer_);
            case NodeKind::STORE_WINDOW: return NodeWork::on_cpu<store_window_op>(layer_);
            default: GGML_ABORT("a node of a GPU only");
        }
    }

    template <typename Sources>
    ggml_tensor * node(NodeKind kind, ggml_type type, int64_t ne0, int64_t ne1, const Sources & sources,
                       const char * name) {
        ggml_tensor * t = new_node(b_.ctx, type, { ne0, ne1, 1, 1 }, sources, work(kind));
        ggml_format_name(t, "subkv_%s-%d", name, b_.il);
        if (layer_.device) {
            check_node(*layer_.device, kind, t, b_.q->ne[2]);
        }
        return t;
    }

    // A part of an I8 tensor as a matrix of another type, for which ggml has no function.
    ggml_tensor * typed_view(ggml_tensor * bytes, ggml_type type, int64_t ne0, int64_t ne1, size_t at) const {
        const size_t  row  = ggml_row_size(type, ne0);
        ggml_tensor * view = ggml_view_2d(b_.ctx, bytes, ne0, ne1, row, at);
        view->type         = type;
        view->nb[0]        = ggml_type_size(type);
        return view;
    }

    // Stores the exact rows of these tokens in the window, without codes, and attends to the cells.
    ggml_tensor * store_attend(SharedRows & rows) {
        const StoreAttendSources in      = { q_,    as_f32(b_.ctx, b_.k), as_f32(b_.ctx, b_.v), b_.k_view,    b_.v_view,
                                             mask_, inputs_.cell_pos,     inputs_.tokens,       inputs_.slots };
        const int64_t            n       = fresh_width(layer_);
        const size_t             at      = fresh_at(shape_);
        const auto               size    = (int64_t) (at + (size_t) (n * shape_.n_tokens) * sizeof(uint16_t));
        ggml_tensor *            partial = node(NodeKind::STORE_AND_ATTEND, GGML_TYPE_I8, size, 1, in, "store_attend");
        ggml_build_forward_expand(b_.gf, b_.k_idxs); // llama.cpp fills both
        ggml_build_forward_expand(b_.gf, b_.v_idxs);
        rows.fresh           = typed_view(partial, GGML_TYPE_F16, n, shape_.n_tokens, at);
        rows.written         = partial;
        rows.n_readers       = layer_.n_readers;
        rows.in_window       = true;
        inputs_.defers_codes = true;
        layer_.k_cache       = b_.k_cache;
        layer_.v_cache       = b_.v_cache;
        return partial;
    }

    // Writes the codes of these tokens. On a CPU, it also projects their queries.
    SharedRows encode() {
        const bool    latent = layer_.codec->latent;
        const int64_t n      = fresh_width(layer_);
        EncodeSources in     = {};
        in.k                 = as_f32(b_.ctx, b_.k);
        in.v                 = latent ? in.k : as_f32(b_.ctx, b_.v);
        in.k_cache           = b_.k_cache;
        in.v_cache           = latent ? b_.k_cache : b_.v_cache;
        in.k_idxs            = b_.k_idxs;
        in.v_idxs            = latent ? b_.k_idxs : b_.v_idxs;
        SharedRows rows;
        rows.n_readers = layer_.n_readers;
        if (layer_.device) {
            rows.fresh = node(NodeKind::ENCODE, GGML_TYPE_F16, n, shape_.n_tokens, in, "encode");
        } else {
            in.q         = q_;
            in.tokens    = inputs_.tokens;
            in.mask_node = mask_node_;

            const EncodeResult result(layer_, shape_.n_tokens);
            ggml_tensor *      both = node(NodeKind::ENCODE, GGML_TYPE_I8, (int64_t) result.bytes, 1, in, "encode");
            rows.fresh              = typed_view(both, GGML_TYPE_F16, n, shape_.n_tokens, 0);
            queries_ = typed_view(both, GGML_TYPE_F32, query_width(layer_), n_queries(), result.queries_at);
        }
        rows.written = layer_.bases->build_encode(layer_, b_, rows.fresh);
        return rows;
    }

    // The rows of the layer that this one reads. On a CPU, it also projects the queries.
    SharedRows rows_of_owner() {
        SharedRows rows = inputs_.shared.at(layer_.owner);
        rows.n_readers--;
        if (!layer_.device) {
            queries_ = new_node(b_.ctx, GGML_TYPE_F32, { query_width(layer_), n_queries(), 1, 1 },
                                ProjectSources{ q_, mask_node_ }, NodeWork::on_cpu<project_op>(layer_));
            ggml_format_name(queries_, "subkv_project-%d", b_.il);
        }
        return rows;
    }

    ggml_tensor * attend(const SharedRows & rows) {
        AttendSources in = {};
        in.q             = q_;
        in.queries       = queries_ ? queries_ : rows.fresh;
        in.k_view        = b_.k_view;
        in.v_view        = layer_.codec->latent ? b_.k_view : b_.v_view;
        in.mask          = mask_;
        in.cell_pos      = inputs_.cell_pos;
        in.tokens        = inputs_.tokens;
        in.written       = rows.written;
        in.extra         = selected_cells_ ? selected_cells_ : mask_node_;
        return node(NodeKind::ATTEND, GGML_TYPE_F32, shape_.n_partial, 1, in, "attend");
    }

    ggml_tensor * combine(ggml_tensor * partial, const SharedRows & rows) {
        CombineSources in = {};
        in.partial        = partial;
        in.q              = q_;
        in.fresh          = rows.fresh;
        in.window         = window() ? window() : rows.fresh;
        in.mask           = mask_;
        in.tokens         = inputs_.tokens;
        in.slots          = inputs_.slots;
        in.cells          = cells();
        in.sinks          = b_.sinks;
        const int64_t n   = (int64_t) layer_.n_head * layer_.codec->d_v;
        return node(NodeKind::COMBINE, GGML_TYPE_F32, n, shape_.n_tokens, in, "combine");
    }

    void store_window(const SharedRows & rows, ggml_tensor * combined) {
        const StoreWindowSources in   = { window(), rows.fresh, inputs_.slots, combined };
        ggml_tensor *            node = new_node_inplace(b_.ctx, in, work(NodeKind::STORE_WINDOW));
        ggml_format_name(node, "subkv_store_window-%d", b_.il);
        ggml_build_forward_expand(b_.gf, node);
    }

    LayerNodes &      layer_;
    const AttnBuild & b_;
    Inputs &          inputs_;
    ggml_tensor *     q_;
    ggml_tensor *     mask_;              // of the selected cells
    ggml_tensor *     selected_cells_;    // the list that attend reads, or nullptr
    ggml_tensor *     mask_node_;         // shared by all layers, or nullptr
    ggml_tensor *     queries_ = nullptr; // projected, by nodes of a CPU
    AttendShape       shape_;
};

} // namespace

ggml_tensor * build_attn_nodes(LayerNodes & layer, const AttnBuild & b) {
    layer.scale          = b.scale;
    layer.softcap        = b.softcap;
    layer.max_alibi_bias = b.max_alibi_bias;
    if (layer.device) {
        layer.device->prepare();
    }
    return AttnNodes(layer, b).build();
}

} // namespace subkv
