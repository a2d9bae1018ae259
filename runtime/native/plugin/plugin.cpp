// plugin.cpp: registration. The device says that it is a GPU, because llama.cpp gives K/V caches only to GPUs and the
// CPU; it computes on the CPU backend, and leaves weights in the CPU's buffers, where they may be repacked. In a process
// that gives it no cache it computes nothing: graphs would be divided between two devices.
#include "plugin.h"

#include "error.h"
#include "ggml-cpu.h"
#include "log_line.h"

#include <dlfcn.h>
#include <link.h>

#include <atomic>
#include <cstdlib>
#include <cstring>

namespace subkv::plugin {

namespace {

const char * name() {
    return "SUBKV";
}

void free_backend(ggml_backend_t backend) {
    delete (Context *) backend->context;
    delete backend;
}

ggml_status graph_compute(ggml_backend_t backend, ggml_cgraph * graph) {
    return compute(*(Context *) backend->context, graph);
}

ggml_backend_t init_backend(ggml_backend_dev_t dev, const char *) {
    static ggml_guid guid    = { 0x73, 0x75, 0x62, 0x6b, 0x76, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 };
    auto *           context = new Context;
    context->backend.reset(ggml_backend_dev_init(cpu_device(), nullptr));
    ggml_backend_i i = {};
    i.get_name       = [](ggml_backend_t) { return name(); };
    i.free           = free_backend;
    i.graph_compute  = graph_compute;
    i.graph_optimize = [](ggml_backend_t, ggml_cgraph * graph, auto...) { plan(graph); };
    return new ggml_backend{ &guid, i, dev, context };
}

// May a weight be in this buffer type? llama.cpp asks with an empty buffer, which K/V tensors have in a dry run.
bool is_question(const ggml_tensor * weight) {
    return weight && weight->buffer && weight->buffer->size == 0 &&
           std::strncmp(root_of(weight)->name, "cache_", 6) != 0;
}

// The setting of the program that loads this ggml which gives all layers to the device.
std::string setting;

void find_setting(const void * caller) {
    Dl_info           ggml;
    const bool        known = caller && dladdr(caller, &ggml) && ggml.dli_fname;
    const std::string path  = known ? ggml.dli_fname : "";
    const auto        has   = [&](const char * part) { return path.find(part) != std::string::npos; };
    setting                 = has("node-llama-cpp") ? "gpuLayers: 99 in node-llama-cpp's loadModel" :
                              has("/llama_cpp/")    ? "n_gpu_layers=-1 of llama_cpp.Llama" :
                              has("/ollama/")       ? "the parameter num_gpu 99 of Ollama" :
                                                      "-ngl all --device SUBKV";
}

// Logs once that a cache is in another buffer type.
void note_elsewhere(const ggml_tensor * root) {
    static std::atomic<bool> noted{ false };
    if (std::strncmp(root->name, "cache_k_l", 9) == 0 && root->type == GGML_TYPE_F16 && root->buffer &&
        root->buffer->buft != buffer_type() && root->buffer->size > 0 && !is_off() && !noted.exchange(true)) {
        log_line(std::string("ordinary f16 K/V cache: it is on ") + ggml_backend_buffer_name(root->buffer) +
                 "; the device SUBKV codes the layers that it has (" + setting + ")");
    }
}

bool is_ours(const ggml_tensor * t) {
    return root_of(t)->buffer && root_of(t)->buffer->buft == buffer_type();
}

bool supports_op(ggml_backend_dev_t, const ggml_tensor * op) {
    static std::atomic<bool> used{ false }; // it has a tensor, which it gets with a context's first graph
    bool                     ours = is_ours(op), asks = false;
    for (const ggml_tensor * src : op->src) {
        ours = ours || (src && is_ours(src));
        asks = asks || is_question(src);
        if (!is_question(src)) {
            continue;
        }
        const ggml_backend_buffer_type_t type = src->buffer->buft;
        if (type == buffer_type() || (identifies_model(src->name) && type != ggml_backend_cpu_buffer_type())) {
            return false;
        }
    }
    if (op->op == ggml_ops().set_rows) {
        if (Store * store = buffer_of(op)) {
            store->check(op);
        } else {
            note_elsewhere(root_of(op));
        }
    }
    used = used || (ours && !asks) || Store::is_any_undecided();
    return (used || asks) && ggml_backend_dev_supports_op(cpu_device(), op);
}

bool supports_buft(ggml_backend_dev_t, ggml_backend_buffer_type_t type) {
    return type == buffer_type() || ggml_backend_dev_supports_buft(cpu_device(), type);
}

void get_memory(ggml_backend_dev_t, size_t * free, size_t * total) {
    ggml_backend_dev_memory(cpu_device(), free, total);
}

// Weights are in the CPU's buffers. Earlier versions do not ask.
template <typename Caps> auto set_mmap_support(Caps & caps, int) -> decltype(void(caps.mmap_support)) {
    caps.mmap_support = true;
}

template <typename Caps> void set_mmap_support(Caps &, long) {}

void get_props(ggml_backend_dev_t dev, ggml_backend_dev_props * props) {
    props->name        = name();
    props->description = dev->iface.get_description(dev);
    props->type        = GGML_BACKEND_DEVICE_TYPE_GPU;
    props->device_id   = nullptr;
    props->caps        = {};

    set_mmap_support(props->caps, 0);
    get_memory(dev, &props->memory_free, &props->memory_total);
}

void * cpu_function(const char * function) {
    return ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(cpu_device()), function);
}

void set_n_threads(ggml_backend_t backend, int n) {
    if (auto set = (ggml_backend_set_n_threads_t) cpu_function("ggml_backend_set_n_threads")) {
        set(((Context *) backend->context)->backend.get(), n);
    }
}

void set_abort_callback(ggml_backend_t backend, ggml_abort_callback callback, void * data) {
    if (auto set = (ggml_backend_set_abort_callback_t) cpu_function("ggml_backend_set_abort_callback")) {
        set(((Context *) backend->context)->backend.get(), callback, data);
    }
}

// The types for weights after our own, which are the CPU's that repack, and then its ordinary one.
ggml_backend_buffer_type_t * extra_bufts(ggml_backend_dev_t) {
    static std::vector<ggml_backend_buffer_type_t> types = [] {
        std::vector<ggml_backend_buffer_type_t> all;
        auto get = (ggml_backend_dev_get_extra_bufts_t) cpu_function("ggml_backend_dev_get_extra_bufts");
        for (auto * at = get ? get(cpu_device()) : nullptr; at && *at; ++at) {
            all.push_back(*at);
        }
        all.push_back(ggml_backend_dev_buffer_type(cpu_device()));
        all.push_back(nullptr);
        return all;
    }();
    return types.data();
}

void * get_proc_address(ggml_backend_reg_t, const char * function) {
    if (std::strcmp(function, "ggml_backend_set_n_threads") == 0) {
        return (void *) set_n_threads;
    }
    if (std::strcmp(function, "ggml_backend_set_abort_callback") == 0) {
        return (void *) set_abort_callback;
    }
    if (std::strcmp(function, "ggml_backend_dev_get_extra_bufts") == 0) {
        return (void *) extra_bufts;
    }
    return nullptr;
}

ggml_backend_reg_t registration() {
    static ggml_backend_reg reg = { api_version(),
                                    { [](ggml_backend_reg_t) { return name(); },
                                      [](ggml_backend_reg_t) -> size_t { return 1; },
                                      [](ggml_backend_reg_t, size_t) { return device(); }, get_proc_address },
                                    nullptr };
    return &reg;
}

// Does this process have our libllama? Its symbols may be visible to its own libraries only.
bool is_patched() {
    bool       found = false;
    const auto look  = [](dl_phdr_info * info, size_t, void * result) {
        void * library =
            std::strstr(info->dlpi_name, "libllama") ? dlopen(info->dlpi_name, RTLD_LAZY | RTLD_NOLOAD) : nullptr;
        if (library) {
            *(bool *) result |= dlsym(library, "_Z20llama_subkv_store_onv") != nullptr; // hook/prompt_store.cpp
            dlclose(library);
        }
        return 0;
    };
    dl_iterate_phdr(look, &found);
    return found;
}

// Why this process cannot have the device, or "" if it can. `caller` is an address in its ggml.
std::string refusal(const void * caller) {
    if (is_patched()) {
        return "this program's llama.cpp has the coefficient cache already; unset GGML_BACKEND_PATH";
    }
    if (const std::string why = misfit(caller); !why.empty()) {
        return "this program's ggml" + why;
    }
    if (!cpu_device()) {
        return "a CPU backend expected, none found";
    }
    return ops_error() ? ops_error() : "";
}

} // namespace

