// sketch.cpp: the sketches of sketch.h, a row at a time, states in f32 and one header.
//   state: Header, then f32
//     COVARIANCE          upper triangle of sum w^2 x x^T, row by row      [d (d + 1)/2]
//     FREQUENT_DIRECTIONS w-scaled rows S                                  [2l][d], the first `fill` in use
//     OJA                 U, then the energy along its rows                [l][d], [l]
// Weights: with a decay g < 1, row number t has weight g^(T - t) after T rows. Instead of multiplying the state by g at
// every row, row t enters with the factor w_t = g^(-t/2), and the state is divided by w when w is large.
//
// Frequent Directions (Liberty 2013; papers/online-subspace-projection.md §5, §8): when all 2l rows are in use, S = W
// diag(s) V^T; a shrink subtracts delta = s_(l+1)^2 from the squares s_i^2 and keeps the l first rows sqrt(s_i^2 -
// delta) v_i^T. Its error is at most delta in norm, and it removes at least (l + 1) delta of energy, hence the bound.
// Oja (papers/ojakv.md): U <- U + eta (x - U y) y^T, y = U^T x, Gram-Schmidt every OJA_PERIOD rows. x is divided by the
// rms norm of the stream so far, and eta by max(1, ||x||^2) of that: eta ||x||^2 <= 1 keeps the rule stable on outliers.
#include "subkv/sketch.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <locale>
#include <sstream>
#include <string>
#include <vector>

