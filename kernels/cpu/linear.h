// linear.h: project, reconstruct and moment for all versions, defined by ref/linear.cpp. lanes.h documents Isa.
#pragma once

#include "lanes.h"
#include "scratch.h"
#include "subkv/ops.h"

#include <stdint.h>
#include <string.h>

namespace subkv::cpu {

// Calls rows(entries [n][d], step, first, n) for rows [first, first + n) of a matrix. `step` is [n] for rows of bytes,
// and nullptr for halves.
template <typename Rows> static inline void for_entries(const Matrix & m, int64_t r, const Rows & rows) {
    const int64_t n_halves = m.bytes ? m.n_halves : r;
    if (n_halves > 0) {
        rows(m.halves, (const uint16_t *) nullptr, (int64_t) 0, n_halves);
    }
    if (n_halves < r) {
        rows(m.bytes, m.step, n_halves, r - n_halves);
    }
}

//
// project
//

template <typename Isa, typename T> static float dot(const T * a, const float * b, int64_t d) {
    auto    sum = Isa::set(0.0f);
    int64_t j   = 0;
    for (; j + 8 <= d; j += 8) {
        sum = Isa::fma(Isa::widen(a + j), Isa::load(b + j), sum);
    }
    float total = Isa::sum(sum);
    for (; j < d; ++j) {
        total += Isa::to_float(a[j]) * b[j];
    }
    return total;
}

// y[k] = scale[k] * m[k] . x for eight rows of m
template <typename Isa, typename T>
static void dot8(const T * m, int64_t d, const float * x, typename Isa::F scale, float * y) {
    typename Isa::F sum[8];
    for (auto & s : sum) {
        s = Isa::set(0.0f);
    }
    for (int64_t j = 0; j < d; j += 8) {
        const auto v = Isa::load(x + j);
        for (int i = 0; i < 8; ++i) {
            sum[i] = Isa::fma(v, Isa::widen(m + i * d + j), sum[i]);
        }
    }
    Isa::store(y, Isa::mul(Isa::sums(sum), scale));
}

// Does the same for two tokens and four rows, where six loads serve eight products. `scale` has its four numbers twice.
template <typename Isa, typename T>
static void dot4x2(const T * m, int64_t d, const float * x0, const float * x1, typename Isa::F scale, float * y0,
                   float * y1) {
    typename Isa::F sum[8];
    for (auto & s : sum) {
        s = Isa::set(0.0f);
    }
    for (int64_t j = 0; j < d; j += 8) {
        const auto v0 = Isa::load(x0 + j);
        const auto v1 = Isa::load(x1 + j);
        for (int i = 0; i < 4; ++i) {
            const auto w = Isa::widen(m + i * d + j);
            sum[i]       = Isa::fma(v0, w, sum[i]);
            sum[4 + i]   = Isa::fma(v1, w, sum[4 + i]);
        }
    }
    Isa::store_parts(y0, y1, Isa::mul(Isa::sums(sum), scale));
}

template <typename Isa, typename T>
static void project_rows(const T * m, const uint16_t * step, int64_t r, int64_t d, const float * x, int64_t ldx,
                         int64_t n, float scale, float * y, int64_t ldy) {
    const int64_t whole = d % 8 == 0 ? r / 8 * 8 : 0;
    const auto    all   = Isa::set(scale);
    int64_t       t     = 0;
    for (; t + 2 <= n; t += 2) {
        for (int64_t i = 0; i < whole; i += 4) {
            const auto of_rows = step ? Isa::mul(all, Isa::widen_twice(step + i)) : all;
            dot4x2<Isa>(m + i * d, d, x + t * ldx, x + (t + 1) * ldx, of_rows, y + t * ldy + i, y + (t + 1) * ldy + i);
        }
    }
    for (; t < n; ++t) {
        for (int64_t i = 0; i < whole; i += 8) {
            const auto of_rows = step ? Isa::mul(all, Isa::widen(step + i)) : all;
            dot8<Isa>(m + i * d, d, x + t * ldx, of_rows, y + t * ldy + i);
        }
    }
    for (t = 0; t < n && whole < r; ++t) {
        for (int64_t i = whole; i < r; ++i) {
            y[t * ldy + i] = scale * (step ? Isa::to_float(step[i]) : 1.0f) * dot<Isa>(m + i * d, x + t * ldx, d);
        }
    }
}

template <typename Isa>
static void project(const Matrix & m, int64_t r, int64_t d, const float * x, int64_t ldx, int64_t n, float scale,
                    float * y, int64_t ldy) {
    for_entries(m, r, [&](const auto * rows, const uint16_t * step, int64_t first, int64_t count) {
        project_rows<Isa>(rows, step, count, d, x, ldx, n, scale, y + first, ldy);
    });
}

//
// reconstruct
//

// o[0 .. 8 * REGS - 1] += sum_i e[i] m[i][..]
template <typename Isa, int REGS, typename T>
static void add_columns(const T * m, int64_t r, int64_t d, const float * e, float * o) {
    typename Isa::F sum[REGS];
    for (auto & s : sum) {
        s = Isa::set(0.0f);
    }
    for (int64_t i = 0; i < r; ++i) {
        const auto w = Isa::set(e[i]);
        for (int k = 0; k < REGS; ++k) {
            sum[k] = Isa::fma(w, Isa::widen(m + i * d + 8 * k), sum[k]);
        }
    }
    for (int k = 0; k < REGS; ++k) {
        Isa::store(o + 8 * k, Isa::plus(Isa::load(o + 8 * k), sum[k]));
    }
}

template <typename Isa, typename T>
static void add_rows(const T * m, int64_t r, int64_t d, const float * e, float * o) {
    int64_t j = 0;
    for (; j + 32 <= d; j += 32) {
        add_columns<Isa, 4>(m + j, r, d, e, o + j);
    }
    for (; j + 8 <= d; j += 8) {
        add_columns<Isa, 1>(m + j, r, d, e, o + j);
    }
    for (; j < d; ++j) {
        float sum = 0.0f;
        for (int64_t i = 0; i < r; ++i) {
            sum += e[i] * Isa::to_float(m[i * d + j]);
        }
        o[j] += sum;
    }
}

template <typename Isa>
static void reconstruct(const Matrix & m, int64_t r, int64_t d, const float * e, float * o) {
    for_entries(m, r, [&](const auto * rows, const uint16_t * step, int64_t first, int64_t count) {
        const float * weights = e + first;
        if (step) {
            float * scaled = (float *) scratch(SLOT_STEPS, (size_t) count * sizeof(float));
            for (int64_t i = 0; i < count; ++i) {
                scaled[i] = weights[i] * Isa::to_float(step[i]);
            }
            weights = scaled;
        }
        add_rows<Isa>(rows, count, d, weights, o);
    });
}

//
// moment
//

constexpr int64_t MOMENT_TOKENS  = 64; // tokens summed in float before they are added to the doubles
constexpr int64_t MOMENT_COLUMNS = 16; // columns of a block

// s[0..3][0..15] += sum_t x[t][i..i+3]' x[t][j..j+15]; x [n][ld], s [..][ld]
template <typename Isa>
static void add_moment_4x16(const float * x, int64_t n, int64_t ld, int64_t i, int64_t j, double * s) {
    typename Isa::F low[4];
    typename Isa::F high[4];
    for (int k = 0; k < 4; ++k) {
        low[k]  = Isa::set(0.0f);
        high[k] = Isa::set(0.0f);
    }
    for (int64_t t = 0; t < n; ++t) {
        const auto b_low  = Isa::load(x + t * ld + j);
        const auto b_high = Isa::load(x + t * ld + j + 8);
        for (int k = 0; k < 4; ++k) {
            const auto a = Isa::set(x[t * ld + i + k]);
            low[k]       = Isa::fma(a, b_low, low[k]);
            high[k]      = Isa::fma(a, b_high, high[k]);
        }
    }
    for (int k = 0; k < 4; ++k) {
        Isa::add_to_doubles(s + (i + k) * ld + j, low[k]);
        Isa::add_to_doubles(s + (i + k) * ld + j + 8, high[k]);
    }
}

// Sums the upper triangle (in 4x16 blocks) of this call alone in scratch memory, and mirrors it into s at the end.
template <typename Isa>
static void moment(const float * x, int64_t ldx, int64_t n, int64_t d, double * s, double * sum) {
    const int64_t ld    = (d + MOMENT_COLUMNS - 1) / MOMENT_COLUMNS * MOMENT_COLUMNS;
    float *       block = (float *) scratch(SLOT_MOMENT_ROWS, (size_t) (MOMENT_TOKENS * ld) * sizeof(float));
    double *      upper = (double *) scratch(SLOT_MOMENT_SUMS, (size_t) (ld * ld) * sizeof(double));
    memset(upper, 0, (size_t) (ld * ld) * sizeof(double));
    for (int64_t first = 0; first < n; first += MOMENT_TOKENS) {
        const int64_t count = n - first < MOMENT_TOKENS ? n - first : MOMENT_TOKENS;
        for (int64_t t = 0; t < count; ++t) {
            const float * row = x + (first + t) * ldx;
            memcpy(block + t * ld, row, (size_t) d * sizeof(float));
            memset(block + t * ld + d, 0, (size_t) (ld - d) * sizeof(float));
            for (int64_t i = 0; i < d; ++i) {
                sum[i] += row[i];
            }
        }
        for (int64_t i = 0; i < ld; i += 4) {
            for (int64_t j = i / MOMENT_COLUMNS * MOMENT_COLUMNS; j < ld; j += MOMENT_COLUMNS) {
                add_moment_4x16<Isa>(block, count, ld, i, j, upper);
            }
        }
    }
    for (int64_t i = 0; i < d; ++i) {
        for (int64_t j = i; j < d; ++j) {
            s[i * d + j] += upper[i * ld + j];
            if (j > i) {
                s[j * d + i] += upper[i * ld + j];
            }
        }
    }
}

} // namespace subkv::cpu
