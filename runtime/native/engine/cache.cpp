#include "cache.h"

#include "available_memory.h"
#include "error.h"
#include "log_line.h"
#include "node_sources.h"
#include "observer.h"
#include "subkv/recent.h"
#include "variables.h"

#include <algorithm>
#include <cstdlib>
#include <stdexcept>

namespace subkv {

// SUBKV_RESUME is the number of tokens before the end of a shortened sequence that need exact rows, so that a program
// evaluates those without one again. Throws Invalid.
static int32_t resume_of_environment() {
    constexpr int32_t N_RESUME = 32; // as exact as an unbroken window (docs/limits.md#edits)
    return (int32_t) number_of("SUBKV_RESUME", 0, MAX_RECENT, N_RESUME);
}

// With SUBKV_DEFER=0, a GPU makes the codes of a decoded token with it, and with 1 those of many tokens later. Throws
// Invalid.
static bool defer_of_environment() {
    return number_of("SUBKV_DEFER", 0, 1, 1) == 1;
}

std::string NodeReports::take_first_bad() {
    const int64_t first = first_bad_;
    if (first < 0 || told_) {
        return "";
    }
    told_ = true;
    return sentence(
        "layer %d: the %s of position %d is not finite (NaN or infinity) and cannot be coded: attention to it "
        "is NaN; later ones are only counted",
        (int32_t) (first >> 32), (first >> 31 & 1) != 0 ? "value" : "key", (int32_t) (first & INT32_MAX));
}

Cache::Cache(const CacheDesc & desc, const CacheChoice & choice, subkv_observer * observer) :
    layout_(choice.layout), observer_(observer),
    window_(choice.n_sink, choice.n_recent, choice.n_rollback, layout_ ? desc.n_seq_max : 0), n_cells_(desc.n_cells),
    n_stream_(desc.n_stream), n_resume_(resume_of_environment()) {
    for (const auto & layer : desc.layers) {
        owners_[layer.il] = layer.il;
    }
    for (const auto & reader : desc.readers) {
        owners_[reader.il] = reader.owner;
    }
    if (layout_) {
        code(desc, choice);
    }
    set_facts();
}

void Cache::code(const CacheDesc & desc, const CacheChoice & choice) {
    if (ops_error()) {
        fail("%s", ops_error());
    }
    check(desc);
    bases_ = bases_of(choice.adapt, choice.adapt_key)(*layout_, window_, desc);

    check_memory(desc);

    std::vector<LayerDesc> coded;
    std::vector<bool>      integers;
    for (const auto & layer : desc.layers) {
        const LayerCodec * codec = layout_->layer(layer.il);
        if (!codec) {
            continue;
        }
        coded.push_back(layer);
        // GPU kernels read halves
        integers.push_back(layout_->recent_bits == RECENT_BITS && !bases_->codes_later() &&
                           !has_device_kernels(layer.buft));
        add_nodes(layer, layer.il, layer.n_head, *codec);
        for (const auto & reader : desc.readers) {
            if (reader.owner == layer.il) {
                add_nodes(layer, reader.il, reader.n_head, *codec);
                nodes_[(size_t) layer.il]->n_readers++;
            }
        }
        elements_per_token_ += (size_t) row_elements(layer);
    }
    window_.allocate(coded, integers, desc.no_alloc);
    if (!bases_->codes_later()) {
        for (const LayerDesc & layer : coded) {
            reserve_shift(*nodes_[(size_t) layer.il], (int64_t) n_cells_ * n_stream_);
        }
    }
}

void Cache::add_nodes(const LayerDesc & layer, int32_t il, int32_t n_head, const LayerCodec & codec) {
    if ((size_t) il >= nodes_.size()) {
        nodes_.resize((size_t) il + 1);
    }
    auto & nodes = nodes_[(size_t) il];
    nodes.reset(new LayerNodes{ &codec, &window_, &bases_->layer(layer.il), &reports_, n_head, layer.il, {} });
    nodes->gathers = !bases_->codes_later() && !has_device_kernels(layer.buft);
    nodes->by_rows = layer.selected && codec.latent && nodes->gathers;
    nodes->means.assign((size_t) (codec.n_head_kv * codec.d_k), 0.0f);
    for (size_t h = 0; h < codec.centre.size(); ++h) {
        const auto & mean = codec.centre[h].mean;
        ggml_fp16_to_fp32_row(mean.data(), nodes->means.data() + h * (size_t) codec.d_k, (int64_t) mean.size());
    }
    if (has_device_kernels(layer.buft)) {
        nodes->device = make_device_layer(*nodes, layer.buft);
        nodes->buft   = layer.buft;
        nodes->defers = nodes->device->defers_codes() && window_.n_recent() > 0 && defer_of_environment();

        ggml_backend_dev_t device = ggml_backend_buft_get_device(layer.buft);
        const std::string  name =
            std::string(ggml_backend_dev_name(device)) + " (" + ggml_backend_dev_description(device) + ")";
        if (devices_.find(name) == std::string::npos) {
            devices_ += (devices_.empty() ? "" : ", ") + name;
        }
    }
}

int32_t Cache::owner(int32_t il) const {
    const auto it = owners_.find(il);
    return it == owners_.end() ? -1 : it->second;
}

static void check_group(int32_t il, int32_t n_head, int32_t n_head_kv) {
    if (n_head % n_head_kv != 0 || n_head / n_head_kv > MAX_GROUP) {
        fail({ SUBKV_ERROR_UNSUPPORTED, "model",
               sentence("layer %d shares one KV head between %d / %d query heads, at most %d supported", il, n_head,
                        n_head_kv, MAX_GROUP) });
    }
}

std::string Cache::misfit(const Layout & l, const CacheDesc & desc) {
    if (l.arch != desc.arch) {
        return sentence("subkv.arch: bases for the model's architecture \"%s\" expected, \"%.100s\" found",
                        desc.arch.c_str(), l.arch.c_str());
    }
    if (l.n_layer != desc.n_layer) {
        return sentence("subkv.block_count: the model's %d layers expected, %d found", desc.n_layer, l.n_layer);
    }
    for (const auto & layer : desc.layers) {
        const LayerCodec * codec = l.layer(layer.il);
        if (codec && (codec->n_head_kv != layer.n_head_kv || codec->d_k != layer.d_k || codec->d_v != layer.d_v)) {
            return sentence("subkv.layout: layer %d of the model has %d KV heads of size %d / %d (K / V), bases for "
                            "%d heads of size %d / %d found",
                            layer.il, layer.n_head_kv, layer.d_k, layer.d_v, codec->n_head_kv, codec->d_k, codec->d_v);
        }
        if (codec && codec->latent != layer.latent) {
            return sentence("subkv.layout: layer %d of the model has %s, bases for %s found", layer.il,
                            layer.latent ? "values that are part of its keys" : "values of their own",
                            codec->latent ? "values that are part of keys" : "values of their own");
        }
    }
    return "";
}

void Cache::check(const CacheDesc & desc) const {
    const auto & l = *layout_;
    if (!desc.unsupported.empty()) {
        fail({ SUBKV_ERROR_UNSUPPORTED, "model " + desc.arch,
               "subkv cannot hold its K/V cache because " + desc.unsupported,
               "use an ordinary cache type (-ctk f16)" });
    }
    if (const std::string why = misfit(l, desc); !why.empty()) {
        fail("%s", why.c_str());
    }
    if (desc.type_k != GGML_TYPE_F16 || desc.type_v != GGML_TYPE_F16) {
        fail("type_k, type_v: f16 expected with a subkv cache (coefficients replace the cache type), "
             "%s, %s found",
             ggml_type_name(desc.type_k), ggml_type_name(desc.type_v));
    }
    if (desc.n_cells % TILE != 0) {
        fail("n_ctx: a multiple of %d cells per stream expected, %u found", TILE, desc.n_cells);
    }
    size_t n_coded = 0;
    for (const auto & layer : desc.layers) {
        const LayerCodec * codec = l.layer(layer.il);
        if (!codec) {
            continue;
        }
        n_coded++;
        check_group(layer.il, layer.n_head, layer.n_head_kv);
        for (const auto & reader : desc.readers) {
            if (reader.owner == layer.il) {
                check_group(reader.il, reader.n_head, layer.n_head_kv);
            }
        }
        if (!ggml_backend_buft_is_host(layer.buft) && !has_device_kernels(layer.buft)) {
            fail({ SUBKV_ERROR_UNSUPPORTED, "layer " + std::to_string(layer.il),
                   sentence("its cache would be on %s, for which there are no coefficient kernels in this build "
                            "(-DGGML_CUDA=ON has NVIDIA's, -DGGML_VULKAN=ON others'); keep it on the CPU (-ngl 0, or "
                            "offload_kqv off)",
                            ggml_backend_buft_name(layer.buft)) });
        }
        if (has_device_kernels(layer.buft)) {
            const uint64_t row   = std::max(codec->k_row_bytes, codec->v_row_bytes);
            const uint64_t bytes = row * desc.n_cells * desc.n_stream;
            const uint64_t most  = device_max_range(layer.buft);
            if (bytes > most) {
                fail("n_ctx: at most %llu bytes of K or V per layer expected on %s, which binds no more at once, %llu "
                     "found; take a smaller context, or keep the cache on the CPU (-ngl 0, or offload_kqv off)",
                     (unsigned long long) most, ggml_backend_buft_name(layer.buft), (unsigned long long) bytes);
            }
        }
    }
    if (n_coded == 0) {
        throw std::runtime_error("subkv.layout: none of its layers has a full-attention K/V cache in this model");
    }
    if (n_coded == desc.layers.size()) {
        return; // a layout may have bases for layers without rows
    }
    for (const auto & codec : l.layers) {
        const auto same = [&](const LayerDesc & layer) { return layer.il == codec.il; };
        if (std::none_of(desc.layers.begin(), desc.layers.end(), same) &&
            std::find(desc.recurrent.begin(), desc.recurrent.end(), codec.il) != desc.recurrent.end()) {
            fail("subkv.layout: bases for layers with a full-attention K/V cache of their own expected, found some for "
                 "layer %d, which has none in this model",
                 codec.il);
        }
    }
}

// llama.cpp fills a cache with zeros. If the system has promised more memory than it has, it would end the process
// then.
void Cache::check_memory(const CacheDesc & desc) const {
    const char *      set = std::getenv("LLAMA_ARG_FIT"); // llama.cpp's variable
    const std::string fit = set ? set : "";
    if ((desc.no_alloc && !desc.is_long) || fit == "off" || fit == "0" || fit == "false") {
        return;
    }
    uint64_t of_cell = 0;
    for (const auto & layer : desc.layers) {
        if (has_device_kernels(layer.buft)) {
            continue;
        }
        const LayerCodec * codec = layout_->layer(layer.il);
        const int64_t      k     = (int64_t) layer.n_head_kv * layer.d_k;
        const int64_t      v     = layer.latent ? 0 : (int64_t) layer.n_head_kv * layer.d_v;
        of_cell += codec ? codec->k_row_bytes + codec->v_row_bytes :
                           ggml_row_size(desc.type_k, k) + ggml_row_size(desc.type_v, v);
    }
    const auto     free    = (uint64_t) available_memory();
    const uint64_t n_cells = (uint64_t) desc.n_cells * desc.n_stream;
    if (of_cell * n_cells <= free) {
        return;
    }
    const uint64_t    fits = free / of_cell / 1024 * 1024;
    const std::string more = fits > 0 ? "; about " + std::to_string(fits) + " tokens would fit" : "";
    fail({ SUBKV_ERROR_MEMORY, "n_ctx",
           sentence("expected a context that fits in the %llu MiB of memory available, found %llu tokens with subkv: "
                    "cells %llu MiB%s",
                    (unsigned long long) (free >> 20), (unsigned long long) n_cells,
                    (unsigned long long) (of_cell * n_cells >> 20), more.c_str()) });
}

size_t Cache::row_bytes(const LayerNodes & nodes, bool value) const {
    const auto & codec = *nodes.codec;
    if (value && codec.latent) {
        return 0;
    }
    return (value ? codec.v_row_bytes : codec.k_row_bytes) + nodes.bases->extra_bytes(value);
}

void Cache::set_facts() {
    facts_.coded        = layout_ != nullptr;
    facts_.shifts       = !bases_->codes_later();
    facts_.moves        = moved_of_environment();
    facts_.n_rollback   = bases_->codes_later() ? window_.n_rollback() : -1;
    facts_.n_slots      = window_.n_slots();
    facts_.identity     = identity();
    facts_.bytes_beside = window_.bytes_by_type();
    for (const auto & [il, owner] : owners_) {
        facts_.layers[il].observed = observer_ != nullptr;
    }
    for (size_t il = 0; il < nodes_.size(); ++il) {
        if (nodes_[il]) {
            facts_.layers[(int32_t) il].k = row_bytes(*nodes_[il], false);
            facts_.layers[(int32_t) il].v = row_bytes(*nodes_[il], true);
        }
    }
}

void Cache::wait_for_devices() const {
    for (const auto & nodes : nodes_) {
        if (nodes && nodes->device) {
            nodes->device->wait();
        }
    }
}

// The list is encoded only when a token no longer reads one of its rows exactly, which happens once in n_recent tokens
// of a sequence.
void Cache::encode_uncoded() const {
    if (uncoded_.empty()) {
        return;
    }
    for (const UncodedRow & row : uncoded_.rows()) {
        GGML_ASSERT(window_.holds(row.seq, row.pos) && window_.slot(row.seq, row.pos) == row.slot);
    }
    wait_for_devices();
    for (const auto & nodes : nodes_) {
        if (nodes && nodes->k_cache) {
            nodes->device->encode_window(nodes->k_cache, nodes->v_cache, uncoded_.rows());
        }
    }
    wait_for_devices();
    uncoded_.clear();
}

void Cache::clear() {
    wait_for_devices();
    uncoded_.clear();
    window_.clear();
    rotated();
    for (uint32_t stream = 0; stream < n_stream_; ++stream) {
        bases_->clear(stream);
    }
}

bool Cache::can_remove(int32_t seq, int32_t p0, int32_t p1, const CellReader & cells) const {
    if (!bases_->codes_later()) { // every token has a code
        return true;
    }
    if (!window_.stays_complete(seq, p0, p1, cells)) {
        return false;
    }
    const auto [s0, s1] = window_.sequences(seq);
    for (int32_t s = s0; s < s1; ++s) {
        if (!bases_->can_remove(s, p0, p1, cells)) {
            return false;
        }
    }
    return true;
}

int32_t Cache::rollback_target(int32_t seq, const CellReader & cells) const {
    if (!bases_->codes_later()) {
        return cells.max_pos_outside(seq, 0, 0) < 0 ? -1 : 0;
    }
    const int32_t to = window_.rollback_target(seq, cells);
    return to >= 0 ? std::max(to, bases_->coded(cells.stream_of(seq))) : to;
}

int32_t Cache::resume(int32_t seq, int32_t pos, const CellReader & cells) const {
    return window_.resume(seq, pos, n_resume_, cells);
}

bool Cache::remove(int32_t seq, int32_t p0, int32_t p1, const CellReader & cells) {
    if (!can_remove(seq, p0, p1, cells)) {
        return false;
    }
    if (uncoded_.shared() || (n_stream_ == 1 && window_.n_seq() > 1)) { // Window::remove may copy rows over others
        encode_uncoded();
    }
    wait_for_devices();
    const auto [s0, s1] = window_.sequences(seq);
    for (int32_t s = s0; s < s1; ++s) {
        uncoded_.remove(s, p0, p1);
        if (cells.max_pos_outside(s, p0, p1) >= 0) {
            window_.remove(s, p0, p1, cells);
            continue;
        }
        window_.forget(s);
        bases_->clear(cells.stream_of(s));
    }
    return true;
}

bool Cache::copy_seq(int32_t src, int32_t dst, int32_t p0, int32_t p1, const CellReader & cells) {
    clear_error(); // as in shift()
    encode_uncoded();

    if (n_stream_ == 1 && std::max(src, dst) < window_.n_seq()) { // in other caches dst loses its cells
        const int32_t pos = cells.doubled(src, dst, p0, p1);
        if (pos >= 0) {
            return reject(
                "seq_cp: one token per position expected, sequence %d has its own at position %d where one of "
                "sequence %d would join it; remove it first",
                dst, pos, src);
        }
    }
    wait_for_devices();
    const bool replace = n_stream_ > 1 || (dst < window_.n_seq() && cells.max_pos_outside(dst, 0, 0) < 0);
    if (!window_.copy_seq(src, dst, p0, p1, replace)) {
        return false;
    }
    bases_->copy((uint32_t) src, (uint32_t) dst); // with adaptive bases the number of a sequence is its stream
    return true;
}

void Cache::keep(int32_t seq, const CellReader & cells) {
    encode_uncoded();
    wait_for_devices();
    for (int32_t s = 0; s < window_.n_seq(); ++s) { // with adaptive bases a stream has no other sequence
        if (s != seq && cells.stream_of(s) == cells.stream_of(seq)) {
            window_.forget(s);
        }
    }
}

bool Cache::ready(const std::vector<TokenDesc> & tokens, const CellReader & cells) const {
    return window_.ready(tokens, cells) && (!bases_->codes_later() || window_.is_complete(tokens, cells)) &&
           bases_->ready(tokens, causal(), window_, cells);
}

bool Cache::can_shift(int32_t seq, int32_t p0, int32_t p1, int32_t by, const CellReader & cells) const {
    clear_error(); // callers of void functions read the result from it
    if (!bases_->can_shift()) {
        return false;
    }
    const auto shifted = [](const auto & nodes) { return nodes && nodes->shifted; };
    if (std::any_of(nodes_.begin(), nodes_.end(), shifted)) {
        return reject(
            "seq_add: an earlier shift was stopped behind some of the layers; decode a token to finish it, or "
            "clear the cache");
    }
    return window_.can_add(seq, p0, p1, by, cells);
}

bool Cache::shift(int32_t seq, int32_t p0, int32_t p1, int32_t by, const CellReader & cells) {
    const bool can = can_shift(seq, p0, p1, by, cells);
    if (can) {
        encode_uncoded();
        wait_for_devices();
        window_.add(seq, p0, p1, by, cells);
    }
    return can;
}

void Cache::rotated() {
    window_.rotated();
    for (const auto & nodes : nodes_) {
        if (nodes) {
            nodes->shifted = false;
            nodes->rotated.clear();
        }
    }
}

void Cache::build_shift(const ShiftBuild & b) {
    build_shift_node(*nodes_[(size_t) b.il], b);
}

bool Cache::report(const std::string & reason) const {
    return reject("%s", reason.c_str());
}

//
// graph inputs
//

Inputs Cache::build_inputs(ggml_context * ctx, int64_t n_kv, int64_t n_stream, int64_t n_tokens) {
    Inputs in;
    in.cell_pos = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, n_kv, n_stream);
    in.tokens   = new_token_rows(ctx, n_tokens);
    in.slots    = new_slot_rows(ctx, std::max<int64_t>(1, window_.n_slots()));
    for (ggml_tensor * t : { in.cell_pos, in.tokens, in.slots }) {
        ggml_set_input(t);
    }
    ggml_set_name(in.cell_pos, "subkv_cell_pos");
    ggml_set_name(in.tokens, "subkv_tokens");
    ggml_set_name(in.slots, "subkv_slots");
    return in;
}

