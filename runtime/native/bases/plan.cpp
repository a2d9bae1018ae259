// plan.cpp: see plan.h. The matrices of equal files are equal on all machines: arithmetic is in double without fused
// operations (cmake/native/CMakeLists.txt), and rounding to bytes and halves hides the last bits of the cosines.
#include "plan.h"

#include "base64.h"
#include "ggml.h"
#include "parallel.h"
#include "variables.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <sstream>
#include <string_view>

namespace subkv {

namespace {

constexpr size_t N_HALVES    = 8; // first rows of D, always in halves
constexpr int    BYTE_MAX    = 127;
constexpr double MIN_LARGEST = 1.0 / (1 << 14); // of a row in bytes, so that its step is a normal half

using Doubles = std::vector<double>; // [d][d] or [r][d]

std::string plan_key(size_t i, const char * name) {
    return "subkv.plan." + std::to_string(i) + "." + name;
}

std::string encode_key(int il) {
    return "subkv.blk." + std::to_string(il) + ".encode";
}

std::vector<uint8_t> decoded(const std::string & key, std::string_view text) {
    size_t n = text.size() / 4 * 3;
    for (size_t i = text.size(); i > 0 && text.size() - i < 2 && text[i - 1] == '=' && n > 0; --i) {
        --n;
    }
    std::vector<uint8_t> bytes(n);
    base64_decode(key, text, bytes.data(), n);
    return bytes;
}

// Reads the encode matrices of a layer in order, K and then V of each head.
struct EncodeReader {
    const std::string &          key;
    const std::vector<uint8_t> & bytes;
    size_t                       at = 0;

    const uint8_t * take(size_t n) {
        if (bytes.size() - at < n) {
            refuse(key, "at least " + std::to_string(at + n) + " bytes", std::to_string(bytes.size()));
        }
        at += n;
        return bytes.data() + (at - n);
    }

    double half(const uint8_t * p) {
        const uint16_t bits = le16(p);
        if ((bits & 0x7c00) == 0x7c00) {
            refuse(key, "finite values", "another one before byte " + std::to_string(at));
        }
        return (double) ggml_fp16_to_fp32(bits);
    }

