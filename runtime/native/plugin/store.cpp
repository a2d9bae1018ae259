// store.cpp: the buffer type: K/V cache tensors, states, copies between streams.
#include "automatic.h"
#include "error.h"
#include "log_line.h"
#include "plugin.h"
#include "variables.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <utility>

namespace subkv::plugin {

namespace {

// Sequences of a cache of one stream that have a window of their own.
constexpr int32_t N_SEQUENCES = 4;

Store & store(ggml_backend_buffer_t buffer) {
    return *(Store *) buffer->context;
}

void free_buffer(ggml_backend_buffer_t buffer) {
    delete &store(buffer);
}

void * get_base(ggml_backend_buffer_t buffer) {
    return store(buffer).base();
}

ggml_status init_tensor(ggml_backend_buffer_t buffer, ggml_tensor * t) {
    return store(buffer).add(t) ? GGML_STATUS_SUCCESS : GGML_STATUS_ALLOC_FAILED;
}

void memset_tensor(ggml_backend_buffer_t buffer, ggml_tensor * t, uint8_t value, size_t offset, size_t size) {
    const std::vector<uint8_t> bytes(size, value);
    store(buffer).set(t, bytes.data(), offset, size);
}

void set_tensor(ggml_backend_buffer_t buffer, ggml_tensor * t, const void * data, size_t offset, size_t size) {
    store(buffer).set(t, data, offset, size);
}

void get_tensor(ggml_backend_buffer_t buffer, const ggml_tensor * t, void * data, size_t offset, size_t size) {
    store(buffer).get(t, data, offset, size);
}

bool cpy_tensor(ggml_backend_buffer_t buffer, const ggml_tensor * src, ggml_tensor * dst) {
    return store(buffer).copy(src, store_of(src), dst);
}

void clear(ggml_backend_buffer_t buffer, uint8_t value) {
    store(buffer).clear(value);
}

} // namespace

ggml_backend_buffer_t new_store(ggml_backend_buffer_type_t type, size_t size) {
    uint8_t * base = place().reserve(size);
    if (!base) {
        return nullptr;
    }
    ggml_backend_buffer_i i = {};
    i.free_buffer           = free_buffer;
    i.get_base              = get_base;
    i.init_tensor           = init_tensor;
    i.memset_tensor         = memset_tensor;
    i.set_tensor            = set_tensor;
    i.get_tensor            = get_tensor;
    i.cpy_tensor            = cpy_tensor;
    i.clear                 = clear;
    return ggml_backend_buffer_init(type, i, new Store(base, size), size);
}

Store * buffer_of(const ggml_tensor * t) {
    const ggml_tensor * root = root_of(t);
    const bool          ours = root->buffer && root->buffer->iface.free_buffer == free_buffer;
    return ours ? &store(root->buffer) : nullptr;
}

Store * store_of(const ggml_tensor * t, CacheTensor * which) {
    Store *             s     = buffer_of(t);
    const CacheTensor * found = s ? s->find(root_of(t)) : nullptr;
    if (!found) {
        return nullptr;
    }
    if (which) {
        *which = *found;
    }
    return s;
}

//
// one cache
//

static std::atomic<int64_t> n_stores{ 0 }, n_undecided{ 0 };

Store::Store(uint8_t * base, size_t size) : base_(base), size_(size), number_(n_stores++) {}

Store::~Store() {
    decided();
    place().release(base_, size_);
}

bool Store::is_any_undecided() {
    return n_undecided > 0;
}

void Store::decided() {
    n_undecided -= !decided_ && !tensors_.empty();
    decided_ = true;
}

bool Store::add(const ggml_tensor * t) {
    int  il = -1, end = 0;
    char side = 0;
    if (!t->view_src && std::sscanf(t->name, "cache_%c_l%d%n", &side, &il, &end) == 2 && t->name[end] == 0 &&
        (side == 'k' || side == 'v') && il >= 0 && il < MAX_LAYERS) {
        (side == 'v' ? type_v_ : type_k_) = t->type;
        if (t->type == GGML_TYPE_F16) {
            n_undecided += !decided_ && tensors_.empty();
            tensors_[t] = { il, side == 'v' };
        }
    }
    return find(root_of(t)) || open();
}

bool Store::open() {
    opened_ = opened_ || place().open(base_, size_);
    return opened_;
}

const CacheTensor * Store::find(const ggml_tensor * root) const {
    const auto it = tensors_.find(root);
    return it == tensors_.end() ? nullptr : &it->second;
}

void Store::clear(uint8_t value) {
    if (is_coded()) {
        for (const auto & [t, of] : tensors_) {
            if (!codes(of.il)) {
                place().fill(t->data, value, ggml_nbytes(t));
            }
        }
    } else if (value == 0 ? opened_ : open()) {
        place().fill(base_, value, size_);
    }
    early_.clear();
    restored_.clear();
    shifting_.clear();
    if (cache_) {
        cache_->clear();
        cells_->clear();
        ggml_backend_buffer_clear(memory_.get(), 0);
    }
}

ggml_tensor * Store::rows(int32_t il, bool value) const {
    return value ? rows_.at(il).second : rows_.at(il).first;
}

void Store::check(const ggml_tensor * node) {
    const CacheTensor * of = find(root_of(node));
    if (decided_ || asked_ || is_off()) {
        return;
    }
    if (type_k_ != GGML_TYPE_F16 || type_v_ != GGML_TYPE_F16) {
        stay_ordinary("its type was requested");
        return;
    }
    if (!of) {
        return;
    }
    weights_.add(node);
    const auto later = [&](const auto & entry) { return entry.second.il > of->il; };
    if (!of->value && std::none_of(tensors_.begin(), tensors_.end(), later)) { // all others have been seen
        checked_ = find_bases(Seen::PART);
        asked_   = true;
    }
}

bool Store::find_bases(Seen seen) {
    auto found = find_model_bases(weights_, seen, [this](int32_t il) {
        return std::any_of(tensors_.begin(), tensors_.end(), [&](const auto & entry) { return entry.second.il == il; });
    });
    if (found) {
        bases_ = std::move(*found);
    }
    return found.has_value();
}

void Store::decide(ggml_cgraph * graph, const GraphUse & use, bool full) {
    if (use.layers.empty()) { // a shift
        if (!open()) {
            fail("K/V cache: out of memory");
        }
        return;
    }
    if (!checked_ && !is_off()) {
        weights_ = {};
        for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
            weights_.add(ggml_graph_node(graph, i));
        }
        checked_ = find_bases(full ? Seen::ALL : Seen::ALL_OF_SLIDING);
    }
    weights_ = {};
    if (bases_.layout) {
        try {
            if (!use.unknown.empty()) {
                throw Invalid(use.unknown);
            }
            code(graph, use);
        } catch (const Invalid & e) {
            uncode();
            if (e.error.kind == SUBKV_ERROR_MEMORY) { // f16 would need more
                throw;
            }
            if (!bases_.automatic) {
                throw Invalid(
                    { e.error.kind, "SUBKV=" + cache_setting(), e.what(), "SUBKV=off runs with an ordinary cache" });
            }
            bases_.words = e.what();
        } catch (...) {
            uncode();
            throw;
        }
    }
    early_.clear();
    if (is_coded()) {
        protect_rows();
        decided();
    } else {
        stay_ordinary(bases_.words);
    }
}

