// gpu.cpp: two GPUs for ggml's registry, so that llama.cpp splits a model, its scheduler places nodes and copies inputs as
// with the CUDA backend. The CPU backend computes their nodes. With -DSUBKV_EMULATE_CUDA=ON they run kernels/cuda for
// subkv's nodes, as the patched CUDA backend does; in libggml-emulated (-DSUBKV_STOCK=ON) they know no such nodes. Their
// memory is accessible only while they compute, so host code that accesses it crashes.
#include "ggml-backend-impl.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <vector>

namespace emulated {
// Of emulated.cpp, where kernels are: how it runs launches that the host makes.
extern void (*around_launch)(void (*launch)(void *), void * data) __attribute__((weak));
} // namespace emulated

namespace {

constexpr int    N_GPU   = 2;
constexpr size_t MEMORY  = (size_t) 8 << 30; // reported memory
constexpr int    THREADS = 2;

bool (*supports)(const ggml_tensor * op, int device)     = nullptr;
const char * (*compute)(ggml_tensor * op, void * stream) = nullptr;
void set_functions(decltype(supports) s, decltype(compute) c) {
    supports = s;
    compute  = c;
}

struct Memory {
    void * base;
    size_t size;
};

struct Gpu {
    int                      index;
    const char *             name;
    ggml_backend_device      device;
    ggml_backend_buffer_type buft;
    std::vector<Memory *>    memory;
};

Gpu        gpus[N_GPU] = { { 0, "EMULATED0", {}, {}, {} }, { 1, "EMULATED1", {}, {}, {} } };
std::mutex working; // the emulation has one set of threads

thread_local bool in_graph = false;

void protect(const Memory & memory, int how) {
    if (mprotect(memory.base, memory.size, how) != 0) {
        GGML_ABORT("mprotect");
    }
}

// Makes a GPU's memory accessible during its lifetime.
class Work {
public:
    explicit Work(Gpu & gpu) : lock_(working), gpu_(gpu) {
        for (const Memory * m : gpu_.memory) {
            protect(*m, PROT_READ | PROT_WRITE);
        }
    }

