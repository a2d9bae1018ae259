// combine.cu: merge the splits of attend, multiply by D_v, add the exact keys (stored window rows and those of this
// ubatch) and attention sinks, normalise. One block per query head and token: a large one, since there are
// few blocks and each waits for memory.
#include "exact.cuh"

namespace subkv::cuda {

namespace {

constexpr int BLOCK       = 512; // threads: few blocks must have many loads in flight
constexpr int BLOCK_WARPS = BLOCK / WARP;
constexpr int KEYS        = 256; // exact keys, or splits, processed at a time
static_assert(KEYS <= BLOCK, "one thread per key");

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
    int     pitch;  // from one warp's sums to the next's
    float * sums;   // [BLOCK_WARPS][pitch] sums of the warps: coefficients, later outputs
    float * q;      // [d_k]
    float * weight; // [KEYS] of splits
    float * z;      // [KEYS] of splits
    float * logit;  // [KEYS]
    Key *   keys;   // [KEYS]
    float * room;   // [BLOCK_WARPS]
    size_t  bytes;

    __host__ __device__ Shared(unsigned char * base, const Layer & l) {
        Carve shared{ base };
        pitch  = max((int) l.width_v, (int) l.d_v);
        sums   = shared.take<float>((size_t) BLOCK_WARPS * pitch);
        q      = shared.take<float>((size_t) l.d_k);
        weight = shared.take<float>(KEYS);
        z      = shared.take<float>(KEYS);
        logit  = shared.take<float>(KEYS);
        keys   = shared.take<Key>(KEYS);
        room   = shared.take<float>(BLOCK_WARPS);
        bytes  = shared.used;
    }
};

// Updates the state for keys whose largest logit is `top`; returns the factor for the old sums.
__device__ float move_top(float & m, float top) {
    const float larger = fmaxf(m, top);
    const float keep   = m == -INFINITY ? 0.0f : expf(m - larger);
    m                  = larger;
    return keep;
}

// OUT: parts of ROW output elements. Warp w sums every split, coefficient, key and value whose number modulo BLOCK_WARPS
// is w; a lane has COLUMNS elements of each part. A step of a loop loads before it computes, and where there is nothing
// left to load it loads a valid row that it does not use: a branch would wait for each load. What the first steps need
// is loaded as soon as its address is known.
template <int OUT> __global__ void __launch_bounds__(BLOCK) combine_kernel(Combine b) {
    const Attend &   a      = b.a;
    const Layer &    l      = a.layer;
    const int        hq     = (int) blockIdx.x;
    const int        h      = hq / l.n_group;
    const int64_t    token  = blockIdx.y;
    const int64_t    all    = a.n_stream * a.n_tps * l.n_group;
    const int64_t    row    = h * all + token * l.n_group + hq % l.n_group; // row in split 0
    const int64_t    stride = l.n_head_kv * all;                            // from one split to the next
    const int64_t    n_keys = b.slots_of_seq > 0 ? b.slots_of_seq + a.n_tps : 0;
    const int        rank   = l.v[h].rank;
    const uint16_t * decode = l.v[h].decode.halves;
    const int64_t    value  = exact_value(l, h);
    const float      slope  = l.slope[hq];
    constexpr int    ROWS   = OUT == 1 ? 8 : 2;                 // splits or coefficients that a warp loads at a time
    constexpr int    N_ROWS = OUT == 1 ? 10 : OUT == 2 ? 5 : 3; // keys or values
    const int        me     = (int) threadIdx.x;
    const int        warp   = me / WARP;
    const int        lane   = me % WARP;
    const int        column = COLUMNS * lane;

    const Shared s(block_memory, l);
    float *      mine = s.sums + warp * s.pitch;

    // The last threads find keys while the first wait for the splits' states.
    bool       any       = false;
    const auto find_keys = [&](int64_t first) {
        const int i = me - (BLOCK - KEYS);
        any         = false;
        if (i >= 0 && first + i < n_keys) {
            const Key key = exact_key(b, token, first + i);
            s.keys[i]     = key;
            s.logit[i]    = key.row == nullptr ? -INFINITY : mask_value(a, token * a.n_kv + key.cell);
            any           = s.logit[i] != -INFINITY;
        }
    };
    struct Splits {
        Loaded<float, 2> acc[ROWS][OUT][2];
    };
    struct Basis {
        FourHalves d[ROWS][OUT];
    };
    // of splits first + i0 + r * BLOCK_WARPS, the last ones again beyond n
    const auto load_splits = [&](int64_t first, int i0, int n) {
        Splits of;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const int64_t i = first + min(i0 + r * BLOCK_WARPS, n - 1);
#pragma unroll
            for (int x = 0; x < OUT; ++x) { // elements beyond the head's rank are not used
                const auto * from = reinterpret_cast<const Loaded<float, 2> *>(
                    a.acc + (row + i * stride) * l.width_v + min(column + x * ROW, l.width_v - COLUMNS));
                of.acc[r][x][0] = from[0];
                of.acc[r][x][1] = from[1];
            }
        }
        return of;
    };
    const auto load_basis = [&](int i0) {
        Basis of;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const uint16_t * from = decode + min(i0 + r * BLOCK_WARPS, rank - 1) * l.d_v;
#pragma unroll
            for (int x = 0; x < OUT; ++x) {
                of.d[r][x] = *reinterpret_cast<const FourHalves *>(from + min(column + x * ROW, l.d_v - COLUMNS));
            }
        }
        return of;
    };
    const int64_t at_split = row + least(me, a.n_split - 1) * stride; // state of split number `me`
    const float   split_m = a.m[at_split], split_z = a.z[at_split];
    const float   sink   = b.sinks == nullptr ? 0.0f : b.sinks[hq];
    Splits        splits = load_splits(0, warp, (int) least(KEYS, a.n_split));

    float m = -INFINITY, z = 0.0f; // z: of this warp's splits and keys