void Cache::set_inputs(const Inputs & in, const std::vector<TokenDesc> & tokens, uint32_t stream0,
                       const CellReader & cells) {
    for (const auto & [il, rows] : in.shared) { // a graph without the last reader would not store rows in the window
        GGML_ASSERT(rows.n_readers == 0);
    }
    const auto exact = [&](int32_t p, int32_t t) { return is_exact(p, t, window_.n_sink(), window_.n_recent()); };
    if (!in.defers_codes || uncoded_.needed(tokens, exact)) {
        encode_uncoded();
    }
    // ggml does not allocate inputs that no node reads, as in a graph without coded layers.
    if (in.cell_pos->data) {
        const int64_t n_kv = in.cell_pos->ne[0];
        for (int64_t s = 0; s < in.cell_pos->ne[1]; ++s) {
            cells.positions(stream0 + (uint32_t) s, (uint32_t) n_kv, (int32_t *) in.cell_pos->data + s * n_kv);
        }
    }
    window_.set_inputs(in, tokens, cells);
    for (const auto & token : tokens) {
        if (in.defers_codes) {
            const int32_t seq  = token.seq[0];
            const auto    cell = (int32_t) ((stream0 + (uint32_t) token.stream) * n_cells_) + token.cell;
            uncoded_.add(token, (int32_t) window_.slot(seq, token.pos), cell);
        }
    }
}

