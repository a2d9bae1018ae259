// layout.cpp: strict reader of the subkv.* keys of a GGUF (converter/FORMAT.md §1 and §3).
//
// Order of work: file, typed keys, layout string, exact length of every basis string, and only then memory for the
// matrices, so that no claimed size is believed before the file has shown the bytes for it.
#include "layout.h"

#include "base64.h"
#include "ggml.h"
#include "gguf.h"
#include "sha256.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <new>
#include <unordered_set>

namespace subkv {

namespace {

constexpr size_t MATRIX_ALIGN = 64;
constexpr float  MAX_FACTOR   = 65504.0f; // of gamma and ratios, as of any half: their products stay finite

struct Invalid {
    std::string why;
};

[[noreturn]] void refuse(const std::string & key, const std::string & expected, const std::string & found) {
    throw Invalid{ key + ": expected " + expected + ", found " + found };
}

uint32_t le32(const uint8_t * p) {
    return p[0] | (uint32_t) p[1] << 8 | (uint32_t) p[2] << 16 | (uint32_t) p[3] << 24;
}

struct GgufFree {
    void operator()(gguf_context * ctx) const { gguf_free(ctx); }
};

using Gguf = std::unique_ptr<gguf_context, GgufFree>;

// ggml's reader does not look at the tensor data when it does not load it: a file cut there would pass.
void check_data_section(const gguf_context * ctx, const std::string & path, uint64_t file_size) {
    const uint64_t data = gguf_get_data_offset(ctx);
    for (int64_t i = 0; i < gguf_get_n_tensors(ctx); ++i) {
        const uint64_t offset = gguf_get_tensor_offset(ctx, i);
        const uint64_t size   = gguf_get_tensor_size(ctx, i);
        if (data > file_size || offset > file_size - data || size > file_size - data - offset) {
            refuse(path, "a complete GGUF file",
                   "a truncated one: tensor '" + std::string(gguf_get_tensor_name(ctx, i)) + "' of " +
                       std::to_string(size) + " bytes ends beyond the file's " + std::to_string(file_size) + " bytes");
        }
    }
}

Gguf open_gguf(const char * path_or_null) {
    if (!path_or_null || !*path_or_null) {
        refuse("path", "the name of a GGUF file", "nothing");
    }
    const std::string path   = path_or_null;
    const auto        fspath = std::filesystem::u8path(path);
    std::error_code   ec;
    const auto        status = std::filesystem::status(fspath, ec);
    if (!std::filesystem::exists(status)) {
        refuse(path, "a GGUF file",
               ec && status.type() == std::filesystem::file_type::none ? ec.message() : "no such file");
    }
    if (!std::filesystem::is_regular_file(status)) {
        refuse(path, "a GGUF file",
               std::filesystem::is_directory(status) ? "a directory" : "something not a regular file");
    }
    const uint64_t size = std::filesystem::file_size(fspath, ec);
    if (ec) {
        refuse(path, "a readable GGUF file", ec.message());
    }
    std::ifstream file(fspath, std::ios::binary);
    if (!file) {
        refuse(path, "a readable GGUF file", std::strerror(errno));
    }
    // ggml names these defects only in its log
    uint8_t head[24] = {};
    file.read((char *) head, sizeof(head));
    if (file.gcount() < 4 || std::memcmp(head, "GGUF", 4) != 0) {
        refuse(path, "a GGUF file", file.gcount() == 0 ? "an empty file" : "other first bytes than 'GGUF'");
    }
    if (file.gcount() < (std::streamsize) sizeof(head)) {
        refuse(path, "a complete GGUF file", "one of " + std::to_string(size) + " bytes");
    }
    file.close();
    const uint32_t version = le32(head + 4);
    if (version < 2 || version > GGUF_VERSION) {
        refuse(path, "GGUF version 2.." + std::to_string(GGUF_VERSION), "version " + std::to_string(version));
    }
    gguf_init_params params = { /*no_alloc =*/true, /*ctx =*/nullptr };
    Gguf             ctx(gguf_init_from_file(path.c_str(), params));
    if (!ctx) {
        refuse(path, "complete and well-formed GGUF metadata", "a truncated or damaged header");
    }
    check_data_section(ctx.get(), path, size);
    return ctx;
}

std::string shortened(std::string s) {
    if (s.size() > 60) {
        s.resize(60);
        while (!s.empty() && ((uint8_t) s.back() & 0xc0) == 0x80) {
            s.pop_back();
        }
        if (!s.empty() && (uint8_t) s.back() >= 0xc0) {
            s.pop_back();
        }
        s += "…";
    }
    return s;
}

bool is_utf8(std::string_view s) {
    for (size_t i = 0; i < s.size();) {
        const uint8_t c = (uint8_t) s[i++];
        const int     n = c < 0x80 ? 0 : (c & 0xe0) == 0xc0 ? 1 : (c & 0xf0) == 0xe0 ? 2 : (c & 0xf8) == 0xf0 ? 3 : -1;
        if (n < 0 || s.size() - i < (size_t) n) {
            return false;
        }
        uint32_t code = n == 0 ? c : c & (0x3fu >> n);
        for (int j = 0; j < n; ++j) {
            const uint8_t next = (uint8_t) s[i++];
            if ((next & 0xc0) != 0x80) {
                return false;
            }
            code = code << 6 | (next & 0x3f);
        }
        static const uint32_t smallest[] = { 0, 0x80, 0x800, 0x10000 };
        if (code < smallest[n] || code > 0x10ffff || (code >= 0xd800 && code <= 0xdfff)) {
            return false;
        }
    }
    return true;
}

bool is_ours(const char * key) {
    return std::strncmp(key, "subkv.", 6) == 0;
}

std::string number(double x) {
    char text[40];
    std::snprintf(text, sizeof(text), "%g", x);
    return text;
}

class Keys {
public:
    explicit Keys(const gguf_context * ctx) : ctx(ctx) {
        // A key with an embedded NUL looks like a shorter one through the C interface.
        std::unordered_set<std::string_view> seen;
        for (int64_t i = 0; i < gguf_get_n_kv(ctx); ++i) {
            const char * key = gguf_get_key(ctx, i);
            if (is_ours(key) && !seen.insert(key).second) {
                refuse(shortened(key), "the key once", "it twice");
            }
        }
    }