void Store::stay_ordinary(const std::string & why) {
    if (!open()) {
        fail({ SUBKV_ERROR_MEMORY, "K/V cache", "out of memory" });
    }
    decided();
    if (!is_off()) {
        const std::string v = type_v_ == type_k_ ? "" : std::string("/") + ggml_type_name(type_v_);
        log_line("ordinary " + (ggml_type_name(type_k_) + v) + " K/V cache: " + why);
    }
}

void Store::begin(const GraphUse & use) {
    if (std::exchange(begun_, true) || !is_coded()) {
        return;
    }
    if (use.unknown.empty() || !bases_.automatic || !restored_.empty()) { // a graph of an unknown use fails
        report();
        return;
    }
    uncode();
    stay_ordinary(use.unknown);
}

void Store::uncode() {
    rows_.clear();
    restored_.clear();
    memory_.reset();
    ctx_.reset();
    cells_.reset();
    cache_.reset();
}

void Store::protect_rows() {
    for (const auto & [t, of] : tensors_) {
        const auto [begin, n] = pages(t->data, ggml_nbytes(t), codes(of.il));
        if (!codes(of.il) && !place().open(begin, n)) {
            fail({ SUBKV_ERROR_MEMORY, "K/V cache", "out of memory" });
        }
        if (codes(of.il) && n > 0) {
            place().close(begin, n);
        }
    }
    opened_ = false;
}

