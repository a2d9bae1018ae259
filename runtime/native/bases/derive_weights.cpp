// derive_weights.cpp: see derive_weights.h. Long sums are sums of integers, so they are exact in any order, whatever the
// number of threads and the instructions; short ones are in double, without fused operations (cmake/native/CMakeLists.txt),
// and rounding to integers, halves and floats hides their order.
#include "derive_weights.h"

#include "derive_rotation.h"
#include "parallel.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

namespace subkv {

namespace {

// These are as in weights_numpy.py.
constexpr int     LEVELS     = 2047;
constexpr double  SUMS       = 1 << 20;
constexpr int     DIRECTIONS = 16;
constexpr double  WHITE      = 0.3;
constexpr int64_t SAMPLE     = 1 << 24;
constexpr int     ROUNDS     = 3;
constexpr int     QUERIES    = 2;
constexpr float   SMALLEST   = 1e-30f;
constexpr double  DEPENDENT  = 1e-8;
constexpr int64_t MOST_WIDE  = 32768;

using Doubles  = std::vector<double>;
using Integers = std::vector<int16_t>;

// Rounds a row to integers up to LEVELS and returns their step, or NaN if a value is not finite.
double to_integers(const float * row, int64_t n, int16_t * out) {
    constexpr float TO_INTEGER = 12582912.0f; // 1.5 * 2^23, which rounds to nearest even when it is added
    int32_t         largest    = 0;           // the bits of positive numbers are ordered as the numbers
    for (int64_t i = 0; i < n; ++i) {
        int32_t bits;
        std::memcpy(&bits, row + i, sizeof(bits));
        largest = std::max(largest, bits & 0x7fffffff);
    }
    float most;
    std::memcpy(&most, &largest, sizeof(most));
    const bool finite = std::isfinite(most);
    if (!finite || most < SMALLEST) {
        std::fill(out, out + n, (int16_t) 0);
        return finite ? 0.0 : std::numeric_limits<double>::quiet_NaN();
    }
    const float factor = (float) LEVELS / most;
    for (int64_t i = 0; i < n; ++i) {
        out[i] = (int16_t) (int32_t) ((row[i] * factor + TO_INTEGER) - TO_INTEGER);
    }
    return (double) most / LEVELS;
}

// The same of a column.
double to_integers(const Doubles & column, int16_t * out) {
    double most = 0.0;
    for (const double x : column) {
        most = std::max(most, std::fabs(x));
    }
    const double step = most / LEVELS;
    for (size_t i = 0; i < column.size(); ++i) {
        out[i] = (int16_t) std::nearbyint(column[i] / (step > 0.0 ? step : 1.0));
    }
    return step;
}

int64_t dot(const int16_t * a, const int16_t * b, int64_t n) {
    constexpr int64_t BLOCK = 256; // products of up to 2^22, whose sum is an int32_t
    int64_t           total = 0;
    for (; n >= BLOCK; a += BLOCK, b += BLOCK, n -= BLOCK) {
        int32_t sum = 0;
        for (int64_t i = 0; i < BLOCK; ++i) {
            sum += a[i] * b[i];
        }
        total += sum;
    }
    for (int64_t i = 0; i < n; ++i) {
        total += a[i] * b[i];
    }
    return total;
}

// The rows of a matrix that compute a layer's queries or keys, from `first` on. `bias` is that of these rows, or empty
// if there is none.
struct Side {
    WeightMatrix matrix;
    int64_t      first = 0, count = 0;
    Doubles      bias;
};

std::string weight_name(int il, const std::string & name, const char * kind = "weight") {
    return "blk." + std::to_string(il) + "." + name + "." + kind;
}

// `side` is 'q' or 'k'. Returns nothing if its rows are unknown. A fused matrix contains q, k and v in this order.
std::optional<Side> side_of(const WeightsFile & weights, const LayerShape & shape, char side) {
    const int64_t of_q = (int64_t) shape.n_head * shape.d_k, of_k = (int64_t) shape.n_head_kv * shape.d_k;
    Side          out;
    out.count         = side == 'q' ? of_q : of_k;
    std::string name  = std::string("attn_") + side;
    int64_t     total = out.count;
    if (!weights.has_tensor(weight_name(shape.il, name))) {
        name      = "attn_qkv";
        out.first = side == 'q' ? 0 : of_q;
        total     = of_q + of_k + (int64_t) shape.n_head_kv * shape.d_v;
        if (!weights.has_tensor(weight_name(shape.il, name))) {
            return std::nullopt;
        }
    }
    out.matrix      = weights.matrix(weight_name(shape.il, name));
    const auto bias = weights.vector(weight_name(shape.il, name, "bias"));
    if (out.matrix.n_rows != total || (bias && (int64_t) bias->size() != total)) {
        return std::nullopt;
    }
    if (bias) {
        out.bias.assign(bias->begin() + out.first, bias->begin() + out.first + out.count);
    }
    return out;
}

// The weights of the norm before attention, which are ones without a norm. Returns nothing if they do not fit.
std::optional<std::vector<float>> norm_of(const WeightsFile & weights, int il, int64_t n) {
    const auto norm = weights.vector(weight_name(il, "attn_norm"));
    if (!norm) {
        return std::vector<float>((size_t) n, 1.0f);
    }
    if ((int64_t) norm->size() != n) {
        return std::nullopt;
    }
    return std::vector<float>(norm->begin(), norm->end());
}

void multiply(float * row, const std::vector<float> & by) {
    for (size_t i = 0; i < by.size(); ++i) {
        row[i] *= by[i];
    }
}

// The sampled rows of a side as integers [rows][n], and the weight of each row, by which a side's rows have a mean
// square of 1.
struct Sampled {
    Integers rows;
    Doubles  weight;
};

Sampled sampled(const WeightsFile & weights, const Side & side, const std::vector<float> & norm, int64_t step) {
    const int64_t n = side.matrix.n;
    Sampled       out;
    double        size = 0.0;
    RowReader(weights).rows(side.matrix, side.first, side.count, step, [&](float * row) {
        multiply(row, norm);
        out.rows.resize(out.rows.size() + (size_t) n);
        int16_t *    integers = out.rows.data() + out.rows.size() - n;
        const double of_row   = to_integers(row, n, integers);
        out.weight.push_back(of_row * of_row);
        size += of_row * of_row * (double) dot(integers, integers, n);
    });
    const double factor = (double) out.rows.size() / size;
    for (double & weight : out.weight) {
        weight = size > 0.0 && std::isfinite(size) ? weight * factor : 0.0;
    }
    return out;
}

// Columns [m][n] as integers, with the step of each.
struct IntegerColumns {
    int64_t  n = 0;
    Integers values;
    Doubles  step;

