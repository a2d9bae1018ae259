// device_cuda.cpp: coded layers on NVIDIA's GPUs, or on the emulated GPUs of tests/kernels/emulated (device_gpu.h).
#include "../engine/device_gpu.h"
#include "layer_tables.h"

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

namespace subkv {

namespace {

// The data of a tensor, for members of any pointer type.
struct Data {
    void * data;

    template <typename T> operator T *() const { return (T *) data; }
};

struct Cuda {
    using Device = int;
    using Encode = cuda::Encode;
    using Store  = cuda::Store;
    using Prompt = cuda::Prompt;

    using StoreRows = cuda::StoreRows;

    static constexpr bool DEFERS_CODES = true;

    static Data place(const ggml_tensor * t) { return { t->data }; }

    template <typename T> static T * behind(T * place, int64_t bytes) { return (T *) ((char *) place + bytes); }

    static void complete(cuda::Attend & a, const Window & window, const float * rest) {
        a.n_sink   = window.n_sink();
        a.n_recent = window.n_recent();
        a.words    = (uint32_t *) GGML_PAD((uintptr_t) rest, WORDS_ALIGNMENT);
        a.exact    = (float *) (a.words + cuda::query_words(a.layer) * a.layer.n_head_kv * a.n_stream * a.n_tps);
    }

    static constexpr size_t WORDS_ALIGNMENT = 16; // bytes
};

// Registers our nodes with the backend of a type of buffer. Returns the number of its device there, or -1 if it has none.
// With GGML_CUDA_DEVICES, several of these devices are one device of CUDA.
int cuda_device(ggml_backend_buffer_type_t buft);

class CudaLayer final : public GpuLayer<Cuda> {
public:
    CudaLayer(const LayerNodes & layer, ggml_backend_buffer_type_t buft);

    int64_t scratch(int64_t n_rows, int64_t n_tps) const override {
        const cuda::Layer l     = args(width_v_);
        const int64_t     words = cuda::query_words(l) * (n_rows / l.n_group);
        return n_rows * (width_k_ + 1) + words + (int64_t) (Cuda::WORDS_ALIGNMENT / sizeof(float)) +
               cuda::exact_floats(l, n_rows, n_tps, slots_of_seq());
    }
    uint64_t   n_bad_rows() const override;
    void       add_bad_rows(uint64_t n) override;
    void       wait() const override;
    size_t     max_range() const override { return SIZE_MAX; }
    bool       makes_rows() const override { return cuda::suits_prompt(args(width_v_), cuda_); }
    bool       defers_codes() const override { return suits_decode_; }
    BlockSteps block_steps() const override { return block_steps_; }
    int64_t    n_decoded() const override { return suits_decode_ ? cuda::DECODE_TOKENS : 1; }
    void       encode_window(const ggml_tensor * k_cache, const ggml_tensor * v_cache,
                             const std::vector<UncodedRow> & rows) const override;

    const char * refusal(NodeKind kind, ggml_tensor * node) const override;

    // Computes a node on a stream of its context, which all later work of the layer uses.
    const char * compute_on(const Node & node, ggml_tensor * dst, void * stream) const {
        stream_ = stream;
        return compute(node.kind, dst, stream);
    }

private:
    cuda::Layer args(int64_t width) const override;

