// combine.cu: merge the splits of attend, multiply by D_v, add the exact keys (stored window rows and those of this
// ubatch) and attention sinks, normalise. One block per query head and token: a large one, since there are
// few blocks and each waits for memory.
#include "exact.cuh"

namespace subkv::cuda {

namespace {

constexpr int BLOCK         = 512; // threads: few blocks must have many loads in flight
constexpr int BLOCK_WARPS   = BLOCK / WARP;
constexpr int GROUPS        = BLOCK / THREADS; // a group sums every GROUPS-th split, coefficient and value
constexpr int KEYS          = 256;             // exact keys, or splits, processed at a time
constexpr int KEYS_PER_WARP = 4;               // keys that a warp multiplies at a time

struct Key {
    const uint16_t * row; // nullptr: masked
    int32_t          cell;
};

// Exact key number i of a stream's token: first the window slots of its sequence, then the ubatch's own tokens.
__device__ Key exact_key(const Combine & b, int64_t token, int64_t i) {
    const int64_t slot  = b.a.tokens[token].first_slot + i;
    const int64_t other = token / b.a.n_tps * b.a.n_tps + i - b.slots_of_seq;
    const bool    held  = i < b.slots_of_seq;
    const int32_t cell  = held ? slot_cell(b, token, slot) : fresh_cell(b, token, other);
    const int64_t width = exact_width(b.a.layer);
    return { cell < 0 ? nullptr : held ? b.window + slot * width : b.fresh + other * width, cell };
}

struct Shared {
    int     pitch; // from one group's sums to the next's
    float * sums;  // [GROUPS][pitch] sums of the groups: coefficients, later outputs
    float * q;     // [d_k]
    float * logit; // [KEYS]
    Key *   keys;  // [KEYS]
    float * room;  // [BLOCK_WARPS]
    size_t  bytes;

