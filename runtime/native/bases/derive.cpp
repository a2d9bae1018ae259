// derive.cpp: see derive.h. Coordinates of keys are sorted by the estimated cost of their errors and mixed inside bands; a
// mean known from biases is subtracted. Values are mixed evenly, because no estimate from weights was reliable. All layers
// and heads have equal budgets. The matrices are Hadamard matrices in bytes, so their inverses are known.
#include "derive.h"

#include "derive_plan.h"
#include "derive_weights.h"
#include "ggml.h"
#include "hadamard.h"
#include "layout_keys.h"
#include "model_file.h"
#include "plan.h"
#include "quantizer.h"
#include "subkv/recent.h"
#include "variables.h"
#include "weights_file.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <mutex>
#include <numeric>

namespace subkv {

const char * const DERIVED_GENERATOR = "subkv " SUBKV_VERSION ", weights 3";

namespace {

// tests/format/derived_numpy.py has the same numbers.
constexpr int    CONTEXT        = 8192;  // for which bits per element are computed
constexpr int    LATENT_CONTEXT = 32768; // the same for latent attention, whose rows are small compared with its bases
constexpr double VALUE_WEIGHT   = 0.7;
constexpr double STEP_FLOOR     = 1e-6;
constexpr float  HALVES_ABOVE   = 6.5f; // bits per element; recent rows of larger budgets are halves
constexpr int    MOST_HEADS     = 1 << 16;

using Doubles = std::vector<double>;

// Returns whether the model has latent attention (MLA) of an architecture that the engine supports.
bool is_latent(const WeightsFile & weights) {
    static const char * const SUPPORTED[] = { "deepseek2",  "mistral4", "kimi-linear", "kimi-k3",   "bailingmoe3",
                                              "deepseek32", "glm-dsa",  "hy_v4",       "dots3note", "glm5-next" };
    const bool known = std::find(std::begin(SUPPORTED), std::end(SUPPORTED), weights.arch()) != std::end(SUPPORTED);
    return known && weights.of_arch("attention.key_length_mla").kind != MetaValue::Kind::NONE;
}

int64_t integer(const MetaValue & value) {
    return value.is_integer() ? value.integer : 0;
}

// The layer whose rows this layer attends to, usually itself (Gemma 3n, Gemma 4: subkv/plan/shared.py).
int64_t owner(const WeightsFile & weights, int64_t il) {
    constexpr int64_t   PERIOD = 5;
    const std::string & arch   = weights.arch();
    int64_t             n_own  = 20;
    if (arch == "gemma4") {
        n_own = integer(weights.of_arch("block_count")) - integer(weights.of_arch("attention.shared_kv_layers"));
    } else if (arch != "gemma3n") {
        return il;
    }
    const MetaValue pattern = weights.of_arch("attention.sliding_window_pattern");
    const int64_t   period  = integer(pattern) > 0 ? integer(pattern) : PERIOD;
    const bool      slides  = pattern.is_list() ? il < (int64_t) pattern.list.size() && pattern.list[(size_t) il] != 0 :
                                                  il % period < period - 1;
    return il < n_own ? il : n_own - (slides ? 2 : 1);
}

// The layers whose K/V heads can be coded. Throws Invalid if there is none.
std::vector<LayerShape> shapes_of(const WeightsFile & weights) {
    const auto of_layer = [&](const char * key, int64_t il) -> int64_t {
        const MetaValue value = weights.of_arch(std::string("attention.") + key);
        if (value.is_list()) {
            return il < (int64_t) value.list.size() ? value.list[(size_t) il] : 0;
        }
        return integer(value);
    };
    const bool    latent  = is_latent(weights);
    const int64_t n_draft = latent ? integer(weights.of_arch("nextn_predict_layers")) : 0; // layers that are not used
    const int64_t n_layer = integer(weights.of_arch("block_count"));
    const auto    slides  = weights.of_arch("attention.sliding_window_pattern");
    const bool    has_kv  = weights.of_arch("attention.head_count_kv").truthy();
    if (n_layer > MAX_LAYERS) {
        refuse(weights.arch() + ".block_count", "at most " + std::to_string(MAX_LAYERS) + " layers",
               std::to_string(n_layer));
    }
    std::vector<LayerShape> layers;
    for (int64_t il = 0; il < n_layer - std::max<int64_t>(n_draft, 0); ++il) {
        const int64_t n_head    = of_layer("head_count", il);
        const int64_t n_head_kv = has_kv ? of_layer("head_count_kv", il) : n_head;
        if (n_head <= 0 || n_head_kv <= 0 || n_head > MOST_HEADS || n_head % n_head_kv != 0 ||
            owner(weights, il) != il) {
            continue;
        }
        const std::string name = "blk." + std::to_string(il) + ".";
        if (weights.has_tensor(name + "ssm_out.weight") && !weights.has_tensor(name + "attn_k.weight")) {
            continue; // linear attention, with a state instead of K/V
        }
        if (latent && slides.is_list() && il < (int64_t) slides.list.size() && slides.list[(size_t) il] != 0) {
            continue; // an ordinary cache has its rows, which have other sizes
        }
        const auto size_of = [&](const char * side, const char * length) {
            const std::string matrix =
                name + "attn_" + side + ".weight"; // sizes of sliding layers are those of matrices
            const int64_t rows = weights.has_tensor(matrix) ? weights.matrix(matrix).n_rows / n_head_kv : 0;
            const int64_t own  = rows != 0 ? rows : of_layer(length, il);
            return own != 0 ? own : integer(weights.of_arch("embedding_length")) / n_head;
        };
        const int64_t d_k = latent ? integer(weights.of_arch("attention.key_length")) : size_of("k", "key_length");
        const int64_t d_v = latent ? integer(weights.of_arch("attention.kv_lora_rank")) : size_of("v", "value_length");
        const auto    ok  = [](int64_t d) { return d >= 8 && d <= MAX_HEAD_SIZE && d % 8 == 0; };
        if (ok(d_k) && ok(d_v)) {
            layers.push_back({ (int) il, (int) n_head, (int) n_head_kv, (int) d_k, (int) d_v });
        }
    }
    const bool other = !latent && weights.of_arch("attention.key_length_mla").kind != MetaValue::Kind::NONE;
    if (other || layers.empty()) {
        const std::string why = other ? "its attention is multi-head latent (MLA) of an unknown form" :
                                        "no layer of it has K/V heads of 8 to " + std::to_string(MAX_HEAD_SIZE) +
                                            " elements in multiples of 8";
        throw Invalid(Error{ SUBKV_ERROR_UNSUPPORTED, "",
                             "model " + shortened(weights.arch()) + ": subkv cannot hold its K/V cache because " + why,
                             "use an ordinary cache type (-ctk f16)" });
    }
    return layers;
}

uint16_t half_of(double x) {
    return ggml_fp32_to_fp16((float) x);
}

// A head's keys. `order` has the coordinates by importance, and is empty if they are evenly mixed. `variance` and
// `importance` are in this order. `mean` is as stored, and is subtracted before encoding.
struct KeyEstimate {
    std::vector<int>      order;
    Doubles               variance, importance;
    std::vector<uint16_t> mean;
    bool                  centred = false;
};

// What a model's weights say about its layers.
struct Estimates {
    std::string                            arch;
    int                                    n_layer = 0;
    bool                                   latent  = false;
    bool                                   slides  = false; // some layers have a sliding window
    std::vector<LayerShape>                layers;
    std::vector<std::vector<KeyEstimate>>  keys;      // of every layer's heads
    std::vector<std::pair<double, double>> variances; // in a latent layer, of its latent and rotary part
};

// A head's costs, divided by the geometric mean of its costs without biases.
void normalize(Doubles & cost, const Doubles & without_bias) {
    const double floor = std::max(*std::max_element(without_bias.begin(), without_bias.end()), 1e-300) * 1e-12;
    double       sum   = 0.0;
    for (const double x : without_bias) {
        sum += std::log(std::max(x, floor));
    }
    const double  mean = std::exp(sum / (double) cost.size());
    const Doubles even = equal_importance((int) cost.size());
    for (size_t i = 0; i < cost.size(); ++i) {
        cost[i] = cost[i] / mean * even[i];
    }
}

// With `centre`, a mean that is known from biases is subtracted, which needs exact sinks.
std::vector<KeyEstimate> keys_of(const LayerShape & shape, const std::optional<Energies> & energies, bool centre) {
    const auto               d = (size_t) shape.d_k;
    std::vector<KeyEstimate> heads;
    for (size_t h = 0; h < (size_t) shape.n_head_kv; ++h) {
        KeyEstimate key;
        key.mean.assign(d, 0);
        if (!energies) {
            key.variance.assign(d, 1.0);
            key.importance = equal_importance(shape.d_k);
            heads.push_back(std::move(key));
            continue;
        }
        Doubles variance(d), cost(d), without_bias(d);
        for (size_t j = 0; j < d; ++j) {
            const double mean = energies->mean[h][j];
            variance[j]       = energies->k[h][j] + energies->rest[h][j] + (centre ? 0.0 : mean * mean);
            cost[j]           = variance[j] * energies->q[h][j];
            without_bias[j]   = energies->k[h][j] * energies->q[h][j];
            key.mean[j]       = centre ? half_of(mean) : (uint16_t) 0;
            key.centred       = key.centred || (key.mean[j] & 0x7fff) != 0;
            if ((key.mean[j] & 0x7c00) == 0x7c00) {
                refuse("blk." + std::to_string(shape.il) + ".attn_k.bias", "means of keys within half precision",
                       number(mean));
            }
            key.order.push_back((int) j);
        }
        std::stable_sort(key.order.begin(), key.order.end(),
                         [&](int a, int b) { return cost[(size_t) a] > cost[(size_t) b]; });
        for (const int j : key.order) {
            key.variance.push_back(variance[(size_t) j]);
            key.importance.push_back(cost[(size_t) j]);
        }
        normalize(key.importance, without_bias);
        heads.push_back(std::move(key));
    }
    return heads;
}

// The mean squares of the elements of a latent and of its rotary part, or 1 if they are unknown. The residual stream is
// assumed to be white.
std::pair<double, double> latent_variances(const WeightsFile & weights, const LayerShape & shape) {
    const std::string name   = "blk." + std::to_string(shape.il) + ".";
    const auto        latent = weights.vector(name + "attn_kv_a_norm.weight");
    const auto        norm   = weights.vector(name + "attn_norm.weight");
    if (!latent || !norm || !weights.has_tensor(name + "attn_kv_a_mqa.weight")) {
        return { 1.0, 1.0 };
    }
    const WeightMatrix matrix = weights.matrix(name + "attn_kv_a_mqa.weight");
    if ((int) latent->size() != shape.d_v || matrix.n_rows != shape.d_k || matrix.n != (int64_t) norm->size()) {
        return { 1.0, 1.0 };
    }
    double    of_latent = 0.0, of_rotated = 0.0;
    const int n_rotated = shape.d_k - shape.d_v;
    for (const double x : *latent) {
        of_latent += x * x;
    }
    of_latent /= (double) latent->size();
    RowReader(weights).rows(matrix, shape.d_v, n_rotated, 1, [&](const float * row) {
        for (size_t j = 0; j < norm->size(); ++j) {
            const double x = (double) row[j] * (*norm)[j];
            of_rotated += x * x;
        }
    });
    of_rotated         = n_rotated > 0 ? of_rotated / n_rotated : 1.0;
    const auto is_size = [](double x) { return x > 0.0 && std::isfinite(x); };
    return is_size(of_latent) && is_size(of_rotated) ? std::make_pair(of_latent, of_rotated) : std::make_pair(1.0, 1.0);
}

Estimates estimate(const WeightsFile & weights, bool centre) {
    Estimates out;
    out.arch    = weights.arch();
    out.n_layer = (int) integer(weights.of_arch("block_count"));
    out.latent  = is_latent(weights);
    out.slides  = weights.of_arch("attention.sliding_window").truthy();
    out.layers  = shapes_of(weights);
    if (out.latent) {
        for (const LayerShape & shape : out.layers) {
            out.variances.push_back(latent_variances(weights, shape));
        }
        return out;
    }
    const auto energies = energies_of(weights, out.layers, CONTEXT);
    for (size_t i = 0; i < out.layers.size(); ++i) {
        out.keys.push_back(keys_of(out.layers[i], energies[i], centre));
    }
    return out;
}

std::vector<int32_t> sliding_layers(const Estimates & all, const Slides & slides) {
    std::vector<int32_t> sliding;
    for (const LayerShape & shape : all.layers) {
        if (all.slides && slides && slides(shape.il)) {
            sliding.push_back(shape.il);
        }
    }
    return sliding;
}

float default_budget(const Estimates & all, const std::vector<int32_t> & sliding) {
    return !sliding.empty() && sliding.size() < all.layers.size() ? DERIVED_BUDGET_BESIDE_SLIDING : DERIVED_BUDGET;
}

// The estimates without those of layers that need no bases.
Estimates without(const Estimates & all, const std::vector<int32_t> & sliding) {
    Estimates out{ all.arch, all.n_layer, all.latent, all.slides, {}, {}, {} };
    for (size_t i = 0; i < all.layers.size(); ++i) {
        if (std::find(sliding.begin(), sliding.end(), all.layers[i].il) != sliding.end()) {
            continue;
        }
        out.layers.push_back(all.layers[i]);
        if (all.latent) {
            out.variances.push_back(all.variances[i]);
        } else {
            out.keys.push_back(all.keys[i]);
        }
    }
    return out.layers.empty() ? all : out;
}

// Whether the keys of all layers could be estimated.
bool is_known(const Estimates & model) {
    return std::all_of(model.keys.begin(), model.keys.end(), [](auto & heads) { return !heads.front().order.empty(); });
}

HeadSpec spec_of(const Bands & bands) {
    HeadSpec spec;
    for (const auto & [n, bits] : bands) {
        spec.bands[spec.n_bands++] = { (uint16_t) n, (uint16_t) bits };
    }
    return spec;
}

// The steps of all bands, of which the largest is 1, if the coefficients of every band are mixed. `variance` is that
// before mixing.
std::vector<float> ratios_of(const HeadSpec & spec, const Doubles & variance) {
    Doubles steps;
    double  largest = 0.0;
    auto    from    = variance.begin();
    for (int b = 0; b < spec.n_bands; ++b) {
        const int    n    = spec.bands[b].n;
        const double mean = std::accumulate(from, from + n, 0.0) / n;
        const bool   wide = spec.bands[b].bits == 16; // without a shared step
        from += n;
        steps.push_back(wide ? -1.0 : mean > 0.0 ? std::sqrt(mean) * quantizer_step(spec.bands[b].bits) : 0.0);
        largest = std::max(largest, steps.back());
    }
    std::vector<float> ratios;
    for (const double step : steps) {
        const bool shared = step >= 0.0 && largest > 0.0;
        ratios.push_back(shared ? (float) std::max(step / largest, STEP_FLOOR) : 1.0f);
    }
    return ratios;
}

// The entry of a mixing matrix of n rows, rounded to bytes.
double entry_of(int n) {
    static std::mutex                 mutex;
    static std::map<int, double>      known;
    const std::lock_guard<std::mutex> lock(mutex);
    double &                          entry = known[n];
    if (entry == 0.0) {
        Doubles row((size_t) n, 1.0 / std::sqrt((double) n));
        round_to_bytes(row.data(), row.size());
        entry = row[0];
    }
    return entry;
}

// Writes the decoded basis of a layer (FORMAT.md §3).
class BlockWriter {
public:
    explicit BlockWriter(uint8_t * out) : out_(out) {}

