// device.cpp: a prototype: the plug-in on a GPU, beside an unmodified CUDA backend (README.md). Its device hands weights
// and ordinary nodes to the process's own backend, and launches the engine's kernels between them.
#include "driver.h"
#include "error.h"
#include "log_line.h"
#include "plugin.h"

#include "ggml-impl.h"

#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>

namespace emulated {
extern void (*around_launch)(void (*launch)(void *), void * data) __attribute__((weak));
} // namespace emulated

namespace subkv::plugin {

namespace {

ggml_backend_dev_t wrapped = nullptr;
const Driver *     driver  = nullptr;

// The engine's functions for its nodes (runtime/native/cuda), as the patched backend has them.
bool (*supports)(const ggml_tensor * node, int device)          = nullptr;
const char * (*compute_node)(ggml_tensor * node, void * stream) = nullptr;

void set_functions(decltype(supports) s, decltype(compute_node) c) {
    supports     = s;
    compute_node = c;
}

const char * name() {
    return "SUBKV";
}

ggml_backend_buffer_type_t wrapped_type() {
    return ggml_backend_dev_buffer_type(wrapped);
}

void check(bool done, const char * what) {
    if (!done) {
        GGML_ABORT("subkv: the GPU's driver: %s failed", what); // as llama.cpp's backend does
    }
}

bool is_view(const ggml_tensor * t) {
    const GgmlOps & ops = ggml_ops();
    return t->op == GGML_OP_NONE || t->op == ops.view || t->op == ops.reshape || t->op == ops.permute ||
           t->op == ops.transpose;
}

bool is_ours(const ggml_tensor * t) {
    return t->op == ggml_ops().custom && device_userdata(t);
}

//
// inputs: the host needs positions, cells and the mask, which llama.cpp's scheduler copies to the device
//

std::map<const void *, std::vector<uint8_t>> inputs; // by their data; of the next graph
std::mutex                                   inputs_mutex;

void (*set_wrapped)(ggml_backend_buffer_t, ggml_tensor *, const void *, size_t, size_t) = nullptr;

void set_tensor(ggml_backend_buffer_t buffer, ggml_tensor * t, const void * data, size_t offset, size_t size) {
    if (t->op == GGML_OP_NONE && !t->view_src && offset == 0 && size == ggml_nbytes(t) && t->type != GGML_TYPE_I8) {
        const std::lock_guard<std::mutex> lock(inputs_mutex);
        inputs[t->data].assign((const uint8_t *) data, (const uint8_t *) data + size);
    }
    set_wrapped(buffer, t, data, offset, size);
}

//
// memory
//

// ggml asks for the sizes of all tensors of a buffer before it allocates it.
thread_local bool asked_for_rows = false;

size_t get_alloc_size(ggml_backend_buffer_type_t, const ggml_tensor * t) {
    asked_for_rows = std::strncmp(t->name, "cache_k_l", 9) == 0 || std::strncmp(t->name, "cache_v_l", 9) == 0;
    return ggml_backend_buft_get_alloc_size(wrapped_type(), t);
}

// The buffers say that they are of the wrapped type, because its backend checks it.
ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t, size_t size) {
    if (std::exchange(asked_for_rows, false)) {
        return new_store(wrapped_type(), size);
    }
    ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(wrapped_type(), size);
    if (buffer) {
        set_wrapped              = buffer->iface.set_tensor;
        buffer->iface.set_tensor = set_tensor;
    }
    return buffer;
}

// What a graph has cost.
struct Counts {
    int pieces, cuts, kernels;
};

class GpuPlace final : public Place {
public:
    uint8_t * reserve(size_t size) override { return driver->reserve(GGML_PAD(size, page())); }
    void      release(uint8_t * base, size_t size) override {
        const auto [first, n] = pages(base, size, false);
        close(first, n);
        driver->release(base, GGML_PAD(size, page()));
    }
    size_t page() const override { return driver->page; }
    bool   open(uint8_t * first, size_t size) override {
        const auto [begin, n] = pages(first, size, false);
        for (uint8_t * at = begin; at < begin + n; at += page()) {
            if (opened_.count(at) == 0 && !driver->map(at)) {
                return false;
            }
            opened_.insert(at);
        }
        return true;
    }
    void close(uint8_t * first, size_t size) override {
        for (uint8_t * at = first; at < first + size; at += page()) {
            if (opened_.erase(at) > 0) {
                driver->unmap(at);
            }
        }
    }