    IntegerColumns(int64_t n, size_t m) : n(n), values((size_t) n * m), step(m, 1.0) {}

    explicit IntegerColumns(const std::vector<Doubles> & columns) :
        IntegerColumns((int64_t) columns[0].size(), columns.size()) {
        for (size_t k = 0; k < columns.size(); ++k) {
            step[k] = to_integers(columns[k], column(k));
        }
    }

    size_t m() const { return step.size(); }

    int16_t * column(size_t k) { return values.data() + (int64_t) k * n; }

    const int16_t * column(size_t k) const { return values.data() + (int64_t) k * n; }
};

// 1 and -1 without order, from the bits of a hash (splitmix64) of the index.
IntegerColumns signs(int64_t n, size_t m) {
    IntegerColumns out(n, m);
    for (int64_t j = 0; j < n; ++j) {
        for (size_t k = 0; k < m; ++k) {
            uint64_t x       = ((uint64_t) j * m + k + 1) * 0x9E3779B97F4A7C15u;
            x                = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
            x                = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
            out.column(k)[j] = x >> 63 ? -1 : 1;
        }
    }
    return out;
}

double dot(const Doubles & a, const Doubles & b) {
    double sum = 0.0;
    for (size_t i = 0; i < a.size(); ++i) {
        sum += a[i] * b[i];
    }
    return sum;
}

// Applies Gram-Schmidt twice. Columns that depend on others become zeros.
void orthonormalize(std::vector<Doubles> & columns) {
    for (size_t k = 0; k < columns.size(); ++k) {
        Doubles &    column = columns[k];
        const double size   = std::sqrt(dot(column, column));
        for (int round = 0; round < 2; ++round) {
            for (size_t j = 0; j < k; ++j) {
                const double part = dot(columns[j], column);
                for (size_t i = 0; i < column.size(); ++i) {
                    column[i] -= part * columns[j][i];
                }
            }
        }
        const double rest = std::sqrt(dot(column, column));
        for (double & x : column) {
            x = rest > DEPENDENT * size ? x / rest : 0.0;
        }
    }
}

// Eigenvalues of a symmetric matrix [m][m], which becomes diagonal, and its eigenvectors as columns (cyclic Jacobi).
void eigen(std::vector<Doubles> & a, std::vector<Doubles> & vectors) {
    constexpr int SWEEPS = 60;
    const size_t  m      = a.size();
    vectors.assign(m, Doubles(m, 0.0));
    for (size_t i = 0; i < m; ++i) {
        vectors[i][i] = 1.0;
    }
    for (int sweep = 0; sweep < SWEEPS; ++sweep) {
        bool done = true;
        for (size_t p = 0; p < m; ++p) {
            for (size_t q = p + 1; q < m; ++q) {
                if (!(std::fabs(a[p][q]) > 1e-300 &&
                      std::fabs(a[p][q]) > 1e-17 * std::sqrt(std::fabs(a[p][p] * a[q][q])))) {
                    continue;
                }
                done               = false;
                const double theta = (a[q][q] - a[p][p]) / (2.0 * a[p][q]);
                const double t     = (theta < 0.0 ? -1.0 : 1.0) / (std::fabs(theta) + std::sqrt(theta * theta + 1.0));
                const double c = 1.0 / std::sqrt(t * t + 1.0), s = t * c;
                for (size_t i = 0; i < m; ++i) {
                    const double ip = a[i][p], iq = a[i][q];
                    a[i][p] = c * ip - s * iq;
                    a[i][q] = s * ip + c * iq;
                }
                for (size_t i = 0; i < m; ++i) {
                    const double pi = a[p][i], qi = a[q][i];
                    a[p][i]         = c * pi - s * qi;
                    a[q][i]         = s * pi + c * qi;
                    const double vp = vectors[i][p], vq = vectors[i][q];
                    vectors[i][p] = c * vp - s * vq;
                    vectors[i][q] = s * vp + c * vq;
                }
            }
        }
        if (done) {
            return;
        }
    }
}

// Samples of all sides, and their products with columns.
class Gram {
public:
    Gram(std::vector<Sampled> parts, int64_t n) : parts_(std::move(parts)), n_(n) {}

