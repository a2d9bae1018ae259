// device_gpu.h: a coded layer on a GPU, whose nodes call kernels/cuda or kernels/vulkan. Nodes have the same sources as
// on the CPU (node_sources.h), except that attend projects the queries and reads the mask, and that one node may store
// rows and attend. Only the upload of the tables and `wait` wait for the device.
#pragma once

#include "gpu_prompt.h"

#include <iterator>

namespace subkv {

template <typename Gpu> class GpuLayer : public GpuTables<Gpu> {
public:
    struct Node {
        NodeKind         kind;
        const GpuLayer * layer;
    };

    GpuLayer(const LayerNodes & layer, typename Gpu::Device device) : GpuTables<Gpu>(layer), device_(device) {
        for (size_t kind = 0; kind < std::size(nodes_); ++kind) {
            nodes_[kind] = { (NodeKind) kind, this };
        }
    }

    void *               userdata(NodeKind kind) override { return &nodes_[(size_t) kind]; }
    typename Gpu::Device device() const { return device_; }

    // Calls the node's kernels with its arguments and `to`.
    template <typename... To> const char * compute(NodeKind kind, ggml_tensor * dst, To... to) const {
        switch (kind) {
            case NodeKind::ENCODE: return encode(encode_args(*this, dst), to...);
            case NodeKind::ATTEND: return attend(attend_args<AttendSources>(*this, dst), to...);
            case NodeKind::STORE_AND_ATTEND:
                if constexpr (Gpu::DEFERS_CODES) {
                    const auto rows = rows_to_store(*this, dst);
                    return store_and_attend(rows, store_attend_args(*this, dst, rows), to...);
                }
                break;
            case NodeKind::COMBINE: return combine(combine_args(*this, dst), to...);
            case NodeKind::STORE_WINDOW: return store_window(store_args<Gpu>(dst), to...);
            case NodeKind::PROMPT_ROWS: return prompt_rows(rows_args(*this, dst), to...);
            case NodeKind::PROMPT_MASK: return prompt_mask(mask_args(*this, dst), to...);
            case NodeKind::PROMPT_LOST: return prompt_lost(lost_args(*this, dst), to...);
        }
        return "unknown node";
    }

private:
    typename Gpu::Device device_;
    Node                 nodes_[N_NODE_KINDS];
};

} // namespace subkv