    LayerTables                 tables_;
    int                         cuda_;   // number of CUDA's device
    mutable std::atomic<void *> stream_; // nullptr before the first node
    bool                        suits_decode_ = false;
    BlockSteps                  block_steps_  = {};
};

CudaLayer::CudaLayer(const LayerNodes & layer, ggml_backend_buffer_type_t buft) :
    GpuLayer(layer, cuda_device(buft)), tables_(*layer.codec, layer.n_head), stream_(nullptr) {
    slopes_at_ = tables_.slopes_at();
    allocate(tables_.n_bytes(), buft);
    const std::vector<uint8_t> bytes = tables_.place((const uint8_t *) memory_->data);
    ggml_backend_tensor_set(memory_, bytes.data(), 0, bytes.size());
    cuda_         = cuda::device_of(memory_->data, device());
    suits_decode_ = cuda::suits_decode(args(width_v_), cuda_);
    block_steps_  = cuda::block_steps(args(width_v_), cuda_);
    if (const size_t lacks = cuda::lacks_shared(args(width_v_), cuda_)) {
        const LayerCodec & codec = *layer.codec;
        fail({ SUBKV_ERROR_UNSUPPORTED, "layer " + std::to_string(codec.il),
               sentence(
                   "heads of %d elements (%d coefficients) need %zu bytes of shared memory beyond what %s has; keep "
                   "its cache on the CPU (-ngl 0, or offload_kqv off)",
                   std::max(codec.d_k, codec.d_v), width_k_, lacks, ggml_backend_buft_name(buft)) });
    }
}

uint64_t CudaLayer::n_bad_rows() const {
    uint64_t n = 0;
    ggml_backend_tensor_get(memory_, &n, tables_.n_bad_at(), sizeof(n));
    return n;
}

void CudaLayer::add_bad_rows(uint64_t n) {
    n += n_bad_rows();
    ggml_backend_tensor_set(memory_, &n, tables_.n_bad_at(), sizeof(n));
}

void CudaLayer::wait() const {
    void *       stream = stream_;
    const char * reason = stream ? cuda::wait(stream) : nullptr; // else no node has run
    if (reason) {
        GGML_ABORT("subkv: layer %d: its device: %s", layer_.codec->il, reason); // like llama.cpp's backend
    }
}

void CudaLayer::encode_window(const ggml_tensor * k_cache, const ggml_tensor * v_cache,
                              const std::vector<UncodedRow> & rows) const {
    cuda::EncodeWindow w = {};
    w.encode             = encode_to(*this, k_cache, v_cache);
    w.window             = Data{ layer_.window_rows().tensor->data };
    std::vector<cuda::WindowRow> of_device;
    for (const UncodedRow & row : rows) {
        of_device.push_back({ row.slot, row.cell });
    }
    if (const char * reason = cuda::encode_window(w, of_device.data(), of_device.size(), cuda_, stream_)) {
        GGML_ABORT("subkv: layer %d: encode_window: %s", layer_.codec->il, reason); // as in wait()
    }
}

const char * CudaLayer::refusal(NodeKind kind, ggml_tensor * node) const {
    // 65535: limit of a grid's y
    return kind == NodeKind::COMBINE && node->ne[1] > 65535 ? "at most 65535 tokens in a batch" : nullptr;
}

cuda::Layer CudaLayer::args(int64_t width) const {
    cuda::Layer l = tables_.layer();
    l.n_group     = layer_.n_head / layer_.codec->n_head_kv;
    l.scale       = layer_.scale;
    l.softcap     = layer_.softcap;
    l.width_v     = (int32_t) width;
    return l;
}

// The backend calls these for a custom node. `supports` says whether the node runs on that device, and `compute` launches
// it and returns nullptr or an error message.
bool supports(const ggml_tensor * node, int device) {
    const auto * n = (const CudaLayer::Node *) device_userdata(node);
    return n && n->layer->device() == device;
}

const char * compute(ggml_tensor * node, void * stream) {
    const auto * n = (const CudaLayer::Node *) device_userdata(node);
    return n ? ((const CudaLayer *) n->layer)->compute_on(*n, node, stream) : "a custom node that is not subkv's";
}

int cuda_device(ggml_backend_buffer_type_t buft) {
    using Set = void (*)(decltype(&supports), decltype(&compute));

    ggml_backend_dev_t dev = ggml_backend_buft_get_device(buft);
    if (!dev || ggml_backend_buft_is_host(buft)) {
        return -1;
    }
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(dev);
    if (!reg) { // several devices as one
        return -1;
    }
    const auto set = (Set) ggml_backend_reg_get_proc_address(reg, "ggml_backend_cuda_subkv_set"); // from our patch
    if (!set) {
        return -1;
    }
    set(supports, compute);
    int index = 0;
    while (ggml_backend_reg_dev_get(reg, (size_t) index) != dev) {
        ++index;
    }
    return index;
}

} // namespace

const char * device_kernels() {
    return "cuda";
}

bool has_device_kernels(ggml_backend_buffer_type_t buft) {
    return cuda_device(buft) >= 0;
}

size_t device_max_range(ggml_backend_buffer_type_t) {
    return SIZE_MAX;
}

std::unique_ptr<DeviceLayer> make_device_layer(const LayerNodes & layer, ggml_backend_buffer_type_t buft) {
    return std::make_unique<CudaLayer>(layer, buft);
}

} // namespace subkv