    ~Work() {
        for (const Memory * m : gpu_.memory) {
            protect(*m, PROT_NONE);
        }
    }

private:
    std::lock_guard<std::mutex> lock_;
    Gpu &                       gpu_;
};

// Makes the memory of all GPUs accessible to a launch.
void run_launch(void (*launch)(void *), void * data) {
    if (in_graph) {
        launch(data);
        return;
    }
    const std::lock_guard<std::mutex> lock(working);
    for (const Gpu & gpu : gpus) {
        for (const Memory * m : gpu.memory) {
            protect(*m, PROT_READ | PROT_WRITE);
        }
    }
    launch(data);
    for (const Gpu & gpu : gpus) {
        for (const Memory * m : gpu.memory) {
            protect(*m, PROT_NONE);
        }
    }
}

//
// memory
//

Gpu & gpu_of(ggml_backend_buffer_t buffer) {
    return *(Gpu *) buffer->buft->context;
}

void buffer_free(ggml_backend_buffer_t buffer) {
    auto * memory = (Memory *) buffer->context;
    {
        const std::lock_guard<std::mutex> lock(working);
        auto &                            all = gpu_of(buffer).memory;
        all.erase(std::find(all.begin(), all.end(), memory));
    }
    munmap(memory->base, memory->size);
    delete memory;
}

void * buffer_base(ggml_backend_buffer_t buffer) {
    return ((Memory *) buffer->context)->base;
}

void buffer_memset(ggml_backend_buffer_t buffer, ggml_tensor * t, uint8_t value, size_t at, size_t n) {
    const Work work(gpu_of(buffer));
    std::memset((char *) t->data + at, value, n);
}

void buffer_set(ggml_backend_buffer_t buffer, ggml_tensor * t, const void * data, size_t at, size_t n) {
    const Work work(gpu_of(buffer));
    std::memcpy((char *) t->data + at, data, n);
}

void buffer_get(ggml_backend_buffer_t buffer, const ggml_tensor * t, void * data, size_t at, size_t n) {
    const Work work(gpu_of(buffer));
    std::memcpy(data, (const char *) t->data + at, n);
}

void buffer_clear(ggml_backend_buffer_t buffer, uint8_t value) {
    const Work work(gpu_of(buffer));
    std::memset(buffer_base(buffer), value, buffer->size);
}

ggml_backend_buffer_t buft_alloc(ggml_backend_buffer_type_t buft, size_t size) {
    const size_t page  = 4096;
    const size_t whole = std::max(page, (size + page - 1) / page * page);
    void *       base  = mmap(nullptr, whole, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) {
        return nullptr;
    }
    ggml_backend_buffer_i iface = {};
    iface.free_buffer           = buffer_free;
    iface.get_base              = buffer_base;
    iface.memset_tensor         = buffer_memset;
    iface.set_tensor            = buffer_set;
    iface.get_tensor            = buffer_get;
    iface.clear                 = buffer_clear;

    auto * memory = new Memory{ base, whole };
    {
        const std::lock_guard<std::mutex> lock(working);
        ((Gpu *) buft->context)->memory.push_back(memory);
    }
    return ggml_backend_buffer_init(buft, iface, memory, size);
}

const char * buft_name(ggml_backend_buffer_type_t buft) {
    return ((const Gpu *) buft->context)->name;
}

size_t buft_alignment(ggml_backend_buffer_type_t) {
    return 128;
}

//
// graphs
//

struct Backend {
    Gpu *            gpu;
    ggml_backend_ptr cpu;
};

const char * backend_name(ggml_backend_t backend) {
    return ((const Backend *) backend->context)->gpu->name;
}

void backend_free(ggml_backend_t backend) {
    delete (Backend *) backend->context;
    delete backend;
}

ggml_status compute_on_cpu(Backend & backend, const std::vector<ggml_tensor *> & nodes) {
    if (nodes.empty()) {
        return GGML_STATUS_SUCCESS;
    }
    const ggml_context_ptr ctx(ggml_init({ ggml_graph_overhead_custom(nodes.size(), false), nullptr, true }));
    ggml_cgraph *          graph = ggml_new_graph_custom(ctx.get(), nodes.size(), false);
    for (ggml_tensor * node : nodes) {
        ggml_graph_add_node(graph, node);
    }
    return ggml_backend_graph_compute(backend.cpu.get(), graph);
}

ggml_status backend_compute(ggml_backend_t b, ggml_cgraph * graph) {
    auto &                     backend = *(Backend *) b->context;
    const Work                 work(*backend.gpu);
    std::vector<ggml_tensor *> others; // since the last node of subkv
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        ggml_tensor * node = ggml_graph_node(graph, i);
        if (node->op != GGML_OP_CUSTOM) {
            others.push_back(node);
            continue;
        }
        const ggml_status status = compute_on_cpu(backend, others);
        others.clear();
        if (status != GGML_STATUS_SUCCESS) {
            return status;
        }
        in_graph           = true;
        const char * error = compute ? compute(node, nullptr) : "no function";
        in_graph           = false;
        if (error) {
            GGML_ABORT("%s: %s", node->name, error);
        }
    }
    return compute_on_cpu(backend, others);
}

//
// device
//

Gpu & gpu_of(ggml_backend_dev_t dev) {
    return *(Gpu *) dev->context;
}

const char * device_name(ggml_backend_dev_t dev) {
    return gpu_of(dev).name;
}

void device_memory(ggml_backend_dev_t, size_t * free, size_t * total) {
    *free = *total = MEMORY;
}

enum ggml_backend_dev_type device_type(ggml_backend_dev_t) {
    return GGML_BACKEND_DEVICE_TYPE_GPU;
}

void device_props(ggml_backend_dev_t dev, ggml_backend_dev_props * props) {
    *props      = {};
    props->name = props->description = device_name(dev);
    props->type                      = GGML_BACKEND_DEVICE_TYPE_GPU;
    props->memory_free = props->memory_total = MEMORY;
}

