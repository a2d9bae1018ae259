// node_prompt.cpp: a prompt's attention on a GPU, see nodes.cpp.
//
// Whether a token reads a cell's code or its exact row depends on the token, but flash attention has one key per row.
// So both are separate rows, and the mask shows one of them to the token.
//
// Zero times NaN is NaN: flash attention would spread a row that is not finite to tokens that do not see it. It reads
// zeros instead, and a last node makes NaN of the output of the tokens that see such a row.
#include "nodes.h"
#include "subkv/splits.h"

#include <algorithm>

namespace subkv {

namespace {

constexpr int64_t MOST_SLOTS  = 2048;      // of the window, of all sequences that share cells
constexpr int64_t MOST_GROUPS = 65535;     // of a grid's dimension, which counts tokens, or rows after the cells
constexpr int64_t MOST_BYTES  = 128 << 20; // of rows at a time, in a full context
constexpr int64_t ROWS        = 256;       // llama.cpp pads cells to a multiple of this for flash attention

struct PromptShape {
    int64_t n_slots; // of a stream
    int64_t n_rows;
    int64_t n_heads; // KV heads at a time
};

PromptShape prompt_shape(const LayerNodes & layer, const AttnBuild & b, const AttendShape & s) {
    const Window & window = *layer.window;
    PromptShape    p;
    p.n_slots           = s.n_stream > 1 ? window.n_slots() / std::max(1, window.n_seq()) : window.n_slots();
    p.n_rows            = (s.n_kv + p.n_slots + s.n_tps + ROWS - 1) / ROWS * ROWS;
    p.n_heads           = s.n_head_kv;
    const int64_t cells = b.k_view->view_src->ne[1] * s.n_stream; // all, so that a longer text changes no shape
    const int64_t head  = cells * (layer.codec->d_k + layer.codec->d_v) * (int64_t) sizeof(ggml_fp16_t);
    while (p.n_heads > 1 && (p.n_heads * head > MOST_BYTES || s.n_head_kv % p.n_heads != 0)) {
        --p.n_heads;
    }
    return p;
}

template <typename Sources>
ggml_tensor * device_node(LayerNodes & layer, const AttnBuild & b, NodeKind kind, const std::array<int64_t, 4> & ne,
                          const Sources & sources, const char * name) {
    ggml_tensor * node = new_node(b.ctx, GGML_TYPE_F16, ne, sources, NodeWork::on_device(*layer.device, kind));
    ggml_format_name(node, "subkv_%s-%d", name, b.il);
    return node;
}

ggml_tensor * prompt_mask(LayerNodes & layer, const AttnBuild & b, const AttendShape & s, const PromptShape & p) {
    Inputs & in = *b.inputs;
    if (!in.prompt_mask || in.prompt_buft != layer.buft ||
        sources_of<PromptMaskSources>(in.prompt_mask).mask != b.mask) {
        in.prompt_mask = device_node(layer, b, NodeKind::PROMPT_MASK, { p.n_rows, s.n_tps, 1, s.n_stream },
                                     PromptMaskSources{ b.mask, in.cell_pos, in.tokens, in.slots }, "prompt_mask");
        in.prompt_buft = layer.buft;
    }
    return in.prompt_mask;
}

// The attention of the query heads of KV heads [first, first + p.n_heads), F32 [d_v, query heads, n_tps, n_stream].
ggml_tensor * flash_attention(LayerNodes & layer, const AttnBuild & b, ggml_tensor * q, const SharedRows & rows,
                              const AttendShape & s, const PromptShape & p, ggml_tensor * mask, int64_t first) {
    ggml_context *     ctx    = b.ctx;
    const LayerCodec & codec  = *layer.codec;
    ggml_tensor *      window = layer.window_rows().tensor;
    ggml_tensor *      halves =
        device_node(layer, b, NodeKind::PROMPT_ROWS, { codec.d_k + codec.d_v, p.n_rows, p.n_heads, s.n_stream },
                    PromptRowsSources{ b.k_view, b.v_view, rows.fresh, window ? window : rows.fresh, b.inputs->tokens,
                                       b.inputs->slots, rows.written },
                    "prompt_rows");
    set_first_head(halves, (int32_t) first);
    const auto side = [&](int64_t d, size_t at) { // keys of all streams, then values
        const size_t row = (size_t) d * sizeof(ggml_fp16_t), head = row * (size_t) p.n_rows;
        return ggml_view_4d(ctx, halves, d, p.n_rows, p.n_heads, s.n_stream, row, head, head * (size_t) p.n_heads, at);
    };
    const size_t  keys   = (size_t) (codec.d_k * p.n_rows * p.n_heads * s.n_stream) * sizeof(ggml_fp16_t);
    const int64_t n_head = p.n_heads * s.n_group, h = first * s.n_group;
    ggml_tensor * heads = ggml_view_4d(ctx, q, q->ne[0], n_head, s.n_tps, s.n_stream, q->nb[1], q->nb[2],
                                       q->nb[2] * (size_t) s.n_tps, (size_t) h * q->nb[1]);
    ggml_tensor * out   = ggml_flash_attn_ext(ctx, ggml_permute(ctx, heads, 0, 2, 1, 3), side(codec.d_k, 0),
                                              side(codec.d_v, keys), mask, b.scale, b.max_alibi_bias, b.softcap);
    if (b.sinks) {
        const size_t at = (size_t) h * ggml_element_size(b.sinks);
        ggml_flash_attn_ext_add_sinks(out, ggml_view_1d(ctx, b.sinks, n_head, at));
    }
    out->op_params[3] = GGML_PREC_F32; // the setter's name depends on the version of ggml
    return out;
}

// The node that follows flash attention's output of these heads.
ggml_tensor * prompt_lost(LayerNodes & layer, const AttnBuild & b, ggml_tensor * out, const SharedRows & rows,
                          int64_t first) {
    ggml_tensor *           window = layer.window_rows().tensor;
    const Inputs &          in     = *b.inputs;
    const PromptLostSources of     = { out,       b.mask,     in.cell_pos,
                                       in.tokens, in.slots,   b.k_view,
                                       b.v_view,  rows.fresh, window ? window : rows.fresh };
    ggml_tensor * node = new_node_inplace(b.ctx, of, NodeWork::on_device(*layer.device, NodeKind::PROMPT_LOST));
    ggml_format_name(node, "subkv_prompt_lost-%d", b.il);
    set_first_head(node, (int32_t) first);
    return node;
}

} // namespace

ggml_tensor * build_prompt(LayerNodes & layer, const AttnBuild & b, ggml_tensor * q, const SharedRows & rows) {
    const AttendShape s         = attend_shape(layer, q, b.k_view);
    const int64_t     n_decoded = layer.device->n_decoded();
    if (!layer.device->makes_rows() || s.n_tps <= (n_decoded > 1 ? n_decoded : PROMPT_TOKENS - 1) ||
        s.n_tokens > MOST_GROUPS || b.selected || b.mask->type != GGML_TYPE_F16 ||
        b.mask->ne[1] != s.n_tps) { // the mask is in halves if flash attention is on
        return nullptr;
    }
    const PromptShape p = prompt_shape(layer, b, s);
    if (p.n_slots > MOST_SLOTS || (b.max_alibi_bias > 0.0f && p.n_heads < s.n_head_kv)) { // slopes follow from n_head
        return nullptr;
    }
    const int64_t row =
        std::max((layer.codec->d_k + layer.codec->d_v) * p.n_heads, s.n_tps); // halves, of rows and mask
    if (p.n_rows - s.n_kv > MOST_GROUPS ||
        (size_t) (row * p.n_rows * s.n_stream) * sizeof(ggml_fp16_t) > layer.device->max_range()) {
        return nullptr;
    }
    ggml_tensor * mask = prompt_mask(layer, b, s, p);
    ggml_tensor * out  = nullptr;
    for (int64_t first = 0; first < s.n_head_kv; first += p.n_heads) {
        ggml_tensor * part = flash_attention(layer, b, q, rows, s, p, mask, first);
        if (!ggml_backend_dev_supports_op(ggml_backend_buft_get_device(layer.buft), part)) {
            return nullptr;
        }
        part = prompt_lost(layer, b, part, rows, first);
        out  = out ? ggml_concat(b.ctx, out, part, 1) : part;
        ggml_build_forward_expand(b.gf, out); // before the next heads' rows, which then take the place of these
    }
    return ggml_reshape_2d(b.ctx, out, out->ne[0] * out->ne[1], s.n_tokens);
}

} // namespace subkv