    void fill(void * at, uint8_t value, size_t n) override { check(driver->fill(at, value, n), "fill"); }
    void read(void * to, const void * from, size_t n) override { check(driver->copy(to, from, n), "copy"); }
    void write(void * to, const void * from, size_t n) override { check(driver->copy(to, from, n), "copy"); }
    void copy_rows(void * to, const void * from, size_t n) override { check(driver->copy(to, from, n), "copy"); }

    ggml_backend_buffer_type_t codes() const override { return buffer_type(); }
    ggml_backend_buffer_type_t results() const override { return buffer_type(); }

    const void * input(const ggml_tensor * t) const override {
        if (!std::exchange(waited_, true)) { // the next inputs of our nodes are written at once
            check(driver->wait_for_all(), "wait");
        }
        const std::lock_guard<std::mutex> lock(inputs_mutex);
        const auto                        it = inputs.find(t->data);
        return it == inputs.end() || it->second.size() != ggml_nbytes(t) ? nullptr : it->second.data();
    }
    void * stage(ggml_tensor * t) override {
        auto & bytes = staged_[t];
        bytes.resize(ggml_nbytes(t));
        return bytes.data();
    }

    ggml_status run(ggml_backend_t backend, const ggml_cgraph * graph, ggml_cgraph * nodes, uint64_t number) override;
    ggml_status rotate(ggml_backend_t, ggml_cgraph * nodes) override {
        cpu_.reset(cpu_ ? cpu_.release() : ggml_backend_dev_init(cpu_device(), nullptr));
        return ggml_backend_graph_compute(cpu_.get(), nodes);
    }

private:
    void cut(ggml_backend_t backend, ggml_tensor ** nodes, int n);

