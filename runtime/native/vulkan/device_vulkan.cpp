// device_vulkan.cpp: coded layers on a GPU with Vulkan (device_gpu.h).
#include "../../../kernels/vulkan/ops.h"
#include "../engine/device_gpu.h"
#include "subkv/vulkan_dispatch.h"

#include <algorithm>

namespace subkv {

namespace {

struct Vulkan {
    using Device = ggml_backend_dev_t;
    using Encode = vulkan::Encode;
    using Store  = vulkan::Store;
    using Prompt = vulkan::Prompt;

    static constexpr bool DEFERS_CODES = false;

    static vulkan::Place place(const ggml_tensor * t) {
        return { t->view_src ? t->view_src : t, t->view_src ? t->view_offs : 0 };
    }

    static vulkan::Place behind(vulkan::Place place, int64_t bytes) {
        return { place.buffer, place.at + (uint64_t) bytes };
    }

    static void complete(vulkan::Attend & a, const Window & /*window*/, vulkan::Place rest) { a.packed = rest; }
};

// Registers our nodes with the backend of a type of buffer. Returns its Vulkan device, or nullptr if it has none.
ggml_backend_dev_t vulkan_device(ggml_backend_buffer_type_t buft);

// A function of our patch.
template <typename Function> Function function_of(ggml_backend_dev_t device, const char * name) {
    return (Function) ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(device), name);
}

// Maximum bytes of a tensor that a shader can address.
size_t vulkan_max_range(ggml_backend_dev_t device) {
    return function_of<size_t (*)(ggml_backend_dev_t)>(device, "ggml_backend_vk_subkv_max_range")(device);
}

// true: the device has fast dot products of four bytes.
bool vulkan_integer_dot(ggml_backend_dev_t device) {
    return function_of<bool (*)(ggml_backend_dev_t)>(device, "ggml_backend_vk_subkv_integer_dot")(device);
}

class VulkanLayer final : public GpuLayer<Vulkan> {
public:
    VulkanLayer(const LayerNodes & layer, ggml_backend_buffer_type_t buft);

    int64_t  scratch(int64_t n_rows, int64_t n_tps) const override;
    uint64_t n_bad_rows() const override;
    void     add_bad_rows(uint64_t n) override;
    void     wait() const override;
    size_t   max_range() const override { return max_range_; }
    bool     makes_rows() const override { return !layer_.codec->latent; }

    // Vulkan does not tell the number of multiprocessors; this suits large GPUs.
    BlockSteps block_steps() const override { return { 256, 4, 2 * TILE, 1, 1 }; }

    const char * refusal(NodeKind kind, ggml_tensor * node) const override;

private:
    vulkan::Layer args(int64_t width_v) const override;

    size_t max_range_;
    bool   integer_dot_;
};

VulkanLayer::VulkanLayer(const LayerNodes & layer, ggml_backend_buffer_type_t buft) :
    GpuLayer(layer, vulkan_device(buft)), max_range_(vulkan_max_range(device())),
    integer_dot_(vulkan_integer_dot(device())) {
    const LayerCodec &  codec = *layer.codec;
    vulkan::LayerTables tables;
    tables.k     = codec.k;
    tables.v     = codec.v;
    tables.gamma = codec.gamma;
    tables.slope.resize((size_t) layer.n_head);
    tables.n_sink   = layer.window->n_sink();
    tables.n_recent = layer.window->n_recent();
    tables.latent   = codec.latent;
    for (const auto & centre : codec.centre) {
        tables.mean.push_back(centre.mean.empty() ? nullptr : centre.mean.data());
    }
    tables.mean.resize((size_t) codec.n_head_kv, nullptr);
    for (int64_t h = 0; h < codec.n_head_kv; ++h) {
        tables.k_offset.push_back(codec.tile_offset(h, false));
        tables.v_offset.push_back(codec.tile_offset(h, true));
    }
    const vulkan::Tables made = vulkan::make_tables(tables);
    slopes_at_                = 4 * made.slopes_at;

    allocate(4 * made.words.size(), buft);
    ggml_backend_tensor_set(memory_, made.words.data(), 0, 4 * made.words.size());
}

int64_t VulkanLayer::scratch(int64_t n_rows, int64_t /*n_tps*/) const {
    return n_rows * (width_k_ + 1 + vulkan::packed_words(args(width_v_)));
}

uint64_t VulkanLayer::n_bad_rows() const {
    uint32_t n = 0;
    ggml_backend_tensor_get(memory_, &n, 0, sizeof(n));
    return n;
}

void VulkanLayer::add_bad_rows(uint64_t n) {
    const auto sum = (uint32_t) std::min<uint64_t>(n_bad_rows() + n, UINT32_MAX);
    ggml_backend_tensor_set(memory_, &sum, 0, sizeof(sum));
}

void VulkanLayer::wait() const {
    function_of<void (*)(ggml_backend_dev_t)>(device(), "ggml_backend_vk_subkv_wait")(device());
}

vulkan::Layer VulkanLayer::args(int64_t width_v) const {
    const LayerCodec & codec = *layer_.codec;
    return { Vulkan::place(memory_),
             codec.n_head_kv,
             layer_.n_head / codec.n_head_kv,
             codec.d_k,
             codec.d_v,
             width_k_,
             (int32_t) width_v,
             layer_.scale,
             layer_.softcap,
             integer_dot_,
             codec.latent };
}

const char * VulkanLayer::refusal(NodeKind kind, ggml_tensor * node) const {
    const vulkan::Run nothing = [](void *, const vulkan::Dispatch &) -> const char * { return nullptr; };
    return compute(kind, node, nothing, (void *) nullptr);
}

// Callbacks of the backend for a custom node: whether it runs on that device; records its dispatches and returns
// nullptr, or an error message.
bool supports(const ggml_tensor * node, ggml_backend_dev_t device) {
    const auto * n = (const VulkanLayer::Node *) device_userdata(node);
    return n && n->layer->device() == device;
}

const char * compute(ggml_tensor * node, vulkan::Run run, void * recorder) {
    const auto * n = (const VulkanLayer::Node *) device_userdata(node);
    return n ? n->layer->compute(n->kind, node, run, recorder) : "a custom node that is not subkv's";
}

ggml_backend_dev_t vulkan_device(ggml_backend_buffer_type_t buft) {
    using Set = void (*)(decltype(&supports), decltype(&compute));

    ggml_backend_dev_t device = ggml_backend_buft_get_device(buft);
    const bool         of_one = device && ggml_backend_dev_backend_reg(device); // else several devices as one
    if (!of_one || ggml_backend_buft_is_host(buft)) {
        return nullptr;
    }
    const auto set = function_of<Set>(device, "ggml_backend_vk_subkv_set");
    if (!set) {
        return nullptr;
    }
    set(supports, compute);
    return device;
}

} // namespace

const char * device_kernels() {
    return "vulkan";
}

bool has_device_kernels(ggml_backend_buffer_type_t buft) {
    return vulkan_device(buft) != nullptr;
}

size_t device_max_range(ggml_backend_buffer_type_t buft) {
    return vulkan_max_range(vulkan_device(buft));
}

std::unique_ptr<DeviceLayer> make_device_layer(const LayerNodes & layer, ggml_backend_buffer_type_t buft) {
    return std::make_unique<VulkanLayer>(layer, buft);
}

} // namespace subkv
