// exact_part.cuh: attention to the exact keys of a token, which are window rows and rows of this ubatch. combine merges
// its partial results. A block computes a part: some of the keys, FOUR query rows of a KV head, and ROW elements of the
// values. It reads each row once for the four query rows.
#pragma once

#include "exact.cuh"
#include "queries.cuh"

namespace subkv::cuda {

constexpr int KEYS_OF_WARP = WARP / FOUR; // keys at a time, with a logit in each lane
constexpr int EXACT_KEYS   = WARPS * KEYS_OF_WARP;

// The partial results in Attend::exact. Query rows are numbered as in a split of attend.
struct ExactParts {
    int64_t n_rows;
    int32_t n;       // parts of the keys, or 0 without exact keys
    int32_t columns; // parts of the values
    float * m;       // [n][n_rows]
    float * z;       // [n][n_rows]
    float * sums;    // [n][n_rows][d_v]

    // If a token is alone in its stream, its keys are in many parts, which wait at once. A prompt has enough blocks.
    __host__ __device__ ExactParts(const Layer & l, int64_t n_tok, int64_t n_tps, int32_t slots_of_seq, float * at) :
        n_rows(n_tok * l.n_head_kv * l.n_group), n(slots_of_seq == 0 ? 0 :
                                                   n_tps > 1         ? 1 :
                                                                       (slots_of_seq + EXACT_KEYS) / EXACT_KEYS),
        columns((l.d_v + ROW - 1) / ROW), m(at), z(at + n * n_rows), sums(at + 2 * n * n_rows) {}

    __host__ __device__ ExactParts(const Combine & b) :
        ExactParts(b.a.layer, b.a.n_stream * b.a.n_tps, b.a.n_tps, b.slots_of_seq, b.a.exact) {}

    // Returns the number of blocks of a token and KV head.
    __host__ __device__ int n_blocks(const Layer & l) const { return n * columns * ((l.n_group + FOUR - 1) / FOUR); }
};

constexpr int EXACT_CHUNK = 256; // elements of the keys that are in shared memory at a time

struct ExactShared {
    int        pitch;     // elements from one row of q to the next
    int        row_pitch; // elements from one of `rows` to the next; 16 bytes of padding let eight use all banks
    float *    q;         // [FOUR][pitch], scaled
    float *    weights;   // [EXACT_KEYS][FOUR]
    float *    room;      // [WARPS][FOUR]
    uint32_t * counted;   // [WARPS] four bits for each of a warp's keys, the query rows that give it weight
    uint16_t * rows;      // [EXACT_KEYS][row_pitch] of the keys, then of their values
    size_t     bytes;

    __host__ __device__ ExactShared(unsigned char * base, const Layer & l) :
        pitch(l.d_k + FOUR), row_pitch(max(min(l.d_k, EXACT_CHUNK), min(l.d_v, ROW)) + 8) {
        Carve shared{ base };
        q       = shared.take<float>((size_t) FOUR * pitch);
        weights = shared.take<float>((size_t) EXACT_KEYS * FOUR);
        room    = shared.take<float>((size_t) WARPS * FOUR);
        counted = shared.take<uint32_t>(WARPS);
        rows    = shared.take<uint16_t>((size_t) EXACT_KEYS * row_pitch);
        bytes   = shared.used;
    }
};

// The exact keys of a token: first the window slots of its sequence, then the ubatch's own tokens of its stream.
struct ExactKeys {
    const Combine & b;
    TokenRow        query;
    int32_t         first_token, n;

    __device__ ExactKeys(const Combine & b, int64_t token) :
        b(b), query(b.a.tokens[token]), first_token((int32_t) token / (int32_t) b.a.n_tps * (int32_t) b.a.n_tps),
        n(b.slots_of_seq + (int32_t) b.a.n_tps) {}

    __device__ const uint16_t * row(int i) const {
        const int held = query.first_slot + i, own = first_token + i - b.slots_of_seq;
        return i < b.slots_of_seq ? b.window + held * exact_width(b.a.layer) : b.fresh + own * exact_width(b.a.layer);
    }

