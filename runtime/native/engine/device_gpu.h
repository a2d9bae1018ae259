// device_gpu.h: a coded layer on a GPU: its tables in device memory, and its nodes as arguments of kernels/cuda or
// kernels/vulkan. Nodes have the same sources as on the CPU (node_sources.h), except that attend projects the queries
// and reads the mask, and that one node may store rows and attend. Only the upload of the tables and `wait` wait for the
// device.
#pragma once

#include "error.h"
#include "nodes.h"

#include <algorithm>
#include <iterator>

namespace subkv {

// Gpu: the kernels' argument types, whose members have the same names for both kinds; Device: identifies a device;
// place(t): a tensor's data; behind(place, bytes); complete(attend, window, rest): members of one kind only, `rest`
// follows the scratch; DEFERS_CODES: it has store_and_attend.
template <typename Gpu> class GpuLayer : public DeviceLayer {
public:
    struct Node {
        NodeKind         kind;
        const GpuLayer * layer;
    };

    GpuLayer(const LayerNodes & layer, typename Gpu::Device device) : layer_(layer), device_(device) {
        for (size_t kind = 0; kind < std::size(nodes_); ++kind) {
            nodes_[kind] = { (NodeKind) kind, this };
        }
        for (int64_t h = 0; h < layer.codec->n_head_kv; ++h) {
            width_k_ = std::max(width_k_, layer.codec->head(h, false).rank);
            width_v_ = std::max(width_v_, layer.codec->head(h, true).rank);
        }
    }

    void                 prepare() override { store_slopes(layer_, memory_, slopes_at_, max_alibi_bias_); }
    void *               userdata(NodeKind kind) override { return &nodes_[(size_t) kind]; }
    typename Gpu::Device device() const { return device_; }

    // Calls the node's kernels with its arguments and `to`.
    template <typename... To> const char * compute(NodeKind kind, ggml_tensor * dst, To... to) const {
        switch (kind) {
            case NodeKind::ENCODE: return encode(encode_args(dst), to...);
            case NodeKind::ATTEND: return attend(attend_args<AttendSources>(dst), to...);
            case NodeKind::STORE_AND_ATTEND:
                if constexpr (Gpu::DEFERS_CODES) {
                    const auto rows = rows_to_store(dst);
                    return store_and_attend(rows, store_attend_args(dst, rows), to...);
                }
                break;
            case NodeKind::COMBINE: return combine(combine_args(dst), to...);
            case NodeKind::STORE_WINDOW: return store_window(store_args(dst), to...);
            case NodeKind::PROMPT_ROWS: return prompt_rows(rows_args(dst), to...);
            case NodeKind::PROMPT_MASK: return prompt_mask(mask_args(dst), to...);
            case NodeKind::PROMPT_LOST: return prompt_lost(lost_args(dst), to...);
        }
        return "unknown node";
    }

protected:
    using Encode  = typename Gpu::Encode;
    using Store   = typename Gpu::Store;
    using Prompt  = typename Gpu::Prompt;
    using Combine = decltype(Prompt::c);
    using Attend  = decltype(Combine::a);
    using Layer   = decltype(Attend::layer);

    virtual Layer args(int64_t width_v) const = 0;

    // Without rows and cells.
    Encode encode_to(const ggml_tensor * k_cache, const ggml_tensor * v_cache) const {
        Encode e   = {};
        e.layer    = args(0);
        e.k_tiles  = Gpu::place(k_cache);
        e.v_tiles  = Gpu::place(v_cache);
        e.k_stride = TILE * (int64_t) k_cache->nb[1];
        e.v_stride = TILE * (int64_t) v_cache->nb[1];
        return e;
    }

    void allocate(size_t n_bytes, ggml_backend_buffer_type_t buft) {
        ctx_.reset(ggml_init({ 2 * ggml_tensor_overhead(), nullptr, true }));
        memory_ = ggml_new_tensor_1d(ctx_.get(), GGML_TYPE_I8, (int64_t) n_bytes);
        ggml_format_name(memory_, "subkv_bases_l%d", layer_.codec->il);
        buffer_.reset(ggml_backend_alloc_ctx_tensors_from_buft(ctx_.get(), buft));
        if (!buffer_) {
            fail({ SUBKV_ERROR_MEMORY, "layer " + std::to_string(layer_.codec->il),
                   sentence("its bases, %zu bytes, do not fit on %s", n_bytes, ggml_backend_buft_name(buft)) });
        }
    }

    int32_t slots_of_seq() const { return (int32_t) (layer_.window->n_slots() / std::max(1, layer_.window->n_seq())); }

    const LayerNodes & layer_;
    int32_t            width_k_ = 0, width_v_ = 0; // largest ranks
    size_t             slopes_at_ = 0;             // bytes
    ggml_tensor *      memory_    = nullptr;       // I8 [bytes]: the tables

private:
    static void set_cells(Attend & a, const ggml_tensor * k_view, const ggml_tensor * v_view) {
        a.k_tiles  = Gpu::place(k_view);
        a.v_tiles  = Gpu::place(v_view);
        a.k_stride = TILE * (int64_t) k_view->nb[1];
        a.v_stride = TILE * (int64_t) v_view->nb[1];
        a.k_stream = (int64_t) k_view->nb[2];
        a.v_stream = (int64_t) v_view->nb[2];
    }

    static void set_mask(Attend & a, const ggml_tensor * mask) {
        a.mask      = Gpu::place(mask);
        a.mask_half = mask->type == GGML_TYPE_F16;
    }

    // Source rows; Rows: Encode or StoreRows.
    template <typename Rows> static void set_rows(Rows & r, const ggml_tensor * k, const ggml_tensor * v) {
        r.k       = Gpu::place(k);
        r.v       = Gpu::place(v);
        r.k_head  = stride_f32(k, 1);
        r.k_token = stride_f32(k, 2);
        r.v_head  = stride_f32(v, 1);
        r.v_token = stride_f32(v, 2);
    }

    Encode encode_args(const ggml_tensor * dst) const {
        const auto in = sources_of<EncodeSources>(dst);
        Encode     e  = encode_to(in.k_cache, in.v_cache);
        set_rows(e, in.k, in.v);
        e.cells = Gpu::place(in.k_idxs);
        e.n_tok = in.k->ne[2];
        e.fresh = Gpu::place(dst);
        return e;
    }

    // Queries, and m, z, acc and scratch of attend's result.
    Attend partial(const ggml_tensor * q, const ggml_tensor * cells, const ggml_tensor * result) const {
        const AttendShape s     = attend_shape(layer_, q, cells);
        const auto        after = [](auto place, int64_t n_floats) {
            return Gpu::behind(place, n_floats * (int64_t) sizeof(float));
        };
        Attend a   = {};
        a.layer    = args(s.width);
        a.q        = Gpu::place(q);
        a.q_head   = stride_f32(q, 1);
        a.q_token  = stride_f32(q, 2);
        a.n_kv     = s.n_kv;
        a.n_stream = s.n_stream;
        a.n_tps    = s.n_tps;
        a.split    = s.split;
        a.n_split  = s.n_split;
        a.m        = Gpu::place(result);
        a.z        = after(a.m, s.n_rows);
        a.acc      = after(a.z, s.n_rows);
        a.qt       = after(a.acc, s.n_rows * s.width);
        a.shift    = after(a.qt, s.n_rows / s.n_split * width_k_);
        Gpu::complete(a, *layer_.window, after(a.shift, s.n_rows / s.n_split));
        return a;
    }

    // Sources: of a node that attends.
    template <typename Sources> Attend attend_args(const ggml_tensor * dst) const {
        const auto in = sources_of<Sources>(dst);
        Attend     a  = partial(in.q, in.k_view, dst);
        set_cells(a, in.k_view, in.v_view);
        set_mask(a, in.mask);
        a.cell_pos = Gpu::place(in.cell_pos);
        a.tokens   = Gpu::place(in.tokens);
        return a;
    }

    auto rows_to_store(const ggml_tensor * dst) const {
        const auto in = sources_of<StoreAttendSources>(dst);

        typename Gpu::StoreRows r = {};
        set_rows(r, in.k, in.v);
        r.k_tiles = Gpu::place(in.k_view);
        r.v_tiles = Gpu::place(in.v_view);
        r.fresh   = Gpu::place(dst);
        r.fresh   = Gpu::behind(r.fresh, (int64_t) fresh_at(attend_shape(layer_, in.q, in.k_view)));
        r.window  = Gpu::place(layer_.window_rows().tensor);
        r.slots   = Gpu::place(in.slots);
        r.n_slots = in.slots->ne[1];
        return r;
    }

    // What attention to coded cells and exact keys needs, of STORE_AND_ATTEND.
    template <typename Rows> Combine store_attend_args(const ggml_tensor * dst, const Rows & rows) const {
        Combine b      = {};
        b.a            = attend_args<StoreAttendSources>(dst);
        b.fresh        = rows.fresh;
        b.window       = rows.window;
        b.slots        = rows.slots;
        b.slots_of_seq = slots_of_seq();
        return b;
    }

    Combine combine_args(const ggml_tensor * dst) const {
        const auto in = sources_of<CombineSources>(dst);
        Combine    b  = {};
        b.a           = partial(in.q, in.cells, in.partial);
        set_mask(b.a, in.mask);
        b.a.tokens     = Gpu::place(in.tokens);
        b.fresh        = Gpu::place(in.fresh);
        b.window       = Gpu::place(in.window);
        b.slots        = Gpu::place(in.slots);
        b.slots_of_seq = slots_of_seq();
        b.out          = Gpu::place(dst);
        b.out_stride   = stride_f32(dst, 1);
        if constexpr (Gpu::DEFERS_CODES) {
            b.has_exact = in.partial->type == GGML_TYPE_I8; // of STORE_AND_ATTEND
        }
        if (in.sinks) {
            b.sinks = Gpu::place(in.sinks);
        }
        return b;
    }

    Store store_args(const ggml_tensor * dst) const {
        const auto in = sources_of<StoreWindowSources>(dst);
        Store      s  = {};
        s.window      = Gpu::place(dst);
        s.fresh       = Gpu::place(in.fresh);
        s.slots       = Gpu::place(in.slots);
        s.n_slots     = in.slots->ne[1];
        s.width       = dst->ne[0];
        return s;
    }

    // Members that rows and mask of a prompt have in common.
    Prompt prompt_args(const ggml_tensor * dst, const ggml_tensor * tokens, const ggml_tensor * slots) const {
        Prompt   p       = {};
        Attend & a       = p.c.a;
        a.layer          = args(width_v_);
        a.tokens         = Gpu::place(tokens);
        a.n_stream       = dst->ne[3];
        a.n_tps          = tokens->ne[1] / a.n_stream;
        p.c.slots        = Gpu::place(slots);
        p.c.slots_of_seq = slots_of_seq();
        p.n_slots        = a.n_stream > 1 ? p.c.slots_of_seq : layer_.window->n_slots();
        Gpu::complete(a, *layer_.window, {});
        return p;
    }

    Prompt rows_args(const ggml_tensor * dst) const {
        const auto in = sources_of<PromptRowsSources>(dst);
        Prompt     p  = prompt_args(dst, in.tokens, in.slots);
        set_cells(p.c.a, in.k_view, in.v_view);
        p.c.a.n_kv = in.k_view->ne[1];
        p.c.fresh  = Gpu::place(in.fresh);
        p.c.window = Gpu::place(in.window);
        p.n_rows   = dst->ne[1];
        p.first    = first_head(dst);
        p.n_heads  = (int32_t) dst->ne[2];
        p.k        = Gpu::place(dst);
        p.v =
            Gpu::behind(p.k, p.n_rows * p.n_heads * p.c.a.n_stream * layer_.codec->d_k * (int64_t) sizeof(ggml_fp16_t));
        return p;
    }

    Prompt mask_args(const ggml_tensor * dst) const {
        const auto in = sources_of<PromptMaskSources>(dst);
        Prompt     p  = prompt_args(dst, in.tokens, in.slots);
        set_mask(p.c.a, in.mask);
        p.c.a.cell_pos = Gpu::place(in.cell_pos);
        p.c.a.n_kv     = in.cell_pos->ne[0];
        p.n_rows       = dst->ne[0];
        p.mask         = Gpu::place(dst);
        return p;
    }

    Prompt lost_args(const ggml_tensor * dst) const {
        const auto in = sources_of<PromptLostSources>(dst);
        Prompt     p  = prompt_args(dst, in.tokens, in.slots);
        set_cells(p.c.a, in.k_view, in.v_view);
        set_mask(p.c.a, in.mask);
        p.c.a.cell_pos = Gpu::place(in.cell_pos);
        p.c.a.n_kv     = in.cell_pos->ne[0];
        p.c.fresh      = Gpu::place(in.fresh);
        p.c.window     = Gpu::place(in.window);
        p.c.out        = Gpu::place(dst);
        p.c.out_stride = stride_f32(dst, 2);
        p.first        = first_head(dst);
        p.n_heads      = (int32_t) (dst->ne[1] / (layer_.n_head / layer_.codec->n_head_kv));
        return p;
    }

    typename Gpu::Device    device_;
    Node                    nodes_[N_NODE_KINDS];
    float                   max_alibi_bias_ = -1.0f; // of the slopes on the device
    ggml_context_ptr        ctx_;
    ggml_backend_buffer_ptr buffer_;
};

} // namespace subkv
