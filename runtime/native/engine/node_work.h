// node_work.h: what a custom node runs. No node runs anything else, so no exception of ours passes through ggml.
#pragma once

#include "device.h"

#include <atomic>
#include <cstdint>
#include <new>
#include <string>

namespace subkv {

// What the nodes of all layers report to the thread that drives the context (CacheHook::computed).
class NodeReports {
public:
    // Notes n rows of a head that are not finite and could not be coded. `pos` is the position of the first one.
    void bad_rows(int32_t il, bool value, int32_t pos, int64_t n) {
        int64_t none = -1;
        first_bad_.compare_exchange_strong(none, (int64_t) il << 32 | (int64_t) value << 31 | pos);
        n_bad_.fetch_add((uint64_t) n);
    }

    void no_memory() { no_memory_ = true; }

    uint64_t n_bad() const { return n_bad_; }
    bool     lacks_memory() const { return no_memory_; }

    bool        take_no_memory() { return no_memory_.exchange(false); }
    std::string take_first_bad(); // a sentence about it, the first time, and else ""

private:
    std::atomic<uint64_t> n_bad_{ 0 };
    std::atomic<int64_t>  first_bad_{ -1 };
    std::atomic<bool>     no_memory_{ false };
    bool                  told_ = false;
};

template <auto OP> struct NodeFunction;

// OP computes a node from its tensor, the thread, the number of threads and the node's data, which has `reports`. Once
// a thread lacks memory, the context's later nodes do nothing and the decode fails (CacheHook::computed).
template <typename Data, void (*OP)(ggml_tensor *, int, int, Data &)> struct NodeFunction<OP> {
    static void run(ggml_tensor * dst, int ith, int nth, void * userdata) {
        Data & data = *(Data *) userdata;
        if (data.reports->lacks_memory()) {
            return;
        }
        try {
            OP(dst, ith, nth, data);
        } catch (const std::bad_alloc &) {
            data.reports->no_memory();
        }
    }

    static void * userdata(Data & data) { return (void *) &data; }
};

class NodeWork {
public:
    template <auto OP, typename Data> static NodeWork on_cpu(Data & data) {
        return { NodeFunction<OP>::run, NodeFunction<OP>::userdata(data) };
    }

    static NodeWork on_device(DeviceLayer & device, NodeKind kind) { return { device_op, device.userdata(kind) }; }

    ggml_custom_op_t function() const { return function_; }
    void *           userdata() const { return userdata_; }

private:
    NodeWork(ggml_custom_op_t function, void * userdata) : function_(function), userdata_(userdata) {}

    ggml_custom_op_t function_;
    void *           userdata_;
};

} // namespace subkv
