// avx512_attend.h: attention in integers with AVX-512 F, BW, DQ and VL, 16 cells or coefficients at a time. The including
// file gives how codes are unpacked and how they are multiplied:
//   Codes     Plan, keys_plan, values_plan, unpack_keys, unpack_values
//   Products  MR                           query rows that share loads
//             split(u, first, second)      16 integers, |u| <= LARGEST, as the dwords that two products take: 16 bytes each
//             Opened, open(codes)          64 codes as the products take them
//             Sum, start(x)                16 sums, all x
//             add(sum, opened, first, second), total(sum)
#pragma once

#include "avx2_simd.h"
#include "integer_attend.h"
#include "versions.h"

// Without a name: every including file is compiled for other instructions and keeps its copy to itself.
namespace subkv::avx512 {
namespace {

using cpu::BLOCK;
using cpu::LARGEST;
using cpu::Row;
using cpu::Rows;
using cpu::Tile;
using cpu::TILE;

constexpr int   LANES   = cpu::LANES_512; // codes of a register
constexpr int   VECS    = 4;              // registers of 16 cells, or of 16 coefficients
constexpr float NEG_INF = cpu::MINUS_INF;

static inline __m512 exp_nonpositive(__m512 x) { // as AVX2's, 0 below -87.3
    const __m512    floor_x = _mm512_set1_ps(-87.3f);
    const __mmask16 alive   = _mm512_cmp_ps_mask(x, floor_x, _CMP_NLT_UQ);
    const __m512    n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
    __m512          r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693145752f), x);
    r                 = _mm512_fnmadd_ps(n, _mm512_set1_ps(1.42860677e-6f), r);
    __m512 p          = _mm512_set1_ps(1.98412698e-4f);
    p                 = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.38888889e-3f));
    p                 = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.33333333e-3f));
    p                 = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.16666667e-2f));
    p                 = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.66666667e-1f));
    p                 = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
    p                 = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    p                 = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_maskz_scalef_ps(alive, p, n);
}

static inline __m512 soft_cap(__m512 x, float cap) {
    const __m512 mag   = _mm512_mul_ps(_mm512_abs_ps(x), _mm512_set1_ps(1.0f / cap));
    const __m512 e     = exp_nonpositive(_mm512_mul_ps(mag, _mm512_set1_ps(-2.0f)));
    const __m512 one   = _mm512_set1_ps(1.0f);
    const __m512 ratio = _mm512_div_ps(_mm512_sub_ps(one, e), _mm512_add_ps(one, e));
    return _mm512_or_ps(_mm512_mul_ps(ratio, _mm512_set1_ps(cap)), _mm512_and_ps(x, _mm512_set1_ps(-0.0f)));
}

// SCALES of 16 scale codes, exactly: an eighth root of two from a table, an exponent by bits.
static inline __m512 scales_of(__m128i codes) {
    const __m512i u     = _mm512_cvtepu8_epi32(codes);
    const __m512  roots = _mm512_castps256_ps512(_mm256_loadu_ps(SCALES + SCALE_ONE));
    const __m512  root  = _mm512_permutexvar_ps(u, _mm512_insertf32x8(roots, _mm512_castps512_ps256(roots), 1));
    const __m512i power =
        _mm512_slli_epi32(_mm512_sub_epi32(_mm512_srli_epi32(u, 3), _mm512_set1_epi32(SCALE_ONE / 8)), 23);
    return _mm512_maskz_mov_ps(_mm512_test_epi32_mask(u, u),
                               _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(root), power)));
}

// Registers of four cells' bytes to dwords of a byte of each: of dwords 4l + k, l = 0..3, to out + k * stride.
static inline void interleave(const __m512i r[4], uint8_t * out, int64_t stride) {
    const __m512i low_01  = _mm512_unpacklo_epi8(r[0], r[1]);
    const __m512i high_01 = _mm512_unpackhi_epi8(r[0], r[1]);
    const __m512i low_23  = _mm512_unpacklo_epi8(r[2], r[3]);
    const __m512i high_23 = _mm512_unpackhi_epi8(r[2], r[3]);
    _mm512_store_si512(out, _mm512_unpacklo_epi16(low_01, low_23));
    _mm512_store_si512(out + stride, _mm512_unpackhi_epi16(low_01, low_23));
    _mm512_store_si512(out + 2 * stride, _mm512_unpacklo_epi16(high_01, high_23));
    _mm512_store_si512(out + 3 * stride, _mm512_unpackhi_epi16(high_01, high_23));
}

