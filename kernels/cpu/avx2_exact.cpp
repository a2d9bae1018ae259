// avx2_exact.cpp: attention over exact keys. Definition: ref/attend.cpp.
//
// The visible keys of a page are converted to float once: keys transposed in panels of 16 cells, values as rows. Blocks
// of 48 query rows then run two register-blocked products (6 rows x 16 columns) around a vector softmax. The rows of a
// single token read halves in place, because a conversion would have no reuse. Every sum has the same terms in the same
// order, because the result must not depend on the number of rows.
//
// Zero times an infinite value is NaN. So a block of sums that are not all finite is computed again, row by row and
// without the keys of weight 0: a check of the values themselves would cost more.
#include "versions.h"

#if defined(SUBKV_X86)

#    include "avx2_simd.h"
#    include "scratch.h"

#    include <string.h>

namespace subkv::avx2 {

constexpr int BLOCK = 48; // query rows whose weights are in memory together
constexpr int MR    = 6;  // query rows of the micro kernels

static __m256 widen(const uint16_t * h) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) h));
}

static void widen_row(const uint16_t * h, int64_t d, float * out) {
    for (int64_t j = 0; j < d; j += 8) {
        _mm256_store_ps(out + j, widen(h + j));
    }
}

static void transpose8(__m256 r[8]) {
    __m256 t[8];
    for (int i = 0; i < 8; i += 2) {
        t[i]     = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    __m256 s[8];
    for (int i = 0; i < 8; i += 4) {
        s[i]     = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        s[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
        s[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        s[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    for (int i = 0; i < 4; ++i) {
        r[i]     = _mm256_permute2f128_ps(s[i], s[i + 4], 0x20);
        r[i + 4] = _mm256_permute2f128_ps(s[i], s[i + 4], 0x31);
    }
}

static void transpose8(const float * from, int64_t ld, float * to) { // rows of `to` are 16 apart
    __m256 r[8];
    for (int i = 0; i < 8; ++i) {
        r[i] = _mm256_load_ps(from + i * ld);
    }
    transpose8(r);
    for (int i = 0; i < 8; ++i) {
        _mm256_store_ps(to + i * 16, r[i]);
    }
}

// out[i][0..15] = sum_j q[i][j] panel[j][0..15]
template <int ROWS>
static void logits(const float * q, int64_t ldq, int64_t d, const float * panel, float * out, int64_t ldo) {
    __m256 low[ROWS];
    __m256 high[ROWS];
    for (int i = 0; i < ROWS; ++i) {
        low[i]  = _mm256_setzero_ps();
        high[i] = _mm256_setzero_ps();
    }
    for (int64_t j = 0; j < d; ++j) {
        const __m256 p_low  = _mm256_load_ps(panel + j * 16);
        const __m256 p_high = _mm256_load_ps(panel + j * 16 + 8);
        for (int i = 0; i < ROWS; ++i) {
            const __m256 x = _mm256_broadcast_ss(q + i * ldq + j);
            low[i]         = _mm256_fmadd_ps(x, p_low, low[i]);
            high[i]        = _mm256_fmadd_ps(x, p_high, high[i]);
        }
    }
    for (int i = 0; i < ROWS; ++i) {
        _mm256_store_ps(out + i * ldo, low[i]);
        _mm256_store_ps(out + i * ldo + 8, high[i]);
    }
}

// Is any of the sums not finite?
template <int ROWS, int VECTORS> static bool any_bad(const __m256 (&sum)[ROWS][VECTORS]) {
    __m256 total[ROWS];
    for (int i = 0; i < ROWS; ++i) {
        total[i] = sum[i][0];
        for (int k = 1; k < VECTORS; ++k) {
            total[i] = _mm256_add_ps(total[i], sum[i][k]);
        }
    }
    for (int step = 1; step < ROWS; step *= 2) {
        for (int i = 0; i + step < ROWS; i += 2 * step) {
            total[i] = _mm256_add_ps(total[i], total[i + step]);
        }
    }
    const __m256 zero = _mm256_sub_ps(total[0], total[0]);
    return _mm256_movemask_ps(_mm256_cmp_ps(zero, zero, _CMP_UNORD_Q)) != 0;
}

// acc[i][0..8*VECTORS-1] = shrink[i]*acc[i] + sum_c weight[i][c] values[c][..]; GUARDED: without weights of 0
template <int ROWS, int VECTORS, bool GUARDED = false>
static void outputs(const float * weight, const float * shrink, int64_t n, const float * values, int64_t ldv,
                    float * acc, int64_t lda) {
    __m256 sum[ROWS][VECTORS];
    for (int i = 0; i < ROWS; ++i) {
        for (int k = 0; k < VECTORS; ++k) {
            sum[i][k] = _mm256_mul_ps(_mm256_set1_ps(shrink[i]), _mm256_loadu_ps(acc + i * lda + 8 * k));
        }
    }
    for (int64_t c = 0; c < n; ++c) {
        __m256 v[VECTORS];
        for (int k = 0; k < VECTORS; ++k) {
            v[k] = _mm256_load_ps(values + c * ldv + 8 * k);
        }
        for (int i = 0; i < ROWS; ++i) {
            if (GUARDED && weight[i * PAGE + c] == 0.0f) {
                continue;
            }
            const __m256 w = _mm256_broadcast_ss(weight + i * PAGE + c);
            for (int k = 0; k < VECTORS; ++k) {
                sum[i][k] = _mm256_fmadd_ps(w, v[k], sum[i][k]);
            }
        }
    }
    if (!GUARDED && any_bad(sum)) {
        for (int i = 0; i < ROWS; ++i) {
            outputs<1, VECTORS, true>(weight + i * PAGE, shrink + i, n, values, ldv, acc + i * lda, lda);
        }
        return;
    }
    for (int i = 0; i < ROWS; ++i) {
        for (int k = 0; k < VECTORS; ++k) {
            _mm256_storeu_ps(acc + i * lda + 8 * k, sum[i][k]);
        }
    }
}

// The same sums from rows of halves: out[i][0..7] for 8 keys.
template <int ROWS>
static void few_logits(const float * q, int64_t d, const uint16_t * const * key, float * out) {
    __m256 sum[ROWS];
    for (int i = 0; i < ROWS; ++i) {
        sum[i] = _mm256_setzero_ps();
    }
    for (int64_t j = 0; j < d; j += 8) {
        __m256 r[8];
        for (int c = 0; c < 8; ++c) {
            r[c] = widen(key[c] + j);
        }
        transpose8(r);
        for (int k = 0; k < 8; ++k) {
            for (int i = 0; i < ROWS; ++i) {
                sum[i] = _mm256_fmadd_ps(_mm256_broadcast_ss(q + i * d + j + k), r[k], sum[i]);
            }
        }
    }
    for (int i = 0; i < ROWS; ++i) {
        _mm256_store_ps(out + i * PAGE, sum[i]);
    }
}

template <int ROWS, int VECTORS, bool GUARDED = false>
static void few_outputs(const float * weight, const float * shrink, int64_t n, const uint16_t * const * value,
                        int64_t first, float * acc, int64_t lda) {
    __m256 sum[ROWS][VECTORS];
    for (int i = 0; i < ROWS; ++i) {
        for (int k = 0; k < VECTORS; ++k) {
            sum[i][k] = _mm256_mul_ps(_mm256_set1_ps(shrink[i]), _mm256_loadu_ps(acc + i * lda + first + 8 * k));
        }
    }
    for (int64_t c = 0; c < n; ++c) {
        __m256 w[ROWS];
        for (int i = 0; i < ROWS; ++i) {
            w[i] = _mm256_broadcast_ss(weight + i * PAGE + c);
        }
        for (int k = 0; k < VECTORS; ++k) {
            const __m256 v = widen(value[c] + first + 8 * k);
            for (int i = 0; i < ROWS; ++i) {
                if (!GUARDED || weight[i * PAGE + c] != 0.0f) {
                    sum[i][k] = _mm256_fmadd_ps(w[i], v, sum[i][k]);
                }
            }
        }
    }
    if (!GUARDED && any_bad(sum)) {
        for (int i = 0; i < ROWS; ++i) {
            few_outputs<1, VECTORS, true>(weight + i * PAGE, shrink + i, n, value, first, acc + i * lda, lda);
        }
        return;
    }
    for (int i = 0; i < ROWS; ++i) {
        for (int k = 0; k < VECTORS; ++k) {
            _mm256_storeu_ps(acc + i * lda + first + 8 * k, sum[i][k]);
        }
    }
}

template <int ROWS>
static void all_outputs(const float * weight, const float * shrink, int64_t n, const float * values, int64_t ldv,
                        int64_t d_v, float * acc, int64_t lda) {
    int64_t j = 0;
    for (; j + 16 <= d_v; j += 16) {
        outputs<ROWS, 2>(weight, shrink, n, values + j, ldv, acc + j, lda);
    }
    if (j < d_v) {
        outputs<ROWS, 1>(weight, shrink, n, values + j, ldv, acc + j, lda);
    }
}

// Data of one page: the bias of every token padded with -inf, the tokens with visible keys, and the rows.
namespace {

struct Page {
    int64_t first;
    int32_t n;
    int32_t begin, end; // of the visible keys, multiples of 16
    float * keys;       // [PAGE/16][a.d_k][16]
    float * values;     // [PAGE][a.d_v]
    float * bias;       // [n_tok][PAGE]
    bool *  awake;      // [n_tok]: sees a key of this page
};

} // namespace

// seen[c]: whether any query sees key first + c. Returns whether any key is visible.
static bool read_bias(const ExactArgs & a, Page & page, bool * seen) {
    const __m256 minus_inf     = _mm256_set1_ps(NEG_INF);
    __m256       any[PAGE / 8] = {};
    for (int64_t t = 0; t < a.n_tok; ++t) {
        float * bias = page.bias + t * PAGE;
        memcpy(bias, a.bias + t * a.bias_stride + page.first, (size_t) page.n * sizeof(float));
        for (int32_t c = page.n; c < PAGE; ++c) {
            bias[c] = NEG_INF;
        }
        __m256 row = _mm256_setzero_ps();
        for (int32_t c = 0; c < PAGE; c += 8) {
            const __m256 open = _mm256_cmp_ps(_mm256_load_ps(bias + c), minus_inf, _CMP_NEQ_UQ);
            row               = _mm256_or_ps(row, open);
            any[c / 8]        = _mm256_or_ps(any[c / 8], open);
        }
        page.awake[t] = _mm256_movemask_ps(row) != 0;
    }
    page.begin = PAGE;
    page.end   = 0;
    for (int32_t c = 0; c < PAGE; c += 8) {
        const int bits = _mm256_movemask_ps(any[c / 8]);
        if (bits != 0) {
            page.begin = page.end == 0 ? c / 16 * 16 : page.begin;
            page.end   = c / 16 * 16 + 16;
        }
        for (int i = 0; i < 8; ++i) {
            seen[c + i] = (bits >> i & 1) != 0;
        }
    }
    return page.end > 0;
}

static void prefetch_rows(const ExactArgs & a, const Page & page, const bool * seen) {
    for (int32_t c = page.begin; c < page.end; ++c) { // a token's weights have pushed them out of the caches
        for (int64_t j = 0; seen[c] && j < a.d_k; j += 32) {
            _mm_prefetch((const char *) (a.k[page.first + c] + j), _MM_HINT_T1); // L1 can wait for fewer lines
        }
        for (int64_t j = 0; seen[c] && j < a.d_v; j += 32) {
            _mm_prefetch((const char *) (a.v[page.first + c] + j), _MM_HINT_T1);
        }
    }
}

// Keys that every query masks become zero vectors: they may contain NaN, and zero times NaN is NaN.
static void read_rows(const ExactArgs & a, Page & page, const bool * seen) {
    float * rows = (float *) cpu::scratch(cpu::SLOT_EXACT_ROWS, (size_t) (PAGE * a.d_k) * sizeof(float));
    for (int32_t c = page.begin; c < page.end; ++c) {
        float * k = rows + c * a.d_k;
        float * v = page.values + c * a.d_v;
        if (seen[c]) {
            widen_row(a.k[page.first + c], a.d_k, k);
            widen_row(a.v[page.first + c], a.d_v, v);
        } else {
            memset(k, 0, (size_t) a.d_k * sizeof(float));
            memset(v, 0, (size_t) a.d_v * sizeof(float));
        }
    }
    for (int32_t c = page.begin; c < page.end; c += 8) {
        float * panel = page.keys + (c / 16) * 16 * a.d_k + c % 16;
        for (int64_t j = 0; j < a.d_k; j += 8) {
            transpose8(rows + c * a.d_k + j, a.d_k, panel + j * 16);
        }
    }
}

// Converts logits in x to weights; returns the factor for the row's earlier sums. A lost row (ops.h) gets weights of 0.
static float soften(const ExactArgs & a, const Page & page, float * x, int64_t row) {
    const float * bias  = page.bias + row / a.n_group * PAGE;
    const float   slope = a.slope[row % a.n_group];
    float &       m     = a.m[row];
    float &       z     = a.z[row];
    const auto    drop  = [&](bool lost) {
        memset(x + page.begin, 0, (size_t) (page.end - page.begin) * sizeof(float));
        if (lost) {
            m = m > NEG_INF ? m : 0.0f;
            z = __builtin_nanf("");
        }
        return 1.0f;
    };

    const __m256 minus_inf = _mm256_set1_ps(NEG_INF);
    __m256       top       = minus_inf;
    for (int32_t c = page.begin; c < page.end; c += 8) {
        __m256 l = _mm256_load_ps(x + c);
        l        = _mm256_fmadd_ps(l, _mm256_setzero_ps(), l); // infinite: NaN, which neither cap nor exponential hide
        if (a.softcap > 0.0f) {
            l = soft_cap(l, a.softcap);
        }
        const __m256 b = _mm256_load_ps(bias + c);
        l              = _mm256_fmadd_ps(_mm256_set1_ps(slope), b, l);
        l              = _mm256_blendv_ps(l, minus_inf, _mm256_cmp_ps(b, minus_inf, _CMP_EQ_OQ));
        top            = _mm256_max_ps(top, l);
        _mm256_store_ps(x + c, l);
    }
    const float page_top = horizontal_max(top);
    if (!(page_top > NEG_INF)) { // without a visible key nothing changes, to the bit
        return drop(page.awake[row / a.n_group]);
    }
    const float  new_m  = page_top > m ? page_top : m;
    const float  shrink = m == NEG_INF ? 0.0f : exp_nonpositive(m - new_m);
    const __m256 base   = _mm256_set1_ps(new_m);
    __m256       total  = _mm256_setzero_ps();
    for (int32_t c = page.begin; c < page.end; c += 8) {
        const __m256 e = exp_nonpositive(_mm256_sub_ps(_mm256_load_ps(x + c), base));
        total          = _mm256_add_ps(total, e);
        _mm256_store_ps(x + c, e);
    }
    const float new_z = z * shrink + horizontal_sum(total);
    if (new_z != new_z) { // a logit is NaN
        return drop(true);
    }
    m = new_m;
    z = new_z;
    return shrink;
}

static void block_logits(const ExactArgs & a, int64_t row, int64_t n, const float * panel, float * out) {
    const float * q = a.q + row * a.d_k;
    switch (n) {
        case 1: logits<1>(q, a.d_k, a.d_k, panel, out, PAGE); break;
        case 2: logits<2>(q, a.d_k, a.d_k, panel, out, PAGE); break;
        case 3: logits<3>(q, a.d_k, a.d_k, panel, out, PAGE); break;
        case 4: logits<4>(q, a.d_k, a.d_k, panel, out, PAGE); break;
        case 5: logits<5>(q, a.d_k, a.d_k, panel, out, PAGE); break;
        default: logits<6>(q, a.d_k, a.d_k, panel, out, PAGE); break;
    }
}

static void block_outputs(const ExactArgs & a, const Page & page, int64_t row, int64_t n, const float * weight,
                          const float * shrink) {
    const int64_t ldv    = a.d_v;
    const int64_t lda    = a.acc_stride;
    const int64_t n_keys = page.end - page.begin;
    const float * values = page.values + page.begin * ldv;
    float *       acc    = a.acc + row * lda;
    weight += page.begin;
    switch (n) {
        case 1: all_outputs<1>(weight, shrink, n_keys, values, ldv, a.d_v, acc, lda); break;
        case 2: all_outputs<2>(weight, shrink, n_keys, values, ldv, a.d_v, acc, lda); break;
        case 3: all_outputs<3>(weight, shrink, n_keys, values, ldv, a.d_v, acc, lda); break;
        case 4: all_outputs<4>(weight, shrink, n_keys, values, ldv, a.d_v, acc, lda); break;
        case 5: all_outputs<5>(weight, shrink, n_keys, values, ldv, a.d_v, acc, lda); break;
        default: all_outputs<6>(weight, shrink, n_keys, values, ldv, a.d_v, acc, lda); break;
    }
}

static bool any_awake(const ExactArgs & a, const Page & page, int64_t row, int64_t n) {
    for (int64_t t = row / a.n_group; t <= (row + n - 1) / a.n_group; ++t) {
        if (page.awake[t]) {
            return true;
        }
    }
    return false;
}

// At most MR query rows against one page. Masked keys read as zeros, as in read_rows.
template <int ROWS> static void few_rows(const ExactArgs & a, const Page & page, const bool * seen, float * weight) {
    const size_t     d      = (size_t) (a.d_k > a.d_v ? a.d_k : a.d_v);
    const uint16_t * unseen = (const uint16_t *) cpu::scratch(cpu::SLOT_EXACT_UNSEEN, d * sizeof(uint16_t));
    const uint16_t * key[PAGE];
    const uint16_t * value[PAGE];
    for (int32_t c = page.begin; c < page.end; ++c) {
        key[c]   = seen[c] ? a.k[page.first + c] : unseen;
        value[c] = seen[c] ? a.v[page.first + c] : unseen;
    }
    for (int32_t c = page.begin; c < page.end; c += 8) {
        few_logits<ROWS>(a.q, a.d_k, key + c, weight + c);
    }
    float shrink[ROWS];
    for (int64_t r = 0; r < ROWS; ++r) {
        shrink[r] = soften(a, page, weight + r * PAGE, r);
    }
    constexpr int VECTORS = ROWS <= 3 ? 4 : 2; // fits 16 registers
    const int64_t n       = page.end - page.begin;
    int64_t       j       = 0;
    for (; j + 8 * VECTORS <= a.d_v; j += 8 * VECTORS) {
        few_outputs<ROWS, VECTORS>(weight + page.begin, shrink, n, value + page.begin, j, a.acc, a.acc_stride);
    }
    for (; j < a.d_v; j += 8) {
        few_outputs<ROWS, 1>(weight + page.begin, shrink, n, value + page.begin, j, a.acc, a.acc_stride);
    }
}

static void all_few_rows(const ExactArgs & a, const Page & page, const bool * seen, float * weight) {
    switch (a.n_tok * a.n_group) {
        case 1: few_rows<1>(a, page, seen, weight); break;
        case 2: few_rows<2>(a, page, seen, weight); break;
        case 3: few_rows<3>(a, page, seen, weight); break;
        case 4: few_rows<4>(a, page, seen, weight); break;
        case 5: few_rows<5>(a, page, seen, weight); break;
        default: few_rows<6>(a, page, seen, weight); break;
    }
}

// Query rows [row, row + n), n <= BLOCK, against one page.
static void step(const ExactArgs & a, const Page & page, int64_t row, int64_t n, float * weight) {
    bool awake[BLOCK / MR];
    for (int64_t i = 0; i < n; i += MR) {
        awake[i / MR] = any_awake(a, page, row + i, n - i < MR ? n - i : MR);
    }
    for (int32_t c = page.begin; c < page.end; c += 16) { // a panel stays in L1 while the block's queries pass
        for (int64_t i = 0; i < n; i += MR) {
            if (awake[i / MR]) {
                block_logits(a, row + i, n - i < MR ? n - i : MR, page.keys + c * a.d_k, weight + i * PAGE + c);
            }
        }
    }
    for (int64_t i = 0; i < n; i += MR) {
        if (!awake[i / MR]) {
            continue;
        }
        const int64_t rows = n - i < MR ? n - i : MR;
        float         shrink[MR];
        for (int64_t k = 0; k < rows; ++k) {
            shrink[k] = soften(a, page, weight + (i + k) * PAGE, row + i + k);
        }
        block_outputs(a, page, row + i, rows, weight + i * PAGE, shrink);
    }
}

void attend_exact(const ExactArgs & a) {
    const int64_t n_rows = a.n_tok * a.n_group;
    float *       weight = (float *) cpu::scratch(cpu::SLOT_EXACT_WEIGHTS, BLOCK * PAGE * sizeof(float));
    bool          seen[PAGE];
    Page          page = {};
    page.bias          = (float *) cpu::scratch(cpu::SLOT_EXACT_BIAS, (size_t) (a.n_tok * PAGE) * sizeof(float));
    page.awake         = (bool *) cpu::scratch(cpu::SLOT_EXACT_AWAKE, (size_t) a.n_tok * sizeof(bool));
    if (n_rows > MR) {
        page.keys   = (float *) cpu::scratch(cpu::SLOT_EXACT_KEYS, (size_t) (PAGE * a.d_k) * sizeof(float));
        page.values = (float *) cpu::scratch(cpu::SLOT_EXACT_VALUES, (size_t) (PAGE * a.d_v) * sizeof(float));
    }
    for (int64_t first = 0; first < a.n_keys; first += PAGE) {
        page.first = first;
        page.n     = (int32_t) (a.n_keys - first < PAGE ? a.n_keys - first : PAGE);
        if (!read_bias(a, page, seen)) {
            continue;
        }
        prefetch_rows(a, page, seen);
        if (n_rows <= MR) {
            all_few_rows(a, page, seen, weight);
            continue;
        }
        read_rows(a, page, seen);
        for (int64_t row = 0; row < n_rows; row += BLOCK) {
            step(a, page, row, n_rows - row < BLOCK ? n_rows - row : BLOCK, weight);
        }
    }
}

} // namespace subkv::avx2

#endif