    uint32_t u32(const std::string & key, uint32_t lo, uint32_t hi) const {
        const uint32_t value = gguf_get_val_u32(ctx, find(key, GGUF_TYPE_UINT32));
        if (value < lo || value > hi) {
            refuse(key, std::to_string(lo) + ".." + std::to_string(hi), std::to_string(value));
        }
        return value;
    }

    uint64_t u64(const std::string & key) const { return gguf_get_val_u64(ctx, find(key, GGUF_TYPE_UINT64)); }

    float positive_f32(const std::string & key) const {
        const float value = gguf_get_val_f32(ctx, find(key, GGUF_TYPE_FLOAT32));
        if (!std::isfinite(value) || value <= 0.0f) {
            refuse(key, "a positive finite number", number(value));
        }
        return value;
    }

    // UTF-8 text that may be absent: then empty.
    std::string optional_str(const std::string & key) const {
        return gguf_find_key(ctx, key.c_str()) < 0 ? std::string() : str(key);
    }

    // Not copied: a basis may be large. Valid as long as the gguf_context.
    std::string_view view(const std::string & key) const { return gguf_get_val_str(ctx, find(key, GGUF_TYPE_STRING)); }

    std::string str(const std::string & key) const {
        const std::string_view value = view(key);
        if (!is_utf8(value)) {
            refuse(key, "UTF-8 text", "other bytes");
        }
        return std::string(value);
    }

    std::string str(const std::string & key, std::initializer_list<const char *> allowed) const {
        std::string value = str(key);
        std::string names;
        for (const char * a : allowed) {
            if (value == a) {
                return value;
            }
            names += (names.empty() ? "'" : " or '") + std::string(a) + "'";
        }
        refuse(key, names, "'" + shortened(value) + "'");
    }

