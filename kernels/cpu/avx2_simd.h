// avx2_simd.h: small pieces shared by the AVX2 files. Everything is static: a copy compiled with AVX2 flags must never
// be the one that other files link against. For the same reason these files use no standard library templates.
#pragma once

#include "../ref/rows.h"
#include "plan.h"

#include <immintrin.h>

namespace subkv::avx2 {

using cpu::GROUP;
using cpu::Group;
using cpu::Part;
using cpu::Plan;

constexpr float NEG_INF = -__builtin_inff();

static inline float horizontal_max(__m256 x) {
    __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y        = _mm_max_ps(y, _mm_movehl_ps(y, y));
    y        = _mm_max_ss(y, _mm_movehdup_ps(y));
    return _mm_cvtss_f32(y);
}

static inline float horizontal_sum(__m256 x) {
    __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y        = _mm_add_ps(y, _mm_movehl_ps(y, y));
    y        = _mm_add_ss(y, _mm_movehdup_ps(y));
    return _mm_cvtss_f32(y);
}

// Sums of eight vectors, given as four hadd'ed pairs.
static inline __m256 sum_pairs(__m256 h01, __m256 h23, __m256 h45, __m256 h67) {
    const __m256 low  = _mm256_hadd_ps(h01, h23);
    const __m256 high = _mm256_hadd_ps(h45, h67);
    return _mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31));
}

// exp(x) for x <= 0, relative error about 2 ulp; 0 below -87.3 and for -inf. Cody-Waite reduction, then Taylor to
// degree 7 on |r| <= ln(2)/2 (remainder 6e-9 relative at the ends; degree 6 would leave 1e-7).
static inline __m256 exp_nonpositive(__m256 x) {
    const __m256 floor_x = _mm256_set1_ps(-87.3f);
    const __m256 alive   = _mm256_cmp_ps(x, floor_x, _CMP_NLT_UQ); // true for NaN: it shall stay visible
    x                    = _mm256_max_ps(floor_x, x);
    const __m256 n =
        _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 r            = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693145752f), x);
    r                   = _mm256_fnmadd_ps(n, _mm256_set1_ps(1.42860677e-6f), r);
    __m256 p            = _mm256_set1_ps(1.98412698e-4f);
    p                   = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.38888889e-3f));
    p                   = _mm256_fmadd_ps(p, r, _mm256_set1_ps(8.33333333e-3f));
    p                   = _mm256_fmadd_ps(p, r, _mm256_set1_ps(4.16666667e-2f));
    p                   = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.66666667e-1f));
    p                   = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.5f));
    p                   = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
    p                   = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
    const __m256i power = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
    const __m256  y     = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), power));
    return _mm256_and_ps(y, alive);
}

static inline float exp_nonpositive(float x) {
    return _mm256_cvtss_f32(exp_nonpositive(_mm256_set1_ps(x)));
}

// cap * tanh(x / cap); absolute error a few ulp of cap.
static inline __m256 soft_cap(__m256 x, float cap) {
    const __m256 sign  = _mm256_and_ps(x, _mm256_set1_ps(-0.0f));
    const __m256 mag   = _mm256_mul_ps(_mm256_andnot_ps(_mm256_set1_ps(-0.0f), x), _mm256_set1_ps(1.0f / cap));
    const __m256 e     = exp_nonpositive(_mm256_mul_ps(mag, _mm256_set1_ps(-2.0f)));
    const __m256 one   = _mm256_set1_ps(1.0f);
    const __m256 ratio = _mm256_div_ps(_mm256_sub_ps(one, e), _mm256_add_ps(one, e));
    return _mm256_or_ps(_mm256_mul_ps(ratio, _mm256_set1_ps(cap)), sign);
}

static inline __m256i gather_part(const Part & part, const uint8_t * row) {
    const __m256i window = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *) (row + part.window)));
    const __m256i bytes =
        _mm256_and_si256(_mm256_shuffle_epi8(window, _mm256_load_si256((const __m256i *) part.shuffle)),
                         _mm256_load_si256((const __m256i *) part.mask));
    return _mm256_maddubs_epi16(bytes, _mm256_load_si256((const __m256i *) part.weight));
}

// Loads are the bottleneck of the inner loops, and a compiler likes to fold one load into every instruction that uses
// its value. A pinned value is loaded once.
static inline __m256i pin(__m256i x) {
#if defined(__GNUC__)
    __asm__("" : "+x"(x));
#endif
    return x;
}

static inline __m256 pin(__m256 x) {
    return _mm256_castsi256_ps(pin(_mm256_castps_si256(x)));
}

// Sums of multiply-adds to centred codes / unit (plan.h).
static inline void center(__m256i sum, __m256 offset_low, __m256 offset_high, __m256 & low, __m256 & high) {
    const __m256i exponent = _mm256_set1_epi16(0x4a80);
    low                    = _mm256_sub_ps(_mm256_castsi256_ps(_mm256_unpacklo_epi16(sum, exponent)), offset_low);
    high                   = _mm256_sub_ps(_mm256_castsi256_ps(_mm256_unpackhi_epi16(sum, exponent)), offset_high);
}

