// encode.cuh: c = E x - offset of rows in half precision, quantized as kernels/ref/encode.cpp and trellis.cpp define.
// One block per row, KV head and side (K or V).
//
// A byte of a tile can have codes of four cells, which other blocks may write at the same time; no two cells share a
// bit. So the kernel exchanges bits atomically, a word at a time. Scale codes and halves have separate bytes.
#pragma once

#include "exact.cuh"
#include "tiles.cuh"

namespace subkv::cuda {

namespace {

constexpr int CANDIDATES = SCALE_CANDIDATES_BELOW + 1;
constexpr int STATES     = 4;  // of the trellis
constexpr int ROWS       = 16; // of a basis that a warp loads before it needs the first
constexpr int STEPS      = 8;  // places of a path whose errors a thread loads at a time; divides the number of places
static_assert(CANDIDATES * 8 <= THREADS, "one thread per candidate and lane");

__device__ float quantize(float c, float inverse, float zero) {
    return fminf(fmaxf(rintf(fmaf(c, inverse, zero)), 0.0f), 2.0f * zero);
}

// Lane `lane` of the squared error with scale s in bands of more than `beyond` bits: coefficients j with j % 8 == lane, in
// ascending order.
__device__ float lane_error(const HeadCodec & codec, const float * c, float s, int lane, int beyond) {
    float error = 0.0f;
#pragma unroll 1
    for (int i = 0; i < codec.n_bands; ++i) {
        const Band & band = codec.bands[i];
        if (band.bits == 16 || band.bits <= beyond) {
            continue;
        }
        const float step    = __fmul_rn(s, band.ratio);
        const float inverse = __fdiv_rn(1.0f, step);
        const float zero    = half_range(band.bits);
#pragma unroll 1
        for (int j = lane; j < band.n; j += 8) {
            const float x = c[band.first + j];
            const float e = fmaf(-step, quantize(x, inverse, zero) - zero, x);
            error         = fmaf(e, e, error);
        }
    }
    return error;
}

__device__ float of_lanes(const float * l) {
    return ((l[0] + l[4]) + (l[2] + l[6])) + ((l[1] + l[5]) + (l[3] + l[7]));
}

// c [rank] in shared memory -> scale code, the same in all threads. room: [CANDIDATES * 8 + WARPS] floats.
__device__ int choose_scale(const HeadCodec & codec, const float * c, float * room) {
    float reach     = 0.0f;
    bool  quantized = false;
#pragma unroll 1
    for (int i = 0; i < codec.n_bands; ++i) {
        const Band & band = codec.bands[i];
        if (band.bits == 16) {
            continue;
        }
        quantized        = true;
        const float full = __fmul_rn(band.ratio, half_range(band.bits));
#pragma unroll 1
        for (int j = (int) threadIdx.x; j < band.n; j += THREADS) {
            reach = fmaxf(reach, __fdiv_rn(fabsf(c[band.first + j]), full));
        }
    }
    if (!quantized) {
        return SCALE_ONE;
    }
    reach = block_max(reach, room + CANDIDATES * 8);
    // the smallest scale that reaches: at most eight codes above that of the power of two
    int k0 = min(max(SCALE_ONE + 8 * ((int) (__float_as_uint(reach) >> 23) - 127), 1), (int) SCALE_MOST);
#pragma unroll 1
    while (k0 < SCALE_MOST && row_scale((uint32_t) k0) < reach) {
        ++k0;
    }
    const int candidate = (int) threadIdx.x / 8;
    if (candidate < CANDIDATES && k0 - candidate >= 1) {
        room[threadIdx.x] = lane_error(codec, c, row_scale((uint32_t) (k0 - candidate)), (int) threadIdx.x % 8, 0);
    }
    __syncthreads();
    int   best       = k0;
    float best_error = INFINITY;
    for (int i = 0; i < CANDIDATES && k0 - i >= 1; ++i) { // ties to the larger scale
        const float error = of_lanes(room + i * 8);
        if (i == 0 || error < best_error) {
            best       = k0 - i;
            best_error = error;
        }
    }
    return best;
}

// Shared memory of the search of the path.
struct Search {
    Octets        octets;
    const float * c;         // [rank]
    uint32_t *    codes;     // [rank] first the four nearest levels, a byte each, later the code
    float *       error;     // [THREADS][STATES] errors of these levels; a thread has one place and scale
    uint32_t *    decisions; // [STATES ends][size / 8] a nibble per place, a bit per state
    float *       room;      // [CANDIDATES * 8]
    int           size;      // rank of the largest head

