// linear.cpp: project, reconstruct, moment.
//   project      y[t][i] = scale * sum_j m[i][j] x[t][j]         m [r][d], x [n][ldx], y [n][ldy] f32
//   reconstruct  o[j] += sum_i e[i] m[i][j]                      m [r][d], e [r], o [d] f32
//   moment       s[i][j] += sum_t x[t][i] x[t][j], sum[i] += sum_t x[t][i]    x [n][ldx] f32, s [d][d], sum [d] f64
// All sums are in double and rounded once, because the fast versions are compared with them.
#include "half.h"
#include "rows.h"

namespace subkv::ref {

static double entry(const Matrix & m, int64_t i, int64_t j, int64_t d) {
    if (!m.bytes || i < m.n_halves) {
        return (double) half_to_float(m.halves[i * d + j]);
    }
    const int64_t row = i - m.n_halves;
    return (double) half_to_float(m.step[row]) * m.bytes[row * d + j];
}

void project(const Matrix & m, int64_t r, int64_t d, const float * x, int64_t ldx, int64_t n, float scale, float * y,
             int64_t ldy) {
    for (int64_t t = 0; t < n; ++t) {
        for (int64_t i = 0; i < r; ++i) {
            double total = 0.0;
            for (int64_t j = 0; j < d; ++j) {
                total += entry(m, i, j, d) * (double) x[t * ldx + j];
            }
            y[t * ldy + i] = (float) (scale * total);
        }
    }
}

void reconstruct(const Matrix & m, int64_t r, int64_t d, const float * e, float * o) {
    for (int64_t j = 0; j < d; ++j) {
        double total = o[j];
        for (int64_t i = 0; i < r; ++i) {
            total += (double) e[i] * entry(m, i, j, d);
        }
        o[j] = (float) total;
    }
}

void moment(const float * x, int64_t ldx, int64_t n, int64_t d, double * s, double * sum) {
    for (int64_t t = 0; t < n; ++t) {
        const float * row = x + t * ldx;
        for (int64_t i = 0; i < d; ++i) {
            sum[i] += row[i];
            for (int64_t j = 0; j < d; ++j) {
                s[i * d + j] += (double) row[i] * (double) row[j];
            }
        }
    }
}

} // namespace subkv::ref

namespace subkv {

void to_halves(const Matrix & m, int64_t r, int64_t d, uint16_t * out) {
    for (int64_t i = 0; i < r * d; ++i) {
        out[i] = ref::float_to_half((float) ref::entry(m, i / d, i % d, d));
    }
}

} // namespace subkv
