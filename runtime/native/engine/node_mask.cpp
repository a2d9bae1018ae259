// node_mask.cpp: the values that attend adds to logits, see nodes.cpp.
#include "nodes.h"

#include <algorithm>

namespace subkv {

namespace {

// A token's row for a tile. Returns whether any cell is open. Both functions see every cell of every token, so they are
// written such that the compiler vectorizes them.
bool row_of_halves(const ggml_fp16_t * mask, const int32_t * cell_pos, int32_t pos, int32_t n_sink, int32_t n_recent,
                   float * row) {
    int32_t open  = 0;
    int32_t other = 0; // values besides 0 and -INFINITY, which ALiBi has
    for (int64_t c = 0; c < TILE; ++c) {
        const int32_t exact  = is_exact(cell_pos[c], pos, n_sink, n_recent);
        const int32_t hidden = mask[c];
        other |= (hidden != 0) & (hidden != 0xFC00);
        row[c] = ((hidden != 0) | exact) != 0 ? -INFINITY : 0.0f;
        open |= (hidden == 0) & (exact == 0);
    }
    for (int64_t c = 0; other != 0 && c < TILE; ++c) {
        row[c] = is_exact(cell_pos[c], pos, n_sink, n_recent) ? -INFINITY : ggml_fp16_to_fp32(mask[c]);
        open |= row[c] != -INFINITY;
    }
    return open != 0;
}

bool row_of_floats(const float * mask, const int32_t * cell_pos, int32_t pos, int32_t n_sink, int32_t n_recent,
                   float * row) {
    int32_t open = 0;
    for (int64_t c = 0; c < TILE; ++c) {
        row[c] = is_exact(cell_pos[c], pos, n_sink, n_recent) ? -INFINITY : mask[c];
        open |= row[c] != -INFINITY;
    }
    return open != 0;
}

//
// mask: dst F32 [n_kv and n_kv / TILE bytes, n_tokens * masks] | MaskSources
//

void mask_op(ggml_tensor * dst, int ith, int nth, const LayerNodes & layer) {
    const auto     in       = sources_of<MaskSources>(dst);
    const int64_t  n_kv     = in.cell_pos->ne[0];
    const int64_t  n_tiles  = n_kv / TILE;
    const MaskRows out      = mask_rows(dst, n_kv);
    const int64_t  n_tokens = in.tokens->ne[1];
    for (int64_t row = 0; row < dst->ne[1]; ++row) {
        const int64_t first = n_tiles * ith / nth;
        const int64_t last  = n_tiles * (ith + 1) / nth;
        fill_mask_row(layer, in, row / n_tokens, row % n_tokens, first * TILE, (last - first) * TILE,
                      out.bias + row * out.bias_stride + first * TILE, out.open + row * out.open_stride + first);
    }
}

//
// selected mask: dst F32 or F16 as the mask | SelectedMaskSources
//

template <typename T> void hide_others(ggml_tensor * dst, int ith, int nth, T hidden) {
    const auto          in       = sources_of<SelectedMaskSources>(dst);
    const ggml_tensor * mask     = in.mask;
    const ggml_tensor * selected = in.selected;
    const int64_t       n_kv     = dst->ne[0];
    const int64_t       first    = n_kv * ith / nth;
    const int64_t       last     = n_kv * (ith + 1) / nth;
    for (int64_t s = 0; s < dst->ne[3]; ++s) {
        for (int64_t t = 0; t < dst->ne[1]; ++t) {
            const auto * cells =
                (const int32_t *) ((const char *) selected->data + t * selected->nb[1] + s * selected->nb[3]);
            const auto * row = (const T *) ((const char *) mask->data + t * mask->nb[1] + s * mask->nb[3]);
            auto *       out = (T *) ((char *) dst->data + t * dst->nb[1] + s * dst->nb[3]);
            std::fill(out + first, out + last, hidden);
            for (int64_t i = 0; i < selected->ne[0]; ++i) {
                if (cells[i] >= first && cells[i] < last) {
                    out[cells[i]] = row[cells[i]];
                }
            }
        }
    }
}

void selected_mask_op(ggml_tensor * dst, int ith, int nth, const LayerNodes & /*layer*/) {
    if (dst->type == GGML_TYPE_F32) {
        hide_others<float>(dst, ith, nth, -INFINITY);
    } else {
        hide_others<ggml_fp16_t>(dst, ith, nth, 0xFC00);
    }
}

//
// selected cells: dst I32, format as in build_selected_cells | SelectedCellsSources
//

void selected_cells_op(ggml_tensor * dst, int ith, int nth, const LayerNodes & layer) {
    const auto          in       = sources_of<SelectedCellsSources>(dst);
    const ggml_tensor * selected = in.selected;
    const TokenRow *    tokens   = token_rows(in.tokens);
    const int64_t       n_kv     = in.mask->ne[0];
    const int64_t       n_tps    = dst->ne[1];
    const int32_t       n_sink   = layer.window->n_sink();
    const int32_t       n_recent = layer.window->n_recent();

    static thread_local std::vector<uint64_t> marks_buf;
    const int64_t                             n_words = (n_kv + 63) / 64;
    for (int64_t t = ith; t < n_tps * dst->ne[3]; t += nth) {
        const auto * from = (const int32_t *) ((const char *) selected->data + t % n_tps * selected->nb[1] +
                                               t / n_tps * selected->nb[3]);
        const auto * pos  = (const int32_t *) in.cell_pos->data + t / n_tps * n_kv;
        auto *       out  = (int32_t *) dst->data + t * dst->ne[0];
        const auto   row  = mask_row(in.mask, 0, t);
        uint64_t *   mark = scratch(marks_buf, n_words);
        std::fill(mark, mark + n_words, (uint64_t) 0);
        for (int64_t i = 0; i < selected->ne[0]; ++i) {
            const int32_t c = from[i];
            if (c >= 0 && c < n_kv && !is_exact(pos[c], tokens[t].pos, n_sink, n_recent) &&
                mask_value(in.mask, row + c) != -INFINITY) {
                mark[c / 64] |= (uint64_t) 1 << c % 64;
            }
        }
        int64_t n = 0;
        for (int64_t w = 0; w < n_words; ++w) {
            for (uint64_t rest = mark[w]; rest != 0; rest &= rest - 1) {
                out[n++] = (int32_t) (64 * w + __builtin_ctzll(rest));
            }
        }
        std::fill(out + n, out + dst->ne[0], -1);
    }
}

} // namespace

ggml_tensor * build_selected_mask(LayerNodes & layer, const AttnBuild & b) {
    if (!b.selected) {
        return b.mask;
    }
    if (b.inputs->selected != b.selected) {
        const auto & ne          = b.mask->ne;
        b.inputs->selected       = b.selected;
        b.inputs->selected_cells = nullptr;
        b.inputs->selected_mask =
            new_node(b.ctx, b.mask->type, { ne[0], ne[1], ne[2], ne[3] }, SelectedMaskSources{ b.mask, b.selected },
                     NodeWork::on_cpu<selected_mask_op>(layer));
        ggml_set_name(b.inputs->selected_mask, "subkv_selected_mask");
    }
    return b.inputs->selected_mask;
}

// The cost of a cell in a list, in eighths of its cost when all cells are read, as measured (kernels/NOTES.md). A prompt's
// tokens unpack a tile once for all of them, so a list costs them more, the less, the more query heads share a row. With
// tiles the cost is mostly memory traffic.
constexpr int64_t ALL_CELLS       = 8;
constexpr int64_t ROW_IN_LIST     = 9;
constexpr int64_t PROMPT_IN_LIST  = 160; // more, divided by the query heads of a row
constexpr int64_t TILE_IN_LIST    = 16;
constexpr int64_t GATHER_IN_LIST  = 2000; // more, divided likewise
constexpr int64_t LEAST_IN_PROMPT = 64;   // query heads of a row for which a list can pay in a prompt

ggml_tensor * build_selected_cells(LayerNodes & layer, const AttnBuild & b, ggml_tensor * mask) {
    if (!b.selected || !layer.gathers || n_masks(mask) > 1) {
        return nullptr;
    }
    const int64_t n_tokens = b.inputs->tokens->ne[1];
    const int64_t n_group  = layer.n_head / layer.codec->n_head_kv;
    const bool    prompt   = n_tokens > FEW_TOKENS;
    const int64_t cost =
        layer.by_rows ? ROW_IN_LIST + (prompt ? PROMPT_IN_LIST / n_group : 0) : TILE_IN_LIST + GATHER_IN_LIST / n_group;
    const int64_t n = (b.selected->ne[0] + TILE - 1) / TILE * TILE;
    if (cost * n > ALL_CELLS * mask->ne[0] || (prompt && n_group < LEAST_IN_PROMPT)) {
        return nullptr;
    }
    if (!b.inputs->selected_cells) {
        const SelectedCellsSources in = { mask, b.selected, b.inputs->cell_pos, b.inputs->tokens };
        b.inputs->selected_cells      = new_node(b.ctx, GGML_TYPE_I32, { n, mask->ne[1], 1, mask->ne[3] }, in,
                                                 NodeWork::on_cpu<selected_cells_op>(layer));
        ggml_set_name(b.inputs->selected_cells, "subkv_selected_cells");
    }
    return b.inputs->selected_cells;
}

void fill_mask_row(const LayerNodes & layer, const MaskSources & in, int64_t h, int64_t t, int64_t c0, int64_t n,
                   float * bias, uint8_t * open) {
    const int64_t   n_kv     = in.cell_pos->ne[0];
    const int64_t   n_tps    = in.tokens->ne[1] / in.cell_pos->ne[1];
    const int32_t * cell_pos = (const int32_t *) in.cell_pos->data + t / n_tps * n_kv + c0;
    const int32_t   pos      = token_rows(in.tokens)[t].pos;
    const int32_t   n_sink   = layer.window->n_sink();
    const int32_t   n_recent = layer.window->n_recent();
    for (int64_t c = 0; c < n; c += TILE) {
        const int64_t at = mask_row(in.mask, h, t) + c0 + c;
        open[c / TILE] =
            in.mask->type == GGML_TYPE_F32 ?
                row_of_floats((const float *) in.mask->data + at, cell_pos + c, pos, n_sink, n_recent, bias + c) :
                row_of_halves((const ggml_fp16_t *) in.mask->data + at, cell_pos + c, pos, n_sink, n_recent, bias + c);
    }
}

MaskRows mask_rows(const ggml_tensor * node, int64_t n_kv) {
    MaskRows rows;
    rows.bias        = (float *) node->data;
    rows.bias_stride = stride_f32(node, 1);
    rows.open        = (uint8_t *) (rows.bias + n_kv);
    rows.open_stride = (int64_t) node->nb[1];
    return rows;
}

ggml_tensor * build_mask_node(LayerNodes & layer, const AttnBuild & b, ggml_tensor * mask) {
    const int64_t n_tokens = b.inputs->tokens->ne[1];
    if (layer.device || n_tokens * n_masks(mask) > FEW_TOKENS) {
        return nullptr;
    }
    ggml_tensor *& node = b.inputs->coded_mask;
    if (!node || sources_of<MaskSources>(node).mask != mask) {
        const int64_t     n_kv = b.inputs->cell_pos->ne[0];
        const MaskSources in   = { mask, b.inputs->cell_pos, b.inputs->tokens };
        node = new_node(b.ctx, GGML_TYPE_F32, { n_kv + (n_kv / TILE + 3) / 4, n_tokens * n_masks(mask), 1, 1 }, in,
                        NodeWork::on_cpu<mask_op>(layer));
        ggml_set_name(node, "subkv_mask");
    }
    return node;
}

} // namespace subkv