namespace subkv {

namespace {

struct Header {
    double  total;  // sum w^2 ||x||^2
    double  weight; // w of the next row
    double  mass;   // sum w^2
    int64_t count;  // rows absorbed
    int64_t fill;   // FREQUENT_DIRECTIONS: rows of S in use
};

constexpr double WEIGHT_LIMIT = 1e3; // and SQUARE_LIMIT: f32 sums of 10^8 rows stay finite
constexpr double SQUARE_LIMIT = 1e24;

size_t values(const SketchParams & p) {
    const auto d = (size_t) p.d;
    const auto l = (size_t) p.rows;
    switch (p.kind) {
        case SketchKind::COVARIANCE: return d * (d + 1) / 2;
        case SketchKind::FREQUENT_DIRECTIONS: return 2 * l * d;
        case SketchKind::OJA: return l * d + l;
    }
    return 0;
}

Header & header(void * state) {
    return *static_cast<Header *>(state);
}

const Header & header(const void * state) {
    return *static_cast<const Header *>(state);
}

float * body(void * state) {
    return reinterpret_cast<float *>(static_cast<Header *>(state) + 1);
}

const float * body(const void * state) {
    return reinterpret_cast<const float *>(static_cast<const Header *>(state) + 1);
}

// gram [d][d] = S^T S of n rows
void gram_of(const float * s, int64_t n, int64_t d, double * gram) {
    std::fill(gram, gram + d * d, 0.0);
    for (int64_t t = 0; t < n; ++t) {
        const float * x = s + t * d;
        for (int64_t i = 0; i < d; ++i) {
            const double xi = x[i];
            for (int64_t j = 0; j < d; ++j) {
                gram[i * d + j] += xi * (double) x[j];
            }
        }
    }
}

void shrink(const SketchParams & p, Header & h, float * s) {
    const int64_t       d = p.d;
    std::vector<double> gram((size_t) (d * d)), squares((size_t) d);
    gram_of(s, h.fill, d, gram.data());
    h.fill = std::min<int64_t>(p.rows, d);
    if (!eigen_symmetric(gram.data(), squares.data(), d)) {
        h.fill = 0; // squares beyond f64: impossible with finite rows
        return;
    }
    const double delta = p.rows < d ? std::max(squares[(size_t) p.rows], 0.0) : 0.0;
    for (int64_t i = 0; i < h.fill; ++i) {
        const double length = std::sqrt(std::max(squares[(size_t) i] - delta, 0.0));
        for (int64_t j = 0; j < d; ++j) {
            s[i * d + j] = (float) (length * gram[(size_t) (i * d + j)]);
        }
    }
}

// Modified Gram-Schmidt on rows [n][d], applied twice; an orthogonalized unit vector replaces a row that vanishes.
template <typename T> void orthonormalize(T * u, int64_t n, int64_t d, int64_t first = 0) {
    int64_t unit = 0; // next unit vector to try
    for (int64_t i = first; i < n; ++i) {
        for (;;) {
            double before = 0.0;
            for (int64_t j = 0; j < d; ++j) {
                before += (double) u[i * d + j] * (double) u[i * d + j];
            }
            for (int64_t k = 0; k < 2 * i; ++k) {
                const T * other = u + k % i * d;
                double    along = 0.0;
                for (int64_t j = 0; j < d; ++j) {
                    along += (double) u[i * d + j] * (double) other[j];
                }
                for (int64_t j = 0; j < d; ++j) {
                    u[i * d + j] = (T) ((double) u[i * d + j] - along * (double) other[j]);
                }
            }
            double left = 0.0;
            for (int64_t j = 0; j < d; ++j) {
                left += (double) u[i * d + j] * (double) u[i * d + j];
            }
            if (left > 1e-6 * before) { // false for 0, too; one of d - i unit vectors always keeps at least 1/d
                const double inverse = 1.0 / std::sqrt(left);
                for (int64_t j = 0; j < d; ++j) {
                    u[i * d + j] = (T) (inverse * (double) u[i * d + j]);
                }
                break;
            }
            for (int64_t j = 0; j < d; ++j) {
                u[i * d + j] = (T) (j == unit % d ? 1 : 0);
            }
            ++unit;
        }
    }
}

void absorb_covariance(int64_t d, const float * x, float weight, float * s) {
    for (int64_t i = 0; i < d; ++i) {
        const float xi = weight * x[i];
        for (int64_t j = i; j < d; ++j) {
            *s++ += xi * x[j];
        }
    }
}

void absorb_oja(const SketchParams & p, const Header & h, const float * x, double square, float weight, float * u) {
    const int64_t d = p.d, r = p.rows;
    float *       energy = u + r * d;
    const double  mean   = h.total / h.mass; // this row included
    const double  rate   = p.rate / std::max(mean, square);
    float         y[MAX_SKETCH_SIZE];
    float         residual[MAX_SKETCH_SIZE]; // x - U y
    std::copy(x, x + d, residual);
    for (int64_t i = 0; i < r; ++i) {
        double along = 0.0;
        for (int64_t j = 0; j < d; ++j) {
            along += (double) u[i * d + j] * (double) x[j];
        }
        y[i] = (float) along;
        energy[i] += weight * y[i] * y[i];
    }
    for (int64_t i = 0; i < r; ++i) {
        for (int64_t j = 0; j < d; ++j) {
            residual[j] -= y[i] * u[i * d + j];
        }
    }
    for (int64_t i = 0; i < r; ++i) {
        const auto step = (float) (rate * y[i]);
        for (int64_t j = 0; j < d; ++j) {
            u[i * d + j] += step * residual[j];
        }
    }
    if (h.count % OJA_PERIOD == 0) {
        orthonormalize(u, r, d);
    }
}

// Divides all weights by the current one.
void rescale(const SketchParams & p, Header & h, float * s) {
    const double square = 1.0 / (h.weight * h.weight);
    const double factor = p.kind == SketchKind::FREQUENT_DIRECTIONS ? 1.0 / h.weight : square;
    // OJA: U has no weight, but the energies behind it do
    const size_t first = p.kind == SketchKind::OJA ? (size_t) p.rows * (size_t) p.d : 0;
    for (size_t i = first; i < values(p); ++i) {
        s[i] = (float) (factor * (double) s[i]);
    }
    h.total *= square;
    h.mass *= square;
    h.weight = 1.0;
}

void absorb_row(const SketchParams & p, Header & h, float * s, const float * x, double square) {
    if (h.weight > WEIGHT_LIMIT) {
        rescale(p, h, s);
    }
    const double w2 = h.weight * h.weight;
    h.total += w2 * square;
    h.mass += w2;
    ++h.count;
    switch (p.kind) {
        case SketchKind::COVARIANCE: absorb_covariance(p.d, x, (float) w2, s); break;
        case SketchKind::FREQUENT_DIRECTIONS:
            if (h.fill == 2 * p.rows) {
                shrink(p, h, s);
            }
            for (int64_t j = 0; j < p.d; ++j) {
                s[h.fill * p.d + j] = (float) (h.weight * (double) x[j]);
            }
            ++h.fill;
            break;
        case SketchKind::OJA:
            if (square > 0.0) {
                absorb_oja(p, h, x, square, (float) w2, s);
            }
            break;
    }
    h.weight /= std::sqrt((double) p.decay);
}

// w of the latest row: read functions divide weights by it.
double latest(const SketchParams & p, const Header & h) {
    return h.count > 0 ? h.weight * std::sqrt((double) p.decay) : 1.0;
}

// U by energy, then a completion that shares the energy outside U.
void top_of_oja(const SketchParams & p, const Header & h, const float * u, double * rows, double * energy) {
    const int64_t        d = p.d, l = p.rows;
    const float *        along = u + l * d;
    std::vector<int64_t> order((size_t) l);
    for (int64_t i = 0; i < l; ++i) {
        order[(size_t) i] = i;
    }
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return along[a] > along[b]; });
    double held = 0.0;
    std::fill(rows, rows + d * d, 0.0);
    for (int64_t i = 0; i < l; ++i) {
        std::copy_n(u + order[(size_t) i] * d, d, rows + i * d);
        energy[i] = along[order[(size_t) i]];
        held += energy[i];
    }
    orthonormalize(rows, d, d);
    for (int64_t i = l; i < d; ++i) {
        energy[i] = std::max(h.total - held, 0.0) / (double) (d - l);
    }
}

} // namespace