    __device__ int places() const { return 8 * octets.n_path; }

    __device__ int octet(int t) const { return octets.path[t % octets.n_path]; }

    __device__ int coefficient(int t) const { return 8 * octet(t) + t / octets.n_path; }
};

// The nearest level to the coefficient of place t in each subset of the levels, and its error in error [STATES].
__device__ uint32_t nearest(const Search & search, int t, float s, float * error) {
    const Octet octet = search.octets.octet[search.octet(t)];
    const float c     = search.c[search.coefficient(t)];
    const int   bits  = octet.bits;
    const float step  = __fmul_rn(s, octet.step);
    const float y     = __fmul_rn(c, __fdiv_rn(1.0f, step));
    const float size  = fabsf(y);
    float       p     = size;
    for (int n = 1; n < N_LINES; ++n) {
        const TrellisLine line = trellis_line(bits, n);
        p                      = fminf(p, fmaf(size, line.a, line.b));
    }
    p                = copysignf(p, y);
    const float half = (float) (1 << bits);
    uint32_t    all  = 0;
    for (int q = 0; q < STATES; ++q) {
        const float g = rintf(fmaf(p, 0.25f, 0.25f * (half - 0.5f - (float) q)));
        const int   i = 4 * (int) fminf(fmaxf(g, 0.0f), 0.5f * half - 1.0f) + q;
        error[q]      = fmaf(-step, (float) trellis_level(bits, i) + 0.5f, c);
        all |= (uint32_t) i << 8 * q;
    }
    return all;
}

__device__ int subset(int p, int x) {
    return 2 * (x ^ p >> 1) + (p & 1);
}

// Whether a lane of PATH_LANES begins at place t.
template <bool LANES> __device__ bool begins_lane(const Search & search, int t) {
    return LANES && t % search.octets.n_path == 0;
}

__device__ int least_state(const float (&cost)[STATES]) {
    int least = 0;
#pragma unroll
    for (int w = 1; w < STATES; ++w) { // ties to the smaller state
        least = cost[w] < cost[least] ? w : least;
    }
    return least;
}

// Errors of STEPS places in registers; the search waits for them once.
struct Errors {
    float4 of[STEPS];