bool Cache::computed() {
    const std::string bad = reports_.take_first_bad();
    if (!bad.empty()) {
        log_line(bad);
    }
    return !reports_.take_no_memory() || reject("decode: out of memory; decode the batch again");
}

ggml_tensor * Cache::build_attn(const AttnBuild & b) {
    ggml_tensor * out = build_attn_nodes(*nodes_[(size_t) b.il], b);
    if (observer_ && b.k) {
        build_observe_output_node(observed_.at(b.il), b, out);
    }
    return out;
}

void Cache::build_observe(ggml_context * ctx, ggml_cgraph * gf, int32_t il, ggml_tensor * q, ggml_tensor * k,
                          ggml_tensor * v, const Inputs & in, float scale) {
    ObserveData & data = observed_.try_emplace(owner(il), ObserveData{ &reports_ }).first->second;
    build_observe_node(*observer_, data, ctx, gf, owner(il), q, k, v, in, scale);
}

void Cache::stats(const RowSizes & rows, subkv_stats & out) const {
    out                     = {};
    const uint64_t n_cells  = (uint64_t) n_cells_ * n_stream_;
    const uint64_t elements = n_cells * elements_per_token_;
    out.bytes_codes         = rows.coded;
    out.bytes_window        = window_.bytes();
    out.bytes_stock         = rows.ordinary;
    out.bytes_f16           = elements * 2 + rows.ordinary_f16;
    out.n_layer_sliding     = rows.n_sliding;
    out.n_layer_other       = rows.n_other;
    out.n_swa               = rows.n_swa;
    out.bytes_bases         = layout_->bytes_bases;
    out.n_zero_rows         = reports_.n_bad();
    out.bytes_kv            = rows.coded + out.bytes_window + bases_->bytes() + rows.ordinary;
    bases_->stats(out);
    for (size_t il = 0; il < nodes_.size(); ++il) {
        const auto & node = nodes_[il];
        if (node && node->owner == (int32_t) il) {
            out.n_layer_coded++;
            out.n_layer_device += node->device ? 1 : 0;
            out.n_zero_rows += node->device ? node->device->n_bad_rows() : 0;
            out.bytes_per_token += row_bytes(*node, false) + row_bytes(*node, true);
        }
    }
    out.n_cells    = n_cells_;
    out.n_stream   = n_stream_;
    out.n_sink     = window_.n_sink();
    out.n_recent   = window_.n_recent();
    out.n_rollback = window_.n_rollback();
    out.bpe        = (float) (8.0 * (double) (out.bytes_kv - rows.ordinary) / (double) elements);
}

} // namespace subkv