    // [rows][m] of every part
    std::vector<Doubles> products(const IntegerColumns & columns) const {
        std::vector<Doubles> out(parts_.size());
        for_each_parallel(parts_.size(), [&](size_t i) {
            for (size_t r = 0; r < parts_[i].weight.size(); ++r) {
                for (size_t k = 0; k < columns.m(); ++k) {
                    out[i].push_back((double) dot(row(i, r), columns.column(k), n_));
                }
            }
        });
        return out;
    }

    // The sum of weight row^T row columns over all rows, [m][n]. Every column has a scale of its own.
    std::vector<Doubles> product(const IntegerColumns & columns) const {
        const size_t         m        = columns.m();
        std::vector<Doubles> weighted = products(columns);
        Doubles              largest(m, 0.0);
        each_product(weighted, m, [&](double & p, size_t i, size_t r, size_t k) {
            p *= parts_[i].weight[r];
            largest[k] = std::max(largest[k], std::fabs(p));
        });
        each_product(weighted, m, [&](double & p, size_t, size_t, size_t k) {
            p = std::nearbyint(p * (SUMS / (largest[k] > 0.0 ? largest[k] : 1.0)));
        });
        constexpr int64_t    BLOCK = 512;
        std::vector<Doubles> out(m, Doubles((size_t) n_, 0.0));
        for_each_parallel((size_t) ((n_ + BLOCK - 1) / BLOCK), [&](size_t b) {
            const int64_t             first = (int64_t) b * BLOCK;
            const int64_t             count = std::min(BLOCK, n_ - first);
            std::array<double, BLOCK> of_row;
            for (size_t i = 0; i < parts_.size(); ++i) {
                for (size_t r = 0; r < parts_[i].weight.size(); ++r) {
                    std::copy_n(row(i, r) + first, count, of_row.begin());
                    for (size_t k = 0; k < m; ++k) {
                        const double factor = weighted[i][r * m + k];
                        double *     sums   = out[k].data() + first;
                        for (int64_t j = 0; j < count; ++j) {
                            sums[j] += factor * of_row[(size_t) j];
                        }
                    }
                }
            }
        });
        return out;
    }