#pragma unroll 1
    for (int64_t i = me; i < a.n_split; i += BLOCK) {
        m = fmaxf(m, i == me ? split_m : a.m[row + i * stride]);
    }
#pragma unroll 1
    for (int j = me; j < l.d_k; j += BLOCK) {
        s.q[j] = l.scale * a.q[hq * a.q_head + token * a.q_token + j];
    }
    Basis basis = load_basis(warp);
    find_keys(0);
    m = block_max<BLOCK_WARPS>(m, s.room);

    float coef[OUT][COLUMNS] = {};
#pragma unroll 1
    for (int64_t first = 0; m != -INFINITY && first < a.n_split; first += KEYS) {
        const int n = (int) least(KEYS, a.n_split - first);
        if (me < n) {
            s.weight[me] = expf((first == 0 ? split_m : a.m[row + (first + me) * stride]) - m);
            s.z[me]      = first == 0 ? split_z : a.z[row + (first + me) * stride];
        }
        __syncthreads();
#pragma unroll 1
        for (int i0 = warp; i0 < n; i0 += ROWS * BLOCK_WARPS) {
            if (first > 0 || i0 > warp) {
                splits = load_splits(first, i0, n);
            }
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const int   i    = min(i0 + r * BLOCK_WARPS, n - 1);
                const bool  adds = i0 + r * BLOCK_WARPS < n;
                const float w    = s.weight[i];
                z                = adds ? fmaf(w, s.z[i], z) : z;
#pragma unroll
                for (int x = 0; x < OUT; ++x) {
#pragma unroll
                    for (int y = 0; y < COLUMNS; ++y) {
                        coef[x][y] = adds ? fmaf(w, splits.acc[r][x][y / 2].of[y % 2], coef[x][y]) : coef[x][y];
                    }
                }
            }
        }
        __syncthreads();
    }
    const auto store_sums = [&](const float (&sums)[OUT][COLUMNS], int size) {
        for (int x = 0; x < OUT; ++x) {
            for (int y = 0; y < COLUMNS && column + x * ROW < size; ++y) {
                mine[column + x * ROW + y] = sums[x][y];
            }
        }
        __syncthreads();
    };
    const auto sum_of_warps = [&](int i) {
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < BLOCK_WARPS; ++w) {
            sum += s.sums[w * s.pitch + i];
        }
        return sum;
    };
    store_sums(coef, rank);
#pragma unroll 1
    for (int c = me; c < rank; c += BLOCK) {
        s.sums[c] = sum_of_warps(c);
    }
    __syncthreads();

    float o[OUT][COLUMNS] = {};
#pragma unroll 1
    for (int i0 = warp; i0 < rank; i0 += ROWS * BLOCK_WARPS) {
        if (i0 > warp) {
            basis = load_basis(i0);
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const int   i = i0 + r * BLOCK_WARPS;
            const float c = i < rank ? s.sums[i] : 0.0f;
#pragma unroll
            for (int x = 0; x < OUT; ++x) {
#pragma unroll
                for (int y = 0; y < COLUMNS; ++y) {
                    o[x][y] = fmaf(c, from_half(basis.d[r][x].of[y]), o[x][y]);
                }
            }
        }
    }

    struct Values {
        int        column, last; // element of the first part; the last valid one
        FourHalves v[N_ROWS][OUT];

        __device__ void load(int r, const uint16_t * row) {
#pragma unroll
            for (int x = 0; x < OUT; ++x) {
                v[r][x] = *reinterpret_cast<const FourHalves *>(row + min(column + x * ROW, last));
            }
        }
    };
    const auto * nothing = reinterpret_cast<const uint16_t *>(a.q + hq * a.q_head + token * a.q_token); // [d_k] or more