bool sketch_check(const SketchParams & p, std::string & err) {
    const auto refuse = [&](const std::string & name, const std::string & expected, const std::string & found) {
        err = "sketch: " + name + ": expected " + expected + ", found " + found;
        return false;
    };
    const auto number = [](float x) { // std::to_string would obey the program's locale
        std::ostringstream out;
        out.imbue(std::locale::classic());
        out << x;
        return out.str();
    };
    if (p.kind < SketchKind::COVARIANCE || p.kind > SketchKind::OJA) {
        return refuse("kind", "0 (covariance), 1 (frequent directions) or 2 (Oja)", std::to_string((int) p.kind));
    }
    if (p.d < 1 || p.d > MAX_SKETCH_SIZE) {
        return refuse("d", "1.." + std::to_string(MAX_SKETCH_SIZE), std::to_string(p.d));
    }
    const int most = p.kind == SketchKind::OJA ? p.d : MAX_SKETCH_ROWS;
    if (p.kind != SketchKind::COVARIANCE && (p.rows < 1 || p.rows > most)) {
        return refuse("rows", "1.." + std::to_string(most), std::to_string(p.rows));
    }
    if (!(p.decay >= 0.5f && p.decay <= 1.0f)) { // a NaN, too
        return refuse("decay", "0.5..1 per token", number(p.decay));
    }
    if (p.kind == SketchKind::OJA && !(p.rate > 0.0f && p.rate < 1.0f)) {
        return refuse("rate", "above 0 and below 1", number(p.rate));
    }
    return true;
}

size_t sketch_bytes(const SketchParams & p) {
    return sizeof(Header) + (values(p) * sizeof(float) + 7) / 8 * 8;
}

void sketch_init(const SketchParams & p, void * state) {
    std::memset(state, 0, sketch_bytes(p));
    header(state).weight = 1.0;
    if (p.kind == SketchKind::OJA) { // any start not orthogonal to the rows works: the first coordinates
        for (int64_t i = 0; i < p.rows; ++i) {
            body(state)[i * p.d + i] = 1.0f;
        }
    }
}

bool sketch_valid(const SketchParams & p, const void * state) {
    const Header & h      = header(state);
    const bool     counts = h.count >= 0 && h.count < INT64_C(1) << 62 && h.fill >= 0 && h.fill <= 2 * (int64_t) p.rows;
    const bool     sums   = h.weight >= 1.0 && h.weight <= 2.0 * WEIGHT_LIMIT && std::isfinite(h.total) &&
                            std::isfinite(h.mass) && (h.count == 0 || h.mass > 0.0);
    return counts && sums &&
           std::all_of(body(state), body(state) + values(p), [](float x) { return std::isfinite(x); });
}

int64_t sketch_absorb(const SketchParams & p, void * state, const float * x, int64_t ldx, int64_t n) {
    int64_t n_bad = 0;
    for (int64_t t = 0; t < n; ++t) {
        const float * row    = x + t * ldx;
        double        square = 0.0;
        for (int64_t j = 0; j < p.d; ++j) {
            square += (double) row[j] * (double) row[j];
        }
        if (square <= SQUARE_LIMIT) { // false for a NaN
            absorb_row(p, header(state), body(state), row, square);
        } else {
            ++n_bad;
        }
    }
    return n_bad;
}

bool sketch_top(const SketchParams & p, const void * state, int64_t r, double * rows, double * energy) {
    const Header &      h = header(state);
    const float *       s = body(state);
    const int64_t       d = p.d;
    std::vector<double> all((size_t) (d * d)), squares((size_t) d);
    if (p.kind == SketchKind::OJA) {
        top_of_oja(p, h, s, all.data(), squares.data());
    } else {
        if (p.kind == SketchKind::COVARIANCE) {
            for (int64_t i = 0; i < d; ++i) {
                for (int64_t j = i; j < d; ++j) {
                    all[(size_t) (i * d + j)] = all[(size_t) (j * d + i)] = *s++;
                }
            }
        } else {
            gram_of(s, h.fill, d, all.data());
        }
        if (!eigen_symmetric(all.data(), squares.data(), d)) {
            return false;
        }
        double held = 0.0;
        for (double & square : squares) {
            square = std::max(square, 0.0);
            held += square;
        }
        for (double & square : squares) {
            square += std::max(h.total - held, 0.0) / (double) d;
        }
    }
    const double last = latest(p, h);
    std::copy_n(all.data(), r * d, rows);
    for (int64_t i = 0; i < r; ++i) {
        energy[i] = squares[(size_t) i] / (last * last);
        if (!std::isfinite(energy[i])) {
            return false;
        }
    }
    return true;
}

int64_t sketch_count(const void * state) {
    return header(state).count;
}

double sketch_energy(const SketchParams & p, const void * state) {
    const Header & h    = header(state);
    const double   last = latest(p, h);
    return h.total / (last * last);
}

int64_t sketch_rows(const SketchParams & p, const void * state, float * s) {
    if (p.kind != SketchKind::FREQUENT_DIRECTIONS) {
        return 0;
    }
    const Header & h    = header(state);
    const double   last = latest(p, h);
    for (int64_t i = 0; i < h.fill * p.d; ++i) {
        s[i] = (float) ((double) body(state)[i] / last);
    }
    return h.fill;
}

} // namespace subkv
