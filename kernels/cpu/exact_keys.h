// exact_keys.h: attention over exact keys for all versions, defined by ref/attend.cpp. lanes.h documents Isa.
//
// The visible keys of a page are converted to float once, keys to transposed panels of 16 cells and values to rows.
// Blocks of 48 query rows then run two register-blocked products (6 rows x 16 columns) around a vector softmax. The
// rows of a single token read halves in place, because a conversion would have no reuse. Every sum has the same terms
// in the same order, because the result must not depend on the number of rows.
//
// Zero times an infinite value is NaN. So a block of sums that are not all finite is computed again, row by row and
// without the keys of weight 0. A check of the values themselves would cost more.
#pragma once

#include "lanes.h"
#include "scratch.h"
#include "subkv/ops.h"

#include <stdint.h>
#include <string.h>

namespace subkv::cpu {

constexpr int   EXACT_BLOCK = 48; // query rows whose weights are in memory together
constexpr int   EXACT_ROWS  = 6;  // query rows of a product
constexpr int   PANEL       = 16; // cells of a panel
constexpr float NO_LOGIT    = -__builtin_inff();

// A page of keys, their values, and the bias of every token, padded with -inf.
struct Page {
    int64_t first;
    int32_t n;
    int32_t begin, end;    // bounds of the visible keys, multiples of PANEL
    float * keys;          // [PAGE/PANEL][a.d_k][PANEL]
    float * values;        // [PAGE][a.d_v]
    float * bias;          // [n_tok][PAGE]
    bool *  has_visible;   // [n_tok] whether the token sees a key of this page
    bool    visible[PAGE]; // whether any query sees key first + c
};

//
// products with converted rows
//

template <typename Isa> static void transpose_panel(const float * from, int64_t ld, float * to) {
    typename Isa::F r[8];
    for (int i = 0; i < 8; ++i) {
        r[i] = Isa::load(from + i * ld);
    }
    Isa::transpose(r);
    for (int i = 0; i < 8; ++i) {
        Isa::store(to + i * PANEL, r[i]);
    }
}

// out[i][0..15] = sum_j q[i][j] panel[j][0..15], where rows of `out` are PAGE apart
template <typename Isa, int ROWS>
static void multiply_panel(const float * q, int64_t d, const float * panel, float * out) {
    typename Isa::F low[ROWS];
    typename Isa::F high[ROWS];
    for (int i = 0; i < ROWS; ++i) {
        low[i]  = Isa::set(0.0f);
        high[i] = Isa::set(0.0f);
    }
    for (int64_t j = 0; j < d; ++j) {
        const auto p_low  = Isa::load(panel + j * PANEL);
        const auto p_high = Isa::load(panel + j * PANEL + 8);
        for (int i = 0; i < ROWS; ++i) {
            const auto x = Isa::set(q[i * d + j]);
            low[i]       = Isa::fma(x, p_low, low[i]);
            high[i]      = Isa::fma(x, p_high, high[i]);
        }
    }
    for (int i = 0; i < ROWS; ++i) {
        Isa::store(out + i * PAGE, low[i]);
        Isa::store(out + i * PAGE + 8, high[i]);
    }
}

// Returns whether any of the sums is not finite.
template <typename Isa, int ROWS, int REGS> static bool any_infinite_sum(const typename Isa::F (&sum)[ROWS][REGS]) {
    typename Isa::F total[ROWS];
    for (int i = 0; i < ROWS; ++i) {
        total[i] = sum[i][0];
        for (int k = 1; k < REGS; ++k) {
            total[i] = Isa::plus(total[i], sum[i][k]);
        }
    }
    for (int step = 1; step < ROWS; step *= 2) {
        for (int i = 0; i + step < ROWS; i += 2 * step) {
            total[i] = Isa::plus(total[i], total[i + step]);
        }
    }
    return Isa::any_nan(Isa::sub(total[0], total[0]));
}

// acc[i][0..8*REGS-1] = shrink[i]*acc[i] + sum_c weight[i][c] values[c][..]. GUARDED skips weights of 0.
template <typename Isa, int ROWS, int REGS, bool GUARDED = false>
static void add_values(const float * weight, const float * shrink, int64_t n, const float * values, int64_t ldv,
                       float * acc, int64_t lda) {
    typename Isa::F sum[ROWS][REGS];
    for (int i = 0; i < ROWS; ++i) {
        for (int k = 0; k < REGS; ++k) {
            sum[i][k] = Isa::mul(Isa::set(shrink[i]), Isa::load(acc + i * lda + 8 * k));
        }
    }
    for (int64_t c = 0; c < n; ++c) {
        typename Isa::F v[REGS];
        for (int k = 0; k < REGS; ++k) {
            v[k] = Isa::load(values + c * ldv + 8 * k);
        }
        for (int i = 0; i < ROWS; ++i) {
            if (GUARDED && weight[i * PAGE + c] == 0.0f) {
                continue;
            }
            const auto w = Isa::set(weight[i * PAGE + c]);
            for (int k = 0; k < REGS; ++k) {
                sum[i][k] = Isa::fma(w, v[k], sum[i][k]);
            }
        }
    }
    if (!GUARDED && any_infinite_sum<Isa>(sum)) {
        for (int i = 0; i < ROWS; ++i) {
            add_values<Isa, 1, REGS, true>(weight + i * PAGE, shrink + i, n, values, ldv, acc + i * lda, lda);
        }
        return;
    }
    for (int i = 0; i < ROWS; ++i) {
        for (int k = 0; k < REGS; ++k) {
            Isa::store(acc + i * lda + 8 * k, sum[i][k]);
        }
    }
}

//
// products with rows of halves, for at most EXACT_ROWS query rows
//

// out[i][0..7] = q[i] . key[0..7], where rows of `out` are PAGE apart
template <typename Isa, int ROWS>
static void multiply_halves(const float * q, int64_t d, const uint16_t * const * key, float * out) {
    typename Isa::F sum[ROWS];
    for (int i = 0; i < ROWS; ++i) {
        sum[i] = Isa::set(0.0f);
    }
    for (int64_t j = 0; j < d; j += 8) {
        typename Isa::F r[8];
        for (int c = 0; c < 8; ++c) {
            r[c] = Isa::widen(key[c] + j);
        }
        Isa::transpose(r);
        for (int k = 0; k < 8; ++k) {
            for (int i = 0; i < ROWS; ++i) {
                sum[i] = Isa::fma(Isa::set(q[i * d + j + k]), r[k], sum[i]);
            }
        }
    }
    for (int i = 0; i < ROWS; ++i) {
        Isa::store(out + i * PAGE, sum[i]);
    }
}

template <typename Isa, int ROWS, int REGS, bool GUARDED = false>
static void add_value_halves(const float * weight, const float * shrink, int64_t n, const uint16_t * const * value,
                             int64_t first, float * acc, int64_t lda) {
    typename Isa::F sum[ROWS][REGS];
    for (int i = 0; i < ROWS; ++i) {
        for (int k = 0; k < REGS; ++k) {
            sum[i][k] = Isa::mul(Isa::set(shrink[i]), Isa::load(acc + i * lda + first + 8 * k));
        }
    }
    for (int64_t c = 0; c < n; ++c) {
        typename Isa::F w[ROWS];
        for (int i = 0; i < ROWS; ++i) {
            w[i] = Isa::set(weight[i * PAGE + c]);
        }
        for (int k = 0; k < REGS; ++k) {
            const auto v = Isa::widen(value[c] + first + 8 * k);
            for (int i = 0; i < ROWS; ++i) {
                if (!GUARDED || weight[i * PAGE + c] != 0.0f) {
                    sum[i][k] = Isa::fma(w[i], v, sum[i][k]);
                }
            }
        }
    }
    if (!GUARDED && any_infinite_sum<Isa>(sum)) {
        for (int i = 0; i < ROWS; ++i) {
            add_value_halves<Isa, 1, REGS, true>(weight + i * PAGE, shrink + i, n, value, first, acc + i * lda, lda);
        }
        return;
    }
    for (int i = 0; i < ROWS; ++i) {
        for (int k = 0; k < REGS; ++k) {
            Isa::store(acc + i * lda + first + 8 * k, sum[i][k]);
        }
    }
}

//
// pages
//

// Reads the bias of a page, and returns whether any key is visible.
template <typename Isa> static bool read_bias(const ExactArgs & a, Page & page) {
    unsigned of_cells[PAGE / 8] = {}; // bits of visible keys
    for (int64_t t = 0; t < a.n_tok; ++t) {
        float * bias = page.bias + t * PAGE;
        memcpy(bias, a.bias + t * a.bias_stride + page.first, (size_t) page.n * sizeof(float));
        for (int32_t c = page.n; c < PAGE; ++c) {
            bias[c] = NO_LOGIT;
        }
        unsigned of_token = 0;
        for (int32_t c = 0; c < PAGE; c += 8) {
            const unsigned bits = Isa::visible(Isa::load(bias + c));
            of_token |= bits;
            of_cells[c / 8] |= bits;
        }
        page.has_visible[t] = of_token != 0;
    }
    page.begin = PAGE;
    page.end   = 0;
    for (int32_t c = 0; c < PAGE; c += 8) {
        const unsigned bits = of_cells[c / 8];
        if (bits != 0) {
            page.begin = page.end == 0 ? c / PANEL * PANEL : page.begin;
            page.end   = c / PANEL * PANEL + PANEL;
        }
        for (int i = 0; i < 8; ++i) {
            page.visible[c + i] = (bits >> i & 1) != 0;
        }
    }
    return page.end > 0;
}

static inline void prefetch_rows(const ExactArgs & a, const Page & page) {
    for (int32_t c = page.begin; c < page.end; ++c) { // The model's weights have displaced the rows in the caches.
        for (int64_t j = 0; page.visible[c] && j < a.d_k; j += 32) {
            __builtin_prefetch(a.k[page.first + c] + j, 0, 2); // into L2, because L1 can wait for fewer lines
        }
        for (int64_t j = 0; page.visible[c] && j < a.d_v; j += 32) {
            __builtin_prefetch(a.v[page.first + c] + j, 0, 2);
        }
    }
}

template <typename Isa> static void widen_row(const uint16_t * h, int64_t d, float * out) {
    for (int64_t j = 0; j < d; j += 8) {
        Isa::store(out + j, Isa::widen(h + j));
    }
}

// Keys that every query masks become zero vectors, because they may contain NaN, and zero times NaN is NaN.
template <typename Isa> static void widen_rows(const ExactArgs & a, Page & page) {
    float * rows = (float *) scratch(SLOT_EXACT_ROWS, (size_t) (PAGE * a.d_k) * sizeof(float));
    for (int32_t c = page.begin; c < page.end; ++c) {
        float * k = rows + c * a.d_k;
        float * v = page.values + c * a.d_v;
        if (page.visible[c]) {
            widen_row<Isa>(a.k[page.first + c], a.d_k, k);
            widen_row<Isa>(a.v[page.first + c], a.d_v, v);
        } else {
            memset(k, 0, (size_t) a.d_k * sizeof(float));
            memset(v, 0, (size_t) a.d_v * sizeof(float));
        }
    }
    for (int32_t c = page.begin; c < page.end; c += 8) {
        float * panel = page.keys + c / PANEL * PANEL * a.d_k + c % PANEL;
        for (int64_t j = 0; j < a.d_k; j += 8) {
            transpose_panel<Isa>(rows + c * a.d_k + j, a.d_k, panel + j * PANEL);
        }
    }
}

// Converts logits in x to weights and returns the factor for the row's earlier sums. A lost row (ops.h) gets weights of
// 0.
template <typename Isa> static float softmax_page(const ExactArgs & a, const Page & page, float * x, int64_t row) {
    const float * bias  = page.bias + row / a.n_group * PAGE;
    const float   slope = a.slope[row % a.n_group];
    float &       m     = a.m[row];
    float &       z     = a.z[row];
    const auto    clear = [&](bool lost) {
        memset(x + page.begin, 0, (size_t) (page.end - page.begin) * sizeof(float));
        if (lost) {
            m = m > NO_LOGIT ? m : 0.0f;
            z = __builtin_nanf("");
        }
        return 1.0f;
    };

    auto top = Isa::set(NO_LOGIT);
    for (int32_t c = page.begin; c < page.end; c += 8) {
        auto l = Isa::load(x + c);
        l      = Isa::fma(l, Isa::set(0.0f), l); // An infinity becomes NaN, which neither cap nor exponential hides.
        if (a.softcap > 0.0f) {
            l = soft_cap<Isa>(l, a.softcap);
        }
        const auto b = Isa::load(bias + c);
        l            = Isa::hide(Isa::fma(Isa::set(slope), b, l), b);
        top          = Isa::max(top, l);
        Isa::store(x + c, l);
    }
    const float page_top = Isa::largest(top);
    if (!(page_top > NO_LOGIT)) { // A row without a visible key keeps its state exactly.
        return clear(page.has_visible[row / a.n_group]);
    }
    const float new_m  = page_top > m ? page_top : m;
    const float shrink = m == NO_LOGIT ? 0.0f : exp_nonpositive<Isa>(m - new_m);
    const auto  base   = Isa::set(new_m);
    auto        total  = Isa::set(0.0f);
    for (int32_t c = page.begin; c < page.end; c += 8) {
        const auto e = exp_nonpositive<Isa>(Isa::sub(Isa::load(x + c), base));
        total        = Isa::plus(total, e);
        Isa::store(x + c, e);
    }
    const float new_z = z * shrink + Isa::sum(total);
    if (new_z != new_z) { // A logit is NaN.
        return clear(true);
    }
    m = new_m;
    z = new_z;
    return shrink;
}

// Multiplies query rows [row, row + ROWS) by a panel of keys.
template <typename Isa, int ROWS>
static void multiply_rows(const ExactArgs & a, int64_t row, const float * panel, float * out) {
    multiply_panel<Isa, ROWS>(a.q + row * a.d_k, a.d_k, panel, out);
}

// Multiplies the weights of these rows by the page's values.
template <typename Isa, int ROWS>
static void add_page_values(const ExactArgs & a, const Page & page, int64_t row, const float * weight,
                            const float * shrink) {
    const int64_t n      = page.end - page.begin;
    const float * values = page.values + page.begin * a.d_v;
    float *       acc    = a.acc + row * a.acc_stride;
    int64_t       j      = 0;
    for (; j + 16 <= a.d_v; j += 16) {
        add_values<Isa, ROWS, 2>(weight + page.begin, shrink, n, values + j, a.d_v, acc + j, a.acc_stride);
    }
    if (j < a.d_v) {
        add_values<Isa, ROWS, 1>(weight + page.begin, shrink, n, values + j, a.d_v, acc + j, a.acc_stride);
    }
}

// Attends from all query rows of the call, at most EXACT_ROWS, to a page. Masked keys are read as zeros, as in
// widen_rows.
template <typename Isa, int ROWS> static void attend_few(const ExactArgs & a, const Page & page, float * weight) {
    const size_t     d    = (size_t) (a.d_k > a.d_v ? a.d_k : a.d_v);
    const uint16_t * zero = (const uint16_t *) scratch(SLOT_EXACT_ZERO, d * sizeof(uint16_t));
    const uint16_t * key[PAGE];
    const uint16_t * value[PAGE];
    for (int32_t c = page.begin; c < page.end; ++c) {
        key[c]   = page.visible[c] ? a.k[page.first + c] : zero;
        value[c] = page.visible[c] ? a.v[page.first + c] : zero;
    }
    for (int32_t c = page.begin; c < page.end; c += 8) {
        multiply_halves<Isa, ROWS>(a.q, a.d_k, key + c, weight + c);
    }
    float shrink[ROWS];
    for (int64_t r = 0; r < ROWS; ++r) {
        shrink[r] = softmax_page<Isa>(a, page, weight + r * PAGE, r);
    }
    constexpr int REGS = ROWS <= 3 ? 4 : 2; // All operands fit 16 registers.
    const int64_t n    = page.end - page.begin;
    int64_t       j    = 0;
    for (; j + 8 * REGS <= a.d_v; j += 8 * REGS) {
        add_value_halves<Isa, ROWS, REGS>(weight + page.begin, shrink, n, value + page.begin, j, a.acc, a.acc_stride);
    }
    for (; j < a.d_v; j += 8) {
        add_value_halves<Isa, ROWS, 1>(weight + page.begin, shrink, n, value + page.begin, j, a.acc, a.acc_stride);
    }
}

static inline bool any_visible(const ExactArgs & a, const Page & page, int64_t row, int64_t n) {
    for (int64_t t = row / a.n_group; t <= (row + n - 1) / a.n_group; ++t) {
        if (page.has_visible[t]) {
            return true;
        }
    }
    return false;
}

// Calls FUNCTION<Isa, n>, with n from 1 to EXACT_ROWS.
#define SUBKV_BY_ROWS(n, FUNCTION, ...)                                                                                \
    switch (n) {                                                                                                       \
        case 1: FUNCTION<Isa, 1>(__VA_ARGS__); break;                                                                  \
        case 2: FUNCTION<Isa, 2>(__VA_ARGS__); break;                                                                  \
        case 3: FUNCTION<Isa, 3>(__VA_ARGS__); break;                                                                  \
        case 4: FUNCTION<Isa, 4>(__VA_ARGS__); break;                                                                  \
        case 5: FUNCTION<Isa, 5>(__VA_ARGS__); break;                                                                  \
        default: FUNCTION<Isa, EXACT_ROWS>(__VA_ARGS__); break;                                                        \
    }

// Attends from query rows [row, row + n), n <= EXACT_BLOCK, to one page.
template <typename Isa>
static void attend_block(const ExactArgs & a, const Page & page, int64_t row, int64_t n, float * weight) {
    const auto count = [&](int64_t i) { return n - i < EXACT_ROWS ? n - i : EXACT_ROWS; };
    bool       has_visible[EXACT_BLOCK / EXACT_ROWS];
    for (int64_t i = 0; i < n; i += EXACT_ROWS) {
        has_visible[i / EXACT_ROWS] = any_visible(a, page, row + i, count(i));
    }
    for (int32_t c = page.begin; c < page.end; c += PANEL) { // A panel stays in L1 for all queries of the block.
        for (int64_t i = 0; i < n; i += EXACT_ROWS) {
            if (has_visible[i / EXACT_ROWS]) {
                SUBKV_BY_ROWS(count(i), multiply_rows, a, row + i, page.keys + c * a.d_k, weight + i * PAGE + c)
            }
        }
    }
    for (int64_t i = 0; i < n; i += EXACT_ROWS) {
        if (!has_visible[i / EXACT_ROWS]) {
            continue;
        }
        float shrink[EXACT_ROWS];
        for (int64_t k = 0; k < count(i); ++k) {
            shrink[k] = softmax_page<Isa>(a, page, weight + (i + k) * PAGE, row + i + k);
        }
        SUBKV_BY_ROWS(count(i), add_page_values, a, page, row + i, weight + i * PAGE, shrink)
    }
}

template <typename Isa> static void attend_exact(const ExactArgs & a) {
    const int64_t n_rows = a.n_tok * a.n_group;
    float *       weight = (float *) scratch(SLOT_EXACT_WEIGHTS, EXACT_BLOCK * PAGE * sizeof(float));
    Page          page;
    page.bias        = (float *) scratch(SLOT_EXACT_BIAS, (size_t) (a.n_tok * PAGE) * sizeof(float));
    page.has_visible = (bool *) scratch(SLOT_EXACT_VISIBLE, (size_t) a.n_tok * sizeof(bool));
    if (n_rows > EXACT_ROWS) {
        page.keys   = (float *) scratch(SLOT_EXACT_KEYS, (size_t) (PAGE * a.d_k) * sizeof(float));
        page.values = (float *) scratch(SLOT_EXACT_VALUES, (size_t) (PAGE * a.d_v) * sizeof(float));
    }
    for (int64_t first = 0; first < a.n_keys; first += PAGE) {
        page.first = first;
        page.n     = (int32_t) (a.n_keys - first < PAGE ? a.n_keys - first : PAGE);
        if (!read_bias<Isa>(a, page)) {
            continue;
        }
        prefetch_rows(a, page);
        if (n_rows <= EXACT_ROWS) {
            SUBKV_BY_ROWS(n_rows, attend_few, a, page, weight)
            continue;
        }
        widen_rows<Isa>(a, page);
        for (int64_t row = 0; row < n_rows; row += EXACT_BLOCK) {
            attend_block<Isa>(a, page, row, n_rows - row < EXACT_BLOCK ? n_rows - row : EXACT_BLOCK, weight);
        }
    }
}

#undef SUBKV_BY_ROWS

} // namespace subkv::cpu
