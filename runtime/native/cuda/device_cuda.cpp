// device_cuda.cpp: tables of a coded layer in device memory, and the ops of kernels/cuda on a graph's tensors. Nodes
// have the same sources as on the CPU (node_sources.h), except that attend projects the queries and reads the mask.
// Only the upload of the tables and `wait` wait for the device.
#include "../../../kernels/cuda/ops.h"
#include "../error.h"
#include "../nodes.h"
#include "backend.h"

#include <cstdint>
#include <cstring>
#include <stdexcept>
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

class CudaLayer;

struct Node {
    NodeKind          kind;
    const CudaLayer * layer;
};

class CudaLayer final : public DeviceLayer {
public:
    CudaLayer(const LayerNodes & layer, ggml_backend_buffer_type_t buft);

    void     prepare() override;
    void *   userdata(NodeKind kind) override { return &nodes_[(int) kind]; }
    int64_t  scratch(int64_t n_rows) const override { return n_rows * (tables_.width_k + 1); }
    int64_t  n_at_once() const override { return n_at_once_; }
    uint64_t n_zero_rows() const override;
    void     wait() const override;
    size_t   max_range() const override { return SIZE_MAX; }
    bool     makes_rows() const override { return cuda::suits_prompt(tables_, device_); }

    const char * refusal(NodeKind kind, ggml_tensor * node) const override;

    int          device() const { return device_; }
    const char * compute(NodeKind kind, ggml_tensor * dst, void * stream) const;

private:
    cuda::Layer  layer(int64_t width) const;
    const char * encode(ggml_tensor * dst, void * stream) const;
    const char * attend(ggml_tensor * dst, void * stream) const;
    const char * combine(ggml_tensor * dst, void * stream) const;
    const char * store_window(ggml_tensor * dst, void * stream) const;
    const char * prompt_rows(ggml_tensor * dst, void * stream) const;
    const char * prompt_mask(ggml_tensor * dst, void * stream) const;
    // pointers that both read
    cuda::Prompt prompt(const ggml_tensor * dst, const ggml_tensor * tokens, const ggml_tensor * slots) const;
    // m, z, acc and scratch of attend's result
    void partial(cuda::Attend & a, const AttendShape & s, ggml_tensor * t) const;

    const LayerNodes &      layer_;
    int                     device_;
    int64_t                 n_at_once_;
    cuda::Layer             tables_  = {};
    int32_t                 width_v_ = 0; // largest rank of values
    Node                    nodes_[6];
    float                   max_alibi_bias_ = -1.0f; // of the slopes on the device
    size_t                  slopes_at_      = 0;
    size_t                  n_bad_at_       = 0;
    ggml_context_ptr        ctx_;
    ggml_backend_buffer_ptr buffer_;
    ggml_tensor *           memory_ = nullptr; // I8 [bytes]
};

