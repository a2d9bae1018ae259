// linear.cpp: project, reconstruct, moment.
//   project      y[t][i] = scale * sum_j m[i][j] x[t][j]         m [r][d] half, x [n][ldx], y [n][ldy] f32
//   reconstruct  o[j] += sum_i e[i] m[i][j]                      m [r][d] half, e [r], o [d] f32
//   moment       s[i][j] += sum_t x[t][i] x[t][j], sum[i] += sum_t x[t][i]    x [n][ldx] f32, s [d][d], sum [d] f64
// Sums in double, rounded once: the yardstick of the fast versions.
#include "half.h"
#include "rows.h"

namespace subkv::ref {

void project(const uint16_t * m, int64_t r, int64_t d, const float * x, int64_t ldx, int64_t n, float scale, float * y,
             int64_t ldy) {
    for (int64_t t = 0; t < n; ++t) {
        for (int64_t i = 0; i < r; ++i) {
            double total = 0.0;
            for (int64_t j = 0; j < d; ++j) {
                total += (double) half_to_float(m[i * d + j]) * (double) x[t * ldx + j];
            }
            y[t * ldy + i] = (float) (scale * total);
        }
    }
}

void reconstruct(const uint16_t * m, int64_t r, int64_t d, const float * e, float * o) {
    for (int64_t j = 0; j < d; ++j) {
        double total = o[j];
        for (int64_t i = 0; i < r; ++i) {
            total += (double) e[i] * (double) half_to_float(m[i * d + j]);
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
