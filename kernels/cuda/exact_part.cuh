// exact_part.cuh: attention to the exact keys of a token (stored window rows and those of this ubatch): partial results
// that combine merges. A part is a block's work: some of the keys, FOUR query rows of a KV head, and ROW elements of the
// values. Each row is read once for the four.
#pragma once

#include "exact.cuh"
#include "queries.cuh"

namespace subkv::cuda {

constexpr int KEYS_OF_WARP = WARP / FOUR; // at a time: a logit for each lane
constexpr int EXACT_KEYS   = WARPS * KEYS_OF_WARP;

// The partial results in Attend::exact. Query rows are numbered as in a split of attend.
struct ExactParts {
    int64_t n_rows;
    int32_t n;       // parts of the keys; 0: no exact keys
    int32_t columns; // parts of the values
    float * m;       // [n][n_rows]
    float * z;       // [n][n_rows]
    float * sums;    // [n][n_rows][d_v]

    // A token alone in its stream waits for all its keys at once; a prompt has enough blocks.
    __host__ __device__ ExactParts(const Layer & l, int64_t n_tok, int64_t n_tps, int32_t slots_of_seq, float * at) :
        n_rows(n_tok * l.n_head_kv * l.n_group), n(slots_of_seq == 0 ? 0 :
                                                   n_tps > 1         ? 1 :
                                                                       (slots_of_seq + EXACT_KEYS) / EXACT_KEYS),
        columns((l.d_v + ROW - 1) / ROW), m(at), z(at + n * n_rows), sums(at + 2 * n * n_rows) {}

    __host__ __device__ ExactParts(const Combine & b) :
        ExactParts(b.a.layer, b.a.n_stream * b.a.n_tps, b.a.n_tps, b.slots_of_seq, b.a.exact) {}

    // Of a token and KV head.
    __host__ __device__ int n_blocks(const Layer & l) const { return n * columns * ((l.n_group + FOUR - 1) / FOUR); }
};

struct ExactShared {
    int     pitch; // elements of q
    float * q;     // [pitch][FOUR], scaled, then zeros
    float * sums;  // [WARPS][FOUR][ROW]
    float * room;  // [WARPS][FOUR]
    size_t  bytes;

    __host__ __device__ ExactShared(unsigned char * base, const Layer & l) : pitch((l.d_k + ROW - 1) / ROW * ROW) {
        Carve shared{ base };
        q     = shared.take<float>((size_t) FOUR * pitch);
        sums  = shared.take<float>((size_t) WARPS * FOUR * ROW);
        room  = shared.take<float>((size_t) WARPS * FOUR);
        bytes = shared.used;
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

    // Its cell; -1: the token does not attend to it exactly.
    __device__ int32_t cell(int i) const {
        static_assert(sizeof(SlotRow) == sizeof(TokenRow) && offsetof(SlotRow, cell) == offsetof(TokenRow, cell));
        const int    held = query.first_slot + i, own = first_token + i - b.slots_of_seq;
        const void * key = i < b.slots_of_seq ? (const void *) (b.slots + held) : (const void *) (b.a.tokens + own);
        const auto   of  = *(const TokenRow *) key;
        return i < n && of.pos >= 0 && is_exact(b.a, of.pos, query.pos) ? of.cell : -1;
    }
};

// The state of query row lane % FOUR, z of this warp's keys; and its lane's elements of the values' sums of all rows.
struct ExactState {
    float m = -INFINITY, z = 0.0f, sums[FOUR][COLUMNS] = {};
};

using RowPointers = const uint16_t * [KEYS_OF_WARP];

// COLUMNS elements of each of a warp's keys or values.
struct ExactRows {
    Loaded<uint32_t, COLUMNS / 2> of[KEYS_OF_WARP]; // two in a register

    __device__ float operator()(int r, int y) const { return from_half((uint16_t) (of[r].of[y / 2] >> 16 * (y % 2))); }

