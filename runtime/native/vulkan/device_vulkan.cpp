// device_vulkan.cpp: tables of a coded layer in device memory, and the ops of kernels/vulkan on a graph's tensors.
// Nodes have the same sources as on the CPU (node_sources.h), except that attend projects the queries and reads the
// mask. Only the upload of the tables and `wait` wait for the device.
#include "../../../kernels/vulkan/ops.h"
#include "../error.h"
#include "../nodes.h"
#include "backend.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace subkv {

namespace {

class VulkanLayer;

struct Node {
    NodeKind            kind;
    const VulkanLayer * layer;
};

class VulkanLayer final : public DeviceLayer {
public:
    VulkanLayer(const LayerNodes & layer, ggml_backend_buffer_type_t buft);

    void     prepare() override;
    void *   userdata(NodeKind kind) override { return &nodes_[(int) kind]; }
    int64_t  scratch(int64_t n_rows) const override;
    int64_t  n_at_once() const override { return 1024; } // unknown in Vulkan; suits large GPUs
    uint64_t n_zero_rows() const override;
    void     wait() const override { vulkan_wait(device_); }
    size_t   max_range() const override { return max_range_; }
    bool     makes_rows() const override { return !layer_.codec->latent; }

    const char * refusal(NodeKind kind, ggml_tensor * node) const override;

    ggml_backend_dev_t device() const { return device_; }
    const char *       compute(NodeKind kind, ggml_tensor * dst, vulkan::Run run, void * recorder) const;

private:
    vulkan::Layer  layer(int64_t width_v) const;
    vulkan::Encode encode(ggml_tensor * dst) const;
    vulkan::Attend attend(ggml_tensor * dst) const;
    // queries, and m, z, acc and scratch of attend's result
    vulkan::Attend  partial(const ggml_tensor * q, const ggml_tensor * k_view, const ggml_tensor * result) const;
    vulkan::Combine combine(ggml_tensor * dst) const;
    vulkan::Store   store_window(ggml_tensor * dst) const;
    vulkan::Prompt  prompt(const ggml_tensor * dst, const ggml_tensor * tokens, const ggml_tensor * slots) const;
    vulkan::Prompt  prompt_rows(ggml_tensor * dst) const;
    vulkan::Prompt  prompt_mask(ggml_tensor * dst) const;

    const LayerNodes &      layer_;
    ggml_backend_dev_t      device_;
    size_t                  max_range_;
    bool                    integer_dot_;
    Node                    nodes_[6];
    int32_t                 width_k_ = 0, width_v_ = 0;
    float                   max_alibi_bias_ = -1.0f; // of the slopes on the device
    size_t                  slopes_at_      = 0;     // bytes
    ggml_context_ptr        ctx_;
    ggml_backend_buffer_ptr buffer_;
    ggml_tensor *           memory_ = nullptr; // I8 [bytes]
};

VulkanLayer::VulkanLayer(const LayerNodes & layer, ggml_backend_buffer_type_t buft) :
    layer_(layer), device_(vulkan_device(buft)), max_range_(vulkan_max_range(device_)),
    integer_dot_(vulkan_integer_dot(device_)),
    nodes_{ { NodeKind::ENCODE, this },       { NodeKind::ATTEND, this },      { NodeKind::COMBINE, this },
            { NodeKind::STORE_WINDOW, this }, { NodeKind::PROMPT_ROWS, this }, { NodeKind::PROMPT_MASK, this } } {
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
        width_k_ = std::max(width_k_, codec.k[(size_t) h].rank);
        width_v_ = std::max(width_v_, codec.v[(size_t) h].rank);
    }
    const vulkan::Tables made = vulkan::make_tables(tables);
    slopes_at_                = 4 * made.slopes_at;

    ctx_.reset(ggml_init({ 2 * ggml_tensor_overhead(), nullptr, true }));
    memory_ = ggml_new_tensor_1d(ctx_.get(), GGML_TYPE_I8, (int64_t) (4 * made.words.size()));
    ggml_format_name(memory_, "subkv_bases_l%d", codec.il);
    buffer_.reset(ggml_backend_alloc_ctx_tensors_from_buft(ctx_.get(), buft));
    if (!buffer_) {
        throw std::runtime_error("layer " + std::to_string(codec.il) + ": its bases, " +
                                 std::to_string(4 * made.words.size()) + " bytes, do not fit on " +
                                 ggml_backend_buft_name(buft));
    }
    ggml_backend_tensor_set(memory_, made.words.data(), 0, 4 * made.words.size());
}