    // columns^T (sum of weight row^T row) columns, with the columns' steps, [m][m]
    std::vector<Doubles> within(const IntegerColumns & columns) const {
        const size_t               m   = columns.m();
        const std::vector<Doubles> all = products(columns);
        std::vector<Doubles>       out(m, Doubles(m, 0.0));
        for (size_t i = 0; i < parts_.size(); ++i) {
            for (size_t r = 0; r < parts_[i].weight.size(); ++r) {
                const double * p = all[i].data() + r * m;
                for (size_t k = 0; k < m; ++k) {
                    for (size_t l = 0; l < m; ++l) {
                        out[k][l] += (p[k] * columns.step[k]) * (p[l] * columns.step[l] * parts_[i].weight[r]);
                    }
                }
            }
        }
        return out;
    }

private:
    template <typename F> void each_product(std::vector<Doubles> & products, size_t m, F use) const {
        for (size_t i = 0; i < products.size(); ++i) {
            for (size_t j = 0; j < products[i].size(); ++j) {
                use(products[i][j], i, j / m, j % m);
            }
        }
    }

    const int16_t * row(size_t part, size_t r) const { return parts_[part].rows.data() + (int64_t) r * n_; }

    std::vector<Sampled> parts_;
    int64_t              n_;
};

// Directions of the normalized residual stream as columns, whose squares sum to 1 - WHITE, by subspace iteration on
// sampled rows of all queries and keys. Returns nothing if there are no rows, or if their widths differ.
std::optional<IntegerColumns> directions_of(const WeightsFile & weights, const std::vector<LayerShape> & layers) {
    struct Reader {
        Side               side;
        std::vector<float> norm;
    };

    std::vector<Reader> readers;
    for (const LayerShape & shape : layers) {
        for (const char side : { 'q', 'k' }) {
            auto rows = side_of(weights, shape, side);
            auto norm = rows ? norm_of(weights, shape.il, rows->matrix.n) : std::nullopt;
            if (norm) {
                readers.push_back({ std::move(*rows), std::move(*norm) });
            }
        }
    }
    const int64_t n         = readers.empty() ? 0 : readers[0].side.matrix.n;
    const auto    same_size = [n](const Reader & reader) { return reader.side.matrix.n == n; };
    if (n == 0 || n > MOST_WIDE || !std::all_of(readers.begin(), readers.end(), same_size)) {
        return std::nullopt;
    }
    const int64_t        n_rows = std::min(n, SAMPLE / n);
    std::vector<Sampled> parts(readers.size());
    for_each_parallel(readers.size(), [&](size_t i) {
        const int64_t all  = readers[i].side.count * (int64_t) readers.size();
        const int64_t step = ((all + n_rows - 1) / n_rows) | 1; // an odd step visits all coordinates of a head
        parts[i]           = sampled(weights, readers[i].side, readers[i].norm, step);
    });
    const Gram           gram(std::move(parts), n);
    IntegerColumns       basis = signs(n, (size_t) std::min<int64_t>(DIRECTIONS, n));
    std::vector<Doubles> orthonormal;
    for (int round = 0; round < ROUNDS; ++round) {
        orthonormal = gram.product(basis);
        orthonormalize(orthonormal);
        basis = IntegerColumns(orthonormal);
    }
    std::vector<Doubles> values = gram.within(basis), vectors;
    eigen(values, vectors);
    const size_t m = basis.m();
    Doubles      shares;
    double       total = 0.0;
    for (size_t k = 0; k < m; ++k) {
        const double value = std::max(values[k][k], 0.0);
        shares.push_back(value * value * value * value);
        total += shares.back();
    }
    if (!(total > 0.0 && std::isfinite(total))) {
        return std::nullopt;
    }
    std::vector<Doubles> columns(m, Doubles((size_t) n, 0.0));
    for (size_t c = 0; c < m; ++c) {
        for (size_t k = 0; k < m; ++k) {
            const double factor = vectors[k][c] * std::sqrt((1.0 - WHITE) * (shares[c] / total));
            for (size_t j = 0; j < (size_t) n; ++j) {
                columns[c][j] += orthonormal[k][j] * factor;
            }
        }
    }
    return IntegerColumns(columns);
}

using Heads = std::vector<Doubles>; // [heads][d]

// Variances and means of some heads before RoPE.
struct Squares {
    Heads square, mean;
};

bool finite(const Heads & heads) {
    return std::all_of(heads.begin(), heads.end(), [](const Doubles & head) {
        return std::all_of(head.begin(), head.end(), [](double x) { return std::isfinite(x); });
    });
}

// A norm of each head, or of all heads, divides by the root mean square.
bool apply_norm(const Doubles & weight, int64_t count, const std::vector<int> & heads, Squares & of) {
    const size_t d = of.square[0].size();
    if (weight.size() != d && (int64_t) weight.size() != count) {
        return false;
    }
    Doubles sizes;
    double  total = 0.0;
    for (size_t i = 0; i < heads.size(); ++i) {
        double size = 0.0;
        for (size_t j = 0; j < d; ++j) {
            size += of.square[i][j] + of.mean[i][j] * of.mean[i][j];
        }
        sizes.push_back(size / (double) d);
        total += size;
    }
    for (size_t i = 0; i < heads.size(); ++i) {
        const bool   of_head = weight.size() == d;
        const double size    = of_head ? sizes[i] : total / (double) (heads.size() * d);
        for (size_t j = 0; j < d; ++j) {
            const double w = weight[of_head ? j : (size_t) heads[i] * d + j] / std::sqrt(std::max(size, 1e-300));
            of.square[i][j] *= w * w;
            of.mean[i][j] *= w;
        }
    }
    return true;
}

class Estimate {
public:
    Estimate(const WeightsFile & weights, const std::vector<LayerShape> & layers, int span) :
        weights_(weights), span_(span), stream_(directions_of(weights, layers)) {
        const MetaValue trained = weights.of_arch("context_length");
        trained_                = trained.truthy() && !trained.is_list() ? trained.real : span_;
    }

