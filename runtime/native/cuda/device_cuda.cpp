// device_cuda.cpp: coded layers on NVIDIA's GPUs, or on the emulated GPUs of tests/kernels/emulated (device_gpu.h).
#include "../../../kernels/cuda/ops.h"
#include "../engine/device_gpu.h"

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace subkv {

namespace {

// Contiguous arrays for one copy to the device.
class Blob {
public:
    // The array's offset in the blob.
    template <typename T> size_t add(const T * data, size_t n) {
        const size_t at = (bytes_.size() + 31) / 32 * 32; // alignment of matrices
        bytes_.resize(at + n * sizeof(T));
        std::memcpy(bytes_.data() + at, data, n * sizeof(T));
        return at;
    }

    template <typename T> size_t add(const std::vector<T> & data) { return add(data.data(), data.size()); }

    void put(size_t at, const void * data, size_t n) { std::memcpy(bytes_.data() + at, data, n); }

    const std::vector<uint8_t> & bytes() const { return bytes_; }

private:
    std::vector<uint8_t> bytes_;
};

// The codecs of a layer's heads in a blob. Until `place`, addresses are offsets in the blob, and 0 means "none".
class CodecBlob {
public:
    CodecBlob(Blob & blob, const LayerCodec & codec) : blob_(blob), sides_{ { codec.k, 0 }, { codec.v, 0 } } {
        for (Side & side : sides_) {
            for (HeadCodec & head : side.heads) {
                for (Matrix * m : { &head.encode, &head.decode }) {
                    add(*m, head);
                }
                if (head.offset) {
                    head.offset = (const float *) (uintptr_t) blob.add(head.offset, (size_t) head.rank);
                }
            }
            side.at = blob.add(side.heads);
        }
        for (const auto & centre : codec.centre) {
            means_.push_back(centre.mean.empty() ? 0 : blob.add(centre.mean));
        }
        means_at_ = blob.add(means_);
    }

    // Replaces the offsets by addresses, and sets the codecs of `tables`. base: address of the blob's copy
    void place(const uint8_t * base, cuda::Layer & tables) {
        for (Side & side : sides_) {
            for (HeadCodec & head : side.heads) {
                move(head.encode.halves, base);
                move(head.decode.halves, base);
                move(head.offset, base);
            }
            blob_.put(side.at, side.heads.data(), side.heads.size() * sizeof(HeadCodec));
        }
        for (uintptr_t & mean : means_) {
            mean = mean ? (uintptr_t) base + mean : 0;
        }
        blob_.put(means_at_, means_.data(), means_.size() * sizeof(uintptr_t));
        tables.k    = (const HeadCodec *) (base + sides_[0].at);
        tables.v    = (const HeadCodec *) (base + sides_[1].at);
        tables.mean = (const uint16_t * const *) (base + means_at_);
    }

private:
    struct Side {
        std::vector<HeadCodec> heads;
        size_t                 at;
    };

    void add(Matrix & m, const HeadCodec & head) {
        if (!present(m)) { // latent values are only decoded
            return;
        }
        const int32_t         rows = (head.rank + cuda::MATRIX_ROWS - 1) / cuda::MATRIX_ROWS * cuda::MATRIX_ROWS;
        std::vector<uint16_t> halves((size_t) rows * (size_t) head.d);
        to_halves(m, head.rank, head.d, halves.data());
        m = { (const uint16_t *) (uintptr_t) blob_.add(halves) };
    }

    template <typename T> static void move(const T *& at, const uint8_t * base) {
        at = at ? (const T *) (base + (uintptr_t) at) : nullptr;
    }

    Blob &                 blob_;
    Side                   sides_[2];
    std::vector<uintptr_t> means_;
    size_t                 means_at_ = 0;
};

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

// Registers our nodes with the backend of a type of buffer. Returns the number of its CUDA device, or -1 if it has none.
int cuda_device(ggml_backend_buffer_type_t buft);

class CudaLayer final : public GpuLayer<Cuda> {
public:
    CudaLayer(const LayerNodes & layer, ggml_backend_buffer_type_t buft);

    int64_t scratch(int64_t n_rows, int64_t n_tps) const override {
        const int64_t words = cuda::query_words(tables_) * (n_rows / tables_.n_group);
        return n_rows * (width_k_ + 1) + words + (int64_t) (Cuda::WORDS_ALIGNMENT / sizeof(float)) +
               cuda::exact_floats(tables_, n_rows, n_tps, slots_of_seq());
    }
    uint64_t   n_bad_rows() const override;
    void       add_bad_rows(uint64_t n) override;
    void       wait() const override;
    size_t     max_range() const override { return SIZE_MAX; }
    bool       makes_rows() const override { return cuda::suits_prompt(tables_, device()); }
    bool       defers_codes() const override { return suits_decode_; }
    BlockSteps block_steps() const override { return block_steps_; }
    int64_t    n_decoded() const override { return suits_decode_ ? cuda::DECODE_TOKENS : 1; }
    void       encode_window(const ggml_tensor * k_cache, const ggml_tensor * v_cache,
                             const std::vector<UncodedRow> & rows) const override;

    const char * refusal(NodeKind kind, ggml_tensor * node) const override;

private:
    cuda::Layer args(int64_t width) const override;
    void        set_sizes(); // of the tables

    bool        suits_decode_ = false;
    BlockSteps  block_steps_  = {};
    cuda::Layer tables_       = {};

    std::vector<cuda::HeadTiles> tiles_; // by head
    size_t                       n_bad_at_ = 0;
};

CudaLayer::CudaLayer(const LayerNodes & layer, ggml_backend_buffer_type_t buft) : GpuLayer(layer, cuda_device(buft)) {
    const LayerCodec & codec = *layer.codec;
    Blob               blob;
    const uint64_t     nothing = 0;
    n_bad_at_                  = blob.add(&nothing, 1);
    CodecBlob            codecs(blob, codec);
    std::vector<int64_t> k_offset, v_offset;
    for (int64_t h = 0; h < codec.n_head_kv; ++h) {
        k_offset.push_back(codec.tile_offset(h, false));
        v_offset.push_back(codec.tile_offset(h, true));
    }
    std::vector<uint8_t> plans;
    for (size_t h = 0; h < (size_t) codec.n_head_kv; ++h) { // of the codecs as the host has them
        plans.resize((h + 1) * cuda::plan_bytes());
        cuda::make_plan(codec.k[h], codec.v[h], plans.data() + h * cuda::plan_bytes());
        tiles_.push_back({ (int32_t) k_offset[h], (int32_t) v_offset[h], (int32_t) TILE * codec.k[h].row_bytes,
                           (int32_t) TILE * codec.v[h].row_bytes });
    }
    const size_t plans_at    = blob.add(plans);
    const size_t k_offset_at = blob.add(k_offset);
    const size_t v_offset_at = blob.add(v_offset);
    const size_t gamma_at    = blob.add(codec.gamma);
    slopes_at_               = blob.add(std::vector<float>((size_t) layer.n_head));

    allocate(blob.bytes().size(), buft);

    const auto * base = (const uint8_t *) memory_->data;
    codecs.place(base, tables_);
    ggml_backend_tensor_set(memory_, blob.bytes().data(), 0, blob.bytes().size());

    tables_.k_offset = (const int64_t *) (base + k_offset_at);
    tables_.v_offset = (const int64_t *) (base + v_offset_at);
    tables_.plan     = base + plans_at;
    tables_.tiles    = tiles_.data();
    tables_.gamma    = (const float *) (base + gamma_at);
    tables_.slope    = (const float *) (base + slopes_at_);
    tables_.n_bad    = (unsigned long long *) (base + n_bad_at_);
    set_sizes();
    suits_decode_ = cuda::suits_decode(args(width_v_), device());
    block_steps_  = cuda::block_steps(args(width_v_), device());
    if (const size_t lacks = cuda::lacks_shared(tables_, device())) {
        fail({ SUBKV_ERROR_UNSUPPORTED, "layer " + std::to_string(codec.il),
               sentence(
                   "heads of %d elements (%d coefficients) need %zu bytes of shared memory beyond what %s has; keep "
                   "its cache on the CPU (-ngl 0, or offload_kqv off)",
                   std::max(codec.d_k, codec.d_v), tables_.width_k, lacks, ggml_backend_buft_name(buft)) });
    }
}

void CudaLayer::set_sizes() {
    const LayerCodec & codec = *layer_.codec;
    tables_.n_head_kv        = codec.n_head_kv;
    tables_.n_group          = layer_.n_head / codec.n_head_kv;
    tables_.d_k              = codec.d_k;
    tables_.d_v              = codec.d_v;
    tables_.latent           = codec.latent;
    tables_.width_k          = width_k_;
    for (int32_t h = 0; h < codec.n_head_kv; ++h) {
        const HeadCodec &k = codec.k[(size_t) h], &v = codec.v[(size_t) h];
        tables_.row_bytes_k = std::max(tables_.row_bytes_k, k.row_bytes);
        tables_.row_bytes_v = std::max(tables_.row_bytes_v, v.row_bytes);
    }
}

uint64_t CudaLayer::n_bad_rows() const {
    uint64_t n = 0;
    ggml_backend_tensor_get(memory_, &n, n_bad_at_, sizeof(n));
    return n;
}

void CudaLayer::add_bad_rows(uint64_t n) {
    n += n_bad_rows();
    ggml_backend_tensor_set(memory_, &n, n_bad_at_, sizeof(n));
}

void CudaLayer::wait() const {
    if (const char * reason = cuda::wait(device())) {
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
    if (const char * reason = cuda::encode_window(w, of_device.data(), of_device.size(), device())) {
        GGML_ABORT("subkv: layer %d: encode_window: %s", layer_.codec->il, reason); // as in wait()
    }
}

const char * CudaLayer::refusal(NodeKind kind, ggml_tensor * node) const {
    // 65535: limit of a grid's y
    return kind == NodeKind::COMBINE && node->ne[1] > 65535 ? "at most 65535 tokens in a batch" : nullptr;
}

cuda::Layer CudaLayer::args(int64_t width) const {
    cuda::Layer l = tables_;
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
    return n ? n->layer->compute(n->kind, node, stream) : "a custom node that is not subkv's";
}

int cuda_device(ggml_backend_buffer_type_t buft) {
    using Set = void (*)(decltype(&supports), decltype(&compute));

    ggml_backend_dev_t dev = ggml_backend_buft_get_device(buft);
    if (!dev || ggml_backend_buft_is_host(buft)) {
        return -1;
    }
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(dev);
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