    // Reads [d][d]. in_bytes says that its rows are in bytes, and so are those of the matrices derived from it. `mixed`
    // says that they are mixed already.
    Doubles matrix(int d, bool & in_bytes, bool & mixed) {
        const uint8_t form = *take(1);
        if (form > 3) {
            refuse(key, "form 0 to 3 of a matrix", std::to_string(form));
        }
        in_bytes            = (form & 1) != 0;
        mixed               = (form & 2) != 0;
        const auto      n   = (size_t) d;
        const size_t    row = in_bytes ? 2 + n : 2 * n;
        const uint8_t * p   = take(n * row);
        Doubles         m(n * n);
        for (size_t i = 0; i < n; ++i, p += row) {
            const double step = in_bytes ? half(p) : 0.0;
            for (size_t j = 0; j < n; ++j) {
                m[i * n + j] = in_bytes ? step * (int8_t) p[2 + j] : half(p + 2 * j);
            }
        }
        return m;
    }
};

// The orthonormal DCT-II [n][n].
const Doubles & dct(int n) {
    thread_local std::map<int, Doubles> cached;
    Doubles &                           matrix = cached[n];
    constexpr double                    PI     = 3.14159265358979323846;
    if (matrix.empty()) {
        matrix.reserve((size_t) n * (size_t) n);
        for (int i = 0; i < n; ++i) {
            for (int j = 0; j < n; ++j) {
                matrix.push_back(std::sqrt((i == 0 ? 1.0 : 2.0) / n) * std::cos(PI * (j + 0.5) * i / n));
            }
        }
    }
    return matrix;
}

// Multiplies n rows [n][d] by Sylvester's Hadamard matrix / sqrt(n).
void mix_hadamard(double * rows, size_t n, size_t d) {
    for (size_t half = 1; half < n; half *= 2) {
        for (size_t i = 0; i < n; ++i) {
            if ((i & half) != 0) {
                continue;
            }
            double * a = rows + i * d;
            double * b = rows + (i + half) * d;
            for (size_t e = 0; e < d; ++e) {
                const double sum = a[e] + b[e];
                b[e]             = a[e] - b[e];
                a[e]             = sum;
            }
        }
    }
    const double factor = 1.0 / std::sqrt((double) n);
    std::for_each(rows, rows + n * d, [&](double & value) { value *= factor; });
}

void mix_rows(double * rows, size_t n, size_t d) {
    if ((n & (n - 1)) == 0) {
        mix_hadamard(rows, n, d);
        return;
    }
    const Doubles & matrix = dct((int) n);
    const Doubles   old(rows, rows + n * d);
    std::fill(rows, rows + n * d, 0.0);
    for (size_t i = 0; i < n; ++i) {
        double * row = rows + i * d;
        for (size_t j = 0; j < n; ++j) {
            const double   factor = matrix[i * n + j];
            const double * from   = old.data() + j * d;
            for (size_t e = 0; e < d; ++e) {
                row[e] += factor * from[e];
            }
        }
    }
}

// m [n][n] becomes the transpose of its inverse (Gauss-Jordan in place). Returns false if it has none.
bool invert(Doubles & m, size_t n) {
    std::vector<size_t> pivots(n);
    for (size_t k = 0; k < n; ++k) {
        size_t pivot = k;
        for (size_t i = k + 1; i < n; ++i) {
            pivot = std::fabs(m[i * n + k]) > std::fabs(m[pivot * n + k]) ? i : pivot;
        }
        double *     own   = m.data() + k * n;
        const double value = m[pivot * n + k];
        if (!(std::fabs(value) > 0.0) || !std::isfinite(value)) {
            return false;
        }
        std::swap_ranges(own, own + (pivot != k ? n : 0), m.data() + pivot * n);
        pivots[k] = pivot;
        own[k]    = 1.0;
        std::for_each(own, own + n, [&](double & x) { x /= value; });
        for (size_t i = 0; i < n; ++i) {
            double *     row    = m.data() + i * n;
            const double factor = row[k];
            if (i == k || factor == 0.0) {
                continue;
            }
            row[k] = 0.0;
            for (size_t j = 0; j < n; ++j) {
                row[j] -= factor * own[j];
            }
        }
    }
    for (size_t k = n; k-- > 0;) { // columns of the inverse as rows of m were swapped
        for (size_t i = 0; i < n && pivots[k] != k; ++i) {
            std::swap(m[i * n + k], m[i * n + pivots[k]]);
        }
    }
    for (size_t i = 0; i < n; ++i) {
        for (size_t j = 0; j < i; ++j) {
            std::swap(m[i * n + j], m[j * n + i]);
        }
    }
    return true;
}

// E[x^|x] / x of the best quantizer of a Gaussian, by which D is divided.
double gain(int bits) {
    switch (bits) {
        case 2: return 0.9116;
        case 3: return 0.97555;
        case 4: return 0.99328;
        case 5: return 0.99818;
        case 6: return 0.9995;
        default: return 1.0;
    }
}

// Writes the first n values of m as halves. Throws Invalid if they do not fit.
void write_halves(const std::string & key, const Doubles & m, size_t n, uint8_t *& out) {
    for (size_t i = 0; i < n; ++i, out += 2) {
        const uint16_t half = ggml_fp32_to_fp16((float) m[i]);
        if ((half & 0x7c00) == 0x7c00) {
            refuse(key, "matrices within half precision", number(m[i]));
        }
        out[0] = (uint8_t) half;
        out[1] = (uint8_t) (half >> 8);
    }
}

// Writes E and D of one head's K or V. `mixed` says that the rows of encode are mixed.
void write_matrices(const std::string & key, Doubles encode, size_t d, const HeadSpec & spec, bool mixed,
                    bool encode_in_bytes, bool decode_in_bytes, uint8_t *& out) {
    const auto rank      = (size_t) spec.rank();
    const auto each_band = [&](auto use) { // use(the band's bits, its first row, number of rows)
        size_t first = 0;
        for (int b = 0; b < spec.n_bands; first += spec.bands[b++].n) {
            use(spec.bands[b].bits, first, (size_t) spec.bands[b].n);
        }
    };
    each_band([&](int bits, size_t first, size_t n) {
        if (bits != 16 && !mixed) {
            mix_rows(encode.data() + first * d, n, d);
        }
    });
    for (size_t i = 0; encode_in_bytes && i < rank; ++i) {
        round_to_bytes(encode.data() + i * d, d);
    }
    const uint8_t * written = out;
    write_halves(key, encode, rank * d, out);
    for (size_t i = 0; i < rank * d; ++i) { // D is the inverse of E as written
        encode[i] = (double) ggml_fp16_to_fp32(le16(written + 2 * i));
    }
    if (!invert(encode, d)) {
        refuse(key, "an invertible matrix of each head", "another one");
    }
    Doubles & decode = encode;
    each_band([&](int bits, size_t first, size_t n) {
        for (size_t i = first; i < first + n; ++i) {
            double * row = decode.data() + i * d;
            std::for_each(row, row + d, [&](double & value) { value /= gain(bits); });
            if (encode_in_bytes && decode_in_bytes && i >= N_HALVES) {
                round_to_bytes(row, d);
            }
        }
    });
    write_halves(key, decode, rank * d, out);
}

// Every layer has at least the shortest encode matrices, so that sizes which grow with them can be trusted.
void check_encodes(const Keys & keys, const std::vector<LayerSpec> & specs) {
    for (const LayerSpec & spec : specs) {
        const auto        matrix = [](int d) { return 1 + (size_t) d * (size_t) (2 + d); }; // its rows in bytes
        const auto        d_k = (size_t) spec.d_k, n_head = (size_t) spec.n_head_kv;
        const size_t      least = base64_length(n_head * (2 * d_k + matrix(spec.d_k) + matrix(spec.d_v)));
        const std::string key   = encode_key(spec.il);
        const size_t      found = keys.view(key).size();
        if (found < least) {
            refuse(key, "at least " + std::to_string(least) + " base64 characters (as subkv.layout requires)",
                   std::to_string(found));
        }
    }
}

// Bytes of a layer's gammas and ratios.
size_t factor_bytes(const LayerSpec & spec) {
    size_t n = 0;
    for (size_t h = 0; h < (size_t) spec.n_head_kv; ++h) {
        n += 4 * (size_t) (1 + spec.k[h].n_bands + spec.v[h].n_bands);
    }
    return n;
}

bool same_shape(const std::vector<LayerSpec> & a, const std::vector<LayerSpec> & b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const LayerSpec & x, const LayerSpec & y) {
        return x.il == y.il && x.n_head_kv == y.n_head_kv && x.d_k == y.d_k && x.d_v == y.d_v &&
               x.latent() == y.latent();
    });
}

