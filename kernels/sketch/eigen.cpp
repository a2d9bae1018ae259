// eigen.cpp: eigen_symmetric. Householder tridiagonalization A = Q T Q^T and QL with implicit Wilkinson shifts, after
// Martin, Reinsch, Wilkinson (Handbook for Automatic Computation II, 1971: tred2, imtql2). Q is kept transposed:
// eigenvectors are rows, so that every inner loop runs along memory.
#include "subkv/sketch.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace subkv {

// Sums in four lanes: a fixed order that a compiler can vectorize without reordering.
static double dot(const double * a, const double * b, int64_t n) {
    double  lane[4] = {};
    int64_t i       = 0;
    for (; i + 4 <= n; i += 4) {
        for (int64_t j = 0; j < 4; ++j) {
            lane[j] += a[i + j] * b[i + j];
        }
    }
    for (int64_t j = 0; i < n; ++i, ++j) {
        lane[j] += a[i] * b[i];
    }
    return (lane[0] + lane[2]) + (lane[1] + lane[3]);
}

// a [n][n] -> diagonal d [n], subdiagonal e [n] (e[i] couples i and i + 1; e[n-1] = 0), a = Q^T [n][n].
// Step k reflects coordinates k+1.. with H = I - beta v v^T so that column k becomes (.., d_k, e_k, 0, .., 0).
static void tridiagonalize(double * a, double * d, double * e, int64_t n) {
    std::vector<double> reflectors((size_t) (n * n)); // row k: v_k, zero up to k
    std::vector<double> beta((size_t) n);
    std::vector<double> p((size_t) n);
    for (int64_t k = 0; k + 1 < n; ++k) {
        double *      v    = reflectors.data() + k * n;
        const int64_t m    = k + 1;
        double        tail = 0.0;
        for (int64_t i = m; i < n; ++i) {
            v[i] = a[k * n + i];
            tail += i > m ? v[i] * v[i] : 0.0;
        }
        e[k] = v[m];
        if (tail == 0.0) {
            continue; // beta 0: nothing to reflect
        }
        e[k] = -std::copysign(std::sqrt(v[m] * v[m] + tail), v[m]);
        v[m] -= e[k];
        beta[(size_t) k] = 2.0 / (v[m] * v[m] + tail);
        // A <- H A H = A - v w^T - w v^T with p = beta A v, w = p - (beta/2)(v.p) v
        std::fill(p.begin(), p.end(), 0.0);
        for (int64_t i = m; i < n; ++i) {
            const double * row = a + i * n;
            const double   c   = beta[(size_t) k] * v[i];
            for (int64_t j = m; j < n; ++j) {
                p[(size_t) j] += c * row[j];
            }
        }
        const double half = 0.5 * beta[(size_t) k] * dot(v + m, p.data() + m, n - m);
        for (int64_t i = m; i < n; ++i) {
            p[(size_t) i] -= half * v[i];
        }
        for (int64_t i = m; i < n; ++i) {
            double *     row = a + i * n;
            const double vi = v[i], wi = p[(size_t) i];
            for (int64_t j = m; j < n; ++j) {
                row[j] -= vi * p[(size_t) j] + wi * v[j];
            }
        }
    }
    for (int64_t i = 0; i < n; ++i) {
        d[i] = a[i * n + i];
    }
    e[n - 1] = 0.0;
    // Q^T = H_last .. H_0, from the last on: rows and columns up to k are still those of the identity
    std::fill(a, a + n * n, 0.0);
    for (int64_t i = 0; i < n; ++i) {
        a[i * n + i] = 1.0;
    }
    for (int64_t k = n - 2; k >= 0; --k) {
        const double * v = reflectors.data() + k * n;
        for (int64_t i = k + 1; i < n && beta[(size_t) k] != 0.0; ++i) {
            double *     row = a + i * n;
            const double c   = beta[(size_t) k] * dot(row + k + 1, v + k + 1, n - k - 1);
            for (int64_t j = k + 1; j < n; ++j) {
                row[j] -= c * v[j];
            }
        }
    }
}

