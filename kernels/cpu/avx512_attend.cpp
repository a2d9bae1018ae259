// avx512_attend.cpp: the products of integer_attend.h with VNNI (VPDPBUSD), 16 cells or coefficients at a time.
#include "versions.h"

#if defined(SUBKV_X86)

#    include "avx512_codes.h"

namespace subkv::avx512 {

using cpu::LARGEST;
using cpu::Row;
using cpu::Tile;

constexpr int   VECS    = 4; // registers of 16 cells, or of 16 coefficients
constexpr float NEG_INF = cpu::MINUS_INF;

struct Isa;

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

// Integers u, |u| <= LARGEST, as signed bytes u = 256 * high + low.
static inline void split(__m512i u, void * high, void * low) {
    const __m512i h = _mm512_srai_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(128)), 8);
    _mm_store_si128((__m128i *) high, _mm512_cvtepi32_epi8(h));
    _mm_store_si128((__m128i *) low, _mm512_cvtepi32_epi8(_mm512_sub_epi32(u, _mm512_slli_epi32(h, 8))));
}

// sum += products of unsigned and signed bytes. GCC copies the sums of a loop from register to register when it may choose.
static inline void add_products(__m512i & sum, __m512i codes, __m512i bytes) {
#    if defined(__GNUC__)
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(bytes));
#    else
    sum = _mm512_dpbusd_epi32(sum, codes, bytes);
#    endif
}

// q[n64] times ratio as integers: bytes to high and low, the rest to row.
static void quantize_query(const float * q, const float * ratio, int32_t rank, const BytePlan & plan, int8_t * high,
                           int8_t * low, Row & row) {
    alignas(64) float x[MAX_HEAD_SIZE];
    const int32_t     n   = plan.n_groups * LANES;
    __m512            top = _mm512_setzero_ps();
    __mmask16         bad = 0;
    for (int32_t j = 0; j < n; j += 16) {
        const int32_t   left   = rank - j;
        const __mmask16 inside = left >= 16 ? 0xffff : left > 0 ? (__mmask16) ((1 << left) - 1) : 0;
        const __m512 v = _mm512_mul_ps(_mm512_maskz_loadu_ps(inside, q + j), _mm512_maskz_loadu_ps(inside, ratio + j));
        top            = _mm512_max_ps(top, _mm512_abs_ps(v));
        bad |= _mm512_cmp_ps_mask(_mm512_abs_ps(v), _mm512_set1_ps(__FLT_MAX__), _CMP_NLE_UQ);
        _mm512_store_ps(x + j, v);
    }
    const float  largest = _mm512_reduce_max_ps(top);
    const __m512 inverse = _mm512_set1_ps(largest > 1e-30f ? LARGEST / largest : 0.0f);
    __m512i      middle  = _mm512_setzero_si512(); // twice what centring takes off; 64-bit sums
    for (int32_t j = 0; j < n; j += 16) {
        const __m512i u = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_load_ps(x + j), inverse));
        split(u, high + j, low + j);
        const __m512i product = _mm512_mullo_epi32(u, _mm512_load_si512(plan.odd + j));
        middle                = _mm512_add_epi64(middle, _mm512_cvtepi32_epi64(_mm512_castsi512_si256(product)));
        middle                = _mm512_add_epi64(middle, _mm512_cvtepi32_epi64(_mm512_extracti64x4_epi64(product, 1)));
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
    __m512i high[ROWS][VECS];
    __m512i low[ROWS][VECS];
    for (int i = 0; i < ROWS; ++i) {
        for (int v = 0; v < VECS; ++v) {
            high[i][v] = _mm512_setzero_si512();
            low[i][v]  = _mm512_set1_epi32(row[i].start);
        }
    }
    for (int32_t j = 0; j < n_dwords; ++j) {
        __m512i c[VECS];
        for (int v = 0; v < VECS; ++v) {
            c[v] = _mm512_load_si512(codes + j * BLOCK + 64 * v);
        }
        for (int i = 0; i < ROWS; ++i) {
            const int32_t * bytes = (const int32_t *) (q + 2 * i * stride);
            const __m512i   h     = _mm512_set1_epi32(bytes[j]);
            const __m512i   l     = _mm512_set1_epi32(bytes[stride / 4 + j]);
            for (int v = 0; v < VECS; ++v) {
                add_products(high[i][v], c[v], h);
                add_products(low[i][v], c[v], l);
            }
        }
    }
    for (int i = 0; i < ROWS; ++i) {
        for (int v = 0; v < VECS; ++v) {
            const __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(high[i][v], 8), low[i][v]);
            _mm512_store_ps(tile.logit[i] + 16 * v,
                            _mm512_sub_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(row[i].half)));
        }
    }
}

// Dots of ROWS query rows become integer weights; m, z, shrink, unit and weights of the rows follow. Weights are taken
// relative to the tile's own top logit, so that they wait for nothing else.
template <int ROWS> static void soften(Tile & tile, float softcap, Row * row) {
    const __m512 minus_inf = _mm512_set1_ps(NEG_INF);
    __m512       x[ROWS][VECS];
    __m512       top[ROWS];
    for (int i = 0; i < ROWS; ++i) {
        top[i] = minus_inf;
        for (int v = 0; v < VECS; ++v) {
            const __m512 unit = _mm512_mul_ps(_mm512_load_ps(tile.scale_k + 16 * v), _mm512_set1_ps(row[i].delta));
            x[i][v] =
                _mm512_fmadd_ps(_mm512_load_ps(tile.logit[i] + 16 * v), unit, _mm512_load_ps(tile.common[i] + 16 * v));
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
            const __m512  e = exp_nonpositive(_mm512_sub_ps(x[i][v], base));
            const __m512  w = _mm512_mul_ps(e, _mm512_mul_ps(_mm512_load_ps(tile.scale_v + 16 * v), inverse));
            const __m512i u = _mm512_cvtps_epi32(w);
            total           = _mm512_add_ps(total, e);
            _mm512_store_ps(tile.logit[i] + 16 * v, e);
            sum = _mm512_add_epi32(sum, u);
            split(u, tile.high[i] + 16 * v, tile.low[i] + 16 * v);
        }
        cpu::take_tile<Isa>(tile, tile_top, _mm512_reduce_add_ps(total), _mm512_reduce_add_epi32(sum), row[i]);
    }
}

