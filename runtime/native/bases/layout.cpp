// layout.cpp: strict reader of the subkv.* keys of a GGUF (converter/FORMAT.md §1 and §3).
//
// Order: file, typed keys, layout string, exact length of every basis string, then memory for the matrices. So the
// reader trusts a size only after it has checked that the file has as many bytes.
#include "layout.h"

#include "base64.h"
#include "layout_keys.h"
#include "plan.h"
#include "sha256.h"
#include "variables.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>

namespace subkv {

namespace {

constexpr size_t MATRIX_ALIGN = 64;
constexpr float  MAX_FACTOR   = 65504.0f; // the largest half, for gamma and ratios, so that products stay finite

void read_header(const Keys & keys, Layout & l) {
    l.version = (int) keys.u32("subkv.version", 0, UINT32_MAX);
    if (l.version != FORMAT_VERSION && l.version != FORMAT_WITHOUT_DIGEST) {
        refuse("subkv.version", std::to_string(FORMAT_WITHOUT_DIGEST) + " or " + std::to_string(FORMAT_VERSION),
               std::to_string((uint32_t) l.version), "convert the base model again with this version of subkv");
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
    l.recent_bits        = read_recent_bits(keys, "subkv.recent_bits");
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

// A basis for a layer outside the layout shows that one of the two is damaged.
void check_stray_bases(const gguf_context * ctx, const std::vector<LayerSpec> & specs) {
    for (int64_t i = 0; i < gguf_get_n_kv(ctx); ++i) {
        const std::string_view key = gguf_get_key(ctx, i);
        const bool             known =
            std::any_of(specs.begin(), specs.end(), [&](const LayerSpec & s) { return basis_key(s.il) == key; });
        if (is_basis(key) && !known) {
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
            const uint16_t half = le16(p);
            if ((half & 0x7c00) == 0x7c00) {
                refuse(key, "finite values in " + what,
                       (half & 0x3ff ? "NaN at " : "an infinity at ") + std::to_string(i));
            }
            out[i] = half;
        }
    }
};

// The mean of a key head, or empty if it is zero.
std::vector<uint16_t> read_mean(int d, const std::string & name, BlockReader & block) {
    std::vector<uint16_t> mean((size_t) d);
    block.halves(mean.data(), mean.size(), "mean of " + name);
    if (std::all_of(mean.begin(), mean.end(), [](uint16_t half) { return (half & 0x7fff) == 0; })) {
        return {};
    }
    return mean;
}

// `halves` are the head's matrices. `centre` is for a key head, and else nullptr.
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
    head.path = path_of(head);
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
            layer.k[h].path = latent_path(layer.k[h]);
            layer.v.push_back(latent_values(key, layer.k[h], spec.d_v, v_halves));
        } else {
            layer.v.push_back(read_head(spec.v[h], spec.d_v, v, block, v_halves, nullptr));
            layer.v_row_bytes += (size_t) layer.v[h].row_bytes;
        }
        store_matrices(layer.k[h], storage, layer.steps[4 * h], layer.steps[4 * h + 1]);
        store_matrices(layer.v[h], storage, layer.steps[4 * h + 2], layer.steps[4 * h + 3]);
    }
    return layer;
}

// Every basis string has the length that its layer requires, so that a size can be trusted.
void check_lengths(const Keys & keys, const std::vector<LayerSpec> & specs) {
    for (const LayerSpec & spec : specs) {
        const std::string key      = basis_key(spec.il);
        const size_t      expected = base64_length(spec.basis_bytes());
        const size_t      found    = keys.view(key).size();
        if (found != expected) {
            refuse(key, std::to_string(expected) + " base64 characters (as subkv.layout requires)",
                   std::to_string(found));
        }
    }
}

// Calls use(spec, bytes) for every layer.
template <typename F> void each_basis(const std::vector<LayerSpec> & specs, const BasisBytes & read, F use) {
    size_t n_bytes = 0; // of the largest one
    for (const LayerSpec & spec : specs) {
        n_bytes = std::max(n_bytes, spec.basis_bytes());
    }
    std::vector<uint8_t> bytes(n_bytes);
    for (const LayerSpec & spec : specs) {
        read(spec, bytes.data());
        use(spec, bytes.data());
    }
}

// `plan` is the name of its keys, or empty for subkv.layout.
void read_bases(const std::vector<LayerSpec> & specs, const BasisBytes & read, Layout & l, Sha256 & sha,
                const std::string & plan) {
    size_t n_halves = 0;
    for (const LayerSpec & spec : specs) {
        for (int h = 0; h < spec.n_head_kv; ++h) {
            const auto rank_k = (size_t) spec.k[h].rank();
            n_halves += 2 * rank_k * (size_t) spec.d_k;
            n_halves += spec.latent() ? rank_k * (size_t) spec.d_v : // at most
                                        2 * (size_t) spec.v[h].rank() * (size_t) spec.d_v;
        }
    }
    l.matrices.reset((uint16_t *) ::operator new[](n_halves * sizeof(uint16_t), std::align_val_t(MATRIX_ALIGN)));

    uint16_t * storage = l.matrices.get();
    each_basis(specs, read, [&](const LayerSpec & spec, const uint8_t * bytes) {
        sha.update(bytes, spec.basis_bytes());
        const std::string key = basis_key(spec.il);
        l.layers.push_back(read_layer(spec, plan.empty() ? key : plan + " of " + key, bytes, storage));
        for (const KeyCentre & centre : l.layers.back().centre) {
            l.bytes_bases += centre.bytes();
        }
        for (const std::vector<uint16_t> & step : l.layers.back().steps) {
            l.bytes_bases += step.size() * sizeof(uint16_t);
        }
        l.bytes_per_token += l.layers.back().k_row_bytes + l.layers.back().v_row_bytes;
    });
    l.bytes_bases += (size_t) (storage - l.matrices.get()) * sizeof(uint16_t);
}

// A fingerprint without the bases.
Sha256 fingerprint_of_codec(const Layout & l, const std::vector<LayerSpec> & specs) {
    Sha256            sha;
    const std::string codec =
        "subkv " + std::to_string(CODES_VERSION) + "\n" + l.arch + "\n" + std::to_string(l.n_layer) + "\n" +
        std::to_string(l.n_sink) + "\n" + std::to_string(l.n_recent) + "\n" +
        (l.recent_bits == 16 ? "" : std::to_string(l.recent_bits) + "\n") + canonical_layout(specs) + "\n";
    sha.update(codec.data(), codec.size());
    return sha;
}

// Checked last, so that a defect that a reader recognizes is reported with its place. `fingerprint` is that of
// subkv.layout.
void check_digest(const gguf_context * ctx, const Keys & keys, const Layout & l, const std::string & fingerprint) {
    if (l.version == FORMAT_WITHOUT_DIGEST && gguf_find_key(ctx, KEYS_DIGEST) < 0) {
        return;
    }
    const std::string stored   = keys.sha256(KEYS_DIGEST);
    const std::string expected = keys_digest(ctx, fingerprint);
    if (stored != expected) {
        refuse(KEYS_DIGEST, "the digest of the subkv.* keys, " + expected,
               stored + ": the file is damaged or was edited", "convert the base model again");
    }
}

// Lists the budgets in ascending order, with `last` between the last two.
std::string listed(std::vector<float> budgets, const char * between, const char * last) {
    std::sort(budgets.begin(), budgets.end());
    std::string list;
    for (size_t i = 0; i < budgets.size(); ++i) {
        list += (i == 0 ? "" : i + 1 < budgets.size() ? between : last) + number(budgets[i]);
    }
    return list;
}

// How to get a file with this budget too, or "" if no file can have it. --plans replaces all plans of a file.
std::string remedy(const Layout & l, const std::vector<LayerSpec> & specs, std::vector<float> plans, float budget) {
    if (!(budget > 0.0f && budget <= MAX_BUDGET)) {
        return "";
    }
    if (l.codec == "int8" || std::any_of(specs.begin(), specs.end(), [](const auto & spec) { return spec.latent(); })) {
        return "`subkv convert MODEL --kv-bits " + number(budget) + "` writes bases with it instead";
    }
    plans.push_back(budget);
    return plans.size() > MAX_PLANS ? "" : "`subkv convert MODEL --plans " + listed(plans, ",", ",") + "` adds it";
}

// The index of the plan that is nearest to this budget, or -1 if subkv.layout is. Throws Invalid with the budgets that
// the file has if none is close.
int plan_of(const Layout & l, const std::vector<LayerSpec> & specs, float budget) {
    constexpr float    CLOSE    = 0.02f; // BUDGET_TOLERANCE of subkv/plan/budget.py
    float              distance = std::fabs(budget - l.budget);
    int                nearest  = -1;
    std::vector<float> plans;
    for (size_t i = 0; i < l.plans.size(); ++i) {
        plans.push_back(l.plans[i].budget);
        if (std::fabs(budget - plans[i]) < distance) {
            distance = std::fabs(budget - plans[i]);
            nearest  = (int) i;
        }
    }
    if (budget == 0.0f || distance < CLOSE) {
        return budget == 0.0f ? -1 : nearest;
    }
    std::vector<float> all = plans;
    all.push_back(l.budget);
    throw Invalid(Error{ SUBKV_ERROR_BUDGET, "bits per element",
                         "expected " + listed(all, ", ", " or ") + ", for which " + l.path + " has a plan, found " +
                             number(budget),
                         remedy(l, specs, plans, budget) });
}

std::shared_ptr<const Layout> read_layout(const char * path, float budget) {
    const gguf_context_ptr ctx = open_gguf(path);
    const Keys             keys(ctx.get());
    auto                   l = std::make_shared<Layout>();
    l->path                  = path;
    read_header(keys, *l);
    read_budgets(keys, *l);
    const std::vector<LayerSpec> specs = parse_layout(keys.view("subkv.layout"), l->n_layer);
    check_stray_bases(ctx.get(), specs);
    check_lengths(keys, specs);
    const BasisBytes stored = [&](const LayerSpec & spec, uint8_t * bytes) {
        const std::string key = basis_key(spec.il);
        base64_decode(key, keys.view(key), bytes, spec.basis_bytes());
    };
    const int i   = plan_of(*l, specs, budget);
    Sha256    sha = fingerprint_of_codec(*l, specs);
    if (i < 0) {
        read_bases(specs, stored, *l, sha, "");
        l->fingerprint = sha.hex();
        check_digest(ctx.get(), keys, *l, l->fingerprint);
        return l;
    }
    each_basis(specs, stored,
               [&](const LayerSpec & spec, const uint8_t * bytes) { sha.update(bytes, spec.basis_bytes()); });
    const Plan                              plan(keys, (size_t) i, specs, *l);
    const std::vector<std::vector<uint8_t>> derived = plan.derive();
    size_t                                  n       = 0; // layers read
    Sha256                                  own     = fingerprint_of_codec(*l, plan.specs());
    read_bases(
        plan.specs(),
        [&](const LayerSpec &, uint8_t * out) { std::copy(derived[n].begin(), derived[n].end(), out), ++n; }, *l, own,
        plan.name);
    l->fingerprint = own.hex();
    check_digest(ctx.get(), keys, *l, sha.hex());
    return l;
}

} // namespace

