// warp_pairs.cu: a prototype of attention where a warp owns a pair of tiles, to count its instructions (warp_pairs.py):
// one band of PAIR_BITS bits, heads of 128 elements, up to 4 query rows, one warp per block. Lines go from memory to
// registers; lane l decodes cells l / 4 and l / 4 + 8 of a quarter in octets 4 * (l % 4) to + 3 one after the other, so
// it has the choices before a code.
#include "decode.cuh"
#include "mask.cuh"

namespace subkv::cuda {

namespace {

constexpr int BITS = PAIR_BITS, N_OCTETS = 16, OCTET = BITS * LINE, PAIR = 2 * TILE;

// The bytes of registers q and q + 4 of the octet whose lines begin at `at`.
__device__ inline void read_levels(const uint8_t * at, int q, const Levels & levels, Choices & before,
                                   uint32_t (&out)[2]) {
    if constexpr (BITS <= 4) {
        nibble_levels<BITS>(nibbles_of<BITS>(Lines{ at }, q), levels, before, out);
    } else {
        uint32_t low, high;
        bytes_of<BITS>(Lines{ at }, q, low, high);
        byte_levels<BITS>(low, high, levels, before, out);
    }
}

__device__ inline uint32_t read_choices(const uint8_t * at, int q) {
    if constexpr (BITS <= TRELLIS_BITS) {
        return choices_of<BITS>(Lines{ at }, q);
    }
    return 0;
}

// 16 cells and 32 coefficients.
__device__ inline void add_key_product(int (&sum)[4], const uint32_t (&left)[2], const uint32_t (&left_8)[2],
                                       const Loaded<uint32_t, 2> & right) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+r"(sum[0]), "+r"(sum[1]), "+r"(sum[2]), "+r"(sum[3])
                 : "r"(left[0]), "r"(left_8[0]), "r"(left[1]), "r"(left_8[1]), "r"(right.of[0]), "r"(right.of[1]));
}

struct PairShared {
    Queries<1> queries;
    uint8_t *  weights; // [8][WEIGHT_PITCH]
    float *    sums;    // [N_OCTETS][WARP]

    __device__ PairShared() : queries(nullptr, 8 * N_OCTETS) {
        Carve shared{ block_memory };
        queries = Queries<1>(shared.take<uint32_t>(Queries<1>::size(8 * N_OCTETS)), 8 * N_OCTETS);
        weights = shared.take<uint8_t>(8 * WEIGHT_PITCH);
        sums    = shared.take<float>(N_OCTETS * WARP);
    }
};

// Of cells 32 * x + lane of a pair.
struct PairCells {
    float bias[4], k_scale[4], v_scale[4];

    __device__ PairCells(const Attend & a, const uint8_t * k, const uint8_t * v, int64_t first, int n) {
        const int     lane  = (int) threadIdx.x;
        const int32_t query = a.tokens[0].pos;
#pragma unroll
        for (int x = 0; x < 4; ++x) {
            bias[x]    = -INFINITY;
            k_scale[x] = v_scale[x] = 0.0f;
            if (32 * x + lane < n) {
                const int32_t key  = a.cell_pos[first + 32 * x + lane];
                const float   seen = mask_value(a, first + 32 * x + lane);
                const int     at   = 32 * (x % 2) + lane;
                bias[x]            = is_exact(a, key, query) ? -INFINITY : seen;
                k_scale[x]         = bias[x] == -INFINITY ? 0.0f : row_scale(k[x / 2 * a.k_stride + at]);
                v_scale[x]         = bias[x] == -INFINITY ? 0.0f : row_scale(v[x / 2 * a.v_stride + at]);
            }
        }
    }
};

// The sums of cells 16 * q + lane / 4 and 8 more of a tile: high and low bytes of query row lane % 4.
__device__ inline void multiply_quarter(const PairShared & s, const uint8_t * tile, int q, const Levels & levels,
                                        int (&sum)[4]) {
    const int       i = (int) threadIdx.x % 4, row = (int) threadIdx.x / 4;
    const uint8_t * at    = tile + LINE + 4 * row + 4 * i * OCTET;
    const uint8_t * from  = i == 0 ? at + N_OCTETS * OCTET : at; // the path is a circle
    const auto *    right = reinterpret_cast<const Loaded<uint32_t, 2> *>(s.queries.words + 2 * i * WARP + 4 * row);
    Choices         before[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        uint32_t one = read_choices(from - OCTET + 32 * e, q), two = read_choices(from - 2 * OCTET + 32 * e, q);
        if (i == 0) {
            one = one << 8 | one >> 28 | (one >> 20 & 16);
            two = two << 8 | two >> 28 | (two >> 20 & 16);
        }
        before[e] = { one, two };
    }
#pragma unroll
    for (int o = 0; o < 4; ++o) {
        uint32_t left[2], left_8[2];
        read_levels(at + o * OCTET, q, levels, before[0], left);
        read_levels(at + o * OCTET + 32, q, levels, before[1], left_8);
        add_key_product(sum, left, left_8, right[o / 2 * (WARP / 2) + o % 2]);
    }
}

