// avx2_decode.cpp: attention for few query rows (decode), straight from the rows. Definition: ref/attend.cpp.
//
// Tiles of 64 cells. For up to four query rows at a time: dot products of two cells with all of them (every group is
// unpacked in registers, nothing is written back), a vector softmax over the tile, then the value sum with 16
// coefficients of every query row in registers while the tile's cells stream past. Band ratios are folded into the
// queries and into the final sum, row scales into the logits and weights.
#include "versions.h"

#if defined(SUBKV_X86)

#    include "avx2_simd.h"

#    include <string.h>

namespace subkv::avx2 {

constexpr int TILE     = 64;
constexpr int MAX_ROWS = 4; // query rows that share one unpacking

enum Slot { SLOT_QUERY, SLOT_SUM, SLOT_RATIO, SLOT_SHORT }; // scratch slots 0..3

struct Tile {
    int32_t      n;  // cells
    int32_t      n8; // rounded up to 8; the last row stands in for the missing ones
    const void * k[TILE];
    const void * v[TILE];
    float        scale_k[TILE];
    float        scale_v[TILE];
    float        bias[TILE];                 // of the query row at hand, -inf beyond n
    float        dot[MAX_ROWS][TILE / 2][8]; // pairs of partial sums
    float        weight[MAX_ROWS][TILE];
};

static const uint16_t ZERO_HALVES[MAX_HEAD_SIZE] = {};

template <int ROWS, typename Opener, typename Rows>
static void dots(const Rows & rows, int32_t n_groups, const float * q, int64_t q_stride, Tile & tile) {
    for (int32_t c = 0; c < tile.n8; c += 2) {
        __m256 a[ROWS];
        __m256 b[ROWS];
        for (int i = 0; i < ROWS; ++i) {
            a[i] = _mm256_setzero_ps();
            b[i] = _mm256_setzero_ps();
        }
        for (int32_t g = 0; g < n_groups; ++g) {
            const Opener group = rows.template open<Opener>(g);
            __m256       a_low, a_high, b_low, b_high;
            group.load(tile.k[c], a_low, a_high);
            group.load(tile.k[c + 1], b_low, b_high);
            for (int i = 0; i < ROWS; ++i) {
                const __m256 q_low  = pin(_mm256_load_ps(q + i * q_stride + g * GROUP));
                a[i]                = _mm256_fmadd_ps(a_low, q_low, a[i]);
                b[i]                = _mm256_fmadd_ps(b_low, q_low, b[i]);
                const __m256 q_high = pin(_mm256_load_ps(q + i * q_stride + g * GROUP + 8));
                a[i]                = _mm256_fmadd_ps(a_high, q_high, a[i]);
                b[i]                = _mm256_fmadd_ps(b_high, q_high, b[i]);
            }
        }
        for (int i = 0; i < ROWS; ++i) {
            _mm256_storeu_ps(tile.dot[i][c / 2], _mm256_hadd_ps(a[i], b[i]));
        }
    }
}

// sum[i][16 coefficients of a group] = shrink[i] * sum + sum_c weight[i][c] * value[c]
template <int ROWS, typename Opener>
static void add_group(const Opener & group, const float * shrink, float * sum, int64_t sum_stride, const Tile & tile) {
    __m256 low[ROWS];
    __m256 high[ROWS];
    for (int i = 0; i < ROWS; ++i) {
        const __m256 f = _mm256_set1_ps(shrink[i]);
        low[i]         = _mm256_mul_ps(f, _mm256_load_ps(sum + i * sum_stride));
        high[i]        = _mm256_mul_ps(f, _mm256_load_ps(sum + i * sum_stride + 8));
    }
    const int32_t n = tile.n;
    for (int32_t c = 0; c < n; ++c) {
        __m256 v_low, v_high;
        group.load(tile.v[c], v_low, v_high);
        for (int i = 0; i < ROWS; ++i) {
            const __m256 w = _mm256_broadcast_ss(&tile.weight[i][c]);
            low[i]         = _mm256_fmadd_ps(v_low, w, low[i]);
            high[i]        = _mm256_fmadd_ps(v_high, w, high[i]);
        }
    }
    for (int i = 0; i < ROWS; ++i) {
        _mm256_store_ps(sum + i * sum_stride, low[i]);
        _mm256_store_ps(sum + i * sum_stride + 8, high[i]);
    }
}

template <int ROWS, typename Rows>
static void add_values(const Rows & rows, int32_t n_groups, const float * shrink, float * sum, int64_t sum_stride,
                       const Tile & tile) {
    using Fast = typename Rows::Fast;
    using Slow = typename Rows::Slow;
    for (int32_t g = 0; g < n_groups; ++g) {
        if (rows.simple(g)) {
            add_group<ROWS>(rows.template open<Fast>(g), shrink, sum + g * GROUP, sum_stride, tile);
        } else {
            add_group<ROWS>(rows.template open<Slow>(g), shrink, sum + g * GROUP, sum_stride, tile);
        }
    }
}

// Logits of query row i of the block from its dots; updates m, z; leaves exp(logit - m) * scale_v in tile.weight[i].
// Returns what the sums so far shrink by.
static float soften(const Call & call, Tile & tile, int i, float shift, float slope, float & m, float & z) {
    const __m256 minus_inf = _mm256_set1_ps(NEG_INF);
    __m256       top       = minus_inf;
    for (int32_t c = 0; c < tile.n8; c += 8) {
        float (*h)[8] = tile.dot[i] + c / 2;
        __m256 x =
            sum_pairs(_mm256_loadu_ps(h[0]), _mm256_loadu_ps(h[1]), _mm256_loadu_ps(h[2]), _mm256_loadu_ps(h[3]));
        x = _mm256_fmadd_ps(x, _mm256_loadu_ps(tile.scale_k + c), _mm256_set1_ps(shift));
        if (call.softcap > 0.0f) {
            x = soft_cap(x, call.softcap);
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
        _mm256_storeu_ps(tile.weight[i] + c, _mm256_mul_ps(e, _mm256_loadu_ps(tile.scale_v + c)));
    }
    m = new_m;
    z = z * shrink + horizontal_sum(total);
    return shrink;
}

static void prefetch_rows(const uint8_t * rows, int64_t stride, int32_t row_bytes, int64_t n) {
    for (int64_t c = 0; c < n; ++c) { // rows lie close together: the last byte's line is enough
        _mm_prefetch((const char *) (rows + c * stride + row_bytes - 1), _MM_HINT_T0);
    }
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

// Points the tile at coded rows; rows under 16 bytes are copied, since unpacking reads 16.
static void point_at_codes(const uint8_t * rows, int64_t stride, int32_t row_bytes, int32_t n, int32_t n8,
                           uint8_t * copy, const void ** row, float * scale) {
    for (int32_t c = 0; c < n; ++c) {
        const uint8_t * from = rows + c * stride;
        scale[c]             = SCALES[from[0]];
        row[c]               = from;
        if (row_bytes < 16) {
            memcpy(copy + 16 * c, from, (size_t) row_bytes);
            row[c] = copy + 16 * c;
        }
    }
    for (int32_t c = n; c < n8; ++c) {
        row[c]   = row[n - 1];
        scale[c] = 0.0f;
    }
}

// seen[c]: some query sees cell first + c. Returns whether any cell is seen.
static bool find_seen(const Call & call, int64_t first, int64_t n, bool * seen) {
    const __m256 minus_inf = _mm256_set1_ps(NEG_INF);
    int32_t      any       = 0;
    for (int64_t c = 0; c < n; c += 8) {
        const int64_t left = n - c;
        int32_t       open = 0;
        for (int64_t t = 0; t < call.n_tok; ++t) {
            const float * bias = call.bias + t * call.bias_stride + first + c;
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

// Fills the tile with cells [first, first + n). false: nobody sees any of them, no row was touched.
static bool fill(const Call & call, int64_t first, int64_t n, Tile & tile) {
    bool seen[TILE];
    if (!find_seen(call, first, n, seen)) {
        return false;
    }
    tile.n  = (int32_t) n;
    tile.n8 = (tile.n + 7) / 8 * 8;
    if (call.coded != nullptr) {
        const AttendArgs & a    = *call.coded;
        uint8_t *          copy = (uint8_t *) cpu::scratch(SLOT_SHORT, 2 * TILE * 16);
        const uint8_t *    k    = a.k_rows + first * a.k_stride;
        const uint8_t *    v    = a.v_rows + first * a.v_stride;
        point_at_codes(k, a.k_stride, a.k->row_bytes, tile.n, tile.n8, copy, tile.k, tile.scale_k);
        point_at_codes(v, a.v_stride, a.v->row_bytes, tile.n, tile.n8, copy + TILE * 16, tile.v, tile.scale_v);
        const int64_t left = call.n - first - n;
        const int64_t next = left < TILE ? left : TILE;
        prefetch_rows(k + n * a.k_stride, a.k_stride, a.k->row_bytes, next);
        prefetch_rows(v + n * a.v_stride, a.v_stride, a.v->row_bytes, next);
        return true;
    }
    prefetch_exact(call.exact->k + first, call.d_k, tile.n);
    prefetch_exact(call.exact->v + first, call.d_v, tile.n);
    for (int32_t c = 0; c < tile.n8; ++c) { // a key nobody sees may hold NaN, which no zero weight would stop
        const bool here = c < tile.n && seen[c];
        tile.k[c]       = here ? call.exact->k[first + c] : ZERO_HALVES;
        tile.v[c]       = here ? call.exact->v[first + c] : ZERO_HALVES;
        tile.scale_k[c] = 1.0f;
        tile.scale_v[c] = 1.0f;
    }
    return true;
}

// Query rows [row, row + ROWS) against one tile.
template <int ROWS, typename KRows, typename VRows>
static void step(const Call & call, const KRows & k_rows, const VRows & v_rows, int64_t row, int64_t first, Tile & tile,
                 const float * q, float * sum, float * m, float * z) {
    const int32_t k_pad = cpu::padded(call.d_k);
    const int32_t v_pad = cpu::padded(call.d_v);
    if (k_rows.all_simple()) {
        dots<ROWS, typename KRows::Fast>(k_rows, k_pad / GROUP, q + row * k_pad, k_pad, tile);
    } else {
        dots<ROWS, typename KRows::Slow>(k_rows, k_pad / GROUP, q + row * k_pad, k_pad, tile);
    }
    float shrink[ROWS];
    for (int i = 0; i < ROWS; ++i) {
        const int64_t t = (row + i) / call.n_group;
        memcpy(tile.bias, call.bias + t * call.bias_stride + first, (size_t) tile.n * sizeof(float));
        for (int32_t c = tile.n; c < tile.n8; ++c) {
            tile.bias[c] = NEG_INF;
        }
        const float shift = call.shift != nullptr ? call.shift[row + i] : 0.0f;
        shrink[i]         = soften(call, tile, i, shift, call.slope[(row + i) % call.n_group], m[row + i], z[row + i]);
    }
    add_values<ROWS>(v_rows, v_pad / GROUP, shrink, sum + row * v_pad, v_pad, tile);
}

template <typename KRows, typename VRows>
static void run(const Call & call, const KRows & k_rows, const VRows & v_rows, const float * k_ratio,
                const float * v_ratio) {
    const int64_t n_rows = call.n_tok * call.n_group;
    const int32_t k_pad  = cpu::padded(call.d_k);
    const int32_t v_pad  = cpu::padded(call.d_v);
    float *       q      = (float *) cpu::scratch(SLOT_QUERY, (size_t) (n_rows * k_pad) * sizeof(float));
    float *       sum    = (float *) cpu::scratch(SLOT_SUM, (size_t) (n_rows * (v_pad + 3)) * sizeof(float));
    float *       m      = sum + n_rows * v_pad;
    float *       z      = m + n_rows;
    memset(sum, 0, (size_t) (n_rows * v_pad) * sizeof(float));
    for (int64_t row = 0; row < n_rows; ++row) {
        for (int32_t j = 0; j < k_pad; ++j) {
            q[row * k_pad + j] = j < call.d_k ? call.q[row * call.d_k + j] * k_ratio[j] : 0.0f;
        }
        m[row] = call.m[row];
        z[row] = call.z[row];
    }
    Tile tile;
    for (int64_t first = 0; first < call.n; first += TILE) {
        if (!fill(call, first, call.n - first < TILE ? call.n - first : TILE, tile)) {
            continue;
        }
        // blocks of equal size: 5 rows are 3 + 2, not 4 + 1
        const int64_t n_blocks = (n_rows + MAX_ROWS - 1) / MAX_ROWS;
        for (int64_t block = 0; block < n_blocks; ++block) {
            const int64_t row = n_rows * block / n_blocks;
            switch (n_rows * (block + 1) / n_blocks - row) {
                case 1: step<1>(call, k_rows, v_rows, row, first, tile, q, sum, m, z); break;
                case 2: step<2>(call, k_rows, v_rows, row, first, tile, q, sum, m, z); break;
                case 3: step<3>(call, k_rows, v_rows, row, first, tile, q, sum, m, z); break;
                default: step<4>(call, k_rows, v_rows, row, first, tile, q, sum, m, z); break;
            }
        }
    }
    for (int64_t row = 0; row < n_rows; ++row) {
        const float old    = call.m[row];
        const float shrink = old == m[row] ? 1.0f : old == NEG_INF ? 0.0f : exp_nonpositive(old - m[row]);
        float *     acc    = call.acc + row * call.acc_stride;
        for (int64_t j = 0; j < call.d_v; ++j) {
            acc[j] = acc[j] * shrink + v_ratio[j] * sum[row * v_pad + j];
        }
        call.m[row] = m[row];
        call.z[row] = z[row];
    }
}

static void spread_ratios(const HeadCodec & codec, const Plan & plan, float * ratio) {
    for (int32_t i = 0; i < codec.n_bands; ++i) {
        for (int32_t j = 0; j < codec.bands[i].n; ++j) {
            const int32_t c = codec.bands[i].first + j;
            ratio[c]        = codec.bands[i].ratio * plan.unit[c];
        }
    }
}

void attend_small(const Call & call) {
    float * ratio = (float *) cpu::scratch(SLOT_RATIO, 2 * MAX_HEAD_SIZE * sizeof(float));
    if (call.coded != nullptr) {
        const Plan & k = cpu::plan_of(*call.coded->k);
        const Plan & v = cpu::plan_of(*call.coded->v);
        spread_ratios(*call.coded->k, k, ratio);
        spread_ratios(*call.coded->v, v, ratio + MAX_HEAD_SIZE);
        run(call, CodeRows{ k }, CodeRows{ v }, ratio, ratio + MAX_HEAD_SIZE);
    } else {
        for (int32_t j = 0; j < MAX_HEAD_SIZE; ++j) {
            ratio[j] = 1.0f;
        }
        run(call, HalfRows{ call.d_k }, HalfRows{ call.d_v }, ratio, ratio);
    }
}

} // namespace subkv::avx2

#endif