    __host__ __device__ Shared(unsigned char * base, const Layer & l) {
        Carve shared{ base };
        pitch = max((int) l.width_v, (int) l.d_v);
        sums  = shared.take<float>((size_t) GROUPS * pitch);
        q     = shared.take<float>((size_t) l.d_k);
        logit = shared.take<float>(KEYS);
        keys  = shared.take<Key>(KEYS);
        room  = shared.take<float>(BLOCK_WARPS);
        bytes = shared.used;
    }
};

// Updates the state for keys whose largest logit is `top`; returns the factor for the old sums.
__device__ float move_top(float & m, float top) {
    const float larger = fmaxf(m, top);
    const float keep   = m == -INFINITY ? 0.0f : expf(m - larger);
    m                  = larger;
    return keep;
}

// OUT: output elements per thread.
template <int OUT> __global__ void __launch_bounds__(BLOCK) combine_kernel(Combine b) {
    const Attend &    a      = b.a;
    const Layer &     l      = a.layer;
    const int         hq     = (int) blockIdx.x;
    const int         h      = hq / l.n_group;
    const int64_t     token  = blockIdx.y;
    const int64_t     all    = a.n_stream * a.n_tps * l.n_group;
    const int64_t     row    = h * all + token * l.n_group + hq % l.n_group; // row in split 0
    const int64_t     stride = l.n_head_kv * all;                            // from one split to the next
    const HeadCodec & codec  = l.v[h];
    const int         me     = (int) threadIdx.x;
    const int         lane   = me % WARP;
    const int         group  = me / THREADS;
    const int         column = me % THREADS; // first coefficient or output of this thread

    const Shared s(block_memory, l);
    float *      mine  = s.sums + group * s.pitch;
    float *      q     = s.q;
    float *      logit = s.logit;
    Key *        keys  = s.keys;
    float *      room  = s.room;

    // A block waits for memory most of the time, so loops load several values before they need the first.
    float m = -INFINITY, z = 0.0f; // z: of this group
    for (int64_t i = me; i < a.n_split; i += BLOCK) {
        m = fmaxf(m, a.m[row + i * stride]);
    }
    for (int j = me; j < l.d_k; j += BLOCK) {
        q[j] = l.scale * a.q[hq * a.q_head + token * a.q_token + j];
    }
    m = block_max<BLOCK_WARPS>(m, room);
    for (int c = column; c < codec.rank; c += THREADS) {
        mine[c] = 0.0f;
    }
    float * weight  = logit; // of KEYS splits at a time
    float * split_z = reinterpret_cast<float *>(keys);
    for (int64_t first = 0; m != -INFINITY && first < a.n_split; first += KEYS) {
        const int n = (int) least(KEYS, a.n_split - first);
        for (int i = me; i < n; i += BLOCK) {
            weight[i]  = expf(a.m[row + (first + i) * stride] - m);
            split_z[i] = a.z[row + (first + i) * stride];
        }
        __syncthreads();
        for (int i = group; i < n; i += GROUPS) {
            z += weight[i] * split_z[i];
        }
        for (int c = column; c < codec.rank; c += THREADS) {
            float         sum = mine[c];
            const float * acc = a.acc + (row + first * stride) * l.width_v + c;
#pragma unroll 8
            for (int i = group; i < n; i += GROUPS) {
                sum += weight[i] * acc[i * stride * l.width_v];
            }
            mine[c] = sum;
        }
        __syncthreads();
    }
    __syncthreads();
    float * coef = s.sums;
    for (int c = me; c < codec.rank; c += BLOCK) {
        for (int i = 1; i < GROUPS; ++i) {
            coef[c] += s.sums[i * s.pitch + c];
        }
    }
    __syncthreads();
    float o[OUT] = {}; // this thread's part of the output: column, column + THREADS, ...
    for (int x = 0; x < OUT; ++x) {
#pragma unroll 8
        for (int i = group; column + x * THREADS < l.d_v && i < codec.rank; i += GROUPS) {
            o[x] = fmaf(coef[i], from_half(codec.decode.halves[i * l.d_v + column + x * THREADS]), o[x]);
        }
    }

    const int64_t n_keys = b.slots_of_seq > 0 ? b.slots_of_seq + a.n_tps : 0;
    for (int64_t first = 0; first < n_keys; first += KEYS) {
        const int n   = (int) least(KEYS, n_keys - first);
        bool      any = false;
        for (int i = me; i < n; i += BLOCK) {
            keys[i]  = exact_key(b, token, first + i);
            logit[i] = keys[i].row == nullptr ? -INFINITY : mask_value(a, token * a.n_kv + keys[i].cell);
            any      = any || logit[i] != -INFINITY;
        }
        if (__syncthreads_or(any) == 0) {
            continue;
        }
        float top = -INFINITY;
        for (int i0 = me / WARP; i0 < n; i0 += KEYS_PER_WARP * BLOCK_WARPS) {
            const uint16_t * key[KEYS_PER_WARP];
            float            bias[KEYS_PER_WARP], dot[KEYS_PER_WARP] = {};
#pragma unroll
            for (int x = 0; x < KEYS_PER_WARP; ++x) {
                const int i = i0 + x * BLOCK_WARPS;
                bias[x]     = i < n ? logit[i] : -INFINITY;
                key[x]      = bias[x] == -INFINITY ? reinterpret_cast<const uint16_t *>(q) : keys[i].row + h * l.d_k;
            }
            for (int j = lane; j < l.d_k; j += WARP) {
#pragma unroll
                for (int x = 0; x < KEYS_PER_WARP; ++x) {
                    dot[x] = fmaf(q[j], from_half(key[x][j]), dot[x]);
                }
            }
#pragma unroll
            for (int x = 0; x < KEYS_PER_WARP; ++x) {
                dot[x] = capped(finite_or_nan(warp_sum(dot[x])), l.softcap) + l.slope[hq] * bias[x];
                if (bias[x] != -INFINITY) {
                    logit[i0 + x * BLOCK_WARPS] = dot[x]; // the same in all lanes
                    top                         = fmaxf(top, dot[x]);
                }
            }
        }
        top              = block_max<BLOCK_WARPS>(top, room);
        const float keep = move_top(m, top);
        z *= keep;
        for (int x = 0; x < OUT; ++x) {
            o[x] *= keep;
        }
        for (int i = me; i < n; i += BLOCK) {
            logit[i] = logit[i] == -INFINITY ? 0.0f : expf(logit[i] - m);
        }
        __syncthreads();
#pragma unroll 8
        for (int i = group; i < n; i += GROUPS) {
            const float p    = logit[i];
            const bool  adds = p > 0.0f; // a value of weight 0 may be infinite
            // q: read and not used
            const auto * value = adds ? keys[i].row + exact_value(l, h) : reinterpret_cast<const uint16_t *>(q);
            z += p;
            for (int x = 0; x < OUT; ++x) {
                const int   j = column + x * THREADS;
                const float v = from_half(value[adds && j < l.d_v ? j : 0]);
                o[x]          = adds ? fmaf(p, v, o[x]) : o[x];
            }
        }
        __syncthreads();
    }

    __syncthreads(); // all reads of coefficients are done
    for (int x = 0; x < OUT; ++x) {
        if (column + x * THREADS < l.d_v) {
            mine[column + x * THREADS] = o[x];
        }
    }
    if (column == 0) {
        room[group] = z;
    }
    __syncthreads();
    z = 0.0f;
    for (int i = 0; i < GROUPS; ++i) {
        z += room[i];
    }
    float w = 1.0f;
    if (b.sinks != nullptr) { // a logit without a value
        w = move_top(m, b.sinks[hq]);
        z = z * w + expf(b.sinks[hq] - m);
    }
    w = z == 0.0f ? 0.0f : w / z; // a token without visible keys gets zeros, a lost row NaN
    for (int j = me; j < l.d_v; j += BLOCK) {
        float sum = s.sums[j];
        for (int i = 1; i < GROUPS; ++i) {
            sum += s.sums[i * s.pitch + j];
        }
        b.out[token * b.out_stride + hq * l.d_v + j] = w * sum;
    }
}

} // namespace

const char * combine(const Combine & args, void * stream) {
    const int64_t n_tok = args.a.n_stream * args.a.n_tps;
    if (n_tok == 0) {
        return nullptr;
    }
    const Layer & l = args.a.layer;
    const dim3    grid((unsigned) (l.n_head_kv * l.n_group), (unsigned) n_tok);
    const size_t  bytes = Shared(nullptr, l).bytes;
    constexpr int FEW   = DECODE_HEAD / THREADS;
    constexpr int MOST  = (MAX_HEAD_SIZE + THREADS - 1) / THREADS;
    if (l.d_v <= THREADS) {
        return launch(combine_kernel<1>, grid, bytes, stream, args, BLOCK);
    }
    return l.d_v <= FEW * THREADS ? launch(combine_kernel<FEW>, grid, bytes, stream, args, BLOCK) :
                                    launch(combine_kernel<MOST>, grid, bytes, stream, args, BLOCK);
}

} // namespace subkv::cuda