    std::optional<Energies> energies(const LayerShape & shape) const {
        const auto partner = rotary_partners(weights_, shape.d_k);
        if (!stream_ || !partner) {
            return std::nullopt;
        }
        const int        n_queries = std::min(shape.n_group(), QUERIES);
        std::vector<int> of_k, of_q;
        for (int h = 0; h < shape.n_head_kv; ++h) {
            of_k.push_back(h);
            for (int g = 0; g < n_queries; ++g) {
                of_q.push_back(h * shape.n_group() + g);
            }
        }
        const auto k = squares(shape, 'k', of_k);
        const auto q = k ? squares(shape, 'q', of_q) : std::nullopt;
        if (!k || !q) {
            return std::nullopt;
        }
        Energies out;
        for (size_t h = 0; h < (size_t) shape.n_head_kv; ++h) {
            add(shape, *partner, k->square[h], k->mean[h], *q, h * (size_t) n_queries, (size_t) n_queries, out);
        }
        return out;
    }

private:
    // Nothing if shapes do not fit.
    std::optional<Squares> squares(const LayerShape & shape, char name, const std::vector<int> & heads) const {
        const auto side = side_of(weights_, shape, name);
        if (!side || side->matrix.n != stream_->n) {
            return std::nullopt;
        }
        const int64_t n    = stream_->n;
        const auto    norm = norm_of(weights_, shape.il, n);
        if (!norm) {
            return std::nullopt;
        }
        Integers   shift((size_t) n), integers((size_t) n);
        double     of_shift = 0.0;
        const auto beta     = weights_.vector(weight_name(shape.il, "attn_norm", "bias"));
        if (beta && (int64_t) beta->size() == n) {
            const std::vector<float> floats(beta->begin(), beta->end());
            of_shift = to_integers(floats.data(), n, shift.data());
        }
        Squares   out;
        RowReader reader(weights_);
        for (const int head : heads) {
            Doubles       square, mean;
            const int64_t first = (int64_t) head * shape.d_k;
            reader.rows(side->matrix, side->first + first, shape.d_k, 1, [&](float * row) {
                double of_mean = 0.0;
                if (of_shift != 0.0) {
                    const double step = to_integers(row, n, integers.data());
                    of_mean           = (double) dot(integers.data(), shift.data(), n) * step * of_shift;
                }
                if (!side->bias.empty()) {
                    of_mean += side->bias[(size_t) first + mean.size()];
                }
                multiply(row, *norm);
                const double step      = to_integers(row, n, integers.data());
                double       in_stream = 0.0;
                for (size_t k = 0; k < stream_->m(); ++k) {
                    const double part = (double) dot(integers.data(), stream_->column(k), n) * stream_->step[k];
                    in_stream += part * part;
                }
                const double all = (double) dot(integers.data(), integers.data(), n);
                square.push_back(step * step * ((double) n * in_stream + WHITE * all));
                mean.push_back(of_mean);
            });
            out.square.push_back(std::move(square));
            out.mean.push_back(std::move(mean));
        }
        const auto weight = weights_.vector(weight_name(shape.il, std::string("attn_") + name + "_norm"));
        if ((weight && !apply_norm(*weight, side->count, heads, out)) || !finite(out.square) || !finite(out.mean)) {
            return std::nullopt;
        }
        return out;
    }

