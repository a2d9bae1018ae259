// gpu_arguments.h: the nodes of a layer on a GPU as arguments of the kernels that encode, store and attend.
#pragma once

#include "gpu_tables.h"

namespace subkv {

template <typename Gpu, typename Attend> void set_cells(Attend & a, const ggml_tensor * k_view,
                                                        const ggml_tensor * v_view) {
    a.k_tiles  = Gpu::place(k_view);
    a.v_tiles  = Gpu::place(v_view);
    a.k_stride = TILE * (int64_t) k_view->nb[1];
    a.v_stride = TILE * (int64_t) v_view->nb[1];
    a.k_stream = (int64_t) k_view->nb[2];
    a.v_stream = (int64_t) v_view->nb[2];
}

template <typename Gpu, typename Attend> void set_mask(Attend & a, const ggml_tensor * mask) {
    a.mask      = Gpu::place(mask);
    a.mask_half = mask->type == GGML_TYPE_F16;
}

// Sets the source rows of Encode or StoreRows.
template <typename Gpu, typename Rows> void set_rows(Rows & r, const ggml_tensor * k, const ggml_tensor * v) {
    r.k       = Gpu::place(k);
    r.v       = Gpu::place(v);
    r.k_head  = stride_f32(k, 1);
    r.k_token = stride_f32(k, 2);
    r.v_head  = stride_f32(v, 1);
    r.v_token = stride_f32(v, 2);
}

// Without rows and cells.
template <typename Gpu> auto encode_to(const GpuTables<Gpu> & layer, const ggml_tensor * k_cache,
                                       const ggml_tensor * v_cache) {
    typename GpuTables<Gpu>::Encode e = {};
    e.layer                           = layer.args(0);
    e.k_tiles                         = Gpu::place(k_cache);
    e.v_tiles                         = Gpu::place(v_cache);
    e.k_stride                        = TILE * (int64_t) k_cache->nb[1];
    e.v_stride                        = TILE * (int64_t) v_cache->nb[1];
    return e;
}

template <typename Gpu> auto encode_args(const GpuTables<Gpu> & layer, const ggml_tensor * dst) {
    const auto                      in = sources_of<EncodeSources>(dst);
    typename GpuTables<Gpu>::Encode e  = encode_to(layer, in.k_cache, in.v_cache);
    set_rows<Gpu>(e, in.k, in.v);
    e.cells = Gpu::place(in.k_idxs);
    e.n_tok = in.k->ne[2];
    e.fresh = Gpu::place(dst);
    return e;
}

// Queries, and m, z, acc and scratch of attend's result.
template <typename Gpu> auto partial_args(const GpuTables<Gpu> & layer, const ggml_tensor * q,
                                          const ggml_tensor * cells, const ggml_tensor * result) {
    const AttendShape s     = attend_shape(layer.nodes(), q, cells);
    const auto        after = [](auto place, int64_t n_floats) {
        return Gpu::behind(place, n_floats * (int64_t) sizeof(float));
    };
    typename GpuTables<Gpu>::Attend a = {};
    a.layer                           = layer.args(s.width);
    a.q                               = Gpu::place(q);
    a.q_head                          = stride_f32(q, 1);
    a.q_token                         = stride_f32(q, 2);
    a.n_kv                            = s.n_kv;
    a.n_stream                        = s.n_stream;
    a.n_tps                           = s.n_tps;
    a.split                           = s.split;
    a.n_split                         = s.n_split;
    a.m                               = Gpu::place(result);
    a.z                               = after(a.m, s.n_rows);
    a.acc                             = after(a.z, s.n_rows);
    a.qt                              = after(a.acc, s.n_rows * s.width);
    a.shift                           = after(a.qt, s.n_rows / s.n_split * layer.width_k());
    Gpu::complete(a, layer.window(), after(a.shift, s.n_rows / s.n_split));
    return a;
}

// The arguments of a node that attends. `Sources` are those of the node.
template <typename Sources, typename Gpu> auto attend_args(const GpuTables<Gpu> & layer, const ggml_tensor * dst) {
    const auto                      in = sources_of<Sources>(dst);
    typename GpuTables<Gpu>::Attend a  = partial_args(layer, in.q, in.k_view, dst);
    set_cells<Gpu>(a, in.k_view, in.v_view);
    set_mask<Gpu>(a, in.mask);
    a.cell_pos = Gpu::place(in.cell_pos);
    a.tokens   = Gpu::place(in.tokens);
    return a;
}

template <typename Gpu> auto rows_to_store(const GpuTables<Gpu> & layer, const ggml_tensor * dst) {
    const auto in = sources_of<StoreAttendSources>(dst);

    typename Gpu::StoreRows r = {};
    set_rows<Gpu>(r, in.k, in.v);
    r.k_tiles = Gpu::place(in.k_view);
    r.v_tiles = Gpu::place(in.v_view);
    r.fresh   = Gpu::place(dst);
    r.fresh   = Gpu::behind(r.fresh, (int64_t) fresh_at(attend_shape(layer.nodes(), in.q, in.k_view)));
    r.window  = Gpu::place(layer.nodes().window_rows().tensor);
    r.slots   = Gpu::place(in.slots);
    r.n_slots = in.slots->ne[1];
    return r;
}

// What attention to coded cells and exact keys needs, of STORE_AND_ATTEND.
template <typename Gpu, typename Rows>
auto store_attend_args(const GpuTables<Gpu> & layer, const ggml_tensor * dst, const Rows & rows) {
    typename GpuTables<Gpu>::Combine b = {};
    b.a                                = attend_args<StoreAttendSources>(layer, dst);
    b.fresh                            = rows.fresh;
    b.window                           = rows.window;
    b.slots                            = rows.slots;
    b.slots_of_seq                     = layer.slots_of_seq();
    return b;
}

template <typename Gpu> auto combine_args(const GpuTables<Gpu> & layer, const ggml_tensor * dst) {
    const auto                       in = sources_of<CombineSources>(dst);
    typename GpuTables<Gpu>::Combine b  = {};
    b.a                                 = partial_args(layer, in.q, in.cells, in.partial);
    set_mask<Gpu>(b.a, in.mask);
    b.a.tokens     = Gpu::place(in.tokens);
    b.fresh        = Gpu::place(in.fresh);
    b.window       = Gpu::place(in.window);
    b.slots        = Gpu::place(in.slots);
    b.slots_of_seq = layer.slots_of_seq();
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

template <typename Gpu> typename Gpu::Store store_args(const ggml_tensor * dst) {
    const auto          in = sources_of<StoreWindowSources>(dst);
    typename Gpu::Store s  = {};
    s.window               = Gpu::place(dst);
    s.fresh                = Gpu::place(in.fresh);
    s.slots                = Gpu::place(in.slots);
    s.n_slots              = in.slots->ne[1];
    s.width                = dst->ne[0];
    return s;
}

} // namespace subkv