// A member of a flat JSON object of numbers, or 0 if it is missing or invalid.
float number_in(const std::string & json, const std::string & name) {
    const std::string  key   = '"' + name + "\":";
    const size_t       at    = json.find(key);
    float              value = 0.0f;
    std::istringstream text(at == std::string::npos ? "" : json.substr(at + key.size()));
    return read_number(text, value) && value > 0.0f ? value : 0.0f;
}

} // namespace

void round_to_bytes(double * row, size_t d) {
    constexpr double TO_INTEGER = 6755399441055744.0; // 1.5 * 2^52, which rounds to nearest even when it is added
    double           largest    = MIN_LARGEST;
    for (size_t j = 0; j < d; ++j) {
        largest = std::max(largest, std::fabs(row[j]));
    }
    double best[MAX_HEAD_SIZE], rounded[MAX_HEAD_SIZE];
    double least = -1.0;
    for (int significand = 8; significand < 16; ++significand) {
        int          exponent = 0; // also of an infinity
        const double mantissa = std::frexp(largest / (BYTE_MAX * significand), &exponent);
        const double step = std::ldexp((double) significand, exponent - (mantissa == 0.5)); // BYTE_MAX steps suffice
        for (size_t j = 0; j < d; ++j) {
            const double multiple = (row[j] / step + TO_INTEGER) - TO_INTEGER;
            rounded[j]            = step * multiple + 0.0; // no negative zeros
        }
        double error = 0.0;
        for (size_t j = 0; j < d; ++j) {
            error += (rounded[j] - row[j]) * (rounded[j] - row[j]);
        }
        if (least < 0.0 || error < least) {
            least = error;
            std::copy(rounded, rounded + d, best);
        }
    }
    std::copy(best, best + d, row);
}