ggml_backend_t device_backend(ggml_backend_dev_t dev, const char *) {
    static ggml_guid guid  = { 's', 'u', 'b', 'k', 'v', 'e', 'm', 'u' };
    ggml_backend_i   iface = {};
    iface.get_name         = backend_name;
    iface.free             = backend_free;
    iface.graph_compute    = backend_compute;

    ggml_backend_dev_t cpu     = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    auto *             backend = new Backend{ &gpu_of(dev), ggml_backend_ptr(ggml_backend_dev_init(cpu, nullptr)) };
    ggml_backend_reg_t reg     = ggml_backend_dev_backend_reg(cpu);
    if (const auto set =
            (ggml_backend_set_n_threads_t) ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads")) {
        set(backend->cpu.get(), THREADS);
    }
    return new ggml_backend{ &guid, iface, dev, backend };
}

ggml_backend_buffer_type_t device_buft(ggml_backend_dev_t dev) {
    return &gpu_of(dev).buft;
}

// Like the CUDA backend, refuses sources of another GPU, custom nodes that are unclaimed or belong to another GPU.
bool device_supports(ggml_backend_dev_t dev, const ggml_tensor * op) {
    const Gpu & gpu = gpu_of(dev);
    for (const ggml_tensor * src : op->src) {
        if (src && src->buffer && src->buffer->buft->iface.get_name == buft_name && src->buffer->buft != &gpu.buft) {
            return false;
        }
    }
    switch (op->op) {
        case GGML_OP_CUSTOM: return supports && supports(op, gpu.index);
        case GGML_OP_MAP_CUSTOM1:
        case GGML_OP_MAP_CUSTOM2:
        case GGML_OP_MAP_CUSTOM3: return false;
        default: return ggml_backend_dev_supports_op(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU), op);
    }
}

bool device_supports_buft(ggml_backend_dev_t dev, ggml_backend_buffer_type_t buft) {
    return buft == &gpu_of(dev).buft;
}

// Copies weights from host memory only for many tokens.
bool device_offloads(ggml_backend_dev_t, const ggml_tensor * op) {
    return op->op != GGML_OP_GET_ROWS && (op->op == GGML_OP_MUL_MAT ? op->ne[1] : ggml_nrows(op)) >= 32;
}

//
// registry
//

const char * reg_name(ggml_backend_reg_t) {
    return "EMULATED";
}

size_t reg_count(ggml_backend_reg_t) {
    return N_GPU;
}

ggml_backend_dev_t reg_device(ggml_backend_reg_t, size_t i) {
    return &gpus[i].device;
}

void * reg_function(ggml_backend_reg_t, const char * name) {
    return std::strcmp(name, "ggml_backend_cuda_subkv_set") == 0 ? (void *) set_functions : nullptr;
}

struct Registered {
    ggml_backend_reg reg = { GGML_BACKEND_API_VERSION, { reg_name, reg_count, reg_device, reg_function }, nullptr };

    Registered() {
        for (Gpu & gpu : gpus) {
            gpu.buft.device              = &gpu.device;
            gpu.buft.context             = &gpu;
            gpu.buft.iface.get_name      = buft_name;
            gpu.buft.iface.alloc_buffer  = buft_alloc;
            gpu.buft.iface.get_alignment = buft_alignment;

            ggml_backend_device_i & iface = gpu.device.iface;
            gpu.device.reg                = &reg;
            gpu.device.context            = &gpu;
            iface.get_name                = device_name;
            iface.get_description         = device_name;
            iface.get_memory              = device_memory;
            iface.get_type                = device_type;
            iface.get_props               = device_props;
            iface.init_backend            = device_backend;
            iface.get_buffer_type         = device_buft;
            iface.supports_op             = device_supports;
            iface.supports_buft           = device_supports_buft;
            iface.offload_op              = device_offloads;
        }
        ggml_backend_register(&reg);
        if (&emulated::around_launch) {
            emulated::around_launch = run_launch;
        }
    }
} registered; // when the library is loaded, before any model

} // namespace
