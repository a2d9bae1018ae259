// gpu_tables.h: a coded layer's tables in the memory of a GPU.
#pragma once

#include "error.h"
#include "nodes.h"

#include <algorithm>

namespace subkv {

// `Gpu` has the kernels' argument types, whose members have the same names for both kinds of GPU. Gpu::Device
// identifies a device, place(t) is a tensor's data, and behind(place, bytes) is a place behind it. complete(attend,
// window, rest) sets the members that only one kind has, where `rest` follows the scratch. DEFERS_CODES says that it
// has store_and_attend.
template <typename Gpu> class GpuTables : public DeviceLayer {
public:
    using Encode  = typename Gpu::Encode;
    using Store   = typename Gpu::Store;
    using Prompt  = typename Gpu::Prompt;
    using Combine = decltype(Prompt::c);
    using Attend  = decltype(Combine::a);
    using Layer   = decltype(Attend::layer);

    virtual Layer args(int64_t width_v) const = 0;

    const LayerNodes & nodes() const { return layer_; }
    const LayerCodec & codec() const { return *layer_.codec; }
    const Window &     window() const { return *layer_.window; }
    int32_t            width_k() const { return width_k_; }
    int32_t            width_v() const { return width_v_; }
    int32_t            slots_of_seq() const { return (int32_t) (window().n_slots() / std::max(1, window().n_seq())); }

    void prepare() override { store_slopes(layer_, memory_, slopes_at_, max_alibi_bias_); }

protected:
    explicit GpuTables(const LayerNodes & layer) : layer_(layer) {
        for (int64_t h = 0; h < layer.codec->n_head_kv; ++h) {
            width_k_ = std::max(width_k_, layer.codec->head(h, false).rank);
            width_v_ = std::max(width_v_, layer.codec->head(h, true).rank);
        }
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

    const LayerNodes & layer_;
    int32_t            width_k_ = 0, width_v_ = 0; // largest ranks
    size_t             slopes_at_ = 0;             // bytes
    ggml_tensor *      memory_    = nullptr;       // I8 [bytes]: the tables

private:
    float                   max_alibi_bias_ = -1.0f; // of the slopes on the device
    ggml_context_ptr        ctx_;
    ggml_backend_buffer_ptr buffer_;
};

} // namespace subkv