    void number(float x) { put(&x, sizeof(x)); }

    void halves(const std::vector<uint16_t> & values) { put(values.data(), values.size() * sizeof(uint16_t)); }

    void ratios(const HeadSpec & spec, const Doubles & variance) {
        for (const float ratio : ratios_of(spec, variance)) {
            number(ratio);
        }
    }

    // Writes E and D of coordinates, in this order, mixed within every band. If `order` is empty, they are mixed in
    // parts of these sizes, whatever the bands.
    void matrices(const HeadSpec & spec, const std::vector<int> & order, const std::vector<int> & parts) {
        const int             d = std::accumulate(parts.begin(), parts.end(), 0);
        std::vector<uint16_t> encode((size_t) d * (size_t) d, 0), decode = encode;
        std::vector<double>   gain;
        std::vector<int>      bits;
        for (int b = 0; b < spec.n_bands; ++b) {
            bits.insert(bits.end(), spec.bands[b].n, spec.bands[b].bits);
        }
        const auto mix = [&](int first, int n, bool plain) {
            int at = first;
            for (const HadamardBlock & block : spreading(n)) {
                const double c = plain ? 1.0 : entry_of(block.n);
                for (int i = 0; i < block.n; ++i) {
                    const auto   row = (size_t) (at + i) * (size_t) d;
                    const double inverse =
                        (plain ? 1.0 : 1.0 / (block.n * c)) / (1.0 - quantizer_distortion(bits[(size_t) (at + i)]));
                    const uint16_t e = half_of(c), of_d = half_of(inverse);
                    for (int j = 0; j < block.n; ++j) {
                        if (plain && i != j) {
                            continue;
                        }
                        const int  to             = order.empty() ? at + j : order[(size_t) (at + j)];
                        const bool minus          = !plain && block.sign[(size_t) (i * block.n + j)] < 0;
                        const auto sign           = (uint16_t) (minus ? 0x8000 : 0);
                        encode[row + (size_t) to] = e | sign;
                        decode[row + (size_t) to] = of_d | sign;
                    }
                }
                at += block.n;
            }
        };
        int first = 0;
        if (order.empty()) {
            for (const int n : parts) {
                mix(first, n, false);
                first += n;
            }
        } else {
            for (int b = 0; b < spec.n_bands; ++b) {
                mix(first, spec.bands[b].n, spec.bands[b].bits == 16);
                first += spec.bands[b].n;
            }
        }
        halves(encode);
        halves(decode);
    }

private:
    void put(const void * from, size_t n) { // little-endian, as all supported machines
        std::memcpy(out_, from, n);
        out_ += n;
    }