// Logits of query row lane % 4: cells 64 * (b / 4) + 16 * (b % 4) + 8 * e + lane / 4. Returns the row's largest.
__device__ inline float make_logits(const PairShared & s, const Attend & a, int h, const uint8_t * k,
                                    const PairCells & cells, const Levels & levels, float (&logit)[8][2]) {
    const Layer & l = a.layer;
    const int     i = (int) threadIdx.x % 4, row = (int) threadIdx.x / 4, g = h * l.n_group + min(i, l.n_group - 1);
    const float   step = 0.5f * s.queries.step[i], shift = a.shift[g], slope = l.slope[g];
    float         top = -INFINITY;
#pragma unroll
    for (int b = 0; b < 8; ++b) {
        int sum[4] = {};
        multiply_quarter(s, k + b / 4 * a.k_stride, b % 4, levels, sum);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int   of    = 16 * (b % 2) + 8 * e + row;
            const float bias  = __shfl_sync(ALL, cells.bias[b / 2], of);
            const float scale = __shfl_sync(ALL, cells.k_scale[b / 2], of);
            const auto  twice =
                (int) (2 * (256 * (uint32_t) sum[2 * e] + (uint32_t) sum[2 * e + 1]) - s.queries.centre[i]);
            float x     = scale * step * (float) twice + shift;
            x           = capped(finite_or_nan(x), l.softcap) + slope * bias;
            logit[b][e] = i < l.n_group && bias != -INFINITY ? x : -INFINITY;
            top         = fmaxf(top, logit[b][e]);
        }
    }
    for (int to = FOUR; to < WARP; to *= 2) {
        top = fmaxf(top, __shfl_xor_sync(ALL, top, to));
    }
    return top;
}

// Moves the row to the pair's largest logit, and stores its weights.
__device__ inline void store_weights(const PairShared & s, const PairCells & cells, const float (&logit)[8][2],
                                     float top, Softmax & row) {
    const int   i = (int) threadIdx.x % 4, of_row = (int) threadIdx.x / 4;
    const float largest = fmaxf(fmaxf(cells.v_scale[0], cells.v_scale[1]), fmaxf(cells.v_scale[2], cells.v_scale[3]));
    const float weight_step = warp_max(fmaxf(largest, 0.0f)) * WEIGHT_STEP;
    const float old         = row.m;
    row.m                   = fmaxf(old, top);
    const float m           = row.m == -INFINITY ? 0.0f : row.m;
    row.keep                = exponential(old - m);
    row.plain_factor        = exponential(top - m);
    row.factor              = 0.5f * weight_step * row.plain_factor;
    row.z *= row.keep;
    const float base    = top == -INFINITY ? 0.0f : top;
    const float inverse = weight_step > 0.0f ? __fdividef(1.0f, weight_step) : 0.0f;
#pragma unroll
    for (int b = 0; b < 8; ++b) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const float scale = __shfl_sync(ALL, cells.v_scale[b / 2], 16 * (b % 2) + 8 * e + of_row) * inverse;
            const float p     = exponential(logit[b][e] - base);
            row.z             = fmaf(p, row.plain_factor, row.z);
            row.z             = p > 0.0f ? fmaf(scale, 0.0f, row.z) : row.z; // NaN if the value is
            const auto weight = (uint32_t) __float2int_rn(p * scale);
            uint8_t *  to = s.weights + 2 * i * WEIGHT_PITCH + of_row / 4 * (TILE / 2) + b % 2 * 16 + of_row % 4 * 2 +
                            b % 4 / 2 + b / 4 * TILE + e * 8;
            to[0]         = (uint8_t) (weight >> 8);
            to[WEIGHT_PITCH] = (uint8_t) weight;
        }
    }
}