// Openers of one group: what unpacking it needs, ready for many rows. load() gives 16 values (zero beyond the end).
struct OneWindow { // a group of one part, everything in registers
    __m256i shuffle, mask, weight;
    __m256  offset_low, offset_high;
    int64_t window;

    OneWindow(const Part * parts, const Group & group) {
        const Part & part = parts[group.first_part];
        shuffle           = pin(_mm256_load_si256((const __m256i *) part.shuffle));
        mask              = pin(_mm256_load_si256((const __m256i *) part.mask));
        weight            = pin(_mm256_load_si256((const __m256i *) part.weight));
        offset_low        = pin(_mm256_load_ps(group.offset));
        offset_high       = pin(_mm256_load_ps(group.offset + 8));
        window            = part.window;
    }

    inline void load(const void * row, __m256 & low, __m256 & high) const {
        const __m128i * at    = (const __m128i *) ((const uint8_t *) row + window);
        const __m256i   bytes = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128(at)), shuffle);
        center(_mm256_maddubs_epi16(_mm256_and_si256(bytes, mask), weight), offset_low, offset_high, low, high);
    }
};

struct ManyWindows { // any number of parts
    const Part *  part;
    const Group * group;

    ManyWindows(const Part * parts, const Group & g) : part(parts + g.first_part), group(&g) {}

    inline void load(const void * row, __m256 & low, __m256 & high) const {
        __m256i sum = gather_part(part[0], (const uint8_t *) row);
        for (int32_t i = 1; i < group->n_parts; ++i) {
            sum = _mm256_add_epi16(sum, gather_part(part[i], (const uint8_t *) row));
        }
        center(sum, _mm256_load_ps(group->offset), _mm256_load_ps(group->offset + 8), low, high);
    }
};

struct Halves {
    int64_t at;
    bool    whole; // 16 values, not 8

    inline void load(const void * row, __m256 & low, __m256 & high) const {
        const __m128i * h = (const __m128i *) ((const uint16_t *) row + at);
        low               = _mm256_cvtph_ps(_mm_loadu_si128(h));
        high              = whole ? _mm256_cvtph_ps(_mm_loadu_si128(h + 1)) : _mm256_setzero_ps();
    }
};

// The rows of one side of a call. The same attention code runs on coded and on exact rows. open<Fast>(g) may be asked
// for Fast only if simple(g).
struct CodeRows {
    using Fast = OneWindow;
    using Slow = ManyWindows;
    const Plan & plan;

    inline bool simple(int32_t g) const { return plan.groups[g].n_parts == 1; }

    inline bool all_simple() const { return plan.single; }

    template <typename Opener> inline Opener open(int32_t g) const { return Opener(plan.parts, plan.groups[g]); }
};

struct HalfRows {
    using Fast = Halves;
    using Slow = Halves;
    int64_t d; // multiple of 8

    inline bool simple(int32_t) const { return true; }

    inline bool all_simple() const { return true; }

    template <typename Opener> inline Opener open(int32_t g) const { return Opener{ g * GROUP, g * GROUP + 8 < d }; }
};

// One attention call, coded or exact, as the loops see it.
struct Call {
    int64_t            n, n_tok, n_group;
    int64_t            d_k, d_v; // ranks or head sizes
    const float *      q;        // [n_tok*n_group][d_k]
    const float *      shift;    // [n_tok*n_group] or nullptr
    const float *      bias;
    int64_t            bias_stride;
    const float *      slope;
    float              softcap;
    float *            m;
    float *            z;
    float *            acc;
    int64_t            acc_stride;
    const AttendArgs * coded; // one of the two is set
    const ExactArgs *  exact;
};

void attend_small(const Call & call); // few query rows: straight from the codes
void attend_tiled(const Call & call); // many: tiles of dequantized rows

// kernels of the table
int64_t encode_rows(const HeadCodec & codec, const float * x, int64_t ldx, int64_t n, const int64_t * cells,
                    uint8_t * rows, int64_t row_stride);
void    dequantize_rows(const HeadCodec & codec, const uint8_t * rows, int64_t row_stride, int64_t n, float * c);
void project(const uint16_t * m, int64_t r, int64_t d, const float * x, int64_t ldx, int64_t n, float scale, float * y,
             int64_t ldy);
void reconstruct(const uint16_t * m, int64_t r, int64_t d, const float * e, float * o);
void moment(const float * x, int64_t ldx, int64_t n, int64_t d, double * s, double * sum);
void to_half(const float * x, uint16_t * h, int64_t n);

// One coded row, dequantized, to out[padded(rank)] (zero beyond rank).
void dequantize_row(const HeadCodec & codec, const Plan & plan, const uint8_t * row, float * out);

} // namespace subkv::avx2