template <typename Codes, typename Products> struct Isa : Codes {
    using Plan                 = typename Codes::Plan;
    static constexpr int LANES = avx512::LANES;
    static constexpr int MR    = Products::MR;

    static float exp_nonpositive(float x) { return avx2::exp_nonpositive(x); }

    static uint64_t open_cells(const float * bias, int32_t n) {
        uint64_t open = 0;
        for (int32_t c = 0; c < n; c += 16) {
            const __mmask16 inside = n - c >= 16 ? 0xffff : (__mmask16) ((1 << (n - c)) - 1);
            const __m512    b      = _mm512_maskz_loadu_ps(inside, bias + c);
            open |= (uint64_t) _mm512_mask_cmp_ps_mask(inside, b, _mm512_set1_ps(NEG_INF), _CMP_NEQ_UQ) << c;
        }
        return open;
    }

    static void widen8(const uint8_t * halves, float * x) {
        _mm256_storeu_ps(x, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) halves)));
    }

    // Scales of the tile's cells, 0 for cells not in `seen`, which may hold anything; returns the largest.
    static float read_scales(const Rows & rows, uint64_t seen, float * scale) {
        alignas(64) uint8_t code[TILE];
        for (int32_t c = 0; c < rows.n; ++c) {
            code[c] = *rows.at(c);
        }
        __m512 largest = _mm512_setzero_ps();
        for (int32_t c = 0; c < rows.n; c += 16) {
            const __mmask16 here = (__mmask16) (seen >> c);
            const __m512    s    = _mm512_maskz_mov_ps(here, scales_of(_mm_load_si128((const __m128i *) (code + c))));
            largest              = _mm512_max_ps(largest, s);
            _mm512_store_ps(scale + c, s);
        }
        return _mm512_reduce_max_ps(largest);
    }

    // q[n64] times ratio as integers: dwords of the products to first and second, the rest to row.
    static void quantize_query(const float * q, const float * ratio, int32_t rank, const Plan & plan, int8_t * first,
                               int8_t * second, Row & row) {
        alignas(64) float x[MAX_HEAD_SIZE];
        const int32_t     n   = plan.n_groups * LANES;
        __m512            top = _mm512_setzero_ps();
        __mmask16         bad = 0;
        for (int32_t j = 0; j < n; j += 16) {
            const int32_t   left   = rank - j;
            const __mmask16 inside = left >= 16 ? 0xffff : left > 0 ? (__mmask16) ((1 << left) - 1) : 0;
            const __m512    v =
                _mm512_mul_ps(_mm512_maskz_loadu_ps(inside, q + j), _mm512_maskz_loadu_ps(inside, ratio + j));
            top = _mm512_max_ps(top, _mm512_abs_ps(v));
            bad |= _mm512_cmp_ps_mask(_mm512_abs_ps(v), _mm512_set1_ps(__FLT_MAX__), _CMP_NLE_UQ);
            _mm512_store_ps(x + j, v);
        }
        const float  largest = _mm512_reduce_max_ps(top);
        const __m512 inverse = _mm512_set1_ps(largest > 1e-30f ? LARGEST / largest : 0.0f);
        __m512i      middle  = _mm512_setzero_si512(); // twice what centring takes off; 64-bit sums
        for (int32_t j = 0; j < n; j += 16) {
            const __m512i u = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_load_ps(x + j), inverse));
            Products::split(u, first + j, second + j);
            const __m512i product = _mm512_mullo_epi32(u, _mm512_load_si512(plan.odd + j));
            middle                = _mm512_add_epi64(middle, _mm512_cvtepi32_epi64(_mm512_castsi512_si256(product)));
            middle = _mm512_add_epi64(middle, _mm512_cvtepi32_epi64(_mm512_extracti64x4_epi64(product, 1)));
        }
        const int64_t twice = _mm512_reduce_add_epi64(middle);
        row.start           = (int32_t) -(twice >> 1);
        row.half            = (twice & 1) != 0 ? 0.5f : 0.0f;
        row.delta           = bad != 0 ? __builtin_nanf("") : largest / LARGEST;
    }

    // Logits without scale, shift and bias of ROWS query rows, in units of their delta.
    template <int ROWS>
    static void dots(const uint8_t * codes, int32_t n_dwords, const int8_t * q, int64_t stride, const Row * row,
                     Tile & tile) {
        typename Products::Sum sum[ROWS][VECS];
        for (int i = 0; i < ROWS; ++i) {
            for (int v = 0; v < VECS; ++v) {
                sum[i][v] = Products::start(row[i].start);
            }
        }
        for (int32_t j = 0; j < n_dwords; ++j) {
            typename Products::Opened c[VECS];
            for (int v = 0; v < VECS; ++v) {
                c[v] = Products::open(_mm512_load_si512(codes + j * BLOCK + 64 * v));
            }
            for (int i = 0; i < ROWS; ++i) {
                const int32_t * dwords = (const int32_t *) (q + 2 * i * stride);
                const __m512i   first  = _mm512_set1_epi32(dwords[j]);
                const __m512i   second = _mm512_set1_epi32(dwords[stride / 4 + j]);
                for (int v = 0; v < VECS; ++v) {
                    Products::add(sum[i][v], c[v], first, second);
                }
            }
        }
        for (int i = 0; i < ROWS; ++i) {
            for (int v = 0; v < VECS; ++v) {
                _mm512_store_ps(tile.logit[i] + 16 * v, _mm512_sub_ps(_mm512_cvtepi32_ps(Products::total(sum[i][v])),
                                                                      _mm512_set1_ps(row[i].half)));
            }
        }
    }

    // Dots of ROWS query rows become integer weights; m, z, shrink, unit and weights of the rows follow. Weights are taken
    // relative to the tile's own top logit, so that they wait for nothing else.
    template <int ROWS>
    static void soften(Tile & tile, float softcap, Row * row) {
        const __m512 minus_inf = _mm512_set1_ps(NEG_INF);
        __m512       x[ROWS][VECS];
        __m512       top[ROWS];
        for (int i = 0; i < ROWS; ++i) {
            top[i] = minus_inf;
            for (int v = 0; v < VECS; ++v) {
                const __m512 unit = _mm512_mul_ps(_mm512_load_ps(tile.scale_k + 16 * v), _mm512_set1_ps(row[i].delta));
                x[i][v]           = _mm512_fmadd_ps(_mm512_load_ps(tile.logit[i] + 16 * v), unit,
                                                    _mm512_load_ps(tile.common[i] + 16 * v));
                if (softcap > 0.0f) {
                    x[i][v] = soft_cap(x[i][v], softcap);
                }
                const __m512    bias = _mm512_load_ps(tile.bias[i] + 16 * v);
                const __mmask16 open = _mm512_cmp_ps_mask(bias, minus_inf, _CMP_NEQ_UQ);
                const __m512    l    = _mm512_fmadd_ps(_mm512_set1_ps(row[i].slope), bias, x[i][v]);
                x[i][v]              = _mm512_mask_blend_ps(open, minus_inf, l); // l is NaN where closed and slope 0
                top[i]               = _mm512_max_ps(top[i], x[i][v]);
            }
        }
        for (int i = 0; i < ROWS; ++i) {
            const float tile_top = _mm512_reduce_max_ps(top[i]);
            if (!(tile_top > NEG_INF)) {
                cpu::skip_tile(tile, i, row[i]);
                continue;
            }
            const __m512 base    = _mm512_set1_ps(tile_top);
            const __m512 inverse = _mm512_set1_ps(tile.largest_v > 0.0f ? LARGEST / tile.largest_v : 0.0f);
            __m512       total   = _mm512_setzero_ps();
            __m512i      sum     = _mm512_setzero_si512();
            for (int v = 0; v < VECS; ++v) {
                const __m512  e = avx512::exp_nonpositive(_mm512_sub_ps(x[i][v], base));
                const __m512  w = _mm512_mul_ps(e, _mm512_mul_ps(_mm512_load_ps(tile.scale_v + 16 * v), inverse));
                const __m512i u = _mm512_cvtps_epi32(w);
                total           = _mm512_add_ps(total, e);
                _mm512_store_ps(tile.logit[i] + 16 * v, e);
                sum = _mm512_add_epi32(sum, u);
                Products::split(u, tile.first[i] + 16 * v, tile.second[i] + 16 * v);
            }
            cpu::take_tile<Isa>(tile, tile_top, _mm512_reduce_add_ps(total), _mm512_reduce_add_epi32(sum), row[i]);
        }
    }

    template <int ROWS>
    static void add_values(const uint8_t * codes, const Plan & plan, const Row * row, float * sum, int64_t sum_stride,
                           const Tile & tile) {
        for (int32_t g = 0; g < plan.n_groups; ++g) {
            add_group<ROWS>(codes + g * BLOCK, plan.n_groups * BLOCK, plan.odd + g * LANES, row, sum + g * LANES,
                            sum_stride, tile);
        }
    }