// The right factors of the pair's values, as read_weights of decode.cuh.
__device__ inline Weights<1> pair_weights(const PairShared & s) {
    constexpr uint32_t ONES[2] = { BYTES, BYTES };
    const int          i = (int) threadIdx.x % 4, row = (int) threadIdx.x / 4;
    const auto *       from   = reinterpret_cast<const Sixteen *>(s.weights + row * WEIGHT_PITCH + i * (TILE / 2));
    int                sum[4] = {};
    Weights<1>         weights;
#pragma unroll
    for (int q = 0; q < QUARTERS; ++q) {
        weights.word[0][q][0] = from[q / 2].of[q % 2 * 2];
        weights.word[0][q][1] = from[q / 2].of[q % 2 * 2 + 1];
        add_deep_product<false>(sum, ONES, ONES, weights.word[0][q]);
    }
    weights.total[0] = 256 * sum[0] + sum[1];
    return weights;
}

__device__ inline void add_pair_values(const PairShared & s, const Attend & a, const uint8_t * tile,
                                       const Levels & levels, const Softmax & row) {
    const int        i = (int) threadIdx.x % 4, j = (int) threadIdx.x / 4;
    const Weights<1> weights = pair_weights(s);
    const uint8_t *  v       = tile + LINE + i / 2 * a.v_stride + i % 2 * 4;
    const uint8_t *  last    = v + 8 * ((j + 7) % 8);
    const uint32_t   zero    = (uint32_t) levels.zero * (uint32_t) weights.total[0];
    Choices          before[QUARTERS];
#pragma unroll
    for (int q = 0; q < QUARTERS; ++q) {
        before[q] = { read_choices(last + 15 * OCTET, q), read_choices(last + 14 * OCTET, q) };
    }
#pragma unroll 1
    for (int o = 0; o < N_OCTETS; o += 2) {
        const uint8_t * at     = v + 8 * j + o * OCTET;
        int             sum[4] = {};
#pragma unroll
        for (int q = 0; q < QUARTERS; ++q) {
            uint32_t words[2], words_8[2];
            read_levels(at, q, levels, before[q], words);
            read_levels(at + OCTET, q, levels, before[q], words_8);
            add_deep_product<true>(sum, words, words_8, weights.word[0][q]);
        }
#pragma unroll
        for (int y = 0; y < 2; ++y) {
            const auto twice = (int) (2 * (256 * (uint32_t) sum[2 * y] + (uint32_t) sum[2 * y + 1]) - zero);
            float &    x     = s.sums[(o + y) * WARP + threadIdx.x];
            x                = fmaf(row.factor, (float) twice, x * row.keep);
        }
    }
}

} // namespace

__global__ void __launch_bounds__(WARP) pairs_kernel(Job job) {
    const Attend &    a = job.c.a;
    const Layer &     l = a.layer;
    const int         h = (int) blockIdx.x, lane = (int) threadIdx.x, i = lane % 4;
    const int64_t     first = blockIdx.y * a.split;
    const int         cells = (int) (least(a.n_kv, first + a.split) - first);
    const HeadTiles & head  = job.of_head[h];
    const uint8_t *   k     = a.k_tiles + head.k_offset + first / TILE * a.k_stride;
    const uint8_t *   v     = a.v_tiles + head.v_offset + first / TILE * a.v_stride;
    const PairShared  s;
    const int         n_words = Queries<1>::size(8 * N_OCTETS);
    for (int j = lane; j < n_words; j += WARP) {
        s.queries.words[j] = a.words[h * n_words + j];
    }
    for (int j = lane; j < N_OCTETS * WARP; j += WARP) {
        s.sums[j] = 0.0f;
    }
    __syncwarp();
    const Levels levels = levels_of_width<BITS>(BITS <= TRELLIS_BITS);
    Softmax      row;
#pragma unroll 1
    for (int c0 = 0; c0 < cells; c0 += PAIR, k += 2 * a.k_stride, v += 2 * a.v_stride) {
        const PairCells of_pair(a, k, v, first + c0, cells - c0);
        float           logit[8][2];
        const float     top = make_logits(s, a, h, k, of_pair, levels, logit);
        store_weights(s, of_pair, logit, top, row);
        __syncwarp();
        add_pair_values(s, a, v, levels, row);
        __syncwarp();
    }
    const int64_t out        = (blockIdx.y * l.n_head_kv + h) * l.n_group + i;
    const float   value_step = ((const Plan *) l.plan)[h].value_step[0];
    for (int o = 0; o < N_OCTETS && i < l.n_group; ++o) {
        a.acc[out * l.width_v + 8 * o + lane / 4] = value_step * s.sums[o * WARP + lane];
    }
    for (int to = FOUR; to < WARP; to *= 2) {
        row.z += __shfl_xor_sync(ALL, row.z, to);
    }
    if (lane < FOUR && lane < l.n_group) {
        a.z[out] = row.z;
        a.m[out] = row.m;
    }
}

} // namespace subkv::cuda