// Length of (x, y). Not std::hypot: glibc 2.35 has a new symbol version, and libraries would not load on 2.34 (RHEL 9).
static double length(double x, double y) {
    const double large = std::max(std::fabs(x), std::fabs(y));
    const double ratio = large > 0.0 ? std::min(std::fabs(x), std::fabs(y)) / large : 0.0;
    return large * std::sqrt(1.0 + ratio * ratio);
}

// QL on the tridiagonal matrix; rows of z [n][n] are rotated along: those of Q^T become eigenvectors.
static bool ql(double * d, double * e, double * z, int64_t n) {
    const double eps   = std::numeric_limits<double>::epsilon();
    double       scale = 0.0; // largest entries so far; much smaller ones are negligible, as in tql2
    for (int64_t l = 0; l < n; ++l) {
        scale = std::max(scale, std::fabs(d[l]) + std::fabs(e[l]));
        for (int32_t iteration = 0;; ++iteration) {
            int64_t m = l;
            while (m + 1 < n && std::fabs(e[m]) > eps * scale) {
                ++m;
            }
            if (m == l) {
                break;
            }
            if (iteration == 60) {
                return false;
            }
            double g = (d[l + 1] - d[l]) / (2.0 * e[l]);
            double r = length(g, 1.0);
            g        = d[m] - d[l] + e[l] / (g + std::copysign(r, g)); // d_m minus the shift
            double s = 1.0, c = 1.0, p = 0.0;
            bool   split = false;
            for (int64_t i = m - 1; i >= l; --i) {
                const double f = s * e[i];
                const double b = c * e[i];
                r              = length(f, g);
                e[i + 1]       = r;
                if (r == 0.0) { // the matrix splits here: restart with the smaller part
                    d[i + 1] -= p;
                    e[m]  = 0.0;
                    split = true;
                    break;
                }
                s            = f / r;
                c            = g / r;
                g            = d[i + 1] - p;
                r            = (d[i] - g) * s + 2.0 * c * b;
                p            = s * r;
                d[i + 1]     = g + p;
                g            = c * r - b;
                double * low = z + i * n;
                double * top = low + n;
                for (int64_t j = 0; j < n; ++j) {
                    const double t = top[j];
                    top[j]         = s * low[j] + c * t;
                    low[j]         = c * low[j] - s * t;
                }
            }
            if (!split) {
                d[l] -= p;
                e[l] = g;
                e[m] = 0.0;
            }
        }
    }
    return true;
}

bool eigen_symmetric(double * a, double * w, int64_t n) {
    double largest = 0.0;
    for (int64_t i = 0; i < n * n; ++i) {
        if (!std::isfinite(a[i])) {
            return false;
        }
        largest = std::max(largest, std::fabs(a[i]));
    }
    // a power of two near the largest entry: squares neither overflow nor underflow, and scaling is exact
    const int exponent = largest > 0.0 ? std::ilogb(largest) : 0;
    for (int64_t i = 0; i < n * n; ++i) {
        a[i] = std::ldexp(a[i], -exponent);
    }
    std::vector<double> d((size_t) n), e((size_t) n);
    tridiagonalize(a, d.data(), e.data(), n);
    if (!ql(d.data(), e.data(), a, n)) {
        return false;
    }
    for (int64_t i = 0; i < n; ++i) { // selection sort: at most n - 1 exchanges of rows
        const int64_t best = std::max_element(d.begin() + i, d.end()) - d.begin();
        if (best != i) {
            std::swap(d[(size_t) i], d[(size_t) best]);
            std::swap_ranges(a + i * n, a + (i + 1) * n, a + best * n);
        }
        w[i] = std::ldexp(d[(size_t) i], exponent);
    }
    return true;
}

} // namespace subkv