ggml_backend_buffer_type_t buffer_type() {
    // no host: else llama.cpp would not call the buffer's functions
    static BufferType type = make_buffer_type(new_store, [](ggml_backend_buffer_type_t) { return false; }, device());
    return (ggml_backend_buffer_type_t) type.data();
}

ggml_backend_dev_t cpu_device() {
    static ggml_backend_dev_t dev = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    return dev;
}

ggml_backend_dev_t device() {
    static ggml_backend_device dev = [] {
        ggml_backend_device_i i = {};
        i.get_name              = [](ggml_backend_dev_t) { return name(); };
        i.get_description       = [](ggml_backend_dev_t) { return "K/V cache of coefficients on the CPU"; };
        i.get_memory            = get_memory;
        i.get_type              = [](ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_GPU; };
        i.get_props             = get_props;
        i.init_backend          = init_backend;
        i.get_buffer_type       = [](ggml_backend_dev_t) { return buffer_type(); };
        i.supports_op           = supports_op;
        i.supports_buft         = supports_buft;
        return ggml_backend_device{ i, registration(), nullptr };
    }();
    return &dev;
}

} // namespace subkv::plugin

extern "C" __attribute__((visibility("default"))) ggml_backend_reg_t ggml_backend_init(void) {
    using namespace subkv;
    const std::string why = plugin::refusal(__builtin_return_address(0));
    if (!why.empty()) {
        log_line("plug-in: " + why);
        return nullptr;
    }
    plugin::find_setting(__builtin_return_address(0));
    return plugin::registration();
}