    std::set<uint8_t *>                                 opened_;
    std::map<const ggml_tensor *, std::vector<uint8_t>> staged_;
    mutable bool                                        waited_ = false; // since the last graph
    void *                                              stream_ = nullptr;
    ggml_backend_event_t                                before_ = nullptr, after_ = nullptr;
    ggml_backend_ptr                                    cpu_; // for rotations
};

// ggml's number of a graph lets the CUDA backend reuse the CUDA graph that it made of a piece.
template <typename Graph> auto set_uid(Graph & graph, uint64_t uid, int) -> decltype(void(graph.uid)) {
    graph.uid = uid;
}

template <typename Graph> void set_uid(Graph &, uint64_t, long) {}

ggml_status GpuPlace::run(ggml_backend_t backend, const ggml_cgraph * graph, ggml_cgraph * nodes, uint64_t number) {
    {
        const std::lock_guard<std::mutex> lock(inputs_mutex);
        inputs.clear();
    }
    waited_            = false;
    Counts      counts = {};
    const int   n      = nodes->n_nodes;
    ggml_status status = GGML_STATUS_SUCCESS;
    for (int i = 0; i < n && status == GGML_STATUS_SUCCESS;) {
        ggml_tensor ** first = nodes->nodes + i;
        if (is_view(*first)) {
            ++i;
            continue;
        }
        const bool ours = is_ours(*first);
        const int  from = i;
        while (i < n && (is_view(nodes->nodes[i]) || is_ours(nodes->nodes[i]) == ours)) {
            counts.kernels += ours && !is_view(nodes->nodes[i]);
            ++i;
        }
        if (ours) {
            cut(backend, first, i - from);
            ++counts.cuts;
            continue;
        }
        ggml_cgraph piece = *graph; // with the uses of its nodes, by which the backend fuses nodes
        piece.size = piece.n_leafs = 0;
        piece.n_nodes              = i - from;
        piece.nodes                = first;
        piece.grads = piece.grad_accs = piece.leafs = nullptr;
        set_uid(piece, (uint64_t) 1 << 63 | number << 16 | (uint64_t) counts.pieces, 0);
        status = ggml_backend_graph_compute_async(backend, &piece);
        ++counts.pieces;
    }
    if (std::getenv("SUBKV_GPU_COUNTS")) {
        log_line("graph: " + std::to_string(counts.pieces) + " pieces, " + std::to_string(counts.cuts) + " cuts, " +
                 std::to_string(counts.kernels) + " kernels, " + std::to_string(opened_.size()) + " pages of rows");
    }
    return status;
}

// Nodes of ours: on a stream of ours, after the backend's earlier work and before its later one.
void GpuPlace::cut(ggml_backend_t backend, ggml_tensor ** nodes, int n) {
    if (!stream_) {
        stream_ = driver->new_stream();
        before_ = ggml_backend_event_new(wrapped);
        after_  = ggml_backend_event_new(wrapped);
        check(stream_ && before_ && after_, "stream");
    }
    ggml_backend_event_record(before_, backend);
    check(driver->wait(stream_, before_->context), "wait");
    for (int i = 0; i < n; ++i) {
        const char * error = is_view(nodes[i]) ? nullptr : compute_node(nodes[i], stream_);
        if (error) {
            GGML_ABORT("subkv: %s: %s", nodes[i]->name, error);
        }
    }
    check(driver->record(after_->context, stream_), "record");
    ggml_backend_event_wait(backend, after_);
}

//
// the device
//

bool supports_op(ggml_backend_dev_t, const ggml_tensor * op) {
    for (const ggml_tensor * src : op->src) { // llama.cpp asks whether weights may be in a type, with an empty buffer
        if (src && src->buffer && src->buffer->buft == buffer_type() &&
            std::strncmp(root_of(src)->name, "cache_", 6) != 0) {
            return false;
        }
    }
    if (op->op == ggml_ops().set_rows) {
        if (Store * store = buffer_of(op)) {
            store->check(op);
        }
    }
    return ggml_backend_dev_supports_op(wrapped, op);
}

void get_props(ggml_backend_dev_t dev, ggml_backend_dev_props * props) {
    ggml_backend_dev_get_props(wrapped, props);
    props->name        = name();
    props->description = dev->iface.get_description(dev);
    props->device_id   = nullptr; // else llama.cpp uses one of two devices with the same number
    props->caps.async = props->caps.events = false;
}

ggml_backend_t init_backend(ggml_backend_dev_t dev, const char *) {
    static ggml_guid guid    = { 0x73, 0x75, 0x62, 0x6b, 0x76, 2, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 };
    auto *           context = new Context;
    context->backend.reset(ggml_backend_dev_init(wrapped, nullptr));
    ggml_backend_i i = {};
    i.get_name       = [](ggml_backend_t) { return name(); };
    i.free           = [](ggml_backend_t backend) {
        delete (Context *) backend->context;
        delete backend;
    };
    i.synchronize = [](ggml_backend_t backend) {
        ggml_backend_synchronize(((Context *) backend->context)->backend.get());
    };
    i.graph_compute = [](ggml_backend_t backend, ggml_cgraph * graph) {
        return compute(*(Context *) backend->context, graph);
    };
    i.graph_optimize = [](ggml_backend_t, ggml_cgraph * graph, auto...) { plan(graph); };
    return new ggml_backend{ &guid, i, dev, context };
}

void * get_proc_address(ggml_backend_reg_t, const char * function) {
    static ggml_backend_buffer_type_t weights[] = { wrapped_type(), nullptr };
    if (std::strcmp(function, "ggml_backend_dev_get_extra_bufts") == 0) {
        return (void *) +[](ggml_backend_dev_t) { return &weights[0]; };
    }
    return std::strcmp(function, "ggml_backend_cuda_subkv_set") == 0 ? (void *) set_functions : nullptr;
}

ggml_backend_reg_t registration() {
    static ggml_backend_reg reg = { GGML_BACKEND_API_VERSION,
                                    { [](ggml_backend_reg_t) { return name(); },
                                      [](ggml_backend_reg_t) -> size_t { return 1; },
                                      [](ggml_backend_reg_t, size_t) { return device(); }, get_proc_address },
                                    nullptr };
    return &reg;
}

// Of the emulated GPUs, if this process has them.
const Driver * find_driver() {
    if (const auto emulated = (const Driver * (*)()) dlsym(RTLD_DEFAULT, "emulated_gpu_driver")) {
        return emulated();
    }
    return &cuda_driver ? cuda_driver() : nullptr;
}

// Why this process cannot have the device; "": it can. caller: an address in its ggml.
std::string refusal(const void * caller) {
    if (const std::string why = misfit(caller); !why.empty()) {
        return "this program's ggml" + why;
    }
    const char * asked = std::getenv("SUBKV_GPU");
    wrapped            = ggml_backend_dev_by_name(asked ? asked : "CUDA0");
    if (!wrapped) {
        return std::string("the device ") + (asked ? asked : "CUDA0") + " expected, none of this name found";
    }
    driver = find_driver();
    if (!driver) {
        return "the GPU's driver expected, none found";
    }
    ggml_backend_event_t event = ggml_backend_event_new(wrapped);
    if (!event || event->device != wrapped || !event->context) {
        return std::string("events of ") + ggml_backend_dev_name(wrapped) + " expected, none found";
    }
    ggml_backend_event_free(event);
    if (driver->around_launch && &emulated::around_launch) {
        emulated::around_launch = driver->around_launch;
    }
    return "";
}

} // namespace

