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
//   store_attend  rounds k, v to half precision ("fresh" rows, also to their window slots, which the exact keys are not
//                 read from: their keys have left the exact window); projects q, attends to cells and exact keys
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
    // about 128 query rows per block share the unpacking of codes
    s.block               = listed ? 1 : std::min(s.n_tps, std::max<int64_t>(1, 128 / s.n_group));
    s.n_blocks            = (s.n_tps + s.block - 1) / s.block * s.n_stream;
    const int64_t n_head  = s.n_head_kv * s.n_group;
    const int64_t scratch = layer.device ? layer.device->scratch(n_head * s.n_tokens, s.n_tps) : 0;
    if (layer.device) { // blocks of one head, as many as run at once; to start a block costs as much as 180 cells
        constexpr int64_t LEAST   = 2 * TILE; // cells of a split
        const int64_t     most    = (int64_t) (layer.device->max_range() / sizeof(float)) - scratch;
        const int64_t     each    = n_head * s.n_tokens * (2 + s.width);
        const int64_t     n_block = s.n_tps <= layer.device->n_decoded() ? s.n_tokens : s.n_blocks;
        const int64_t     at_once = layer.device->n_at_once() / (n_block * s.n_head_kv);
        const int64_t     n_split = std::min({ at_once, s.n_kv / LEAST, most / each });
        s.n_split                 = std::max<int64_t>(1, n_split);
        s.split                   = ((s.n_kv + s.n_split - 1) / s.n_split + TILE - 1) / TILE * TILE;
        s.n_split                 = (s.n_kv + s.split - 1) / s.split;
        s.n_parts                 = s.n_head_kv;
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

// Not in the file of a caller: inlined there, it might be rounded differently from one caller to the next.
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

// Checks a node on a GPU: whether the device can bind its tensors, and the kernels run for so many tokens at once. An
// error for the largest batch occurs here, when llama.cpp reserves the first graph.
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

// Whether the GPU makes the codes of these tokens later: the window has their rows. It has none of a picture's tokens.
bool defers_codes(const LayerNodes & layer, const AttnBuild & b, const AttendShape & s) {
    return b.k && layer.defers && s.n_tps == 1 && !b.pictures;
}

// A part of an I8 tensor as a matrix of another type, for which ggml has no function.
ggml_tensor * typed_view(ggml_context * ctx, ggml_tensor * bytes, ggml_type type, int64_t ne0, int64_t ne1, size_t at) {
    const size_t  row  = ggml_row_size(type, ne0);
    ggml_tensor * view = ggml_view_2d(ctx, bytes, ne0, ne1, row, at);
    view->type         = type;
    view->nb[0]        = ggml_type_size(type);
    return view;
}

} // namespace

