// plan.cpp: see plan.h. The matrices of equal files are equal on all machines: arithmetic is in double without fused
// operations (cmake/native/CMakeLists.txt), and rounding to bytes and halves hides the last bits of the cosines.
#include "plan.h"

#include "base64.h"
#include "ggml.h"
#include "variables.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string_view>

namespace subkv {

namespace {

constexpr size_t MAX_PLANS   = 16;
constexpr int    N_HALVES    = 8; // first rows of D, always in halves
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

uint16_t le16(const uint8_t * p) {
    return (uint16_t) (p[0] | p[1] << 8);
}

// The encode matrices of a layer in order: of each head K, then V.
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

    // [d][d]; in_bytes: its rows are in bytes, and so are those of the matrices derived from it.
    Doubles matrix(int d, bool & in_bytes) {
        const uint8_t form = *take(1);
        if (form > 1) {
            refuse(key, "form 0 or 1 of a matrix", std::to_string(form));
        }
        in_bytes            = form == 1;
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

// Row i of the orthonormal matrix that mixes n coefficients: Sylvester's Hadamard matrix, or the DCT-II.
double mixing(int n, int i, int j) {
    if ((n & (n - 1)) == 0) {
        bool odd = false;
        for (int both = i & j; both != 0; both &= both - 1) {
            odd = !odd;
        }
        return (odd ? -1.0 : 1.0) / std::sqrt((double) n);
    }
    constexpr double PI = 3.14159265358979323846;
    return std::sqrt((i == 0 ? 1.0 : 2.0) / n) * std::cos(PI * (j + 0.5) * i / n);
}

// Mixes rows [first, first + n) of m [..][d].
void mix_rows(Doubles & m, int d, int first, int n) {
    const auto    width = (size_t) d;
    const Doubles old(m.begin() + first * d, m.begin() + (first + n) * d);
    for (int i = 0; i < n; ++i) {
        double * row = m.data() + (size_t) (first + i) * width;
        std::fill(row, row + width, 0.0);
        for (int j = 0; j < n; ++j) {
            const double   factor = mixing(n, i, j);
            const double * from   = old.data() + (size_t) j * width;
            for (size_t e = 0; e < width; ++e) {
                row[e] += factor * from[e];
            }
        }
    }
}

// Rounds a row to multiples of a step whose significand has 4 bits: the step of the smallest error.
void round_to_bytes(double * row, int d, std::vector<double> & best) {
    double largest = MIN_LARGEST;
    for (int j = 0; j < d; ++j) {
        largest = std::max(largest, std::fabs(row[j]));
    }
    best.resize((size_t) d);
    std::vector<double> rounded((size_t) d);
    double              least = -1.0;
    for (int significand = 8; significand < 16; ++significand) {
        int          exponent;
        const double mantissa = std::frexp(largest / (BYTE_MAX * significand), &exponent);
        const double step  = std::ldexp((double) significand, exponent - (mantissa == 0.5)); // BYTE_MAX steps suffice
        double       error = 0.0;
        for (int j = 0; j < d; ++j) {
            rounded[(size_t) j] = step * std::nearbyint(row[j] / step) + 0.0; // no negative zeros
            error += (rounded[(size_t) j] - row[j]) * (rounded[(size_t) j] - row[j]);
        }
        if (least < 0.0 || error < least) {
            least = error;
            best.swap(rounded);
        }
    }
    std::copy(best.begin(), best.end(), row);
}

// m [d][d] becomes the transpose of its inverse. false: it has none.
bool invert(Doubles & m, int d) {
    const auto n = (size_t) d;
    Doubles    inverse(n * n, 0.0);
    for (size_t i = 0; i < n; ++i) {
        inverse[i * n + i] = 1.0;
    }
    for (size_t column = 0; column < n; ++column) {
        size_t pivot = column;
        for (size_t i = column + 1; i < n; ++i) {
            pivot = std::fabs(m[i * n + column]) > std::fabs(m[pivot * n + column]) ? i : pivot;
        }
        const double value = m[pivot * n + column];
        if (!(std::fabs(value) > 0.0) || !std::isfinite(value)) {
            return false;
        }
        if (pivot != column) {
            std::swap_ranges(m.begin() + (ptrdiff_t) (pivot * n), m.begin() + (ptrdiff_t) ((pivot + 1) * n),
                             m.begin() + (ptrdiff_t) (column * n));
            std::swap_ranges(inverse.begin() + (ptrdiff_t) (pivot * n), inverse.begin() + (ptrdiff_t) ((pivot + 1) * n),
                             inverse.begin() + (ptrdiff_t) (column * n));
        }
        double * own         = m.data() + column * n;
        double * own_inverse = inverse.data() + column * n;
        for (size_t j = 0; j < n; ++j) {
            own[j] /= value;
            own_inverse[j] /= value;
        }
        for (size_t i = 0; i < n; ++i) {
            const double factor = m[i * n + column];
            if (i == column || factor == 0.0) {
                continue;
            }
            double * row         = m.data() + i * n;
            double * row_inverse = inverse.data() + i * n;
            for (size_t j = 0; j < n; ++j) {
                row[j] -= factor * own[j];
                row_inverse[j] -= factor * own_inverse[j];
            }
        }
    }
    for (size_t i = 0; i < n; ++i) {
        for (size_t j = 0; j < n; ++j) {
            m[i * n + j] = inverse[j * n + i];
        }
    }
    return true;
}

// E[x^|x] / x of the best quantizer of a Gaussian: D is divided by it.
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

// Writes the first `rank` rows of m as halves. Throws Invalid if they do not fit.
void write_halves(const std::string & key, const Doubles & m, int rank, int d, uint8_t *& out) {
    for (size_t i = 0; i < (size_t) rank * (size_t) d; ++i, out += 2) {
        const uint16_t half = ggml_fp32_to_fp16((float) m[i]);
        if ((half & 0x7c00) == 0x7c00) {
            refuse(key, "matrices within half precision", number(m[i]));
        }
        out[0] = (uint8_t) half;
        out[1] = (uint8_t) (half >> 8);
    }
}

// Writes E and D of one head's K or V.
void write_matrices(const std::string & key, Doubles encode, int d, const HeadSpec & spec, bool encode_in_bytes,
                    bool decode_in_bytes, uint8_t *& out) {
    const int           rank  = spec.rank();
    int                 first = 0;
    std::vector<double> scratch;
    for (int b = 0; b < spec.n_bands; first += spec.bands[b++].n) {
        if (spec.bands[b].bits != 16) {
            mix_rows(encode, d, first, spec.bands[b].n);
        }
    }
    for (int i = 0; encode_in_bytes && i < rank; ++i) {
        round_to_bytes(encode.data() + (size_t) i * (size_t) d, d, scratch);
    }
    uint8_t * written = out;
    write_halves(key, encode, rank, d, out);
    for (size_t i = 0; i < (size_t) rank * (size_t) d; ++i) { // D is the inverse of E as written
        encode[i] = (double) ggml_fp16_to_fp32(le16(written + 2 * i));
    }
    if (!invert(encode, d)) {
        refuse(key, "an invertible matrix of each head", "another one");
    }
    Doubles & decode = encode;
    first            = 0;
    for (int b = 0; b < spec.n_bands; first += spec.bands[b++].n) {
        for (int i = first; i < first + spec.bands[b].n; ++i) {
            double * row = decode.data() + (size_t) i * (size_t) d;
            std::for_each(row, row + d, [&](double & value) { value /= gain(spec.bands[b].bits); });
            if (encode_in_bytes && decode_in_bytes && i >= N_HALVES) {
                round_to_bytes(row, d, scratch);
            }
        }
    }
    write_halves(key, decode, rank, d, out);
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

} // namespace

void read_budgets(const Keys & keys, Layout & layout) {
    const auto budget_of = [&](const std::string & key) {
        const float budget = keys.positive_f32(key);
        if (budget > MAX_BUDGET) {
            refuse(key, "at most " + number(MAX_BUDGET) + " bits", number(budget));
        }
        return budget;
    };
    layout.budget    = keys.has("subkv.budget") ? budget_of("subkv.budget") : layout.bpe;
    const uint32_t n = keys.optional_u32("subkv.plans", 0);
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
    in_bytes_          = keys.u32(plan_key(i, "decode_in_bytes"), 0, 1) != 0;
    layout.recent_bits = read_recent_bits(keys, plan_key(i, "recent_bits"));
    layout.budget      = layout.plans[i].budget;
    layout.bpe         = layout.plans[i].bpe;
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

void Plan::derive(const LayerSpec & spec, uint8_t * out) const {
    const uint8_t * factors = factors_.data();
    for (const LayerSpec & before : specs_) {
        if (before.il == spec.il) {
            break;
        }
        factors += factor_bytes(before);
    }
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
            bool    in_bytes;
            Doubles encode = reader.matrix(d, in_bytes);
            write_matrices(key, std::move(encode), d, head, in_bytes, in_bytes_, out);
        }
    }
    if (reader.at != bytes.size()) {
        refuse(key, std::to_string(reader.at) + " bytes (as subkv.layout requires)", std::to_string(bytes.size()));
    }
}

} // namespace subkv