#pragma unroll 1
    for (int64_t first = 0; first < n_keys; first += KEYS) {
        const int n = (int) least(KEYS, n_keys - first);
        if (first > 0) {
            find_keys(first);
        }
        if (__syncthreads_or(any) == 0) {
            continue;
        }
        Values values{ column, l.d_v - COLUMNS, {} };
        float  top = -INFINITY;
#pragma unroll 1
        for (int i0 = warp; i0 < n; i0 += N_ROWS * BLOCK_WARPS) {
            const uint16_t * key[N_ROWS];
            float            bias[N_ROWS], dot[N_ROWS] = {};
#pragma unroll
            for (int x = 0; x < N_ROWS; ++x) {
                const int i = i0 + x * BLOCK_WARPS;
                bias[x]     = i < n ? s.logit[i] : -INFINITY;
                key[x]      = bias[x] == -INFINITY ? nothing : s.keys[i].row + h * l.d_k;
            }
            if (i0 == warp) { // the first values, too
#pragma unroll
                for (int r = 0; r < N_ROWS; ++r) {
                    values.load(r, bias[r] == -INFINITY ? nothing : s.keys[i0 + r * BLOCK_WARPS].row + value);
                }
            }
#pragma unroll 1
            for (int j = column; j < l.d_k; j += ROW) {
                FourHalves k[N_ROWS];
#pragma unroll
                for (int x = 0; x < N_ROWS; ++x) {
                    k[x] = *reinterpret_cast<const FourHalves *>(key[x] + j);
                }
#pragma unroll
                for (int x = 0; x < N_ROWS; ++x) {
#pragma unroll
                    for (int y = 0; y < COLUMNS; ++y) {
                        dot[x] = fmaf(s.q[j + y], from_half(k[x].of[y]), dot[x]);
                    }
                }
            }
#pragma unroll
            for (int x = 0; x < N_ROWS; ++x) {
                dot[x] = warp_sum(dot[x]);
            }
#pragma unroll
            for (int x = 0; x < N_ROWS; ++x) {
                dot[x] = capped(finite_or_nan(dot[x]), l.softcap) + slope * bias[x];
                if (bias[x] != -INFINITY) {
                    s.logit[i0 + x * BLOCK_WARPS] = dot[x]; // the same in all lanes
                    top                           = fmaxf(top, dot[x]);
                }
            }
        }
        top              = block_max<BLOCK_WARPS>(top, s.room);
        const float keep = move_top(m, top);
        z *= keep;
        for (int x = 0; x < OUT; ++x) {
            for (int y = 0; y < COLUMNS; ++y) {
                o[x][y] *= keep;
            }
        }
        if (me < n) {
            s.logit[me] = s.logit[me] == -INFINITY ? 0.0f : expf(s.logit[me] - m);
        }
        __syncthreads();
#pragma unroll 1
        for (int i0 = warp; i0 < n; i0 += N_ROWS * BLOCK_WARPS) {
            float p[N_ROWS];
#pragma unroll
            for (int r = 0; r < N_ROWS; ++r) {
                const int i = i0 + r * BLOCK_WARPS;
                p[r]        = i < n ? s.logit[i] : 0.0f;
                if (i0 > warp) { // a value of weight 0 may be infinite
                    values.load(r, p[r] > 0.0f ? s.keys[i].row + value : nothing);
                }
            }
#pragma unroll
            for (int r = 0; r < N_ROWS; ++r) {
                z += p[r];
#pragma unroll
                for (int x = 0; x < OUT; ++x) {
#pragma unroll
                    for (int y = 0; y < COLUMNS; ++y) {
                        o[x][y] = p[r] > 0.0f ? fmaf(p[r], from_half(values.v[r][x].of[y]), o[x][y]) : o[x][y];
                    }
                }
            }
        }
        __syncthreads();
    }

    if (lane == 0) {
        s.room[warp] = z;
    }
    __syncthreads(); // all reads of coefficients are done
    store_sums(o, l.d_v);
    z = 0.0f;
    for (int w = 0; w < BLOCK_WARPS; ++w) {
        z += s.room[w];
    }
    float w = 1.0f;
    if (b.sinks != nullptr) { // a logit without a value
        w = move_top(m, sink);
        z = z * w + expf(sink - m);
    }
    w = z == 0.0f ? 0.0f : w / z; // a token without visible keys gets zeros, a lost row NaN
#pragma unroll 1
    for (int j = me; j < l.d_v; j += BLOCK) {
        b.out[token * b.out_stride + hq * l.d_v + j] = w * sum_of_warps(j);
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
    constexpr int FEW   = DECODE_HEAD / ROW;
    constexpr int MOST  = (MAX_HEAD_SIZE + ROW - 1) / ROW;
    const auto    size  = [&](auto n) { return max((int) l.d_v, (int) l.width_v) <= n * ROW; };
    return size(1)   ? launch(combine_kernel<1>, grid, bytes, stream, args, BLOCK) :
           size(FEW) ? launch(combine_kernel<FEW>, grid, bytes, stream, args, BLOCK) :
                       launch(combine_kernel<MOST>, grid, bytes, stream, args, BLOCK);
}

} // namespace subkv::cuda
