// gpu.cpp: two GPUs for ggml's registry, so that llama.cpp splits a model, its scheduler places nodes and copies inputs as
// with the CUDA backend. The CPU backend computes their nodes. With -DSUBKV_EMULATE_CUDA=ON they run kernels/cuda for
// subkv's nodes, as the patched CUDA backend does; in libggml-emulated (-DSUBKV_STOCK=ON) they know no such nodes. Their
// memory is accessible only while they compute, so host code that accesses it crashes.
//
// With kernels/cuda, a backend computes as late as it may: when the host waits for its stream. Copies of the host do not
// wait, as in the CUDA backend, whose copies use another stream. So a wait that the host forgets gives wrong results,
// unless an event hides it: to wait for one is to wait for all streams here. Like
// a CUDA graph, a graph of the same nodes repeats the launches of the last one, with the arguments that they had then.
//
// libggml-emulated also plays CUDA's driver for a plug-in that launches kernels itself (research/gpu/plugin/driver.h): it
// ends the process if work of two streams is not ordered by events.
#include "../../../research/gpu/plugin/driver.h"
#include "ggml-backend-impl.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace emulated {
// Of emulated.cpp, where kernels are: how it runs launches that the host makes, and its streams.
extern void (*around_launch)(void (*launch)(void *), void * data) __attribute__((weak));
extern void (*on_stream)(void * stream, std::function<void()> work) __attribute__((weak));
extern void (*wait_for)(void * stream) __attribute__((weak));
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

Gpu                  gpus[N_GPU] = { { 0, "EMULATED0", {}, {}, {} }, { 1, "EMULATED1", {}, {}, {} } };
std::recursive_mutex working; // the emulation has one set of threads

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
    std::lock_guard<std::recursive_mutex> lock_;
    Gpu &                                 gpu_;
};