void VulkanLayer::prepare() {
    store_slopes(layer_, memory_, slopes_at_, max_alibi_bias_);
}

int64_t VulkanLayer::scratch(int64_t n_rows) const {
    return n_rows * (width_k_ + 1 + vulkan::packed_words(layer(width_v_)));
}

uint64_t VulkanLayer::n_zero_rows() const {
    uint32_t n = 0;
    ggml_backend_tensor_get(memory_, &n, 0, sizeof(n));
    return n;
}

vulkan::Place place(const ggml_tensor * t) {
    return { t->view_src ? t->view_src : t, t->view_src ? t->view_offs : 0 };
}

vulkan::Place behind(vulkan::Place from, int64_t n_floats) {
    from.at += (uint64_t) n_floats * sizeof(float);
    return from;
}

void set_cells(vulkan::Attend & a, const ggml_tensor * k_view, const ggml_tensor * v_view) {
    a.k_tiles  = place(k_view);
    a.v_tiles  = place(v_view);
    a.k_stride = TILE * (int64_t) k_view->nb[1];
    a.v_stride = TILE * (int64_t) v_view->nb[1];
    a.k_stream = (int64_t) k_view->nb[2];
    a.v_stream = (int64_t) v_view->nb[2];
}

void set_mask(vulkan::Attend & a, const ggml_tensor * mask) {
    a.mask      = place(mask);
    a.mask_half = mask->type == GGML_TYPE_F16;
}

vulkan::Layer VulkanLayer::layer(int64_t width_v) const {
    const LayerCodec & codec = *layer_.codec;
    return { place(memory_),    codec.n_head_kv, layer_.n_head / codec.n_head_kv,
             codec.d_k,         codec.d_v,       width_k_,
             (int32_t) width_v, layer_.scale,    layer_.softcap,
             integer_dot_,      codec.latent };
}

vulkan::Encode VulkanLayer::encode(ggml_tensor * dst) const {
    const auto     in = sources_of<EncodeSources>(dst);
    vulkan::Encode e;
    e.layer    = layer(0);
    e.k        = place(in.k);
    e.v        = place(in.v);
    e.k_head   = stride_f32(in.k, 1);
    e.k_token  = stride_f32(in.k, 2);
    e.v_head   = stride_f32(in.v, 1);
    e.v_token  = stride_f32(in.v, 2);
    e.k_tiles  = place(in.k_cache);
    e.v_tiles  = place(in.v_cache);
    e.k_stride = TILE * (int64_t) in.k_cache->nb[1];
    e.v_stride = TILE * (int64_t) in.v_cache->nb[1];
    e.cells    = place(in.k_idxs);
    e.fresh    = place(dst);
    e.n_tok    = in.k->ne[2];
    return e;
}

vulkan::Attend VulkanLayer::partial(const ggml_tensor * q, const ggml_tensor * k_view,
                                    const ggml_tensor * result) const {
    const AttendShape s = attend_shape(layer_, q, k_view);
    vulkan::Attend    a = {};
    a.layer             = layer(s.width);
    a.q                 = place(q);
    a.q_head            = stride_f32(q, 1);
    a.q_token           = stride_f32(q, 2);
    a.n_kv              = s.n_kv;
    a.n_stream          = s.n_stream;
    a.n_tps             = s.n_tps;
    a.split             = s.split;
    a.n_split           = s.n_split;
    a.m                 = place(result);
    a.z                 = behind(a.m, s.n_rows);
    a.acc               = behind(a.z, s.n_rows);
    a.qt                = behind(a.acc, s.n_rows * s.width);
    a.shift             = behind(a.qt, s.n_rows / s.n_split * width_k_);
    a.packed            = behind(a.shift, s.n_rows / s.n_split);
    return a;
}

vulkan::Attend VulkanLayer::attend(ggml_tensor * dst) const {
    const auto     in = sources_of<AttendSources>(dst);
    vulkan::Attend a  = partial(in.q, in.k_view, dst);
    set_cells(a, in.k_view, in.v_view);
    set_mask(a, in.mask);
    a.cell_pos = place(in.cell_pos);
    a.tokens   = place(in.tokens);
    return a;
}