ggml_tensor * build_attn_nodes(LayerNodes & layer, const AttnBuild & b) {
    layer.scale          = b.scale;
    layer.softcap        = b.softcap;
    layer.max_alibi_bias = b.max_alibi_bias;

    ggml_context * ctx = b.ctx;
    // a layer on a GPU has the same nodes, which the GPU's backend computes
    const auto run = [&](const NodeWork & on_cpu, NodeKind kind) {
        return layer.device ? NodeWork::on_device(*layer.device, kind) : on_cpu;
    };
    const auto custom = [&](ggml_type type, int64_t ne0, int64_t ne1, const auto & sources, const NodeWork & work,
                            NodeKind kind, const char * name) {
        ggml_tensor * t = new_node(ctx, type, { ne0, ne1, 1, 1 }, sources, run(work, kind));
        ggml_format_name(t, "subkv_%s-%d", name, b.il);
        if (layer.device) {
            check_node(*layer.device, kind, t, b.q->ne[2]);
        }
        return t;
    };
    if (layer.device) {
        layer.device->prepare();
    }
    ggml_tensor * q      = as_f32(ctx, b.q);
    const auto &  codec  = *layer.codec;
    ggml_tensor * chosen = build_chosen_mask(layer, b);
    if (layer.device && n_masks(chosen) > 1) {
        fail({ SUBKV_ERROR_UNSUPPORTED, "",
               "this model's KV heads attend to cells of their own, or with a bias of their own: its cache on the CPU "
               "expected (-ngl 0, or offload_kqv off), a GPU found" });
    }
    ggml_tensor *     list    = build_chosen_cells(layer, b, chosen);
    ggml_tensor *     mask    = list ? nullptr : build_mask_node(layer, b, chosen);
    const AttendShape s       = attend_shape(layer, q, list ? list : b.k_view);
    const int64_t     width   = fresh_width(layer);
    ggml_tensor *     window  = layer.window_rows().tensor;
    const int64_t     n_query = layer.n_head * s.n_tokens;
    ggml_tensor *     queries = nullptr; // projected, by nodes of a CPU

    const Inputs & inputs  = *b.inputs;
    ggml_tensor *  partial = nullptr; // of attend
    SharedRows     rows;
    rows.n_readers = layer.n_readers;
    if (defers_codes(layer, b, s)) {
        const StoreAttendSources in   = { q,      as_f32(ctx, b.k), as_f32(ctx, b.v), b.k_view,    b.v_view,
                                          chosen, inputs.cell_pos,  inputs.tokens,    inputs.slots };
        const size_t             at   = fresh_at(s);
        const auto               size = (int64_t) (at + (size_t) (width * s.n_tokens) * sizeof(uint16_t));
        partial = custom(GGML_TYPE_I8, size, 1, in, NodeWork::on_device(*layer.device, NodeKind::STORE_AND_ATTEND),
                         NodeKind::STORE_AND_ATTEND, "store_attend");
        ggml_build_forward_expand(b.gf, b.k_idxs); // llama.cpp fills both
        ggml_build_forward_expand(b.gf, b.v_idxs);
        rows.fresh             = typed_view(ctx, partial, GGML_TYPE_F16, width, s.n_tokens, at);
        rows.written           = partial;
        rows.in_window         = true;
        b.inputs->defers_codes = true;
        layer.k_cache          = b.k_cache;
        layer.v_cache          = b.v_cache;
    } else if (b.k) {
        EncodeSources in = {};
        in.k             = as_f32(ctx, b.k);
        in.v             = codec.latent ? in.k : as_f32(ctx, b.v);
        in.k_cache       = b.k_cache;
        in.v_cache       = codec.latent ? b.k_cache : b.v_cache;
        in.k_idxs        = b.k_idxs;
        in.v_idxs        = codec.latent ? b.k_idxs : b.v_idxs;
        if (layer.device) {
            rows.fresh = custom(GGML_TYPE_F16, width, s.n_tokens, in, NodeWork::on_cpu<encode_op>(layer),
                                NodeKind::ENCODE, "encode");
        } else {
            in.q         = q;
            in.tokens    = inputs.tokens;
            in.mask_node = mask;

            const EncodeResult result(layer, s.n_tokens);
            ggml_tensor * both = custom(GGML_TYPE_I8, (int64_t) result.bytes, 1, in, NodeWork::on_cpu<encode_op>(layer),
                                        NodeKind::ENCODE, "encode");
            rows.fresh         = typed_view(ctx, both, GGML_TYPE_F16, width, s.n_tokens, 0);
            queries            = typed_view(ctx, both, GGML_TYPE_F32, query_width(layer), n_query, result.queries_at);
        }
        rows.written = layer.bases->build_encode(layer, b, rows.fresh);
    } else {
        rows = b.inputs->shared.at(layer.owner);
        if (!layer.device) {
            const ProjectSources in = { q, mask };
            queries = custom(GGML_TYPE_F32, query_width(layer), n_query, in, NodeWork::on_cpu<project_op>(layer),
                             NodeKind::ENCODE, "project");
        }
        rows.n_readers--;
    }
    if (layer.n_readers > 0 || !b.k) {
        b.inputs->shared[layer.owner] = rows;
    }
    ggml_tensor * fresh = rows.fresh;
    ggml_tensor * out   = layer.device && !partial ? build_prompt(layer, b, q, rows) : nullptr;
    if (!out && !partial) {
        AttendSources in = {};
        in.q             = q;
        in.queries       = queries ? queries : fresh;
        in.k_view        = b.k_view;
        in.v_view        = codec.latent ? b.k_view : b.v_view;
        in.mask          = chosen;
        in.cell_pos      = inputs.cell_pos;
        in.tokens        = inputs.tokens;
        in.written       = rows.written;
        in.extra         = list ? list : mask;
        partial =
            custom(GGML_TYPE_F32, s.n_partial, 1, in, NodeWork::on_cpu<attend_op>(layer), NodeKind::ATTEND, "attend");
    }
    if (!out) {
        CombineSources of = {};
        of.partial        = partial;
        of.q              = q;
        of.fresh          = fresh;
        of.window         = window ? window : fresh;
        of.mask           = chosen;
        of.tokens         = inputs.tokens;
        of.slots          = inputs.slots;
        of.cells          = list ? list : b.k_view;
        of.sinks          = b.sinks;
        out               = custom(GGML_TYPE_F32, (int64_t) layer.n_head * codec.d_v, s.n_tokens, of,
                                   NodeWork::on_cpu<combine_op>(layer), NodeKind::COMBINE, "combine");
    }
    ggml_build_forward_expand(b.gf, out);

    if (window && rows.n_readers == 0 && !rows.in_window) {
        const StoreWindowSources in    = { window, fresh, inputs.slots, out };
        const NodeWork           work  = run(NodeWork::on_cpu<store_window_op>(layer), NodeKind::STORE_WINDOW);
        ggml_tensor *            store = new_node_inplace(ctx, in, work);
        ggml_format_name(store, "subkv_store_window-%d", b.il);
        ggml_build_forward_expand(b.gf, store);
    }
    return out;
}

} // namespace subkv
