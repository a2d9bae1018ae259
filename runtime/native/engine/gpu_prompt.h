// gpu_prompt.h: the nodes of a prompt on a GPU as arguments of its kernels.
#pragma once

#include "gpu_arguments.h"

namespace subkv {

// Members that rows and mask of a prompt have in common.
template <typename Gpu> auto prompt_args(const GpuTables<Gpu> & layer, const ggml_tensor * dst,
                                         const ggml_tensor * tokens, const ggml_tensor * slots) {
    typename GpuTables<Gpu>::Prompt p = {};
    auto &                          a = p.c.a;
    a.layer                           = layer.args(layer.width_v());
    a.tokens                          = Gpu::place(tokens);
    a.n_stream                        = dst->ne[3];
    a.n_tps                           = tokens->ne[1] / a.n_stream;
    p.c.slots                         = Gpu::place(slots);
    p.c.slots_of_seq                  = layer.slots_of_seq();
    p.n_slots                         = a.n_stream > 1 ? p.c.slots_of_seq : layer.window().n_slots();
    Gpu::complete(a, layer.window(), {});
    return p;
}

template <typename Gpu> auto rows_args(const GpuTables<Gpu> & layer, const ggml_tensor * dst) {
    const auto                      in = sources_of<PromptRowsSources>(dst);
    typename GpuTables<Gpu>::Prompt p  = prompt_args(layer, dst, in.tokens, in.slots);
    set_cells<Gpu>(p.c.a, in.k_view, in.v_view);
    p.c.a.n_kv = in.k_view->ne[1];
    p.c.fresh  = Gpu::place(in.fresh);
    p.c.window = Gpu::place(in.window);
    p.n_rows   = dst->ne[1];
    p.first    = first_head(dst);
    p.n_heads  = (int32_t) dst->ne[2];
    p.k        = Gpu::place(dst);
    p.v = Gpu::behind(p.k, p.n_rows * p.n_heads * p.c.a.n_stream * layer.codec().d_k * (int64_t) sizeof(ggml_fp16_t));
    return p;
}

template <typename Gpu> auto mask_args(const GpuTables<Gpu> & layer, const ggml_tensor * dst) {
    const auto                      in = sources_of<PromptMaskSources>(dst);
    typename GpuTables<Gpu>::Prompt p  = prompt_args(layer, dst, in.tokens, in.slots);
    set_mask<Gpu>(p.c.a, in.mask);
    p.c.a.cell_pos = Gpu::place(in.cell_pos);
    p.c.a.n_kv     = in.cell_pos->ne[0];
    p.n_rows       = dst->ne[0];
    p.mask         = Gpu::place(dst);
    return p;
}

template <typename Gpu> auto lost_args(const GpuTables<Gpu> & layer, const ggml_tensor * dst) {
    const auto                      in = sources_of<PromptLostSources>(dst);
    typename GpuTables<Gpu>::Prompt p  = prompt_args(layer, dst, in.tokens, in.slots);
    set_cells<Gpu>(p.c.a, in.k_view, in.v_view);
    set_mask<Gpu>(p.c.a, in.mask);
    p.c.a.cell_pos = Gpu::place(in.cell_pos);
    p.c.a.n_kv     = in.cell_pos->ne[0];
    p.c.fresh      = Gpu::place(in.fresh);
    p.c.window     = Gpu::place(in.window);
    p.c.out        = Gpu::place(dst);
    p.c.out_stride = stride_f32(dst, 2);
    p.first        = first_head(dst);
    p.n_heads      = (int32_t) (dst->ne[1] / (layer.nodes().n_head / layer.codec().n_head_kv));
    return p;
}

} // namespace subkv