vulkan::Combine VulkanLayer::combine(ggml_tensor * dst) const {
    const auto      in = sources_of<CombineSources>(dst);
    vulkan::Combine b  = {};
    b.a                = partial(in.q, in.cells, in.partial);
    set_mask(b.a, in.mask);
    b.a.tokens     = place(in.tokens);
    b.fresh        = place(in.fresh);
    b.window       = place(in.window);
    b.slots        = place(in.slots);
    b.slots_of_seq = (int32_t) (layer_.window->n_slots() / std::max(1, layer_.window->n_seq()));
    b.sinks        = in.sinks ? place(in.sinks) : vulkan::Place{};
    b.out          = place(dst);
    b.out_stride   = stride_f32(dst, 1);
    return b;
}

vulkan::Store VulkanLayer::store_window(ggml_tensor * dst) const {
    const auto in = sources_of<StoreWindowSources>(dst);
    return { place(dst), place(in.fresh), place(in.slots), in.slots->ne[1], dst->ne[0] };
}

vulkan::Prompt VulkanLayer::prompt(const ggml_tensor * dst, const ggml_tensor * tokens,
                                   const ggml_tensor * slots) const {
    const Window & window = *layer_.window;
    vulkan::Prompt p      = {};
    p.c.a.layer           = layer(width_v_);
    p.c.a.tokens          = place(tokens);
    p.c.a.n_stream        = dst->ne[3];
    p.c.a.n_tps           = tokens->ne[1] / dst->ne[3];
    p.c.slots             = place(slots);
    p.c.slots_of_seq      = (int32_t) (window.n_slots() / std::max(1, window.n_seq()));
    p.n_slots             = dst->ne[3] > 1 ? p.c.slots_of_seq : window.n_slots();
    return p;
}

vulkan::Prompt VulkanLayer::prompt_rows(ggml_tensor * dst) const {
    const auto       in = sources_of<PromptRowsSources>(dst);
    vulkan::Prompt   p  = prompt(dst, in.tokens, in.slots);
    vulkan::Attend & a  = p.c.a;
    set_cells(a, in.k_view, in.v_view);
    a.n_kv     = in.k_view->ne[1];
    p.c.fresh  = place(in.fresh);
    p.c.window = place(in.window);
    p.n_rows   = dst->ne[1];
    p.first    = first_head(dst);
    p.n_heads  = (int32_t) dst->ne[2];
    p.k        = place(dst);
    p.v        = behind(p.k, p.n_rows * p.n_heads * a.n_stream * a.layer.d_k / 2);
    return p;
}

vulkan::Prompt VulkanLayer::prompt_mask(ggml_tensor * dst) const {
    const auto     in = sources_of<PromptMaskSources>(dst);
    vulkan::Prompt p  = prompt(dst, in.tokens, in.slots);
    set_mask(p.c.a, in.mask);
    p.c.a.cell_pos = place(in.cell_pos);
    p.c.a.n_kv     = in.cell_pos->ne[0];
    p.n_rows       = dst->ne[0];
    p.mask         = place(dst);
    return p;
}

const char * VulkanLayer::compute(NodeKind kind, ggml_tensor * dst, vulkan::Run run, void * recorder) const {
    switch (kind) {
        case NodeKind::ENCODE: return vulkan::encode(encode(dst), run, recorder);
        case NodeKind::ATTEND: return vulkan::attend(attend(dst), run, recorder);
        case NodeKind::COMBINE: return vulkan::combine(combine(dst), run, recorder);
        case NodeKind::STORE_WINDOW: return vulkan::store_window(store_window(dst), run, recorder);
        case NodeKind::PROMPT_ROWS: return vulkan::prompt_rows(prompt_rows(dst), run, recorder);
        case NodeKind::PROMPT_MASK: return vulkan::prompt_mask(prompt_mask(dst), run, recorder);
    }
    return "unknown node";
}

const char * VulkanLayer::refusal(NodeKind kind, ggml_tensor * node) const {
    const auto nothing = [](void *, const vulkan::Dispatch &) -> const char * { return nullptr; };
    return compute(kind, node, nothing, nullptr);
}

} // namespace

bool vulkan_supports(const ggml_tensor * node, ggml_backend_dev_t device) {
    const auto * n = (const Node *) device_userdata(node);
    return n && n->layer->device() == device;
}

const char * vulkan_compute(ggml_tensor * node, vulkan::Run run, void * recorder) {
    const auto * n = (const Node *) device_userdata(node);
    return n ? n->layer->compute(n->kind, node, run, recorder) : "a custom node that is not subkv's";
}

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