void Layout::AlignedDelete::operator()(uint16_t * p) const {
    ::operator delete[](p, std::align_val_t(MATRIX_ALIGN));
}

std::shared_ptr<const Layout> load_layout(const char * path, float budget) {
    try {
        return read_layout(path, budget);
    } catch (const std::bad_alloc &) {
        throw Unavailable("subkv.layout", "to fit in memory", "too little of it");
    }
}

std::shared_ptr<const Layout> make_layout(const std::shared_ptr<Layout> & header, const std::vector<LayerSpec> & specs,
                                          const BasisBytes & bases) {
    try {
        const auto checked = parse_layout(canonical_layout(specs), header->n_layer);
        Sha256     sha     = fingerprint_of_codec(*header, checked);
        read_bases(checked, bases, *header, sha, "");
        header->fingerprint = sha.hex();
        return header;
    } catch (const std::bad_alloc &) {
        throw Unavailable("subkv.layout", "to fit in memory", "too little of it");
    }
}

float budget_of_fingerprint(const Layout & layout, const std::string & fingerprint) {
    std::vector<float> budgets = { 0.0f };
    for (const PlanFacts & plan : layout.plans) {
        budgets.push_back(plan.budget);
    }
    for (const float budget : budgets) {
        try {
            const auto other = load_layout(layout.path.c_str(), budget);
            if (other->fingerprint == fingerprint) {
                return other->budget;
            }
        } catch (const Invalid &) { // the file has changed
        }
    }
    return 0.0f;
}

bool layout_present(const char * path) {
    const gguf_context_ptr ctx = open_gguf(path);
    for (int64_t i = 0; i < gguf_get_n_kv(ctx.get()); ++i) {
        if (is_ours(gguf_get_key(ctx.get(), i))) {
            return true;
        }
    }
    return false;
}

} // namespace subkv