CudaLayer::CudaLayer(const LayerNodes & layer, ggml_backend_buffer_type_t buft) :
    layer_(layer), device_(cuda_device(buft)), n_at_once_(cuda::n_at_once(device_)),
    nodes_{ { NodeKind::ENCODE, this },       { NodeKind::ATTEND, this },      { NodeKind::COMBINE, this },
            { NodeKind::STORE_WINDOW, this }, { NodeKind::PROMPT_ROWS, this }, { NodeKind::PROMPT_MASK, this } } {
    const LayerCodec & codec = *layer.codec;
    Blob               blob;
    // first set offsets in place of pointers; 0 means "none"
    const uint64_t nothing = 0;
    n_bad_at_              = blob.add(&nothing, 1);
    struct Side {
        std::vector<HeadCodec> heads;
        size_t                 at;
    } sides[2] = { { codec.k, 0 }, { codec.v, 0 } };

    const auto offset_of = [](const void * p) { return (size_t) (uintptr_t) p; };
    for (Side & side : sides) {
        for (HeadCodec & head : side.heads) {
            for (Matrix * m : { &head.encode, &head.decode }) {
                if (!present(*m)) { // latent values are only decoded
                    continue;
                }
                const int32_t rows = (head.rank + cuda::MATRIX_ROWS - 1) / cuda::MATRIX_ROWS * cuda::MATRIX_ROWS;
                std::vector<uint16_t> halves((size_t) rows * (size_t) head.d);
                to_halves(*m, head.rank, head.d, halves.data());
                *m = { (const uint16_t *) (uintptr_t) blob.add(halves) };
            }
            if (head.offset) {
                head.offset = (const float *) (uintptr_t) blob.add(head.offset, (size_t) head.rank);
            }
        }
        side.at = blob.add(side.heads);
    }
    std::vector<uintptr_t> means;
    for (const auto & centre : codec.centre) {
        means.push_back(centre.mean.empty() ? 0 : blob.add(centre.mean));
    }
    const size_t         means_at = blob.add(means);
    std::vector<int64_t> k_offset, v_offset;
    for (int64_t h = 0; h < codec.n_head_kv; ++h) {
        k_offset.push_back(codec.tile_offset(h, false));
        v_offset.push_back(codec.tile_offset(h, true));
    }
    const size_t k_offset_at = blob.add(k_offset);
    const size_t v_offset_at = blob.add(v_offset);
    const size_t gamma_at    = blob.add(codec.gamma);
    slopes_at_               = blob.add(std::vector<float>((size_t) layer.n_head));

    ctx_.reset(ggml_init({ 2 * ggml_tensor_overhead(), nullptr, true }));
    memory_ = ggml_new_tensor_1d(ctx_.get(), GGML_TYPE_I8, (int64_t) blob.bytes().size());
    ggml_format_name(memory_, "subkv_bases_l%d", codec.il);
    buffer_.reset(ggml_backend_alloc_ctx_tensors_from_buft(ctx_.get(), buft));
    if (!buffer_) {
        throw std::runtime_error("layer " + std::to_string(codec.il) + ": its bases, " +
                                 std::to_string(blob.bytes().size()) + " bytes, do not fit on " +
                                 ggml_backend_buft_name(buft));
    }

    // offsets -> addresses
    const auto * base    = (const uint8_t *) memory_->data;
    const auto   address = [&](size_t at) { return base + at; };
    for (Side & side : sides) {
        for (HeadCodec & head : side.heads) {
            for (Matrix * m : { &head.encode, &head.decode }) {
                m->halves = m->halves ? (const uint16_t *) address(offset_of(m->halves)) : nullptr;
            }
            head.offset = head.offset ? (const float *) address(offset_of(head.offset)) : nullptr;
        }
        blob.put(side.at, side.heads.data(), side.heads.size() * sizeof(HeadCodec));
    }
    for (uintptr_t & mean : means) {
        mean = mean ? (uintptr_t) address(mean) : 0;
    }
    blob.put(means_at, means.data(), means.size() * sizeof(uintptr_t));
    ggml_backend_tensor_set(memory_, blob.bytes().data(), 0, blob.bytes().size());

    tables_.k         = (const HeadCodec *) address(sides[0].at);
    tables_.v         = (const HeadCodec *) address(sides[1].at);
    tables_.k_offset  = (const int64_t *) address(k_offset_at);
    tables_.v_offset  = (const int64_t *) address(v_offset_at);
    tables_.gamma     = (const float *) address(gamma_at);
    tables_.mean      = (const uint16_t * const *) address(means_at);
    tables_.slope     = (const float *) address(slopes_at_);
    tables_.n_bad     = (unsigned long long *) address(n_bad_at_);
    tables_.n_head_kv = codec.n_head_kv;
    tables_.n_group   = layer.n_head / codec.n_head_kv;
    tables_.d_k       = codec.d_k;
    tables_.d_v       = codec.d_v;
    tables_.latent    = codec.latent;
    for (int32_t h = 0; h < codec.n_head_kv; ++h) {
        const HeadCodec &k = codec.k[(size_t) h], &v = codec.v[(size_t) h];
        tables_.width_k     = std::max(tables_.width_k, k.rank);
        width_v_            = std::max(width_v_, v.rank);
        tables_.row_bytes_k = std::max(tables_.row_bytes_k, k.row_bytes);
        tables_.row_bytes_v = std::max(tables_.row_bytes_v, v.row_bytes);
    }
    if (const size_t lacks = cuda::lacks_shared(tables_, device_)) {
        fail(
            "layer %d: heads of %d elements (%d coefficients) need %zu bytes of shared memory beyond what %s has; keep "
            "its cache on the CPU (-ngl 0, or offload_kqv off)",
            codec.il, std::max(codec.d_k, codec.d_v), tables_.width_k, lacks, ggml_backend_buft_name(buft));
    }
}

void CudaLayer::prepare() {
    store_slopes(layer_, memory_, slopes_at_, max_alibi_bias_);
}