// Makes the memory of all GPUs accessible to a launch.
void run_launch(void (*launch)(void *), void * data) {
    if (in_graph) {
        launch(data);
        return;
    }
    const std::lock_guard<std::recursive_mutex> lock(working);
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

void wait_for(void * stream);

void buffer_free(ggml_backend_buffer_t buffer) {
    wait_for(nullptr); // as cudaFree does
    auto * memory = (Memory *) buffer->context;
    {
        const std::lock_guard<std::recursive_mutex> lock(working);
        auto &                                      all = gpu_of(buffer).memory;
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
        const std::lock_guard<std::recursive_mutex> lock(working);
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
// streams and events
//

// The work of a backend, and of streams that wait for it, numbered in the order in which the host starts it.
struct Order {
    uint64_t last = 0; // started
    uint64_t host = 0; // the host has waited for this and all before
};

struct Stream {
    std::shared_ptr<Order> order;    // nullptr: has not waited yet
    uint64_t               seen = 0; // its next work runs after this and all before

    void wait(const std::shared_ptr<Order> & of, uint64_t number) {
        seen  = order == of ? std::max(seen, number) : number;
        order = of;
    }

    // All work uses the same tensors, so it has to follow all earlier work.
    void start_work() {
        if (!order || std::max(seen, order->host) != order->last) {
            GGML_ABORT("emulated GPU: work that no event orders after earlier work of another stream");
        }
        seen = ++order->last;
    }
};

struct Event : Stream {
    ggml_backend_event event;
};

Event & event_of(void * context) {
    return *(Event *) context;
}

//
// graphs
//

using Launch = std::function<void()>;

// A graph, and the launches of each of its custom nodes.
struct Captured {
    std::vector<ggml_tensor>         nodes, sources; // as they were
    std::vector<std::vector<Launch>> launches;
};

struct Backend {
    Gpu *              gpu;
    ggml_backend_ptr   cpu;
    Stream             stream = {};
    std::deque<Launch> work   = {}; // not yet done
    uint64_t           n_done = 0;

    std::unordered_map<const ggml_tensor *, Captured> graphs = {}; // by first node
};

std::mutex             queues; // of `work` and `backends`
std::vector<Backend *> backends;

bool asynchronous() {
    return &emulated::on_stream != nullptr;
}

// Does the first `n` pieces of a backend's work, counted from its start, or all.
void finish(Backend & backend, uint64_t n = UINT64_MAX) {
    const std::lock_guard<std::recursive_mutex> lock(working); // pieces run in order, whichever thread waits
    const auto                                  next = [&] {
        const std::lock_guard<std::mutex> lock(queues);
        Launch                            one;
        if (backend.n_done < n && !backend.work.empty()) {
            one = std::move(backend.work.front());
            backend.work.pop_front();
            ++backend.n_done;
        }
        return one;
    };
    while (const auto one = next()) {
        const Work work(*backend.gpu);
        const bool before = in_graph;
        in_graph          = true;
        one();
        in_graph = before;
    }
}

// Waits for a backend's stream, or for all of them.
void wait_for(void * stream) {
    const std::lock_guard<std::recursive_mutex> lock(working); // no backend ends meanwhile
    for (size_t i = 0;; ++i) {
        Backend * backend = nullptr;
        {
            const std::lock_guard<std::mutex> list(queues);
            if (i >= backends.size()) {
                return;
            }
            backend = backends[i];
        }
        if (!stream || backend == stream) {
            finish(*backend);
        }
    }
}

thread_local std::vector<Launch> * recorded = nullptr; // gets the launches of a node

// Starts work on a backend's stream. Work of the default stream is done at once, whatever other streams do.
void on_stream(void * stream, Launch work) {
    if (recorded) {
        recorded->push_back(work);
    }
    if (!stream) {
        work();
        return;
    }
    const std::lock_guard<std::mutex> lock(queues);
    ((Backend *) stream)->work.push_back(std::move(work));
}

void backend_record(ggml_backend_t backend, ggml_backend_event_t event) {
    const Stream & stream = ((const Backend *) backend->context)->stream;
    event_of(event->context).wait(stream.order, stream.order->last);
}

void backend_wait(ggml_backend_t backend, ggml_backend_event_t event) {
    wait_for(nullptr); // The event's work is among that of all streams.
    Stream & stream = ((Backend *) backend->context)->stream;
    stream.seen     = std::max(stream.seen, event_of(event->context).seen);
}

void backend_synchronize(ggml_backend_t backend) {
    finish(*(Backend *) backend->context);
    Stream & stream    = ((Backend *) backend->context)->stream;
    stream.order->host = std::max(stream.order->host, stream.seen);
}

ggml_backend_event_t new_event(ggml_backend_dev_t dev) {
    auto * event = new Event;
    event->event = { dev, event };
    return &event->event;
}

void free_event(ggml_backend_dev_t, ggml_backend_event_t event) {
    delete &event_of(event->context);
}

void synchronize_event(ggml_backend_dev_t, ggml_backend_event_t event) {
    wait_for(nullptr);
    const Event & e = event_of(event->context);
    if (e.order) {
        e.order->host = std::max(e.order->host, e.seen);
    }
}

const char * backend_name(ggml_backend_t backend) {
    return ((const Backend *) backend->context)->gpu->name;
}

void backend_free(ggml_backend_t backend) {
    auto * mine = (Backend *) backend->context;
    {
        const std::lock_guard<std::recursive_mutex> work(working);
        wait_for(nullptr); // also for copies from this backend, which another one has still to do
        const std::lock_guard<std::mutex> lock(queues);
        backends.erase(std::find(backends.begin(), backends.end(), mine));
    }
    delete mine;
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

// Copies of nodes and their sources, because the host may change or free them before they are computed.
struct Copies {
    std::deque<ggml_tensor>                                tensors;
    std::unordered_map<const ggml_tensor *, ggml_tensor *> by_tensor;

    ggml_tensor * of(const ggml_tensor * t, bool with_sources) {
        const auto [at, is_new] = by_tensor.try_emplace(t, nullptr);
        if (is_new) {
            at->second = &tensors.emplace_back(*t);
        }
        ggml_tensor * copy = at->second;
        for (int i = 0; with_sources && i < GGML_MAX_SRC; ++i) {
            copy->src[i] = t->src[i] ? of(t->src[i], false) : nullptr;
        }
        return copy;
    }
};

void compute_later(Backend & backend, const std::vector<ggml_tensor *> & nodes) {
    const auto                 copies = std::make_shared<Copies>();
    std::vector<ggml_tensor *> copied;
    for (const ggml_tensor * node : nodes) {
        copied.push_back(copies->of(node, true));
    }
    on_stream(&backend, [&backend, copies, copied] {
        if (compute_on_cpu(backend, copied) != GGML_STATUS_SUCCESS) {
            GGML_ABORT("emulated GPU: a graph fails");
        }
    });
}

// Does a tensor have the properties that the CUDA backend compares? `t` may be a source, of which it compares fewer.
bool same(const ggml_tensor & a, const ggml_tensor & t, bool source) {
    return source ? a.data == t.data && std::memcmp(a.ne, t.ne, sizeof(t.ne)) == 0 &&
                        std::memcmp(a.nb, t.nb, sizeof(t.nb)) == 0 :
                    std::memcmp(&a, &t, sizeof(t)) == 0;
}

// Returns the graph's launches, which are empty if it differs from the last graph with the same first node.
Captured & captured(Backend & backend, ggml_cgraph * graph) {
    Captured now;
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        const ggml_tensor & node = now.nodes.emplace_back(*ggml_graph_node(graph, i));
        for (const ggml_tensor * src : node.src) {
            now.sources.push_back(src ? *src : ggml_tensor{});
        }
    }
    Captured & last  = backend.graphs[ggml_graph_node(graph, 0)];
    const auto alike = [](const auto & a, const auto & b, bool source) {
        return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                          [&](const auto & x, const auto & y) { return same(x, y, source); });
    };
    if (!alike(last.nodes, now.nodes, false) || !alike(last.sources, now.sources, true)) {
        last = std::move(now);
    }
    return last;
}

// Starts the nodes in order. Launches of subkv's nodes get their arguments now, or had got them in an equal graph.
void start_nodes(Backend & backend, ggml_cgraph * graph) {
    Captured &                 of_graph = captured(backend, graph);
    const bool                 repeat   = !of_graph.launches.empty();
    size_t                     next     = 0;
    std::vector<ggml_tensor *> others; // since the last node of subkv
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        ggml_tensor * node = ggml_graph_node(graph, i);
        if (node->op != GGML_OP_CUSTOM) {
            others.push_back(node);
            continue;
        }
        compute_later(backend, others);
        others.clear();
        if (repeat) {
            for (const Launch & launch : of_graph.launches.at(next++)) {
                on_stream(&backend, launch);
            }
            continue;
        }
        recorded           = &of_graph.launches.emplace_back();
        const char * error = compute ? compute(node, &backend) : "no function";
        recorded           = nullptr;
        if (error) {
            GGML_ABORT("%s: %s", node->name, error);
        }
    }
    compute_later(backend, others);
}

// Copies between GPUs after what the source's stream has to do now.
bool copy_later(ggml_backend_t from, ggml_backend_t to, const ggml_tensor * src, ggml_tensor * dst) {
    const bool both = from->device->reg == to->device->reg && src->buffer->buft->iface.get_name == buft_name &&
                      dst->buffer->buft->iface.get_name == buft_name;
    if (!both || !asynchronous() || from == to) {
        return false;
    }
    auto *   source_of = (Backend *) from->context;
    uint64_t n;
    {
        const std::lock_guard<std::mutex> lock(queues);
        n = source_of->n_done + source_of->work.size();
    }
    on_stream(to->context, [source_of, n, src = *src, dst = *dst] {
        finish(*source_of, n);
        const Work source(*source_of->gpu);
        std::memcpy(dst.data, src.data, ggml_nbytes(&src));
    });
    return true;
}

ggml_status backend_compute(ggml_backend_t b, ggml_cgraph * graph) {
    auto & backend = *(Backend *) b->context;
    backend.stream.start_work();
    if (asynchronous()) {
        start_nodes(backend, graph);
        return GGML_STATUS_SUCCESS;
    }
    const Work work(*backend.gpu);
    return compute_on_cpu(backend, { ggml_graph_nodes(graph), ggml_graph_nodes(graph) + ggml_graph_n_nodes(graph) });
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
    iface.synchronize      = backend_synchronize;
    iface.cpy_tensor_async = copy_later;
    iface.event_record     = backend_record;
    iface.event_wait       = backend_wait;

    ggml_backend_dev_t cpu     = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    auto *             backend = new Backend{ &gpu_of(dev), ggml_backend_ptr(ggml_backend_dev_init(cpu, nullptr)) };
    backend->stream.order      = std::make_shared<Order>();
    {
        const std::lock_guard<std::mutex> lock(queues);
        backends.push_back(backend);
    }
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(cpu);
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
// CUDA's driver, for the first GPU
//

constexpr size_t PAGE = 64 << 10;

std::vector<Stream *> streams;

void * new_stream() {
    return streams.emplace_back(new Stream);
}

bool stream_wait(void * stream, void * event) {
    const Event & e = event_of(event);
    ((Stream *) stream)->wait(e.order, e.seen);
    return true;
}

bool stream_record(void * event, void * stream) {
    ((Stream *) stream)->start_work();
    (Stream &) event_of(event) = *(const Stream *) stream;
    return true;
}

bool wait_for_all() {
    for (const Stream * stream : streams) {
        if (stream->order) {
            stream->order->host = stream->order->last;
        }
    }
    return true;
}

uint8_t * reserve(size_t size) {
    void * base = mmap(nullptr, size + PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) {
        return nullptr;
    }
    auto * first = (uint8_t *) GGML_PAD((uintptr_t) base, PAGE);
    munmap(first + size, (size_t) ((uint8_t *) base + PAGE - first));
    if (first > base) {
        munmap(base, (size_t) (first - (uint8_t *) base));
    }
    return first;
}

void release(uint8_t * base, size_t size) {
    munmap(base, size);
}

bool map(uint8_t * page) {
    const std::lock_guard<std::recursive_mutex> lock(working);
    gpus[0].memory.push_back(new Memory{ page, PAGE });
    return true;
}

void unmap(uint8_t * page) {
    const std::lock_guard<std::recursive_mutex> lock(working);
    auto &                                      all = gpus[0].memory;
    const auto it = std::find_if(all.begin(), all.end(), [&](const Memory * m) { return m->base == page; });
    if (it == all.end() || madvise(page, PAGE, MADV_DONTNEED) != 0) {
        GGML_ABORT("unmap");
    }
    delete *it;
    all.erase(it);
}

bool copy(void * to, const void * from, size_t n) {
    const Work work(gpus[0]);
    std::memcpy(to, from, n);
    return true;
}

bool fill(void * at, uint8_t value, size_t n) {
    const Work work(gpus[0]);
    std::memset(at, value, n);
    return true;
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
            iface.event_new               = new_event;
            iface.event_free              = free_event;
            iface.event_synchronize       = synchronize_event;
        }
        ggml_backend_register(&reg);
        if (&emulated::around_launch) {
            emulated::around_launch = run_launch;
            emulated::on_stream     = on_stream;
            emulated::wait_for      = wait_for;
        }
    }
} registered; // when the library is loaded, before any model

} // namespace

extern "C" const subkv::plugin::Driver * emulated_gpu_driver() {
    static const subkv::plugin::Driver driver = { PAGE,         new_stream, stream_wait, stream_record,
                                                  wait_for_all, reserve,    release,     map,
                                                  unmap,        copy,       fill,        run_launch };
    return &driver;
}