void read_budgets(const Keys & keys, Layout & layout) {
    const auto budget_of = [&](const std::string & key) {
        const float budget = keys.positive_f32(key);
        if (budget > MAX_BUDGET) {
            refuse(key, "at most " + number(MAX_BUDGET) + " bits", number(budget));
        }
        return budget;
    };
    layout.budget               = keys.has("subkv.budget") ? budget_of("subkv.budget") : layout.bpe;
    const std::string predicted = keys.optional_str("subkv.predicted");
    layout.predicted            = number_in(predicted, "subkv");
    layout.predicted_q8_0       = number_in(predicted, "q8_0");
    const uint32_t n            = keys.optional_u32("subkv.plans", 0);
    if (n > MAX_PLANS) {
        refuse("subkv.plans", "at most " + std::to_string(MAX_PLANS), std::to_string(n));
    }
    for (size_t i = 0; i < n; ++i) {
        PlanFacts plan;
        plan.budget    = budget_of(plan_key(i, "budget"));
        plan.bpe       = keys.positive_f32(plan_key(i, "bits_per_element"));
        plan.predicted = keys.has(plan_key(i, "predicted")) ? keys.positive_f32(plan_key(i, "predicted")) : 0.0f;
        layout.plans.push_back(plan);
    }
}

Plan::Plan(const Keys & keys, size_t i, const std::vector<LayerSpec> & base, Layout & layout) :
    name("subkv.plan." + std::to_string(i)), keys_(keys) {
    const std::string key = plan_key(i, "layout");
    specs_                = parse_layout(keys.view(key), layout.n_layer, key);
    if (!same_shape(specs_, base)) {
        refuse(key, "the layers and heads of subkv.layout", "other ones");
    }
    if (std::any_of(specs_.begin(), specs_.end(), [](const LayerSpec & spec) { return spec.latent(); })) {
        refuse(key, "no latent layer", "one");
    }
    check_encodes(keys, specs_);
    in_bytes_          = keys.u32(plan_key(i, "decode_in_bytes"), 0, 1) != 0;
    layout.recent_bits = read_recent_bits(keys, plan_key(i, "recent_bits"));
    layout.budget      = layout.plans[i].budget;
    layout.bpe         = layout.plans[i].bpe;
    layout.predicted   = layout.plans[i].predicted;
    layout.bpe_rows    = keys.positive_f32(plan_key(i, "bits_per_element.rows"));

    const std::string factors = plan_key(i, "factors");
    factors_                  = decoded(factors, keys.view(factors));
    size_t n_bytes            = 0;
    for (const LayerSpec & spec : specs_) {
        n_bytes += factor_bytes(spec);
    }
    if (factors_.size() != n_bytes) {
        refuse(factors, std::to_string(n_bytes) + " bytes (as " + key + " requires)", std::to_string(factors_.size()));
    }
}

std::vector<std::vector<uint8_t>> Plan::derive() const {
    std::vector<std::vector<uint8_t>> blocks(specs_.size());
    std::vector<const uint8_t *>      factors = { factors_.data() };
    for (const LayerSpec & spec : specs_) {
        factors.push_back(factors.back() + factor_bytes(spec));
    }
    for_each_parallel(specs_.size(), [&](size_t i) {
        blocks[i].resize(specs_[i].basis_bytes());
        derive_layer(specs_[i], factors[i], blocks[i].data());
    });
    return blocks;
}

void Plan::derive_layer(const LayerSpec & spec, const uint8_t * factors, uint8_t * out) const {
    const std::string          key   = encode_key(spec.il);
    const std::vector<uint8_t> bytes = decoded(key, keys_.view(key));
    EncodeReader               reader{ key, bytes };
    const auto                 copy = [&out](const uint8_t * from, size_t n) {
        std::memcpy(out, from, n);
        out += n;
    };
    const auto copy_factors = [&](int n) {
        copy(factors, 4 * (size_t) n);
        factors += 4 * n;
    };
    for (size_t h = 0; h < (size_t) spec.n_head_kv; ++h) {
        for (const bool value : { false, true }) {
            const HeadSpec & head = (value ? spec.v : spec.k)[h];
            const int        d    = value ? spec.d_v : spec.d_k;
            copy_factors((value ? 0 : 1) + head.n_bands);
            if (!value) {
                copy(reader.take(2 * (size_t) d), 2 * (size_t) d); // the mean
            }
            bool    in_bytes, mixed;
            Doubles encode = reader.matrix(d, in_bytes, mixed);
            write_matrices(key, std::move(encode), (size_t) d, head, mixed, in_bytes, in_bytes_, out);
        }
    }
    if (reader.at != bytes.size()) {
        refuse(key, std::to_string(reader.at) + " bytes (as subkv.layout requires)", std::to_string(bytes.size()));
    }
}

} // namespace subkv
