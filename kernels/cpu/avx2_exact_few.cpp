// avx2_exact_few.cpp: attention over exact keys for few query rows. Definition: ref/attend.cpp.
//
// Tiles of 64 keys. For up to four query rows at a time: dot products of two keys with all of them, a vector softmax over
// the tile, then the value sum with 16 coefficients of every query row in registers while the tile's values stream past.
#include "versions.h"

#if defined(SUBKV_X86)

#    include "avx2_simd.h"
#    include "scratch.h"

#    include <string.h>

namespace subkv::avx2 {

constexpr int KEYS     = 64; // of a tile
constexpr int MAX_ROWS = 4;  // query rows that share one load

namespace {

struct Tile {
    int32_t          n;  // keys
    int32_t          n8; // rounded up to 8; zeros stand in for the missing ones
    const uint16_t * k[KEYS];
    const uint16_t * v[KEYS];
    float            bias[KEYS];                 // of the query row at hand, -inf beyond n
    float            dot[MAX_ROWS][KEYS / 2][8]; // pairs of partial sums
    float            weight[MAX_ROWS][KEYS];
};

} // namespace

// Entries [at, at + 16) of a row of d halves, zeros beyond.
static inline void load16(const uint16_t * row, int64_t at, int64_t d, __m256 & low, __m256 & high) {
    const __m128i * h = (const __m128i *) (row + at);
    low               = _mm256_cvtph_ps(_mm_loadu_si128(h));
    high              = at + 8 < d ? _mm256_cvtph_ps(_mm_loadu_si128(h + 1)) : _mm256_setzero_ps();
}

template <int ROWS> static void dots(int64_t d, const float * q, int64_t q_stride, Tile & tile) {
    for (int32_t c = 0; c < tile.n8; c += 2) {
        __m256 a[ROWS];
        __m256 b[ROWS];
        for (int i = 0; i < ROWS; ++i) {
            a[i] = _mm256_setzero_ps();
            b[i] = _mm256_setzero_ps();
        }
        for (int64_t j = 0; j < d; j += GROUP) {
            __m256 a_low, a_high, b_low, b_high;
            load16(tile.k[c], j, d, a_low, a_high);
            load16(tile.k[c + 1], j, d, b_low, b_high);
            for (int i = 0; i < ROWS; ++i) {
                const __m256 q_low  = pin(_mm256_load_ps(q + i * q_stride + j));
                a[i]                = _mm256_fmadd_ps(a_low, q_low, a[i]);
                b[i]                = _mm256_fmadd_ps(b_low, q_low, b[i]);
                const __m256 q_high = pin(_mm256_load_ps(q + i * q_stride + j + 8));
                a[i]                = _mm256_fmadd_ps(a_high, q_high, a[i]);
                b[i]                = _mm256_fmadd_ps(b_high, q_high, b[i]);
            }
        }
        for (int i = 0; i < ROWS; ++i) {
            _mm256_storeu_ps(tile.dot[i][c / 2], _mm256_hadd_ps(a[i], b[i]));
        }
    }
}

// sum[i][16 entries from `at` on] = shrink[i] * sum + sum_c weight[i][c] * value[c]
template <int ROWS>
static void add_group(int64_t at, int64_t d, const float * shrink, float * sum, int64_t sum_stride, const Tile & tile) {
    __m256 low[ROWS];
    __m256 high[ROWS];
    for (int i = 0; i < ROWS; ++i) {
        const __m256 f = _mm256_set1_ps(shrink[i]);
        low[i]         = _mm256_mul_ps(f, _mm256_load_ps(sum + i * sum_stride + at));
        high[i]        = _mm256_mul_ps(f, _mm256_load_ps(sum + i * sum_stride + at + 8));
    }
    const int32_t n = tile.n;
    for (int32_t c = 0; c < n; ++c) {
        __m256 v_low, v_high;
        load16(tile.v[c], at, d, v_low, v_high);
        for (int i = 0; i < ROWS; ++i) {
            const __m256 w = _mm256_broadcast_ss(&tile.weight[i][c]);
            low[i]         = _mm256_fmadd_ps(v_low, w, low[i]);
            high[i]        = _mm256_fmadd_ps(v_high, w, high[i]);
        }
    }
    for (int i = 0; i < ROWS; ++i) {
        _mm256_store_ps(sum + i * sum_stride + at, low[i]);
        _mm256_store_ps(sum + i * sum_stride + at + 8, high[i]);
    }
}

// Logits of query row i of the block from its dots; updates m, z; leaves exp(logit - m) in tile.weight[i].
// Returns what the sums so far shrink by.
static float soften(float softcap, Tile & tile, int i, float slope, float & m, float & z) {
    const __m256 minus_inf = _mm256_set1_ps(NEG_INF);
    __m256       top       = minus_inf;
    for (int32_t c = 0; c < tile.n8; c += 8) {
        float (*h)[8] = tile.dot[i] + c / 2;
        __m256 x =
            sum_pairs(_mm256_loadu_ps(h[0]), _mm256_loadu_ps(h[1]), _mm256_loadu_ps(h[2]), _mm256_loadu_ps(h[3]));
        if (softcap > 0.0f) {
            x = soft_cap(x, softcap);
        }
        const __m256 bias = _mm256_loadu_ps(tile.bias + c);
        x                 = _mm256_fmadd_ps(_mm256_set1_ps(slope), bias, x);
        x                 = _mm256_blendv_ps(x, minus_inf, _mm256_cmp_ps(bias, minus_inf, _CMP_EQ_OQ));
        top               = _mm256_max_ps(top, x);
        _mm256_storeu_ps(tile.weight[i] + c, x);
    }
    const float tile_top = horizontal_max(top);
    const float new_m    = tile_top > m ? tile_top : m;
    if (new_m == NEG_INF) {
        memset(tile.weight[i], 0, sizeof(tile.weight[i]));
        return 1.0f;
    }
    const float  shrink = m == NEG_INF ? 0.0f : exp_nonpositive(m - new_m);
    __m256       total  = _mm256_setzero_ps();
    const __m256 base   = _mm256_set1_ps(new_m);
    for (int32_t c = 0; c < tile.n8; c += 8) {
        const __m256 e = exp_nonpositive(_mm256_sub_ps(_mm256_loadu_ps(tile.weight[i] + c), base));
        total          = _mm256_add_ps(total, e);
        _mm256_storeu_ps(tile.weight[i] + c, e);
    }
    m = new_m;
    z = z * shrink + horizontal_sum(total);
    return shrink;
}

// Rows of the window, which a token's weights have pushed out of the caches: all lines at once, into L2, since L1 can wait
// for fewer.
static void prefetch_exact(const uint16_t * const * row, int64_t d, int64_t n) {
    for (int64_t c = 0; c < n; ++c) {
        for (int64_t j = 0; j < d; j += 32) {
            _mm_prefetch((const char *) (row[c] + j), _MM_HINT_T1);
        }
    }
}

// seen[c]: some query sees cell first + c. Returns whether any cell is seen.
static bool find_seen(const ExactArgs & a, int64_t first, int64_t n, bool * seen) {
    const __m256 minus_inf = _mm256_set1_ps(NEG_INF);
    int32_t      any       = 0;
    for (int64_t c = 0; c < n; c += 8) {
        const int64_t left = n - c;
        int32_t       open = 0;
        for (int64_t t = 0; t < a.n_tok; ++t) {
            const float * bias = a.bias + t * a.bias_stride + first + c;
            if (left >= 8) {
                open |= _mm256_movemask_ps(_mm256_cmp_ps(_mm256_loadu_ps(bias), minus_inf, _CMP_NEQ_UQ));
                continue;
            }
            for (int64_t i = 0; i < left; ++i) {
                open |= (bias[i] != NEG_INF ? 1 : 0) << i;
            }
        }
        for (int64_t i = 0; i < 8 && i < left; ++i) {
            seen[c + i] = (open >> i & 1) != 0;
        }
        any |= open;
    }
    return any != 0;
}

static const uint16_t ZERO_HALVES[MAX_HEAD_SIZE] = {};

// Fills the tile with keys [first, first + n). false: nobody sees any of them, no row was touched.
static bool fill(const ExactArgs & a, int64_t first, int64_t n, Tile & tile) {
    bool seen[KEYS];
    if (!find_seen(a, first, n, seen)) {
        return false;
    }
    tile.n  = (int32_t) n;
    tile.n8 = (tile.n + 7) / 8 * 8;
    prefetch_exact(a.k + first, a.d_k, tile.n);
    prefetch_exact(a.v + first, a.d_v, tile.n);
    for (int32_t c = 0; c < tile.n8; ++c) { // a key nobody sees may hold NaN, which no zero weight would stop
        const bool here = c < tile.n && seen[c];
        tile.k[c]       = here ? a.k[first + c] : ZERO_HALVES;
        tile.v[c]       = here ? a.v[first + c] : ZERO_HALVES;
    }
    return true;
}

// Query rows [row, row + ROWS) against one tile.
template <int ROWS>
static void step(const ExactArgs & a, int64_t row, int64_t first, Tile & tile, const float * q, float * sum) {
    const int32_t k_pad = padded(a.d_k);
    const int32_t v_pad = padded(a.d_v);
    dots<ROWS>(a.d_k, q + row * k_pad, k_pad, tile);
    float shrink[ROWS];
    for (int i = 0; i < ROWS; ++i) {
        const int64_t t = (row + i) / a.n_group;
        memcpy(tile.bias, a.bias + t * a.bias_stride + first, (size_t) tile.n * sizeof(float));
        for (int32_t c = tile.n; c < tile.n8; ++c) {
            tile.bias[c] = NEG_INF;
        }
        shrink[i] = soften(a.softcap, tile, i, a.slope[(row + i) % a.n_group], a.m[row + i], a.z[row + i]);
    }
    for (int64_t j = 0; j < a.d_v; j += GROUP) {
        add_group<ROWS>(j, a.d_v, shrink, sum + row * v_pad, v_pad, tile);
    }
}

void attend_exact_few(const ExactArgs & a) {
    const int64_t n_rows = a.n_tok * a.n_group;
    const int32_t k_pad  = padded(a.d_k);
    const int32_t v_pad  = padded(a.d_v);
    float * q   = (float *) cpu::scratch(cpu::SLOT_EXACT_QUERIES, (size_t) (n_rows * (k_pad + v_pad)) * sizeof(float));
    float * sum = q + n_rows * k_pad;
    for (int64_t row = 0; row < n_rows; ++row) {
        for (int32_t j = 0; j < k_pad; ++j) {
            q[row * k_pad + j] = j < a.d_k ? a.q[row * a.d_k + j] : 0.0f;
        }
        for (int32_t j = 0; j < v_pad; ++j) {
            sum[row * v_pad + j] = j < a.d_v ? a.acc[row * a.acc_stride + j] : 0.0f;
        }
    }
    Tile tile;
    for (int64_t first = 0; first < a.n_keys; first += KEYS) {
        if (!fill(a, first, a.n_keys - first < KEYS ? a.n_keys - first : KEYS, tile)) {
            continue;
        }
        // blocks of equal size: 5 rows are 3 + 2, not 4 + 1
        const int64_t n_blocks = (n_rows + MAX_ROWS - 1) / MAX_ROWS;
        for (int64_t block = 0; block < n_blocks; ++block) {
            const int64_t row = n_rows * block / n_blocks;
            switch (n_rows * (block + 1) / n_blocks - row) {
                case 1: step<1>(a, row, first, tile, q, sum); break;
                case 2: step<2>(a, row, first, tile, q, sum); break;
                case 3: step<3>(a, row, first, tile, q, sum); break;
                default: step<4>(a, row, first, tile, q, sum); break;
            }
        }
    }
    for (int64_t row = 0; row < n_rows; ++row) {
        memcpy(a.acc + row * a.acc_stride, sum + row * v_pad, (size_t) a.d_v * sizeof(float));
    }
}

} // namespace subkv::avx2

#endif