private:
    // sum[i][64 coefficients of a group] = shrink * sum + unit * sum_c weight[c] (code[c] - middle)
    template <int ROWS>
    static void add_group(const uint8_t * codes, int64_t stride, const int32_t * odd, const Row * row, float * sum,
                          int64_t sum_stride, const Tile & tile) {
        typename Products::Sum group[ROWS][VECS];
        for (int i = 0; i < ROWS; ++i) {
            for (int v = 0; v < VECS; ++v) {
                group[i][v] = Products::start(0);
            }
        }
        const int32_t n_quads = (tile.n + 3) / 4;
        for (int32_t c = 0; c < n_quads; ++c) {
            typename Products::Opened u[VECS];
            for (int v = 0; v < VECS; ++v) {
                u[v] = Products::open(_mm512_load_si512(codes + c * stride + 64 * v));
            }
            for (int i = 0; i < ROWS; ++i) {
                const __m512i first  = _mm512_set1_epi32(((const int32_t *) tile.first[i])[c]);
                const __m512i second = _mm512_set1_epi32(((const int32_t *) tile.second[i])[c]);
                for (int v = 0; v < VECS; ++v) {
                    Products::add(group[i][v], u[v], first, second);
                }
            }
        }
        for (int i = 0; i < ROWS; ++i) {
            const __m512 shrink = _mm512_set1_ps(row[i].shrink);
            const __m512 unit   = _mm512_set1_ps(0.5f * row[i].unit);
            for (int v = 0; v < VECS;
                 ++v) { // twice the sum, since twice the middle is an integer; 64 cells fit 31 bits
                const __m512i twice = _mm512_slli_epi32(Products::total(group[i][v]), 1);
                const __m512i middle =
                    _mm512_mullo_epi32(_mm512_set1_epi32(row[i].weights), _mm512_load_si512(odd + 16 * v));
                float *      at  = sum + i * sum_stride + 16 * v;
                const __m512 add = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(twice, middle)), unit);
                _mm512_store_ps(at, _mm512_fmadd_ps(shrink, _mm512_load_ps(at), add));
            }
        }
    }
};

template <typename Codes, typename Products> static void attend(const AttendArgs & a) {
    cpu::attend_codes<Isa<Codes, Products>>(a, Codes::keys_plan(*a.k), Codes::values_plan(*a.v));
}

// Not ops_avx2's pointer in the table: copying it would be code that runs when the library is loaded, on any processor.
static void attend_exact(const ExactArgs & a) {
    ops_avx2.attend_exact(a);
}

template <typename Codes, typename Products> constexpr Ops table(const char * name) {
    return { name,          avx2::encode_rows, avx2::dequantize_rows,
             avx2::project, avx2::reconstruct, attend<Codes, Products>,
             attend_exact,  avx2::moment,      avx2::to_half,
             1.0f / LARGEST };
}

} // namespace
} // namespace subkv::avx512
