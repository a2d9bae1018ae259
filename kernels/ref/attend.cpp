// attend.cpp: attention over coded cells and over exact keys, one query row at a time, in double.
//   logit(t,g,c) = cap(q[t*n_group+g] . k(c) + shift[t*n_group+g]) + slope[g]*bias[t][c]
//   cap(x) = softcap > 0 ? softcap*tanh(x/softcap) : x;  no shift over exact keys
//   m' = max(m, max_c logit);  z' = z exp(m - m') + sum_c exp(logit - m');  acc' = acc exp(m - m') + sum_c exp(..) v(c)
// bias = -INFINITY excludes a cell, whose bytes are then not read. A query row without visible cells keeps its state. A
// row with a logit that is not a finite float is lost (ops.h). A weight below 2^-126 adds nothing to acc.
// m is a float between calls, so m' is rounded to float before its first use.
#include "half.h"
#include "rows.h"

#include <cfloat>
#include <cmath>
#include <vector>

namespace subkv::ref {

// key(c, out) and value(c, out) write key and value number c to `out`, as d_k and d_v floats.
template <typename Key, typename Value>
static void attend_row(int64_t n, int64_t d_k, int64_t d_v, const float * q, float shift, const float * bias,
                       float slope, float softcap, float * m, float * z, float * acc, Key key, Value value) {
    std::vector<double> logit((size_t) n);
    std::vector<float>  buffer((size_t) (d_k > d_v ? d_k : d_v));
    float               top  = *m;
    bool                lost = false;
    for (int64_t c = 0; c < n; ++c) {
        logit[(size_t) c] = -INFINITY;
        if (bias[c] == -INFINITY) {
            continue;
        }
        key(c, buffer.data());
        double dot = shift;
        for (int64_t j = 0; j < d_k; ++j) {
            dot += (double) q[j] * (double) buffer[(size_t) j];
        }
        lost = lost || !std::isfinite((float) dot);
        if (softcap > 0.0f) {
            dot = softcap * std::tanh(dot / softcap);
        }
        logit[(size_t) c] = dot + (double) slope * (double) bias[c];
        lost              = lost || !std::isfinite((float) logit[(size_t) c]);
        top               = std::fmax(top, (float) logit[(size_t) c]);
    }
    if (lost) {
        *m = *m == -INFINITY ? 0.0f : *m;
        *z = NAN;
        return;
    }
    if (top == -INFINITY) {
        return;
    }
    const double        keep  = *m == -INFINITY ? 0.0 : std::exp((double) *m - (double) top);
    double              total = keep * (double) *z;
    std::vector<double> sum((size_t) d_v);
    for (int64_t j = 0; j < d_v; ++j) {
        sum[(size_t) j] = keep * (double) acc[j];
    }
    for (int64_t c = 0; c < n; ++c) {
        if (bias[c] == -INFINITY) {
            continue;
        }
        const double weight = std::exp(logit[(size_t) c] - (double) top);
        total += weight;
        value(c, buffer.data());
        for (int64_t j = 0; j < d_v && weight >= (double) FLT_MIN; ++j) {
            sum[(size_t) j] += weight * (double) buffer[(size_t) j];
        }
    }
    *m = top;
    *z = (float) total;
    for (int64_t j = 0; j < d_v; ++j) {
        acc[j] = (float) sum[(size_t) j];
    }
}

void attend(const AttendArgs & a) {
    for (int64_t row = 0; row < a.n_tok * a.n_group; ++row) {
        attend_row(
            a.n_cells, a.k->rank, a.v->rank, a.qt + row * a.k->rank, a.shift != nullptr ? a.shift[row] : 0.0f,
            a.bias + row / a.n_group * a.bias_stride, a.slope[row % a.n_group], a.softcap, a.m + row, a.z + row,
            a.acc + row * a.acc_stride,
            [&](int64_t c, float * out) { dequantize(*a.k, a.k_tiles, a.k_stride, 1, &c, out); },
            [&](int64_t c, float * out) { dequantize(*a.v, a.v_tiles, a.v_stride, 1, &c, out); });
    }
}

void attend_exact(const ExactArgs & a) {
    const auto widen = [](const uint16_t * h, int64_t d, float * out) {
        for (int64_t j = 0; j < d; ++j) {
            out[j] = half_to_float(h[j]);
        }
    };
    for (int64_t row = 0; row < a.n_tok * a.n_group; ++row) {
        attend_row(
            a.n_keys, a.d_k, a.d_v, a.q + row * a.d_k, 0.0f, a.bias + row / a.n_group * a.bias_stride,
            a.slope[row % a.n_group], a.softcap, a.m + row, a.z + row, a.acc + row * a.acc_stride,
            [&](int64_t c, float * out) { widen(a.k[c], a.d_k, out); },
            [&](int64_t c, float * out) { widen(a.v[c], a.d_v, out); });
    }
}

} // namespace subkv::ref
