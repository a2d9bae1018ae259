// avx2_tiled.cpp: attention for many query rows (prefill), and for layouts with 16-bit bands. Definition: ref/attend.cpp.
//
// A tile of 128 cells is dequantized once: keys transposed in panels of 16 cells, values as rows. Blocks of 48 query
// rows then run two register-blocked products (6 rows x 16 columns) around a vector softmax.
#include "versions.h"

#if defined(SUBKV_X86)

#    include "avx2_simd.h"

#    include <string.h>

namespace subkv::avx2 {

constexpr int TILE  = 128;
constexpr int BLOCK = 48; // query rows whose weights are held at once
constexpr int MR    = 6;  // query rows of the micro kernels

enum Slot { SLOT_KEYS = 4, SLOT_VALUES, SLOT_ROWS, SLOT_WEIGHT, SLOT_BIAS, SLOT_SEEN }; // 4..9

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

// acc[i][0..8*VECTORS-1] = shrink[i]*acc[i] + sum_c weight[i][c] values[c][..]
template <int ROWS, int VECTORS>
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
            const __m256 w = _mm256_broadcast_ss(weight + i * TILE + c);
            for (int k = 0; k < VECTORS; ++k) {
                sum[i][k] = _mm256_fmadd_ps(w, v[k], sum[i][k]);
            }
        }
    }
    for (int i = 0; i < ROWS; ++i) {
        for (int k = 0; k < VECTORS; ++k) {
            _mm256_storeu_ps(acc + i * lda + 8 * k, sum[i][k]);
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

static void transpose8(const float * from, int64_t ld, float * to) { // 8x8; rows of `to` are 16 apart
    __m256 r[8];
    for (int i = 0; i < 8; ++i) {
        r[i] = _mm256_load_ps(from + i * ld);
    }
    __m256 t[8];
    for (int i = 0; i < 8; i += 2) {
        t[i]     = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        r[i]     = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
        r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    for (int i = 0; i < 4; ++i) {
        _mm256_store_ps(to + i * 16, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
        _mm256_store_ps(to + (i + 4) * 16, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
    }
}

static void widen_row(const uint16_t * h, int64_t d, float * out) {
    for (int64_t j = 0; j < d; j += 8) {
        _mm256_store_ps(out + j, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) (h + j))));
    }
}

// What is known about one tile: the bias of every token padded with -inf, who sees anything, and the rows.
struct Tile {
    int64_t first;
    int32_t n;
    int32_t n16;
    float * keys;   // [n16/16][k_pad][16]
    float * values; // [TILE][v_pad]
    float * bias;   // [n_tok][TILE]
    bool *  awake;  // [n_tok]: sees a cell of this tile
};

static bool read_bias(const Call & call, Tile & tile, bool * seen) {
    const __m256 minus_inf = _mm256_set1_ps(NEG_INF);
    __m256       any[TILE / 8];
    for (int32_t c = 0; c < tile.n16; c += 8) {
        any[c / 8] = _mm256_setzero_ps();
    }
    for (int64_t t = 0; t < call.n_tok; ++t) {
        float * bias = tile.bias + t * TILE;
        memcpy(bias, call.bias + t * call.bias_stride + tile.first, (size_t) tile.n * sizeof(float));
        for (int32_t c = tile.n; c < tile.n16; ++c) {
            bias[c] = NEG_INF;
        }
        __m256 row = _mm256_setzero_ps();
        for (int32_t c = 0; c < tile.n16; c += 8) {
            const __m256 open = _mm256_cmp_ps(_mm256_load_ps(bias + c), minus_inf, _CMP_NEQ_UQ);
            row               = _mm256_or_ps(row, open);
            any[c / 8]        = _mm256_or_ps(any[c / 8], open);
        }
        tile.awake[t] = _mm256_movemask_ps(row) != 0;
    }
    int found = 0;
    for (int32_t c = 0; c < tile.n16; c += 8) {
        const int bits = _mm256_movemask_ps(any[c / 8]);
        found |= bits;
        for (int i = 0; i < 8; ++i) {
            seen[c + i] = (bits >> i & 1) != 0;
        }
    }
    return found != 0;
}

// Cells nobody sees become zero vectors, whatever their bytes are.
static void read_rows(const Call & call, Tile & tile, const bool * seen) {
    const int32_t k_pad  = cpu::padded(call.d_k);
    const int32_t v_pad  = cpu::padded(call.d_v);
    float *       rows   = (float *) cpu::scratch(SLOT_ROWS, (size_t) (TILE * k_pad) * sizeof(float));
    const Plan *  plan_k = call.coded != nullptr ? &cpu::plan_of(*call.coded->k) : nullptr;
    const Plan *  plan_v = call.coded != nullptr ? &cpu::plan_of(*call.coded->v) : nullptr;
    for (int32_t c = 0; c < tile.n16; ++c) {
        float *       k    = rows + c * k_pad;
        float *       v    = tile.values + c * v_pad;
        const int64_t cell = tile.first + c;
        if (!seen[c]) {
            memset(k, 0, (size_t) k_pad * sizeof(float));
            memset(v, 0, (size_t) v_pad * sizeof(float));
        } else if (call.coded != nullptr) {
            const AttendArgs & a = *call.coded;
            dequantize_row(*a.k, *plan_k, a.k_rows + cell * a.k_stride, k);
            dequantize_row(*a.v, *plan_v, a.v_rows + cell * a.v_stride, v);
        } else {
            widen_row(call.exact->k[cell], call.d_k, k);
            widen_row(call.exact->v[cell], call.d_v, v);
        }
    }
    for (int32_t c = 0; c < tile.n16; c += 8) {
        float * panel = tile.keys + (c / 16) * 16 * k_pad + c % 16;
        for (int64_t j = 0; j < call.d_k; j += 8) {
            transpose8(rows + c * k_pad + j, k_pad, panel + j * 16);
        }
    }
}

// Logits in x[n16] become weights; returns what the row's sum so far shrinks by.
static float soften(const Call & call, const Tile & tile, float * x, const float * bias, float shift, float slope,
                    float & m, float & z) {
    const __m256 minus_inf = _mm256_set1_ps(NEG_INF);
    __m256       top       = minus_inf;
    for (int32_t c = 0; c < tile.n16; c += 8) {
        __m256 l = _mm256_add_ps(_mm256_load_ps(x + c), _mm256_set1_ps(shift));
        if (call.softcap > 0.0f) {
            l = soft_cap(l, call.softcap);
        }
        const __m256 b = _mm256_load_ps(bias + c);
        l              = _mm256_fmadd_ps(_mm256_set1_ps(slope), b, l);
        l              = _mm256_blendv_ps(l, minus_inf, _mm256_cmp_ps(b, minus_inf, _CMP_EQ_OQ));
        top            = _mm256_max_ps(top, l);
        _mm256_store_ps(x + c, l);
    }
    const float tile_top = horizontal_max(top);
    const float new_m    = tile_top > m ? tile_top : m;
    if (new_m == NEG_INF) {
        memset(x, 0, (size_t) tile.n16 * sizeof(float));
        return 1.0f;
    }
    const float  shrink = m == NEG_INF ? 0.0f : exp_nonpositive(m - new_m);
    const __m256 base   = _mm256_set1_ps(new_m);
    __m256       total  = _mm256_setzero_ps();
    for (int32_t c = 0; c < tile.n16; c += 8) {
        const __m256 e = exp_nonpositive(_mm256_sub_ps(_mm256_load_ps(x + c), base));
        total          = _mm256_add_ps(total, e);
        _mm256_store_ps(x + c, e);
    }
    m = new_m;
    z = z * shrink + horizontal_sum(total);
    return shrink;
}

static void block_logits(const Call & call, int64_t row, int64_t n, const float * panel, float * out) {
    const float * q = call.q + row * call.d_k;
    switch (n) {
        case 1: logits<1>(q, call.d_k, call.d_k, panel, out, TILE); break;
        case 2: logits<2>(q, call.d_k, call.d_k, panel, out, TILE); break;
        case 3: logits<3>(q, call.d_k, call.d_k, panel, out, TILE); break;
        case 4: logits<4>(q, call.d_k, call.d_k, panel, out, TILE); break;
        case 5: logits<5>(q, call.d_k, call.d_k, panel, out, TILE); break;
        default: logits<6>(q, call.d_k, call.d_k, panel, out, TILE); break;
    }
}

static void block_outputs(const Call & call, const Tile & tile, int64_t row, int64_t n, const float * weight,
                          const float * shrink) {
    const int64_t ldv = cpu::padded(call.d_v);
    const int64_t lda = call.acc_stride;
    float *       acc = call.acc + row * lda;
    switch (n) {
        case 1: all_outputs<1>(weight, shrink, tile.n, tile.values, ldv, call.d_v, acc, lda); break;
        case 2: all_outputs<2>(weight, shrink, tile.n, tile.values, ldv, call.d_v, acc, lda); break;
        case 3: all_outputs<3>(weight, shrink, tile.n, tile.values, ldv, call.d_v, acc, lda); break;
        case 4: all_outputs<4>(weight, shrink, tile.n, tile.values, ldv, call.d_v, acc, lda); break;
        case 5: all_outputs<5>(weight, shrink, tile.n, tile.values, ldv, call.d_v, acc, lda); break;
        default: all_outputs<6>(weight, shrink, tile.n, tile.values, ldv, call.d_v, acc, lda); break;
    }
}

static bool any_awake(const Call & call, const Tile & tile, int64_t row, int64_t n) {
    for (int64_t t = row / call.n_group; t <= (row + n - 1) / call.n_group; ++t) {
        if (tile.awake[t]) {
            return true;
        }
    }
    return false;
}

// Query rows [row, row + n), n <= BLOCK, against one tile.
static void step(const Call & call, const Tile & tile, int64_t row, int64_t n, float * weight) {
    const int32_t k_pad = cpu::padded(call.d_k);
    bool          awake[BLOCK / MR];
    for (int64_t i = 0; i < n; i += MR) {
        awake[i / MR] = any_awake(call, tile, row + i, n - i < MR ? n - i : MR);
    }
    for (int32_t c = 0; c < tile.n16; c += 16) { // a panel stays in L1 while the block's queries pass
        for (int64_t i = 0; i < n; i += MR) {
            if (awake[i / MR]) {
                block_logits(call, row + i, n - i < MR ? n - i : MR, tile.keys + c * k_pad, weight + i * TILE + c);
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
            const int64_t r = row + i + k;
            shrink[k] = soften(call, tile, weight + (i + k) * TILE, tile.bias + r / call.n_group * TILE,
                               call.shift != nullptr ? call.shift[r] : 0.0f, call.slope[r % call.n_group], call.m[r],
                               call.z[r]);
        }
        block_outputs(call, tile, row + i, rows, weight + i * TILE, shrink);
    }
}

void attend_tiled(const Call & call) {
    const int64_t n_rows = call.n_tok * call.n_group;
    const int32_t k_pad  = cpu::padded(call.d_k);
    const int32_t v_pad  = cpu::padded(call.d_v);
    float *       weight = (float *) cpu::scratch(SLOT_WEIGHT, BLOCK * TILE * sizeof(float));
    bool          seen[TILE];
    Tile          tile;
    tile.keys   = (float *) cpu::scratch(SLOT_KEYS, (size_t) (TILE * k_pad) * sizeof(float));
    tile.values = (float *) cpu::scratch(SLOT_VALUES, (size_t) (TILE * v_pad) * sizeof(float));
    tile.bias   = (float *) cpu::scratch(SLOT_BIAS, (size_t) (call.n_tok * TILE) * sizeof(float));
    tile.awake  = (bool *) cpu::scratch(SLOT_SEEN, (size_t) call.n_tok * sizeof(bool));
    for (int64_t first = 0; first < call.n; first += TILE) {
        tile.first = first;
        tile.n     = (int32_t) (call.n - first < TILE ? call.n - first : TILE);
        tile.n16   = (tile.n + 15) / 16 * 16;
        if (!read_bias(call, tile, seen)) {
            continue;
        }
        read_rows(call, tile, seen);
        for (int64_t row = 0; row < n_rows; row += BLOCK) {
            step(call, tile, row, n_rows - row < BLOCK ? n_rows - row : BLOCK, weight);
        }
    }
}

} // namespace subkv::avx2

#endif