    // error [STEPS] with `stride` floats from one place to the next
    __device__ Errors(const float * error, int stride) {
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
            of[i] = *reinterpret_cast<const float4 *>(error + i * stride);
        }
    }
};

// Extends cost by a place with an error per subset. Returns decisions: bit w: state w's branch is from the larger state.
__device__ uint32_t extend(const float4 & errors, float (&cost)[STATES]) {
    const float error[STATES] = { errors.x, errors.y, errors.z, errors.w };
    float       next[STATES];
    uint32_t    decisions = 0;
#pragma unroll
    for (int w = 0; w < STATES; ++w) {
        const int   x = w & 1, p = w >> 1;
        const float from_p = error[subset(p, x)], from_other = error[subset(p | 2, x)];
        const float a = fmaf(from_p, from_p, cost[p]);
        const float b = fmaf(from_other, from_other, cost[p | 2]);
        decisions |= (b < a ? 1u : 0u) << w;
        next[w] = b < a ? b : a;
    }
    for (int w = 0; w < STATES; ++w) {
        cost[w] = next[w];
    }
    return decisions;
}

__device__ float least_of(const float (&cost)[STATES]) {
    return fminf(fminf(cost[0], cost[1]), fminf(cost[2], cost[3]));
}

// A lane starts in state 0 with the least final cost of the lane before.
__device__ void begin_lane(float (&cost)[STATES]) {
    cost[0] = least_of(cost);
    cost[1] = cost[2] = cost[3] = INFINITY;
}

// The scale code, the same in all threads, near `middle`, which is the best one without a trellis. All threads prepare
// places, THREADS / TRELLIS_TRIED at a time; then one thread per scale takes the steps.
template <bool LANES>
__device__ int choose_path_scale(const Search & search, const HeadCodec & codec, int middle) {
    constexpr int AT_ONCE = THREADS / TRELLIS_TRIED;
    static_assert(AT_ONCE % STEPS == 0 && 8 % STEPS == 0, "loads of places do not pass the end");
    const int  me = (int) threadIdx.x, first = middle - TRELLIS_BELOW;
    const auto may          = [&](int candidate) { return first + candidate >= 1 && first + candidate <= SCALE_MOST; };
    float      cost[STATES] = {};
#pragma unroll 1
    for (int t0 = 0; t0 < search.places(); t0 += AT_ONCE) {
        const int t = t0 + me / TRELLIS_TRIED;
        if (t < search.places() && may(me % TRELLIS_TRIED)) {
            nearest(search, t, row_scale((uint32_t) (first + me % TRELLIS_TRIED)), search.error + STATES * me);
        }
        __syncthreads();
#pragma unroll 1
        for (int i = 0; me < TRELLIS_TRIED && i < AT_ONCE && t0 + i < search.places(); i += STEPS) {
            const Errors errors(search.error + STATES * (TRELLIS_TRIED * i + me), STATES * TRELLIS_TRIED);
#pragma unroll
            for (int x = 0; x < STEPS; ++x) {
                if (begins_lane<LANES>(search, t0 + i + x)) {
                    begin_lane(cost);
                }
                extend(errors.of[x], cost);
            }
        }
        __syncthreads();
    }
    if (me / 8 < TRELLIS_TRIED && may(me / 8)) {
        search.room[me] = lane_error(codec, search.c, row_scale((uint32_t) (first + me / 8)), me % 8, TRELLIS_BITS);
    }
    __syncthreads();
    if (me < TRELLIS_TRIED) {
        search.error[me] = may(me) ? __fadd_rn(least_of(cost), of_lanes(search.room + 8 * me)) : INFINITY;
    }
    __syncthreads();
    int   best  = middle;
    float least = INFINITY;
    for (int i = 0; i < TRELLIS_TRIED; ++i) { // ties to the smaller code
        if (search.error[i] < least) {
            best  = first + i;
            least = search.error[i];
        }
    }
    __syncthreads();
    return best;
}

// Stores the codes of the path of least cost at scale s. One thread per state in which a closed path may begin and end;
// with lanes, only the first thread's path is used.
template <bool LANES> __device__ void find_path(const Search & search, float s) {
    const int  me           = (int) threadIdx.x;
    float      cost[STATES] = { INFINITY, INFINITY, INFINITY, INFINITY };
    uint32_t * decisions    = search.decisions + me * (search.size / 8);
    uint32_t   ended        = 0; // final state of each lane of the path, two bits
#pragma unroll
    for (int w = 0; w < STATES; ++w) {
        cost[w] = w == me ? 0.0f : cost[w];
    }
#pragma unroll 1
    for (int t0 = 0; t0 < search.places(); t0 += THREADS) {
        if (t0 + me < search.places()) {
            search.codes[search.coefficient(t0 + me)] = nearest(search, t0 + me, s, search.error + STATES * me);
        }
        __syncthreads();
#pragma unroll 1
        for (int i = 0; me < STATES && i < THREADS && t0 + i < search.places(); i += STEPS) {
            const Errors errors(search.error + STATES * i, STATES);
            uint32_t     nibbles = 0;
#pragma unroll
            for (int x = 0; x < STEPS; ++x) {
                if (begins_lane<LANES>(search, t0 + i + x)) {
                    ended = ended << 2 | (uint32_t) least_state(cost);
                    begin_lane(cost);
                }
                nibbles |= extend(errors.of[x], cost) << 4 * x;
            }
            decisions[(t0 + i) / 8] = nibbles;
        }
        __syncthreads();
    }
#pragma unroll
    for (int w = 0; w < STATES; ++w) {
        if (w == me) {
            search.room[w] = cost[w];
        }
    }
    __syncthreads();
    if (me >= WARP) {
        return;
    }
    int ends = 0;
    for (int w = 1; !LANES && w < STATES; ++w) { // ties to the smaller state
        ends = search.room[w] < search.room[ends] ? w : ends;
    }
    // The first warp walks back. Each lane loads the levels of one place, so that no step waits for memory.
    int w = __shfl_sync(ALL, LANES ? least_state(cost) : ends, 0);
    ended = __shfl_sync(ALL, ended, 0);
#pragma unroll 1
    for (int t0 = (search.places() - 1) / WARP * WARP; t0 >= 0; t0 -= WARP) {
        const int      n      = min(WARP, search.places() - t0);
        const int      at     = search.coefficient(t0 + min(me, n - 1));
        const uint32_t levels = me < n ? search.codes[at] : 0; // a code is read only by the lane that replaces it
        uint32_t       code   = 0;
#pragma unroll 1
        for (int i0 = n - STEPS; i0 >= 0; i0 -= STEPS) {
            const uint32_t nibbles = search.decisions[ends * (search.size / 8) + (t0 + i0) / 8];
            uint32_t       of[STEPS];
#pragma unroll
            for (int i = 0; i < STEPS; ++i) {
                of[i] = __shfl_sync(ALL, levels, i0 + i);
            }
#pragma unroll
            for (int i = STEPS; i-- > 0;) {
                const int      x = w & 1, p = w >> 1 | (int) (nibbles >> (4 * i + w) & 1) << 1;
                const uint32_t level = of[i] >> 8 * subset(p, x) & 255;
                code                 = me == i0 + i ? (level ^ 2 * (p >> 1) ^ (p & 1)) >> 1 : code;
                w                    = p;
                if (begins_lane<LANES>(search, t0 + i0 + i)) {
                    w = (int) (ended & 3);
                    ended >>= 2;
                }
            }
        }
        if (me < n) {
            search.codes[at] = code;
        }
    }
}

// Sets the bits of `mask` in the word at `at` to those of `bits`; no other thread changes or reads these bits. Neither
// instruction waits for the word.
__device__ void put(uint8_t * at, uint32_t bits, uint32_t mask) {
    auto * word = reinterpret_cast<unsigned *>(at);
    atomicAnd(word, ~(mask & ~bits));
    atomicOr(word, bits & mask);
}

// Writes the codes [rank] of cell c to its tile.
__device__ void store_codes(const HeadCodec & codec, const uint32_t * codes, uint8_t * tile, int c) {
    // a word holds four coefficients of a key, but one of a value
    const int each = codec.value != 0 ? 1 : 4, words = 8 / each;
#pragma unroll 1
    for (int b = 0; b < codec.n_bands; ++b) {
        const Band & band = codec.bands[b];
#pragma unroll 1
        for (int i = (int) threadIdx.x; band.bits != 16 && i < band.n / each; i += THREADS) {
            const uint32_t * u     = codes + band.first + i * each;
            const int        j     = i % words; // word of the octet
            const int        rho   = codec.value != 0 ? c / 8 : 4 * j + c / 16;
            const int        at    = codec.value != 0 ? 8 * j + c % 8 / 4 * 4 : 4 * (c % 16);
            const uint32_t   ones  = codec.value != 0 ? 1u << 8 * (c % 4) : 0x01010101u;
            uint8_t *        lines = tile + TILE * (band.offset + i / words * band.bits);
            uint32_t         word  = 0;
            for (int x = 0; x < each; ++x) {
                word |= u[x] << (codec.value != 0 ? 8 * (c % 4) : 8 * x);
            }
            const TileFields fields = tile_fields(band.bits, rho);
#pragma unroll 1
            for (int x = 0; x < fields.n; ++x) {
                const TileField f    = fields.field[x];
                const uint32_t  mask = ones * ((1u << f.width) - 1);
                put(lines + f.line * LINE + at, (word >> f.from & mask) << f.shift, mask << f.shift);
            }
        }
    }
}

// Shared memory of a block.
struct EncodeShared {
    float * xs; // [d]
    float * c;  // [rank]
    Search  search;
    size_t  bytes;