    // Adds a head. `q` has all query heads, of which n_q from first_q on belong to this head.
    void add(const LayerShape & shape, const std::vector<int> & partner, const Doubles & k_square,
             const Doubles & k_mean, const Squares & q, size_t first_q, size_t n_q, Energies & out) const {
        const auto d         = (size_t) shape.d_k;
        const auto pair_mean = [&](const Doubles & x) {
            Doubles mean(d);
            for (size_t j = 0; j < d; ++j) {
                mean[j] = 0.5 * (x[j] + x[(size_t) partner[j]]);
            }
            return mean;
        };
        Doubles q_square(d, 0.0), q_bias(d, 0.0), squared(d);
        for (size_t j = 0; j < d; ++j) {
            for (size_t g = first_q; g < first_q + n_q; ++g) {
                q_square[j] += q.square[g][j];
                q_bias[j] += q.mean[g][j] * q.mean[g][j];
            }
            q_square[j] /= (double) n_q;
            q_bias[j] /= (double) n_q;
            squared[j] = k_mean[j] * k_mean[j];
        }
        // Keys and queries of a pair grow together, so the geometric mean of both estimates is better than either.
        Doubles       energy = pair_mean(k_square), of_q = pair_mean(q_square);
        const Doubles of_bias = pair_mean(q_bias);
        Doubles       shares(d);
        double        total_k = 0.0, total_q = 0.0, total = 0.0;
        for (size_t j = 0; j < d; ++j) {
            shares[j] = std::sqrt(energy[j] * of_q[j]);
            total += shares[j];
            total_k += energy[j];
            total_q += of_q[j];
        }
        for (size_t j = 0; j < d; ++j) {
            const double share = shares[j] / std::max(total, 1e-300);
            energy[j]          = share * total_k;
            of_q[j]            = share * total_q + of_bias[j];
        }
        Doubles near(d, 0.0), far(d, 0.0);
        if (is_unrotated(weights_.arch()) ||
            std::all_of(k_mean.begin(), k_mean.end(), [](double x) { return x == 0.0; })) {
            near = far = k_mean;
        } else if (const auto pairs = rotary_pairs(weights_, shape.d_k)) {
            near = pairs->averaged(k_mean, span_);
            far  = pairs->averaged(k_mean, trained_);
        }
        // These are mean squares around `near`, averaged over all trained positions.
        const Doubles of_pair = pair_mean(squared);
        Doubles       rest(d);
        for (size_t j = 0; j < d; ++j) {
            rest[j] = std::max(of_pair[j] - 2.0 * near[j] * far[j] + near[j] * near[j], 0.0);
        }
        out.k.push_back(std::move(energy));
        out.q.push_back(std::move(of_q));
        out.mean.push_back(std::move(near));
        out.rest.push_back(pair_mean(rest));
    }

    const WeightsFile &           weights_;
    double                        span_, trained_ = 0.0;
    std::optional<IntegerColumns> stream_;
};

} // namespace

std::vector<std::optional<Energies>> energies_of(const WeightsFile & weights, const std::vector<LayerShape> & layers,
                                                 int span) {
    const Estimate                       estimate(weights, layers, span);
    std::vector<std::optional<Energies>> out(layers.size());
    for_each_parallel(layers.size(), [&](size_t i) { out[i] = estimate.energies(layers[i]); });
    return out;
}

} // namespace subkv