    std::string sha256(const std::string & key) const {
        std::string value = str(key);
        if (value.size() != 64 || value.find_first_not_of("0123456789abcdef") != std::string::npos) {
            refuse(key, "64 lower-case hex digits", "'" + shortened(value) + "'");
        }
        return value;
    }

private:
    int64_t find(const std::string & key, gguf_type type) const {
        const int64_t id = gguf_find_key(ctx, key.c_str());
        if (id < 0) {
            refuse(key, std::string("a value of type ") + gguf_type_name(type), "no such key");
        }
        const gguf_type found = gguf_get_kv_type(ctx, id);
        if (found != type) {
            refuse(key, std::string("type ") + gguf_type_name(type), std::string("type ") + gguf_type_name(found));
        }
        return id;
    }

    const gguf_context * ctx;
};

void read_header(const Keys & keys, Layout & l) {
    l.version = (int) keys.u32("subkv.version", 0, UINT32_MAX);
    if (l.version < OLDEST_VERSION || l.version > FORMAT_VERSION) {
        refuse("subkv.version", std::to_string(OLDEST_VERSION) + " or " + std::to_string(FORMAT_VERSION),
               std::to_string((uint32_t) l.version) + "; convert the base model again with this version of subkv");
    }
    l.codec = keys.str("subkv.codec", { "banded", "int8" });
    l.arch  = keys.str("subkv.arch");

    const std::string arch = keys.str("general.architecture");
    if (arch != l.arch) {
        refuse("subkv.arch", "general.architecture '" + shortened(arch) + "'", "'" + shortened(l.arch) + "'");
    }
    l.n_layer            = (int) keys.u32("subkv.block_count", 1, MAX_LAYERS);
    l.n_sink             = (int) keys.u32("subkv.n_sink", 0, MAX_SINK);
    l.n_recent           = (int) keys.u32("subkv.n_recent", 0, MAX_RECENT);
    l.bpe                = keys.positive_f32("subkv.bits_per_element");
    l.bpe_rows           = keys.positive_f32("subkv.bits_per_element.rows");
    l.bpe_context        = keys.u32("subkv.bpe_context", 1, UINT32_MAX);
    l.gamma              = keys.str("subkv.gamma", { "calibrated", "sqrt_r_d", "one" });
    l.basis_k            = keys.str("subkv.basis_k", { "pca", "query-aware", "kld-aware" });
    l.basis_v            = keys.str("subkv.basis_v", { "pca", "output-aware", "kld-aware" });
    l.base_sha256        = keys.sha256("subkv.base.sha256");
    l.calibration_sha256 = keys.sha256("subkv.calibration.sha256");
    l.calibration_tokens = keys.u64("subkv.calibration.tokens");
    l.calibration_text   = keys.str("subkv.calibration.text");
    l.generator          = keys.str("subkv.generator");
    l.adapt              = keys.optional_str("subkv.adapt");
}

std::string basis_key(int il) {
    return "subkv.blk." + std::to_string(il) + ".basis";
}

// A basis of a layer that the layout leaves out means that one of the two is damaged.
void check_stray_bases(const gguf_context * ctx, const std::vector<LayerSpec> & specs) {
    for (int64_t i = 0; i < gguf_get_n_kv(ctx); ++i) {
        const std::string_view key    = gguf_get_key(ctx, i);
        const std::string_view prefix = "subkv.blk.";
        const std::string_view suffix = ".basis";
        if (key.size() <= prefix.size() + suffix.size() || key.substr(0, prefix.size()) != prefix ||
            key.substr(key.size() - suffix.size()) != suffix) {
            continue;
        }
        const bool known =
            std::any_of(specs.begin(), specs.end(), [&](const LayerSpec & s) { return basis_key(s.il) == key; });
        if (!known) {
            refuse(shortened(std::string(key)), "bases only of layers in subkv.layout", "another one");
        }
    }
}

// Reads little-endian values of one decoded basis string in order.
struct BlockReader {
    const std::string & key;
    const uint8_t *     p;

    float positive(const std::string & what) {
        const uint32_t bits = le32(p);
        float          value;
        std::memcpy(&value, &bits, sizeof(value));
        p += 4;
        if (!(value > 0.0f && value <= MAX_FACTOR)) {
            refuse(key, "a positive " + what + " of at most " + number(MAX_FACTOR), number(value));
        }
        return value;
    }