    uint8_t * out_;
};

// Two rows of bases in bytes, of E and of D.
int64_t bases_in_bytes(int d) {
    return 2 * byte_row_bits(d);
}

std::vector<PlannedHead> heads_of(const Estimates & model) {
    std::vector<PlannedHead> heads;
    for (size_t i = 0; i < model.layers.size(); ++i) {
        const LayerShape & shape = model.layers[i];
        Doubles            value = equal_importance(shape.d_v);
        std::for_each(value.begin(), value.end(), [](double & x) { x *= VALUE_WEIGHT; });
        for (const KeyEstimate & key : model.keys[i]) {
            heads.push_back({ shape.d_k, key.importance, key.centred, bases_in_bytes(shape.d_k), false });
            heads.push_back({ shape.d_v, value, false, bases_in_bytes(shape.d_v), false });
        }
    }
    return heads;
}

// Of every layer the latent, whose D is stored again for values, then the rotary part, if any.
std::vector<PlannedHead> latent_heads(const Estimates & model) {
    std::vector<PlannedHead> heads;
    for (const LayerShape & shape : model.layers) {
        const int64_t bits    = bases_in_bytes(shape.d_k);
        const int     rotated = shape.d_k - shape.d_v;
        heads.push_back({ shape.d_v, equal_importance(shape.d_v), false, bits + byte_row_bits(shape.d_v), false });
        if (rotated > 0) {
            heads.push_back({ rotated, equal_importance(rotated), false, bits, true });
        }
    }
    return heads;
}

// Merges neighbouring bands of a latent and its rotary part, with the smaller of their bits, where that costs least, until
// their row has at most MAX_BANDS.
void join(const PlannedHead * heads, Bands * bands, size_t n) {
    for (;;) {
        size_t total = 0, best = 0, at = 0;
        double least = -1.0;
        for (size_t i = 0; i < n; ++i) {
            total += bands[i].size();
            auto from = heads[i].importance.begin();
            for (size_t j = 0; j + 1 < bands[i].size(); from += bands[i][j++].first) {
                const double loss = loss_of(bands[i][j + 1].second) - loss_of(bands[i][j].second);
                const double cost = std::accumulate(from, from + bands[i][j].first, 0.0) * loss;
                if (least < 0.0 || cost < least) {
                    least = cost;
                    best  = i;
                    at    = j;
                }
            }
        }
        if (total <= (size_t) MAX_BANDS) {
            return;
        }
        bands[best][at + 1].first += bands[best][at].first;
        bands[best].erase(bands[best].begin() + (std::ptrdiff_t) at);
    }
}

// The bands of every head, planned within a budget.
std::vector<Bands> bands_of(const Estimates & model, const std::vector<PlannedHead> & heads, double kv_bits,
                            const PlanOverhead & overhead) {
    std::vector<Bands> bands = plan_bands(heads, kv_bits, overhead, model.latent ? 0 : WIDEST_BITS);
    for (size_t i = 0, n = 1; model.latent && i < heads.size(); i += n) {
        n = i + 1 < heads.size() && heads[i + 1].joined ? 2 : 1;
        join(heads.data() + i, bands.data() + i, n);
    }
    return bands;
}

// bands: in the order of heads_of or latent_heads.
std::vector<LayerSpec> specs_of(const Estimates & model, const std::vector<Bands> & bands) {
    std::vector<LayerSpec> specs;
    size_t                 next = 0; // in bands
    for (const LayerShape & shape : model.layers) {
        LayerSpec spec;
        spec.il        = shape.il;
        spec.n_head_kv = model.latent ? 1 : shape.n_head_kv;
        spec.d_k       = shape.d_k;
        spec.d_v       = shape.d_v;
        for (int h = 0; h < spec.n_head_kv; ++h) {
            Bands keys = bands[next++];
            if (model.latent && shape.d_k > shape.d_v) {
                keys.insert(keys.end(), bands[next].begin(), bands[next].end());
                ++next;
            }
            spec.k.push_back(spec_of(keys));
            if (!model.latent) {
                spec.v.push_back(spec_of(bands[next++]));
            }
        }
        specs.push_back(std::move(spec));
    }
    return specs;
}

// variances: of the latent and of its rotary part.
void write_latent(BlockWriter block, const LayerSpec & spec, const std::pair<double, double> & variances) {
    Doubles variance((size_t) spec.d_v, variances.first);
    variance.resize((size_t) spec.d_k, variances.second);
    block.number(1.0f); // gamma
    block.ratios(spec.k[0], variance);
    block.halves(std::vector<uint16_t>((size_t) spec.d_k, 0));
    block.matrices(spec.k[0], {}, { spec.d_v, spec.d_k - spec.d_v });
}

void write_heads(BlockWriter block, const LayerSpec & spec, const std::vector<KeyEstimate> & keys) {
    for (size_t h = 0; h < (size_t) spec.n_head_kv; ++h) {
        block.number(1.0f); // gamma
        block.ratios(spec.k[h], keys[h].variance);
        block.halves(keys[h].mean);
        block.matrices(spec.k[h], keys[h].order, { spec.d_k });
        block.ratios(spec.v[h], Doubles((size_t) spec.d_v, 1.0));
        block.matrices(spec.v[h], {}, { spec.d_v });
    }
}

std::shared_ptr<const Layout> planned(const Estimates & model, float budget, int n_sink, int n_recent) {
    const bool   halves = model.latent || budget > HALVES_ABOVE; // recent rows
    PlanOverhead overhead;
    overhead.context     = model.latent ? LATENT_CONTEXT : CONTEXT;
    overhead.n_sink      = n_sink;
    overhead.n_recent    = n_recent;
    overhead.n_rollback  = DEFAULT_ROLLBACK;
    overhead.recent_bits = halves ? 16 : RECENT_BITS;

    const std::vector<PlannedHead> heads   = model.latent ? latent_heads(model) : heads_of(model);
    const std::vector<Bands>       bands   = bands_of(model, heads, (double) budget, overhead);
    const PlanAccount              account = account_of(heads, bands, overhead);

    auto l                = std::make_shared<Layout>();
    l->version            = FORMAT_VERSION;
    l->codec              = "banded";
    l->arch               = model.arch;
    l->n_layer            = model.n_layer;
    l->n_sink             = n_sink;
    l->n_recent           = n_recent;
    l->recent_bits        = overhead.recent_bits;
    l->bpe                = (float) account.total();
    l->bpe_rows           = (float) account.rows;
    l->bpe_context        = (uint32_t) overhead.context;
    l->budget             = budget;
    l->gamma              = "one";
    l->basis_k            = is_known(model) && !model.latent ? "query-aware" : "pca";
    l->basis_v            = "pca";
    l->base_sha256        = std::string(64, '0');
    l->calibration_sha256 = std::string(64, '0');
    l->calibration_text   = "weights";
    l->generator          = DERIVED_GENERATOR;

    size_t i = 0; // layers written
    return make_layout(l, specs_of(model, bands), [&](const LayerSpec & spec, uint8_t * out) {
        if (model.latent) {
            write_latent(BlockWriter(out), spec, model.variances[i++]);
        } else {
            write_heads(BlockWriter(out), spec, model.keys[i++]);
        }
    });
}

// The estimates of the last models, by their content, because a program makes several caches for one model.
std::shared_ptr<const Estimates> estimates_of(const std::string & model, const std::string & known_content) {
    constexpr size_t                                               MOST = 8;
    static std::mutex                                              mutex;
    static std::map<std::string, std::shared_ptr<const Estimates>> known;
    const std::string                 content = known_content.empty() ? model_content(model) : known_content;
    const std::lock_guard<std::mutex> lock(mutex);
    auto                              it = known.find(content);
    if (it == known.end()) {
        auto made = std::make_shared<const Estimates>(estimate(WeightsFile(model), true));
        if (known.size() >= MOST) {
            known.clear();
        }
        it = known.emplace(content, std::move(made)).first;
    }
    return it->second;
}

} // namespace

std::vector<int> derivable_layers(const std::string & model) {
    std::vector<int> layers;
    for (const LayerShape & shape : shapes_of(WeightsFile(model))) {
        layers.push_back(shape.il);
    }
    return layers;
}

std::shared_ptr<const Layout> derive_layout(const std::string & model, const std::string & content, float budget,
                                            const Slides & slides) {
    static std::mutex                       mutex;
    static std::shared_ptr<const Estimates> of; // the last layout's
    static std::vector<int32_t>             of_sliding;
    static std::shared_ptr<const Layout>    last; // caches share it
    const auto                              estimates = estimates_of(model, content);
    const std::vector<int32_t>              sliding   = sliding_layers(*estimates, slides);
    const float                             bits      = budget == 0.0f ? default_budget(*estimates, sliding) : budget;
    const std::lock_guard<std::mutex>       lock(mutex);
    if (of != estimates || last->budget != bits || of_sliding != sliding) {
        last = planned(sliding.empty() ? *estimates : without(*estimates, sliding), bits, DEFAULT_SINK, DEFAULT_RECENT);
        of   = estimates;
        of_sliding = sliding;
    }
    return last;
}

std::shared_ptr<const Layout> derive_layout(const WeightsFile & weights, float budget, int n_sink, int n_recent) {
    return planned(estimate(weights, n_sink > 0), budget == 0.0f ? DERIVED_BUDGET : budget, n_sink, n_recent);
}

float derived_budget(const std::string & model, const std::string & content, const Slides & slides) {
    const auto estimates = estimates_of(model, content);
    return default_budget(*estimates, sliding_layers(*estimates, slides));
}

} // namespace subkv