uint64_t CudaLayer::n_zero_rows() const {
    uint64_t n = 0;
    ggml_backend_tensor_get(memory_, &n, n_bad_at_, sizeof(n));
    return n;
}

void CudaLayer::wait() const {
    if (const char * reason = cuda::wait(device_)) {
        GGML_ABORT("subkv: layer %d: its device: %s", layer_.codec->il, reason); // like llama.cpp's backend
    }
}

const char * CudaLayer::refusal(NodeKind kind, ggml_tensor * node) const {
    // 65535: limit of a grid's y
    return kind == NodeKind::COMBINE && node->ne[1] > 65535 ? "at most 65535 tokens in a batch" : nullptr;
}

cuda::Layer CudaLayer::layer(int64_t width) const {
    cuda::Layer l = tables_;
    l.scale       = layer_.scale;
    l.softcap     = layer_.softcap;
    l.width_v     = (int32_t) width;
    return l;
}

void set_queries(cuda::Attend & a, const ggml_tensor * q) {
    a.q       = (const float *) q->data;
    a.q_head  = stride_f32(q, 1);
    a.q_token = stride_f32(q, 2);
}

void set_cells(cuda::Attend & a, const ggml_tensor * k_view, const ggml_tensor * v_view) {
    a.k_tiles  = (const uint8_t *) k_view->data;
    a.v_tiles  = (const uint8_t *) v_view->data;
    a.k_stride = TILE * (int64_t) k_view->nb[1];
    a.v_stride = TILE * (int64_t) v_view->nb[1];
    a.k_stream = (int64_t) k_view->nb[2];
    a.v_stream = (int64_t) v_view->nb[2];
}

void set_mask(cuda::Attend & a, const ggml_tensor * mask) {
    a.mask      = mask->data;
    a.mask_half = mask->type == GGML_TYPE_F16;
}

const char * CudaLayer::encode(ggml_tensor * dst, void * stream) const {
    const auto   in = sources_of<EncodeSources>(dst);
    cuda::Encode e;
    e.layer    = layer(0);
    e.k        = (const float *) in.k->data;
    e.v        = (const float *) in.v->data;
    e.k_head   = stride_f32(in.k, 1);
    e.k_token  = stride_f32(in.k, 2);
    e.v_head   = stride_f32(in.v, 1);
    e.v_token  = stride_f32(in.v, 2);
    e.k_tiles  = (uint8_t *) in.k_cache->data;
    e.v_tiles  = (uint8_t *) in.v_cache->data;
    e.k_stride = TILE * (int64_t) in.k_cache->nb[1];
    e.v_stride = TILE * (int64_t) in.v_cache->nb[1];
    e.cells    = (const int64_t *) in.k_idxs->data;
    e.fresh    = (uint16_t *) dst->data;
    e.n_tok    = in.k->ne[2];
    return cuda::encode(e, stream);
}

void CudaLayer::partial(cuda::Attend & a, const AttendShape & s, ggml_tensor * t) const {
    a.layer    = layer(s.width);
    a.n_sink   = layer_.window->n_sink();
    a.n_recent = layer_.window->n_recent();
    a.n_kv     = s.n_kv;
    a.n_stream = s.n_stream;
    a.n_tps    = s.n_tps;
    a.split    = s.split;
    a.n_split  = s.n_split;
    a.m        = (float *) t->data;
    a.z        = a.m + s.n_rows;
    a.acc      = a.z + s.n_rows;
    a.qt       = a.acc + s.n_rows * s.width;
    a.shift    = a.qt + s.n_rows / s.n_split * tables_.width_k;
}

const char * CudaLayer::attend(ggml_tensor * dst, void * stream) const {
    const auto   in = sources_of<AttendSources>(dst);
    cuda::Attend a  = {};
    partial(a, attend_shape(layer_, in.q, in.k_view), dst);
    set_queries(a, in.q);
    set_cells(a, in.k_view, in.v_view);
    set_mask(a, in.mask);
    a.cell_pos = (const int32_t *) in.cell_pos->data;
    a.tokens   = token_rows(in.tokens);
    return cuda::attend(a, stream);
}

