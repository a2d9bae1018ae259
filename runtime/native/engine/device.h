// device.h: coded layers with a cache on a GPU. Implemented by runtime/native/cuda with -DGGML_CUDA=ON, by
// runtime/native/vulkan with -DGGML_VULKAN=ON, else by device_none.cpp.
#pragma once

#include "ggml-backend.h"
#include "ggml.h"
#include "subkv/splits.h"
#include "uncoded.h"

#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

namespace subkv {

struct LayerNodes;

enum class NodeKind {
    ENCODE,
    ATTEND,
    STORE_AND_ATTEND,
    COMBINE,
    STORE_WINDOW,
    PROMPT_ROWS,
    PROMPT_MASK,
    PROMPT_LOST,
};
constexpr int N_NODE_KINDS = (int) NodeKind::PROMPT_LOST + 1;

// Data in device memory that the nodes of one layer read besides tensors. Addresses are stable.
class DeviceLayer {
public:
    virtual ~DeviceLayer() = default;

    // Called when a graph is built, because slopes depend on fields of LayerNodes that are set then.
    virtual void     prepare()                = 0;
    virtual void *   userdata(NodeKind kind)  = 0; // of device_op
    virtual uint64_t n_bad_rows() const       = 0; // that could not be coded
    virtual void     add_bad_rows(uint64_t n) = 0; // which the host has stored
    virtual void     wait() const             = 0; // until the device has finished the context's work
    virtual size_t   max_range() const        = 0; // maximum bytes of one tensor that kernels can address
    virtual bool     makes_rows() const       = 0; // it has kernels for PROMPT_*
    // How the blocks of attend work, for splits of the cells.
    virtual BlockSteps block_steps() const = 0;
    // Floats that attend needs for n_rows query rows of all heads, n_tps tokens per stream.
    virtual int64_t scratch(int64_t n_rows, int64_t n_tps) const = 0;

    // Most tokens of a sequence whose attention has blocks for each token, and needs no PROMPT_* to be fast.
    virtual int64_t n_decoded() const { return 1; }

    // Does it have kernels for STORE_AND_ATTEND, which makes no codes, and for encode_window, which makes them later?
    virtual bool defers_codes() const { return false; }
    // Encodes rows of the window into their cells. Like `wait`, it is called while the device has no other work.
    virtual void encode_window(const ggml_tensor * k_cache, const ggml_tensor * v_cache,
                               const std::vector<UncodedRow> & rows) const {
        GGML_UNUSED(k_cache);
        GGML_UNUSED(v_cache);
        GGML_ASSERT(rows.empty());
    }

    // Checks a node whose sources are set. nullptr, or the unmet requirement of its kernels.
    virtual const char * refusal(NodeKind kind, ggml_tensor * node) const = 0;
};

// The GPU kernels in this build, "cuda" or "vulkan", or nullptr if there are none.
const char * device_kernels();

// Do they support caches in this type of buffer?
bool has_device_kernels(ggml_backend_buffer_type_t buft);

// Maximum bytes of one tensor there that kernels can address.
size_t device_max_range(ggml_backend_buffer_type_t buft);

// Throws std::runtime_error if device memory is short.
std::unique_ptr<DeviceLayer> make_device_layer(const LayerNodes & layer, ggml_backend_buffer_type_t buft);

// The function of a device layer's nodes. The backend recognizes them by its address.
void device_op(ggml_tensor * dst, int ith, int nth, void * userdata);

// DeviceLayer::userdata of a node, or nullptr for another custom node.
inline void * device_userdata(const ggml_tensor * t) {
    struct { // ggml_custom_op_params, which is private to ggml
        ggml_custom_op_t fun;
        int              n_tasks;
        void *           userdata;
    } params;
    static_assert(sizeof(params) <= sizeof(t->op_params));
    std::memcpy(&params, t->op_params, sizeof(params));
    return t->op == GGML_OP_CUSTOM && params.fun == device_op ? params.userdata : nullptr;
}

// The first KV head of a PROMPT_ROWS or PROMPT_LOST node, stored behind the fields that device_userdata reads.
inline void set_first_head(ggml_tensor * t, int32_t head) {
    t->op_params[GGML_MAX_OP_PARAMS / sizeof(int32_t) - 1] = head;
}

inline int32_t first_head(const ggml_tensor * t) {
    return t->op_params[GGML_MAX_OP_PARAMS / sizeof(int32_t) - 1];
}

} // namespace subkv