// sum[i][64 coefficients of a group] = shrink * sum + unit * sum_c weight[c] (code[c] - middle)
template <int ROWS>
static void add_group(const uint8_t * codes, int64_t stride, const int32_t * odd, const Row * row, float * sum,
                      int64_t sum_stride, const Tile & tile) {
    __m512i high[ROWS][VECS];
    __m512i low[ROWS][VECS];
    for (int i = 0; i < ROWS; ++i) {
        for (int v = 0; v < VECS; ++v) {
            high[i][v] = _mm512_setzero_si512();
            low[i][v]  = _mm512_setzero_si512();
        }
    }
    const int32_t n_quads = (tile.n + 3) / 4;
    for (int32_t c = 0; c < n_quads; ++c) {
        __m512i u[VECS];
        for (int v = 0; v < VECS; ++v) {
            u[v] = _mm512_load_si512(codes + c * stride + 64 * v);
        }
        for (int i = 0; i < ROWS; ++i) {
            const __m512i h = _mm512_set1_epi32(((const int32_t *) tile.high[i])[c]);
            const __m512i l = _mm512_set1_epi32(((const int32_t *) tile.low[i])[c]);
            for (int v = 0; v < VECS; ++v) {
                add_products(high[i][v], u[v], h);
                add_products(low[i][v], u[v], l);
            }
        }
    }
    for (int i = 0; i < ROWS; ++i) {
        const __m512 shrink = _mm512_set1_ps(row[i].shrink);
        const __m512 unit   = _mm512_set1_ps(0.5f * row[i].unit);
        for (int v = 0; v < VECS; ++v) { // twice the sum, since twice the middle is an integer; 64 cells fit 31 bits
            const __m512i twice = _mm512_add_epi32(_mm512_slli_epi32(high[i][v], 9), _mm512_slli_epi32(low[i][v], 1));
            const __m512i middle =
                _mm512_mullo_epi32(_mm512_set1_epi32(row[i].weights), _mm512_load_si512(odd + 16 * v));
            float *      at  = sum + i * sum_stride + 16 * v;
            const __m512 add = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(twice, middle)), unit);
            _mm512_store_ps(at, _mm512_fmadd_ps(shrink, _mm512_load_ps(at), add));
        }
    }
}

struct Isa {
    static constexpr int        LANES  = avx512::LANES;
    static constexpr int        MR     = 3; // 24 sums, 4 registers of codes
    static constexpr cpu::Order KEYS   = cpu::Order::NATURAL_512;
    static constexpr cpu::Order VALUES = cpu::Order::INTERLEAVED_512;

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

    static void unpack_keys(const BytePlan & plan, const Rows & rows, uint8_t * out) {
        avx512::unpack_keys(plan, rows, out);
    }

    static void unpack_values(const BytePlan & plan, const Rows & rows, uint8_t * out) {
        avx512::unpack_values(plan, rows, out);
    }

    static float read_scales(const Rows & rows, uint64_t seen, float * scale) {
        return avx512::read_scales(rows, seen, scale);
    }

    static void quantize_query(const float * q, const float * ratio, int32_t rank, const BytePlan & plan, int8_t * high,
                               int8_t * low, Row & row) {
        avx512::quantize_query(q, ratio, rank, plan, high, low, row);
    }

    template <int ROWS>
    static void dots(const uint8_t * codes, int32_t n_dwords, const int8_t * q, int64_t stride, const Row * row,
                     Tile & tile) {
        avx512::dots<ROWS>(codes, n_dwords, q, stride, row, tile);
    }

    template <int ROWS> static void soften(Tile & tile, float softcap, Row * row) {
        avx512::soften<ROWS>(tile, softcap, row);
    }

    template <int ROWS>
    static void add_values(const uint8_t * codes, const BytePlan & plan, const Row * row, float * sum,
                           int64_t sum_stride, const Tile & tile) {
        for (int32_t g = 0; g < plan.n_groups; ++g) {
            add_group<ROWS>(codes + g * BLOCK, plan.n_groups * BLOCK, plan.odd + g * LANES, row, sum + g * LANES,
                            sum_stride, tile);
        }
    }
};

static void attend(const AttendArgs & a) {
    cpu::attend_codes<Isa>(a, cpu::byte_plan_of(*a.k, Isa::KEYS), cpu::byte_plan_of(*a.v, Isa::VALUES));
}

// Not ops_avx2's pointer in the table: copying it would be code that runs when the library is loaded, on any processor.
static void attend_exact(const ExactArgs & a) {
    ops_avx2.attend_exact(a);
}

} // namespace subkv::avx512

namespace subkv {

const Ops ops_avx512 = {
    "avx512",       avx2::encode_rows,    avx2::dequantize_rows, avx2::project, avx2::reconstruct,
    avx512::attend, avx512::attend_exact, avx2::moment,          avx2::to_half, 1.0f / cpu::LARGEST
};

} // namespace subkv

#endif