Place & place() {
    static GpuPlace gpu;
    return gpu;
}

ggml_backend_buffer_type_t buffer_type() {
    static ggml_backend_buffer_type type = {
        { [](ggml_backend_buffer_type_t) { return name(); }, alloc_buffer,
          [](ggml_backend_buffer_type_t) { return ggml_backend_buft_get_alignment(wrapped_type()); }, nullptr,
          get_alloc_size, [](ggml_backend_buffer_type_t) { return false; } },
        device(),
        nullptr
    };
    return &type;
}

ggml_backend_dev_t cpu_device() {
    return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
}

ggml_backend_dev_t device() {
    static ggml_backend_device dev = [] {
        ggml_backend_device_i i = {};
        i.get_name              = [](ggml_backend_dev_t) { return name(); };
        i.get_description       = [](ggml_backend_dev_t) { return "K/V cache of coefficients on a GPU"; };
        i.get_memory            = [](ggml_backend_dev_t, size_t * free, size_t * total) {
            ggml_backend_dev_memory(wrapped, free, total);
        };
        i.get_type             = [](ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_GPU; };
        i.get_props            = get_props;
        i.init_backend         = init_backend;
        i.get_buffer_type      = [](ggml_backend_dev_t) { return buffer_type(); };
        i.get_host_buffer_type = [](ggml_backend_dev_t) { return ggml_backend_dev_host_buffer_type(wrapped); };
        i.supports_op          = supports_op;
        i.supports_buft        = [](ggml_backend_dev_t, ggml_backend_buffer_type_t type) {
            return type == buffer_type() || ggml_backend_dev_supports_buft(wrapped, type);
        };
        i.offload_op = [](ggml_backend_dev_t, const ggml_tensor * op) {
            return ggml_backend_dev_offload_op(wrapped, op);
        };
        return ggml_backend_device{ i, registration(), nullptr };
    }();
    return &dev;
}

} // namespace subkv::plugin

extern "C" __attribute__((visibility("default"))) ggml_backend_reg_t ggml_backend_init(void) {
    const std::string why = subkv::plugin::refusal(__builtin_return_address(0));
    if (!why.empty()) {
        subkv::log_line("plug-in: " + why);
        return nullptr;
    }
    return subkv::plugin::registration();
}