const char * CudaLayer::combine(ggml_tensor * dst, void * stream) const {
    const auto    in = sources_of<CombineSources>(dst);
    cuda::Combine b  = {};
    partial(b.a, attend_shape(layer_, in.q, in.cells), in.partial);
    set_queries(b.a, in.q);
    set_mask(b.a, in.mask);
    b.a.tokens     = token_rows(in.tokens);
    b.fresh        = (const uint16_t *) in.fresh->data;
    b.window       = (const uint16_t *) in.window->data;
    b.slots        = slot_rows(in.slots);
    b.slots_of_seq = (int32_t) (layer_.window->n_slots() / std::max(1, layer_.window->n_seq()));
    b.sinks        = in.sinks ? (const float *) in.sinks->data : nullptr;
    b.out          = (float *) dst->data;
    b.out_stride   = stride_f32(dst, 1);
    return cuda::combine(b, stream);
}

const char * CudaLayer::store_window(ggml_tensor * dst, void * stream) const {
    const auto  in = sources_of<StoreWindowSources>(dst);
    cuda::Store s;
    s.window  = (uint16_t *) dst->data;
    s.fresh   = (const uint16_t *) in.fresh->data;
    s.slots   = slot_rows(in.slots);
    s.n_slots = in.slots->ne[1];
    s.width   = dst->ne[0];
    return cuda::store_window(s, stream);
}

cuda::Prompt CudaLayer::prompt(const ggml_tensor * dst, const ggml_tensor * tokens, const ggml_tensor * slots) const {
    const Window & window = *layer_.window;
    cuda::Prompt   p      = {};
    cuda::Attend & a      = p.c.a;
    a.layer               = layer(width_v_);
    a.tokens              = token_rows(tokens);
    a.n_sink              = window.n_sink();
    a.n_recent            = window.n_recent();
    a.n_stream            = dst->ne[3];
    a.n_tps               = tokens->ne[1] / a.n_stream;
    p.c.slots             = slot_rows(slots);
    p.c.slots_of_seq      = (int32_t) (window.n_slots() / std::max(1, window.n_seq()));
    p.n_slots             = a.n_stream > 1 ? p.c.slots_of_seq : window.n_slots();
    return p;
}

const char * CudaLayer::prompt_rows(ggml_tensor * dst, void * stream) const {
    const auto     in = sources_of<PromptRowsSources>(dst);
    cuda::Prompt   p  = prompt(dst, in.tokens, in.slots);
    cuda::Attend & a  = p.c.a;
    set_cells(a, in.k_view, in.v_view);
    a.n_kv     = in.k_view->ne[1];
    p.c.fresh  = (const uint16_t *) in.fresh->data;
    p.c.window = (const uint16_t *) in.window->data;
    p.n_rows   = dst->ne[1];
    p.first    = first_head(dst);
    p.n_heads  = (int32_t) dst->ne[2];
    p.k        = (uint16_t *) dst->data;
    p.v        = p.k + p.n_rows * p.n_heads * a.n_stream * a.layer.d_k;
    return cuda::prompt_rows(p, stream);
}

const char * CudaLayer::prompt_mask(ggml_tensor * dst, void * stream) const {
    const auto   in = sources_of<PromptMaskSources>(dst);
    cuda::Prompt p  = prompt(dst, in.tokens, in.slots);
    set_mask(p.c.a, in.mask);
    p.c.a.cell_pos = (const int32_t *) in.cell_pos->data;
    p.c.a.n_kv     = in.cell_pos->ne[0];
    p.n_rows       = dst->ne[0];
    p.mask         = (uint16_t *) dst->data;
    return cuda::prompt_mask(p, stream);
}

const char * CudaLayer::compute(NodeKind kind, ggml_tensor * dst, void * stream) const {
    switch (kind) {
        case NodeKind::ENCODE: return encode(dst, stream);
        case NodeKind::ATTEND: return attend(dst, stream);
        case NodeKind::COMBINE: return combine(dst, stream);
        case NodeKind::STORE_WINDOW: return store_window(dst, stream);
        case NodeKind::PROMPT_ROWS: return prompt_rows(dst, stream);
        case NodeKind::PROMPT_MASK: return prompt_mask(dst, stream);
    }
    return "unknown node";
}

} // namespace

bool cuda_supports(const ggml_tensor * node, int device) {
    const auto * n = (const Node *) device_userdata(node);
    return n && n->layer->device() == device;
}

const char * cuda_compute(ggml_tensor * node, void * stream) {
    const auto * n = (const Node *) device_userdata(node);
    return n ? n->layer->compute(n->kind, node, stream) : "a custom node that is not subkv's";
}

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