void Store::code(ggml_cgraph * graph, const GraphUse & use) {
    const Layout & layout = *bases_.layout;
    CacheDesc      desc   = {};
    desc.arch             = layout.arch; // a backend does not know the model's; widths are compared below
    desc.n_layer          = layout.n_layer;
    desc.type_k = desc.type_v = GGML_TYPE_F16;
    std::map<std::pair<int32_t, bool>, const ggml_tensor *> tensors;
    for (const auto & [t, of] : tensors_) {
        tensors[{ of.il, of.value }] = t;
        desc.n_cells                 = (uint32_t) t->ne[1];
        desc.n_stream                = (uint32_t) t->ne[2];
    }
    desc.n_seq_max = desc.n_stream > 1 ? desc.n_stream : (uint32_t) number_of("SUBKV_SEQUENCES", 1, 256, N_SEQUENCES);
    int32_t n_readers = 0;
    for (const LayerUse & layer : use.layers) {
        const LayerCodec * codec = layout.layer(layer.il);
        if (!codec) {
            continue;
        }
        const auto width = [&](bool value) {
            const auto it = tensors.find({ layer.il, value });
            return it == tensors.end() ? 0 : it->second->ne[0];
        };
        const int64_t k = (int64_t) codec->n_head_kv * codec->d_k, v = (int64_t) codec->n_head_kv * codec->d_v;
        if (width(false) != k || width(true) != (codec->latent ? 0 : v)) {
            fail("subkv.layout: rows of %lld and %lld elements expected in layer %d of this model, bases for %lld and "
                 "%lld found",
                 (long long) width(false), (long long) width(true), layer.il, (long long) k, (long long) v);
        }
        if (layer.attends.empty()) {
            fail("layer %d: its attention is not computed on the device SUBKV; load all layers there (-ngl all "
                 "--device SUBKV)",
                 layer.il);
        }
        const auto n_head = [&](int node) { return (int32_t) ggml_graph_node(graph, node)->src[0]->ne[2]; };
        desc.layers.push_back({ layer.il, n_head(layer.attends[0]), codec->n_head_kv, codec->d_k, codec->d_v,
                                codec->latent, false, place().codes() });
        for (size_t i = 1; i < layer.attends.size(); ++i) {
            desc.readers.push_back({ MAX_LAYERS + n_readers++, layer.il, n_head(layer.attends[i]) });
        }
    }
    if (desc.layers.empty()) {
        fail("this context holds none of the layers with bases");
    }
    cache_ = std::make_unique<Cache>(desc, bases_, nullptr);
    cells_ = std::make_unique<KnownCells>(desc.n_stream, desc.n_cells, (int32_t) desc.n_seq_max);
    ctx_.reset(ggml_init({ (2 * desc.layers.size() + 1) * ggml_tensor_overhead(), nullptr, true }));
    for (const LayerDesc & layer : desc.layers) {
        const auto tensor = [&](bool value) {
            const size_t row = cache_->facts().row_bytes(layer.il, value);
            return row == 0 ? nullptr :
                              ggml_new_tensor_3d(ctx_.get(), GGML_TYPE_I8, (int64_t) row, desc.n_cells, desc.n_stream);
        };
        ggml_tensor * k = tensor(false);
        rows_[layer.il] = { k, tensor(true) };
    }
    memory_.reset(ggml_backend_alloc_ctx_tensors_from_buft(ctx_.get(), place().codes()));
    if (!memory_) {
        fail({ SUBKV_ERROR_MEMORY, "K/V cache", "out of memory" });
    }
    ggml_backend_buffer_clear(memory_.get(), 0);
    for (const Part & part : early_) {
        const size_t          row = part.root->nb[1];
        std::vector<uint16_t> rows((size_t) part.n * row / sizeof(uint16_t));
        place().read(rows.data(), (const char *) part.root->data + (size_t) part.first * row, (size_t) part.n * row);
        set_rows(part, rows.data());
    }
}

void Store::report() const {
    RowSizes          sizes;
    std::set<int32_t> ordinary;
    for (const auto & [t, of] : tensors_) {
        if (!codes(of.il)) {
            sizes.ordinary += ggml_nbytes(t);
            sizes.ordinary_f16 += ggml_nelements(t) * sizeof(uint16_t);
            ordinary.insert(of.il);
        }
    }
    sizes.coded             = ggml_backend_buffer_get_size(memory_.get());
    sizes.n_other           = (uint32_t) ordinary.size();
    const int32_t n_windows = rows_.begin()->second.first->ne[2] > 1 ? cache_->n_seq() : 1; // others may stay unused
    log_line(cache_line(*cache_, sizes, n_windows) + bases_.words);
}

//
// states
//

Store::Part Store::part(const ggml_tensor * t, size_t offset, size_t size) const {
    const ggml_tensor * root = root_of(t);
    const size_t        at   = (t->view_src ? t->view_offs : 0) + offset;
    GGML_ASSERT(at % root->nb[1] == 0 && size % root->nb[1] == 0 && "states of a coded cache are whole rows");
    return { root, *find(root), (int64_t) (at / root->nb[1]), (int64_t) (size / root->nb[1]) };
}