    // Returns the cell of key i, or -1 if the token does not attend to it exactly.
    __device__ int32_t cell(int i) const {
        static_assert(sizeof(SlotRow) == sizeof(TokenRow) && offsetof(SlotRow, cell) == offsetof(TokenRow, cell));
        const int    known = min(i, n - 1); // All keys are read at once, also those beyond the last one.
        const int    held = query.first_slot + known, own = first_token + known - b.slots_of_seq;
        const void * key = known < b.slots_of_seq ? (const void *) (b.slots + held) : (const void *) (b.a.tokens + own);
        const auto   of  = *(const TokenRow *) key;
        return i < n && of.pos >= 0 && is_exact(b.a, of.pos, query.pos) ? of.cell : -1;
    }
};

// m and z of query row threadIdx.x % FOUR, where z is for the thread's keys, and sums of all four rows for element
// threadIdx.x of the values.
struct ExactState {
    float m = -INFINITY, z = 0.0f, sums[FOUR] = {};
};

// Starts to copy n elements of the row of key threadIdx.x / FOUR to shared memory. `row` is nullptr if the key has
// none.
__device__ inline void copy_exact_row(const ExactShared & s, const uint16_t * row, int n) {
    static_assert(EXACT_KEYS * FOUR == THREADS, "four threads copy a row");
    const int place = (int) threadIdx.x % FOUR * (int) (sizeof(Sixteen) / sizeof(uint16_t));
    copy_part((uint8_t *) (s.rows + (int) threadIdx.x / FOUR * s.row_pitch + place), (const uint8_t *) (row + place),
              row == nullptr ? 0 : (n - place) * (int) sizeof(uint16_t), FOUR);
}

// Returns the product of key threadIdx.x / FOUR and query row threadIdx.x % FOUR. `key` is the key's row in global
// memory.
__device__ inline float exact_product(const Layer & l, const ExactShared & s, const uint16_t * key) {
    const uint16_t * row       = s.rows + (int) threadIdx.x / FOUR * s.row_pitch;
    const float *    q         = s.q + (int) threadIdx.x % FOUR * s.pitch;
    float            sum[FOUR] = {};
#pragma unroll 1
    for (int first = 0; first < l.d_k; first += EXACT_CHUNK) {
        const int n = min(l.d_k - first, EXACT_CHUNK);
        __syncwarp(); // This warp has read its rows.
        copy_exact_row(s, key == nullptr ? key : key + first, n);
        copies_done<0>();
        __syncwarp();
#pragma unroll 1
        for (int j = 0; j < n; j += 8) {
            const Sixteen eight = *reinterpret_cast<const Sixteen *>(row + j);
#pragma unroll
            for (int i = 0; i < 8; i += FOUR) {
                const auto of_q = *reinterpret_cast<const Loaded<float, FOUR> *>(q + first + j + i);
#pragma unroll
                for (int y = 0; y < FOUR; ++y) {
                    const auto half = (uint16_t) (eight.of[(i + y) / 2] >> 16 * (y % 2));
                    sum[y]          = fmaf(of_q.of[y], from_half(half), sum[y]);
                }
            }
        }
    }
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// Adds the values in shared memory, whose rows have n elements. `keep` is the factor for the sums of query row
// threadIdx.x % FOUR.
__device__ inline void add_exact_values(const ExactShared & s, float keep, int n, ExactState & state) {
#pragma unroll
    for (int g = 0; g < FOUR; ++g) {
        state.sums[g] *= __shfl_sync(ALL, keep, g);
    }
    const uint16_t * value   = s.rows + min((int) threadIdx.x, n - 1);
    const float *    weights = s.weights;
#pragma unroll 1
    for (int w = 0; w < WARPS; ++w) {
        const uint32_t counted = s.counted[w];
#pragma unroll
        for (int r = 0; r < KEYS_OF_WARP; ++r, value += s.row_pitch, weights += FOUR) {
            const auto  p = *reinterpret_cast<const Loaded<float, FOUR> *>(weights);
            const float x = (counted >> FOUR * r & 15) != 0 ? from_half(*value) : 0.0f; // It may be NaN with weight 0.
#pragma unroll
            for (int g = 0; g < FOUR; ++g) {
                state.sums[g] = fmaf(p.of[g], x, state.sums[g]);
            }
        }
    }
}

// Adds EXACT_KEYS keys from `first` on. `column` is the first element of the values, and `slope` is that of the
// thread's query row.
__device__ inline void add_exact_keys(const ExactKeys & keys, const ExactShared & s, int64_t token, int first, int h,
                                      int column, float slope, ExactState & state) {
    const Attend & a    = keys.b.a;
    const Layer &  l    = a.layer;
    const int      warp = (int) threadIdx.x / WARP, lane = (int) threadIdx.x % WARP;
    const int      mine = first + (int) threadIdx.x / FOUR; // number of the thread's key
    const int32_t  cell = keys.cell(mine);
    const float    bias = cell < 0 ? -INFINITY : mask_value(a, token * a.n_kv + cell);
    const bool     seen = bias != -INFINITY;
    if (__syncthreads_or(seen) == 0) {
        return;
    }
    const int        n     = min(l.d_v - column, ROW);
    const uint16_t * row   = keys.row(mine);
    float            logit = exact_product(l, s, seen ? row + h * l.d_k : nullptr);
    __syncwarp(); // This warp has read its keys.
    copy_exact_row(s, seen ? row + exact_value(l, h) + column : nullptr, n);
    logit     = seen ? capped(finite_or_nan(logit), l.softcap) + slope * bias : -INFINITY;
    float top = logit;
    for (int step = FOUR; step < WARP; step *= 2) {
        top = fmaxf(top, __shfl_xor_sync(ALL, top, step));
    }
    if (lane < FOUR) {
        s.room[warp * FOUR + lane] = top;
    }
    __syncthreads();
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        top = fmaxf(top, s.room[w * FOUR + lane % FOUR]);
    }
    const float keep       = move_top(state.m, top);
    const float p          = seen ? expf(logit - state.m) : 0.0f;
    state.z                = state.z * keep + p; // NaN if p is NaN
    s.weights[threadIdx.x] = p > 0.0f ? p : 0.0f;
    s.counted[warp]        = __ballot_sync(ALL, p > 0.0f);
    copies_done<0>();
    __syncthreads();
    add_exact_values(s, keep, n, state);
    __syncthreads(); // All reads of shared memory are done.
}

// Writes a part of the query rows g0 to g0 + FOUR - 1, and of the values' elements from `first` on.
__device__ inline void store_exact(const ExactParts & to, const Layer & l, const ExactShared & s, ExactState & state,
                                   int64_t row, int g0, int first) {
    const int warp = (int) threadIdx.x / WARP, lane = (int) threadIdx.x % WARP;
    for (int step = FOUR; step < WARP; step *= 2) {
        state.z += __shfl_xor_sync(ALL, state.z, step);
    }
    if (lane < FOUR) {
        s.room[warp * FOUR + lane] = state.z;
    }
    static_assert(THREADS == ROW, "a thread per column");
    const int column = first + (int) threadIdx.x;
    float *   sums   = to.sums + (row + g0) * l.d_v + column;
#pragma unroll
    for (int g = 0; g < FOUR; ++g, sums += l.d_v) {
        if (column < l.d_v && g0 + g < l.n_group) {
            *sums = state.sums[g];
        }
    }
    __syncthreads();
    static_assert(WARPS == 4, "four sums");
    if (threadIdx.x < FOUR && g0 + (int) threadIdx.x < l.n_group && first == 0) {
        const float * room                 = s.room + threadIdx.x;
        const float   z                    = (room[0] + room[FOUR]) + (room[2 * FOUR] + room[3 * FOUR]);
        to.z[row + g0 + (int) threadIdx.x] = z;
        to.m[row + g0 + (int) threadIdx.x] = state_top(state.m, z);
    }
}

// Computes part number `block` of a token and KV head. ALONE says that the token is alone in its stream.
template <bool ALONE> __device__ inline void attend_exact(const Combine & b, int h, int64_t token, int block) {
    const Attend &    a = b.a;
    const Layer &     l = a.layer;
    const ExactParts  parts(b);
    const ExactShared s(block_memory, l);
    const ExactKeys   keys(b, token);
    const int         part  = (int) ((unsigned) block % (unsigned) parts.n);
    const int         rest  = (int) ((unsigned) block / (unsigned) parts.n);
    const int         g0    = (int) ((unsigned) rest / (unsigned) parts.columns) * FOUR;
    const int         first = (int) ((unsigned) rest % (unsigned) parts.columns) * ROW; // first element of the values
    const int         lane  = (int) threadIdx.x % WARP;
    const float       slope = l.slope[h * l.n_group + min(g0 + lane % FOUR, l.n_group - 1)];
#pragma unroll 1
    for (int j = (int) threadIdx.x; j < l.d_k; j += THREADS) {
        const float * q = a.q + (h * l.n_group + g0) * a.q_head + token * a.q_token + j;
#pragma unroll
        for (int g = 0; g < FOUR; ++g) {
            s.q[g * s.pitch + j] = l.scale * *q;
            q += g0 + g < l.n_group - 1 ? a.q_head : 0; // Missing query heads repeat the last one.
        }
    }
    __syncthreads();
    ExactState state;
    if (ALONE) {
        add_exact_keys(keys, s, token, part * EXACT_KEYS, h, first, slope, state);
    } else {
#pragma unroll 1
        for (int i = 0; i < keys.n; i += EXACT_KEYS) {
            add_exact_keys(keys, s, token, i, h, first, slope, state);
        }
    }
    const int64_t row = part * parts.n_rows + (h * a.n_stream * a.n_tps + token) * l.n_group;
    store_exact(parts, l, s, state, row, g0, first);
}

} // namespace subkv::cuda