    __host__ __device__ EncodeShared(unsigned char * base, const Layer & l) {
        search.size     = max(l.d_k, l.d_v);
        const auto size = (size_t) search.size;
        Carve      shared{ base };
        xs               = shared.take<float>(size);
        c                = shared.take<float>(size);
        search.octets    = Octets::take(shared, search.size);
        search.c         = c;
        search.codes     = shared.take<uint32_t>(size);
        search.error     = shared.take<float>(THREADS * STATES);
        search.decisions = shared.take<uint32_t>(STATES * size / 8);
        search.room      = shared.take<float>(CANDIDATES * 8 + WARPS);
        bytes            = shared.used;
    }
};

// The row of a KV head and a side, whose exact row is at `exact`, into a cell. x: its elements before they are rounded,
// stored at `exact`; nullptr: `exact` has them. LANES: paths are lanes (PATH_LANES)
template <bool LANES>
__device__ void encode_row(const Encode & a, const float * x, uint16_t * exact, int64_t cell, int h, bool value) {
    const Layer &     l      = a.layer;
    const HeadCodec & codec  = (value ? l.v : l.k)[h];
    const uint16_t *  basis  = codec.encode.halves; // [rank][d]
    const float *     offset = codec.offset;
    const int         d = codec.d, rank = codec.rank;
    const int         lane = (int) threadIdx.x % WARP;
    const int         in   = (int) (cell % TILE); // cell in its tile
    uint8_t *         tile = value ? a.v_tiles + cell / TILE * a.v_stride + l.v_offset[h] :
                                     a.k_tiles + cell / TILE * a.k_stride + l.k_offset[h];

    EncodeShared shared(block_memory, l);
    float *      xs     = shared.xs;
    float *      c      = shared.c;
    float *      room   = shared.search.room;
    Search &     search = shared.search;

    fill_octets(codec, search.octets);
    bool finite = true;
#pragma unroll 1
    for (int j = (int) threadIdx.x; j < d; j += THREADS) {
        const uint16_t half = x == nullptr ? exact[j] : exact_half(x[j]);
        xs[j]               = from_half(half);
        finite              = finite && (x == nullptr ? half != HALF_NAN : isfinite(x[j]));
    }
    const bool x_finite = __syncthreads_and(finite) != 0;

    finite    = x_finite;
    bool zero = true;
#pragma unroll 1
    for (int i0 = (int) threadIdx.x / WARP; i0 < rank; i0 += ROWS * WARPS) {
        float total[ROWS] = {};
#pragma unroll 1
        for (int j = COLUMNS * lane; j < d; j += COLUMNS * WARP) {
            FourHalves e[ROWS];
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                e[r] = *reinterpret_cast<const FourHalves *>(basis + min(i0 + r * WARPS, rank - 1) * d + j);
            }
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
#pragma unroll
                for (int y = 0; y < COLUMNS; ++y) {
                    total[r] = fmaf(from_half(e[r].of[y]), xs[j + y], total[r]);
                }
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            total[r] = warp_sum(total[r]);
        }
        float mine = 0.0f; // of lane r: total[r]
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            mine = lane == r ? total[r] : mine;
        }
        const int i = i0 + lane * WARPS;
        if (lane < ROWS && i < rank) {
            mine   = offset == nullptr ? mine : __fsub_rn(mine, offset[i]);
            finite = finite && isfinite(mine);
            zero   = zero && mine == 0.0f;
            c[i]   = mine;
        }
    }
    finite = __syncthreads_and(finite) != 0;
    zero   = __syncthreads_and(zero) != 0;
    if (!finite && threadIdx.x == 0 && (x != nullptr || x_finite)) { // store_and_attend has counted the others
        atomicAdd(l.n_bad, 1ull);
    }
    const bool live = finite && !zero;
    int        code = live ? choose_scale(codec, c, room) : 0;
    if (live && codec.path != PATH_NONE) {
        code = choose_path_scale<LANES>(search, codec, code);
        find_path<LANES>(search, row_scale((uint32_t) code));
    }
    const float s = row_scale((uint32_t) code);
    if (threadIdx.x == 0) {
        tile[in] = (uint8_t) (finite ? code : SCALE_NAN);
    }
#pragma unroll 1
    for (int i = 0; i < codec.n_bands; ++i) {
        const Band & band    = codec.bands[i];
        const float  inverse = live ? __fdiv_rn(1.0f, __fmul_rn(s, band.ratio)) : 0.0f;
#pragma unroll 1
        for (int j = (int) threadIdx.x; j < band.n; j += THREADS) {
            const float x = live ? c[band.first + j] : 0.0f;
            if (band.bits == 16) {
                uint8_t * half                      = tile + TILE * band.offset + 2 * (j * TILE + in);
                *reinterpret_cast<uint16_t *>(half) = to_half(fminf(fmaxf(x, -HALF_MAX), HALF_MAX));
            } else if (!live || !on_path(codec, band)) {
                search.codes[band.first + j] = live ? (uint32_t) quantize(x, inverse, half_range(band.bits)) : 0;
            }
        }
    }
    __syncthreads();
    store_codes(codec, search.codes, tile, in);

#pragma unroll 1
    for (int j = (int) threadIdx.x; x != nullptr && j < d; j += THREADS) {
        exact[j] = x_finite ? to_half(xs[j]) : HALF_NAN;
    }
}

} // namespace

} // namespace subkv::cuda