    void halves(uint16_t * out, size_t n, const std::string & what) {
        for (size_t i = 0; i < n; ++i, p += 2) {
            const uint16_t half = (uint16_t) (p[0] | p[1] << 8);
            if ((half & 0x7c00) == 0x7c00) {
                refuse(key, "finite values in " + what,
                       (half & 0x3ff ? "NaN at " : "an infinity at ") + std::to_string(i));
            }
            out[i] = half;
        }
    }
};

// The mean of a key head; empty when it is zero.
std::vector<uint16_t> read_mean(int d, const std::string & name, BlockReader & block) {
    std::vector<uint16_t> mean((size_t) d);
    block.halves(mean.data(), mean.size(), "mean of " + name);
    if (std::all_of(mean.begin(), mean.end(), [](uint16_t half) { return (half & 0x7fff) == 0; })) {
        return {};
    }
    return mean;
}

// halves: its matrices. centre: of a key head, else nullptr.
HeadCodec read_head(const HeadSpec & spec, int d, const std::string & name, BlockReader & block,
                    std::vector<uint16_t> & halves, KeyCentre * centre) {
    HeadCodec head = {};
    head.value     = centre ? 0 : 1;
    head.d         = d;
    head.row_bytes = 1;
    for (int b = 0; b < spec.n_bands; ++b) {
        add_band(head, spec.bands[b].n, spec.bands[b].bits,
                 block.positive("ratio of band " + std::to_string(b) + " of " + name));
    }
    if (centre) {
        centre->mean = read_mean(d, name, block);
    }
    const size_t n = (size_t) head.rank * (size_t) d;
    halves.resize(2 * n);
    block.halves(halves.data(), n, "E of " + name);
    block.halves(halves.data() + n, n, "D of " + name);
    head.encode = { halves.data() };
    head.decode = { halves.data() + n };
    if (centre && !centre->mean.empty()) {
        centre->offset = project_mean(head, centre->mean);
        head.offset    = centre->offset.data();
    }
    return head;
}

LayerCodec read_layer(const LayerSpec & spec, const std::string & key, const uint8_t * bytes, uint16_t *& storage) {
    BlockReader           block{ key, bytes };
    LayerCodec            layer;
    std::vector<uint16_t> k_halves, v_halves; // of a head
    layer.il        = spec.il;
    layer.n_head_kv = spec.n_head_kv;
    layer.d_k       = spec.d_k;
    layer.d_v       = spec.d_v;
    layer.latent    = spec.latent();
    layer.centre.resize((size_t) spec.n_head_kv);
    layer.steps.resize(4 * (size_t) spec.n_head_kv);
    for (size_t h = 0; h < (size_t) spec.n_head_kv; ++h) {
        const std::string k = "k head " + std::to_string(h);
        const std::string v = "v head " + std::to_string(h);
        layer.gamma.push_back(block.positive("gamma of " + k));
        layer.k.push_back(read_head(spec.k[h], spec.d_k, k, block, k_halves, &layer.centre[h]));
        layer.k_offset.push_back(layer.k_row_bytes);
        layer.v_offset.push_back(layer.v_row_bytes);
        layer.k_row_bytes += (size_t) layer.k[h].row_bytes;
        if (layer.latent) {
            if (layer.k[h].offset) {
                refuse(key, "a mean of zeros in a latent layer", "another one");
            }
            std::string err;
            layer.v.push_back(latent_values(layer.k[h], spec.d_v, v_halves, err));
            if (!err.empty()) {
                throw Invalid{ key + ": " + err };
            }
        } else {
            layer.v.push_back(read_head(spec.v[h], spec.d_v, v, block, v_halves, nullptr));
            layer.v_row_bytes += (size_t) layer.v[h].row_bytes;
        }
        keep(layer.k[h], storage, layer.steps[4 * h], layer.steps[4 * h + 1]);
        keep(layer.v[h], storage, layer.steps[4 * h + 2], layer.steps[4 * h + 3]);
    }
    return layer;
}

void read_bases(const Keys & keys, const std::vector<LayerSpec> & specs, Layout & l, Sha256 & sha) {
    size_t n_halves = 0;
    size_t n_bytes  = 0; // of the largest block
    for (const LayerSpec & spec : specs) {
        const std::string key      = basis_key(spec.il);
        const size_t      expected = base64_length(spec.basis_bytes());
        const size_t      found    = keys.view(key).size();
        if (found != expected) {
            refuse(key, std::to_string(expected) + " base64 characters (what subkv.layout asks for)",
                   std::to_string(found));
        }
        n_bytes = std::max(n_bytes, spec.basis_bytes());
        for (int h = 0; h < spec.n_head_kv; ++h) {
            const auto rank_k = (size_t) spec.k[h].rank();
            n_halves += 2 * rank_k * (size_t) spec.d_k;
            n_halves += spec.latent() ? rank_k * (size_t) spec.d_v : // at most
                                        2 * (size_t) spec.v[h].rank() * (size_t) spec.d_v;
        }
    }
    l.matrices.reset((uint16_t *) ::operator new[](n_halves * sizeof(uint16_t), std::align_val_t(MATRIX_ALIGN)));

    uint16_t *           storage = l.matrices.get();
    std::vector<uint8_t> bytes(n_bytes);
    for (const LayerSpec & spec : specs) {
        const std::string      key  = basis_key(spec.il);
        const std::string_view text = keys.view(key);
        std::string            err;
        if (!base64_decode(text.data(), text.size(), bytes.data(), spec.basis_bytes(), err)) {
            throw Invalid{ key + ": " + err };
        }
        sha.update(bytes.data(), spec.basis_bytes());
        l.layers.push_back(read_layer(spec, key, bytes.data(), storage));
        for (const KeyCentre & centre : l.layers.back().centre) {
            l.bytes_bases += centre.bytes();
        }
        for (const std::vector<uint16_t> & step : l.layers.back().steps) {
            l.bytes_bases += step.size() * sizeof(uint16_t);
        }
        l.bytes_per_token += l.layers.back().k_row_bytes + l.layers.back().v_row_bytes;
    }
    l.bytes_bases += (size_t) (storage - l.matrices.get()) * sizeof(uint16_t);
}

std::shared_ptr<const Layout> read_layout(const char * path) {
    const Gguf             ctx = open_gguf(path);
    const Keys             keys(ctx.get());
    auto                   l = std::make_shared<Layout>();
    std::vector<LayerSpec> specs;
    std::string            err;

    read_header(keys, *l);
    if (!parse_layout(keys.view("subkv.layout"), l->n_layer, specs, err)) {
        throw Invalid{ "subkv.layout: " + err };
    }
    for (const LayerSpec & spec : specs) {
        if (spec.latent() && l->version < FORMAT_VERSION) {
            refuse("subkv.version", std::to_string(FORMAT_VERSION) + " with a latent layer",
                   std::to_string(l->version));
        }
    }
    check_stray_bases(ctx.get(), specs);

    Sha256            sha;
    const std::string codec = "subkv " + std::to_string(l->version) + "\n" + l->arch + "\n" +
                              std::to_string(l->n_layer) + "\n" + std::to_string(l->n_sink) + "\n" +
                              std::to_string(l->n_recent) + "\n" + canonical_layout(specs) + "\n";
    sha.update(codec.data(), codec.size());
    read_bases(keys, specs, *l, sha);
    l->fingerprint = sha.hex();
    return l;
}

// Runs `body`, turning every way to fail into `err`.
template <typename T, typename F> T sentence(T failed, std::string & err, F body) {
    try {
        return body();
    } catch (const Invalid & e) {
        err = e.why;
    } catch (const std::bad_alloc &) {
        err = "subkv.layout: expected to fit in memory, found too little of it";
    } catch (const std::exception & e) {
        err = std::string("subkv.layout: ") + e.what();
    }
    return failed;
}

} // namespace

void Layout::AlignedDelete::operator()(uint16_t * p) const {
    ::operator delete[](p, std::align_val_t(MATRIX_ALIGN));
}

std::shared_ptr<const Layout> load_layout(const char * path, std::string & err) {
    return sentence<std::shared_ptr<const Layout>>(nullptr, err, [&] { return read_layout(path); });
}

int layout_present(const char * path, std::string & err) {
    return sentence(-1, err, [&] {
        const Gguf ctx = open_gguf(path);
        for (int64_t i = 0; i < gguf_get_n_kv(ctx.get()); ++i) {
            if (is_ours(gguf_get_key(ctx.get(), i))) {
                return 1;
            }
        }
        return 0;
    });
}

} // namespace subkv