    __device__ void load(const RowPointers & row, int element) {
#pragma unroll
        for (int r = 0; r < KEYS_OF_WARP; ++r) {
            of[r] = *reinterpret_cast<const Loaded<uint32_t, COLUMNS / 2> *>(row[r] + element);
        }
    }
};

// The product of key lane / FOUR and query row lane % FOUR.
__device__ inline float exact_product(const Layer & l, const ExactShared & s, const RowPointers & row, int h) {
    const int column         = COLUMNS * ((int) threadIdx.x % WARP);
    float     products[WARP] = {};
#pragma unroll 1
    for (int first = 0; first < l.d_k; first += ROW) {
        ExactRows rows;
        rows.load(row, h * l.d_k + min(first + column, l.d_k - COLUMNS));
#pragma unroll
        for (int y = 0; y < COLUMNS; ++y) {
            const auto q = *reinterpret_cast<const Loaded<float, FOUR> *>(s.q + (first + column + y) * FOUR);
#pragma unroll
            for (int r = 0; r < KEYS_OF_WARP; ++r) {
                const float key = rows(r, y);
#pragma unroll
                for (int g = 0; g < FOUR; ++g) {
                    products[r * FOUR + g] = fmaf(q.of[g], key, products[r * FOUR + g]);
                }
            }
        }
    }
    return sum_of_each(products);
}

// Adds values of the weights p of key lane / FOUR and query row lane % FOUR.
__device__ inline void add_exact_values(float p, float keep, const ExactRows & values, ExactState & state) {
    const uint32_t counts = __ballot_sync(ALL, p > 0.0f);
    p                     = p > 0.0f ? p : 0.0f; // z is NaN where p is
    state.z *= keep;
#pragma unroll
    for (int g = 0; g < FOUR; ++g) {
        const float keep_row = __shfl_sync(ALL, keep, g);
#pragma unroll
        for (int y = 0; y < COLUMNS; ++y) {
            state.sums[g][y] *= keep_row;
        }
    }
#pragma unroll
    for (int r = 0; r < KEYS_OF_WARP; ++r) {
        const bool any = (counts >> FOUR * r & 15) != 0; // a value of weight 0 may be NaN
        float      value[COLUMNS];
#pragma unroll
        for (int y = 0; y < COLUMNS; ++y) {
            value[y] = any ? values(r, y) : 0.0f;
        }
#pragma unroll
        for (int g = 0; g < FOUR; ++g) {
            const float weight = __shfl_sync(ALL, p, r * FOUR + g);
#pragma unroll
            for (int y = 0; y < COLUMNS; ++y) {
                state.sums[g][y] = fmaf(weight, value[y], state.sums[g][y]);
            }
        }
    }
}

// Adds EXACT_KEYS keys from `first` on. element: the lane's first one of the values; slope: of the lane's query row.
__device__ inline void add_exact_keys(const ExactKeys & keys, const ExactShared & s, int64_t token, int first, int h,
                                      int element, float slope, ExactState & state) {
    const Attend & a    = keys.b.a;
    const Layer &  l    = a.layer;
    const int      warp = (int) threadIdx.x / WARP, lane = (int) threadIdx.x % WARP;
    const int      mine = first + warp * KEYS_OF_WARP; // of this warp
    const int32_t  cell = keys.cell(mine + lane / FOUR);
    const float    bias = cell < 0 ? -INFINITY : mask_value(a, token * a.n_kv + cell);
    const uint32_t seen = __ballot_sync(ALL, bias != -INFINITY);
    if (__syncthreads_or(seen != 0) == 0) {
        return;
    }
    RowPointers row; // of unseen keys another one
#pragma unroll
    for (int r = 0; r < KEYS_OF_WARP; ++r) {
        row[r] = keys.row((seen >> FOUR * r & 1) != 0 ? mine + r : first);
    }
    float logit = exact_product(l, s, row, h);
    logit       = bias == -INFINITY ? bias : capped(finite_or_nan(logit), l.softcap) + slope * bias;
    float top   = logit;
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
    const float keep = move_top(state.m, top);
    const float p    = bias == -INFINITY ? 0.0f : expf(logit - state.m);
    ExactRows   values;
    values.load(row, (int) exact_value(l, h) + min(element, l.d_v - COLUMNS));
    add_exact_values(p, keep, values, state);
    state.z += p;
    __syncthreads(); // all reads of `room` are done
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
#pragma unroll
    for (int g = 0; g < FOUR; ++g) {
#pragma unroll
        for (int y = 0; y < COLUMNS; ++y) {
            s.sums[(warp * FOUR + g) * ROW + COLUMNS * lane + y] = state.sums[g][y];
        }
    }
    __syncthreads();
    const auto sum = [](const float * x, int step) {
        return (x[0] + x[step]) + (x[2 * step] + x[3 * step]); // of the warps
    };
    static_assert(WARPS == 4, "four sums");
    const int column = first + (int) threadIdx.x;
#pragma unroll 1
    for (int g = 0; g < FOUR && g0 + g < l.n_group && column < l.d_v; ++g) {
        to.sums[(row + g0 + g) * l.d_v + column] = sum(s.sums + g * ROW + threadIdx.x, FOUR * ROW);
    }
    if (threadIdx.x < FOUR && g0 + (int) threadIdx.x < l.n_group && first == 0) {
        const float z                      = sum(s.room + threadIdx.x, FOUR);
        to.z[row + g0 + (int) threadIdx.x] = z;
        to.m[row + g0 + (int) threadIdx.x] = state_top(state.m, z);
    }
    static_assert(THREADS == ROW, "a thread per column");
}

// Part number `block` (of n_blocks) of a token and KV head. ALONE: the token is alone in its stream.
template <bool ALONE> __device__ inline void attend_exact(const Combine & b, int h, int64_t token, int block) {
    const Attend &    a = b.a;
    const Layer &     l = a.layer;
    const ExactParts  parts(b);
    const ExactShared s(block_memory, l);
    const ExactKeys   keys(b, token);
    const int         part  = block % parts.n;
    const int         first = block / parts.n % parts.columns * ROW; // element of the values
    const int         g0    = block / parts.n / parts.columns * FOUR;
    const int         lane  = (int) threadIdx.x % WARP;
    const float       slope = l.slope[h * l.n_group + min(g0 + lane % FOUR, l.n_group - 1)];
#pragma unroll 1
    for (int j = (int) threadIdx.x; j < s.pitch; j += THREADS) {
#pragma unroll
        for (int g = 0; g < FOUR; ++g) { // without a query head: the last one again
            const float * q   = a.q + (h * l.n_group + min(g0 + g, l.n_group - 1)) * a.q_head + token * a.q_token;
            s.q[j * FOUR + g] = j < l.d_k ? l.scale * q[j] : 0.0f;
        }
    }
    __syncthreads();
    ExactState state;
    if (ALONE) {
        add_exact_keys(keys, s, token, part * EXACT_KEYS, h, first + COLUMNS * lane, slope, state);
    } else {
#pragma unroll 1
        for (int i = 0; i < keys.n; i += EXACT_KEYS) {
            add_exact_keys(keys, s, token, i, h, first + COLUMNS * lane, slope, state);
        }
    }
    const int64_t row = part * parts.n_rows + (h * a.n_stream * a.n_tps + token) * l.n_group;
    store_exact(parts, l, s, state, row, g0, first);
}

} // namespace subkv::cuda