void Store::get(const ggml_tensor * t, void * data, size_t offset, size_t size) const {
    const CacheTensor * of = find(root_of(t));
    if (!opened_ && !is_coded()) { // nothing has been stored
        std::memset(data, 0, size);
        return;
    }
    if (!of || !codes(of->il)) {
        place().read(data, (const char *) t->data + offset, size);
        return;
    }
    const Part    p     = part(t, offset, size);
    const int64_t width = p.root->ne[0];
    auto *        rows  = (uint16_t *) data;
    cache_->decode_cells(of->il, of->value, this->rows(of->il, of->value), p.first, p.n, rows);
    for (int64_t i = 0; i < p.n; ++i) {
        const auto [seq, pos] = cells_->holder(p.first + i);
        cache_->exact_row(of->il, of->value, seq, pos, rows + i * width);
    }
}

void Store::set(ggml_tensor * t, const void * data, size_t offset, size_t size) {
    const CacheTensor * of = find(root_of(t));
    if (of && codes(of->il)) {
        set_rows(part(t, offset, size), (const uint16_t *) data);
        return;
    }
    if (!is_coded() && !open()) {
        fail({ SUBKV_ERROR_MEMORY, "K/V cache", "out of memory" });
    }
    place().write((char *) t->data + offset, data, size);
    if (of && !decided_ && offset % root_of(t)->nb[1] == 0 && size % root_of(t)->nb[1] == 0) {
        early_.push_back(part(t, offset, size));
    }
}

void Store::set_rows(const Part & p, const uint16_t * rows) {
    if (!codes(p.of.il)) {
        return;
    }
    const int64_t width = p.root->ne[0];
    cache_->encode_rows(p.of.il, p.of.value, this->rows(p.of.il, p.of.value), p.first, p.n, rows);
    cells_->forget(p.first, p.n);
    Restored & restored = restored_[p.first];
    if (restored.n != p.n) {
        restored = { p.n, {} };
    }
    const int64_t n_first                  = std::min<int64_t>(p.n, cache_->n_sink());
    const int64_t n_last                   = std::min<int64_t>(p.n, cache_->n_recent());
    restored.rows[{ p.of.il, p.of.value }] = { { rows, rows + n_first * width },
                                               { rows + (p.n - n_last) * width, rows + p.n * width } };
}

void Store::adopt_restored(const std::vector<GraphToken> & tokens, const ggml_tensor * mask) {
    if (restored_.empty()) {
        return;
    }
    std::vector<KnownCells::Range> ranges;
    for (const auto & [first, restored] : restored_) {
        ranges.push_back({ first, restored.n });
    }
    const auto all     = cells_->adopt(*cache_, ranges, tokens, mask);
    auto       adopted = all.begin();
    for (const auto & [first, restored] : restored_) {
        for (const auto & [of, rows] : restored.rows) {
            const int64_t width   = cache_->width(of.first, of.second);
            const auto    n_first = (int64_t) rows.first.size() / width, n_last = (int64_t) rows.second.size() / width;
            const auto    put = [&](int64_t i, const uint16_t * row) { // of the i-th cell
                if (i < adopted->n) {
                    cache_->set_exact_row(of.first, of.second, adopted->seq, adopted->pos + (int32_t) i, row);
                }
            };
            for (int64_t i = 0; i < n_first; ++i) {
                put(i, rows.first.data() + i * width);
            }
            for (int64_t i = 0; i < n_last; ++i) {
                put(restored.n - n_last + i, rows.second.data() + i * width);
            }
        }
        ++adopted;
    }
    restored_.clear();
}

//
// copies
//

bool Store::copy(const ggml_tensor * src, const Store * from, ggml_tensor * dst) {
    const CacheTensor * of = find(root_of(dst));
    if (from != this || !of || !codes(of->il) || root_of(src) != root_of(dst)) {
        return false;
    }
    const ggml_tensor * root = root_of(dst);
    if (ggml_nbytes(src) != root->nb[2] || ggml_nbytes(dst) != root->nb[2] || src->view_offs % root->nb[2] != 0 ||
        dst->view_offs % root->nb[2] != 0) {
        return false;
    }
    const auto    a = (int32_t) (src->view_offs / root->nb[2]), b = (int32_t) (dst->view_offs / root->nb[2]);
    ggml_tensor * t = rows(of->il, of->value);
    place().copy_rows((char *) t->data + b * t->nb[2], (const char *) t->data + a * t->nb[2], t->nb[2]);
    if (of->il == rows_.begin()->first && !of->value) { // once for all layers
        cells_->copy_stream(*cache_, a, b);
        restored_.erase(restored_.lower_bound(b * root->ne[1]), restored_.lower_bound((b + 1) * root->ne[1]));
    }
    return true;
}

} // namespace subkv::plugin
