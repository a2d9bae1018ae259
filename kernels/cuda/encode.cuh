// encode.cuh: computes c = E x - offset of rows in half precision, and quantizes c as kernels/ref/encode.cpp and
// trellis.cpp define. There is one block per KV head, side (K or V) and up to ROWS_MOST rows. It reads the basis once,
// and one warp searches the paths of all rows at once, with a lane per row and scale or state.
//
// A byte of a tile can have codes of four cells, which other blocks may write at the same time. No two cells share a
// bit, so the kernel writes bits atomically, a word at a time. Scale codes and halves have separate bytes.
#pragma once

#include "exact.cuh"
#include "tiles.cuh"

namespace subkv::cuda {

namespace {

constexpr int CANDIDATES = SCALE_CANDIDATES_BELOW + 1;
constexpr int STATES     = 4; // states of the trellis
constexpr int STEPS      = 8; // places of a path whose errors a lane loads at a time; divides the number of places
constexpr int ROWS_MOST  = WARP / STATES; // rows of a block; a warp has a lane per row and state
constexpr int TOGETHER   = 4;             // rows of a basis that a warp loads before it needs the first
constexpr int ENTRIES    = 512;           // maximum entries of walk()
static_assert(TOGETHER == 4 && ROWS_MOST * TOGETHER == WARP, "a lane has one sum");
static_assert(TRELLIS_TRIED == STATES, "lanes of scales are those of states");
static_assert(ENTRIES % (WARP * STEPS) == 0 && THREADS % (4 * STEPS) == 0 && 8 % STEPS == 0,
              "loads of places do not pass the end");

// nearest_integer(x) is rintf(x) for |x| < 2^22, and a number beyond 2^21 for larger ones, in two fast instructions.
// For x >= 0, this integer is in the lower bits of x + ROUNDER.
constexpr float ROUNDER = 12582912.0f;

__device__ float nearest_integer(float x) {
    return __fsub_rn(__fadd_rn(x, ROUNDER), ROUNDER);
}

__device__ float quantize(float c, float inverse, float zero) {
    return fminf(fmaxf(nearest_integer(fmaf(c, inverse, zero)), 0.0f), 2.0f * zero);
}

// Returns lane `lane` of the squared error with scale s in bands of more than `beyond` bits. It sums coefficients j
// with j % 8 == lane in ascending order.
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
#pragma unroll 4
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

// Constants of the search in an octet on the path.
struct alignas(16) PathOctet {
    float of_line[N_LINES - 1]; // TrellisLine::b of lines 1 and higher
    float twice, thrice;        // a level's magnitude k is max(k, 2 k - twice, 3 k - thrice), as in trellis_level
    float half;                 // half the number of levels in the alphabet
    float step;                 // distance of two adjacent levels near 0, relative to the row's scale
};

// The distance of two adjacent levels near 0, and its inverse.
struct alignas(8) Distance {
    float is, inverse;
};

// Returns the floats of a lane in EncodeShared::sums. With eight rows, reads and writes have no bank conflicts.
__host__ __device__ constexpr int sum_stride(int rows) {
    return TOGETHER * rows + 4;
}

// Shared memory of a block. `size` is the size of a key or value, the larger one.
struct EncodeShared {
    float *     c;                               // [rows][size]
    PathOctet * octet;                           // [size / 8]
    uint16_t *  order;                           // [size] coefficients in the order of places
    int32_t *   scale;                           // [ROWS_MOST] scale codes
    uint32_t *  flags;                           // [ROWS_MOST] X_FINITE, FINITE, LIVE
    int         size, row_bits, entries, n_path; // entries of walk(), octets on the path
    // used until c is computed
    float * xs;   // [rows][size]
    float * sums; // [WARPS][WARP][sum_stride]
    // used after that, in the same memory
    uint32_t * codes;     // [rows][size] first the indices of the four nearest levels, a byte each, later the code
    uint32_t * decisions; // [size / 8][rows * STATES] a nibble for each place, with a bit for each state
    Distance * distance;  // [rows * TRELLIS_TRIED][size / 8] distances of levels by scale and octet
    float *    errors;    // [rows][CANDIDATES][8] errors of scales
    float4 *   nearest;   // [entries] errors of the nearest levels at places (walk), in the memory of `errors`
    size_t     bytes;

    __host__ __device__ EncodeShared(unsigned char * base, const Layer & l, int row_bits) : row_bits(row_bits) {
        size           = max(l.d_k, l.d_v);
        entries        = min(ENTRIES, THREADS << row_bits);
        const size_t n = (size_t) size << row_bits, n_octets = (size_t) size / 8;
        Carve        shared{ base };
        c            = shared.take<float>(n);
        octet        = shared.take<PathOctet>(n_octets);
        order        = shared.take<uint16_t>((size_t) size);
        scale        = shared.take<int32_t>(ROWS_MOST);
        flags        = shared.take<uint32_t>(ROWS_MOST);
        Carve before = shared, after = shared;
        xs                = before.take<float>(n);
        sums              = before.take<float>((size_t) (WARPS * WARP * sum_stride(1 << row_bits)));
        codes             = after.take<uint32_t>(n);
        decisions         = after.take<uint32_t>(n_octets * STATES << row_bits);
        distance          = after.take<Distance>(n_octets * TRELLIS_TRIED << row_bits);
        Carve search      = after;
        errors            = after.take<float>((size_t) (CANDIDATES * 8) << row_bits);
        nearest           = search.take<float4>((size_t) entries);
        const size_t last = after.used > search.used ? after.used : search.used;
        bytes             = before.used > last ? before.used : last;
    }
};

constexpr uint32_t X_FINITE = 1, FINITE = 2, LIVE = 4; // flags of a row: x is finite, c is finite, c is also not all 0

// Fills octet, order and n_path, which are valid after the next barrier.
__device__ void fill_path(const HeadCodec & codec, EncodeShared & s) {
    s.n_path = 0;
    for (int b = 0; b < codec.n_bands; ++b) {
        s.n_path += on_path(codec, codec.bands[b]) ? codec.bands[b].n / 8 : 0;
    }
    int place = 0;
    for (int b = 0; b < codec.n_bands; ++b) {
        const Band & band = codec.bands[b];
        if (!on_path(codec, band)) {
            continue;
        }
        for (int i = (int) threadIdx.x; i < band.n; i += THREADS) {
            s.order[i % 8 * s.n_path + place + i / 8] = (uint16_t) (band.first + i);
            if (i % 8 == 0) {
                const float twice = (float) trellis_double(band.bits) + 0.5f;
                const float other = (float) trellis_triple(band.bits) + 0.5f;
                PathOctet   octet;
#pragma unroll
                for (int n = 1; n < N_LINES; ++n) {
                    octet.of_line[n - 1] = trellis_line(band.bits, n).b;
                }
                octet.twice                   = fminf(twice, other);
                octet.thrice                  = twice + other;
                octet.half                    = (float) (1 << band.bits);
                octet.step                    = level_step(codec, band);
                s.octet[(band.first + i) / 8] = octet;
            }
        }
        place += band.n / 8;
    }
}

// Returns the errors of the nearest level to c in each subset of the levels. With CODES, `codes` gets the indices of
// these levels, a byte each.
template <bool CODES>
__device__ float4 nearest(const PathOctet & octet, float c, const Distance & distance, uint32_t & codes) {
    constexpr float A[N_LINES - 1] = { trellis_line(2, 1).a, trellis_line(2, 2).a, trellis_line(2, 3).a,
                                       trellis_line(2, 4).a };
    const float     y              = __fmul_rn(c, distance.inverse);
    const float     size           = fabsf(y);
    float           p              = size;
#pragma unroll
    for (int n = 0; n < N_LINES - 1; ++n) {
        p = fminf(p, fmaf(size, A[n], octet.of_line[n]));
    }
    // Beyond the outermost levels, all numbers have the same nearest levels. At this limit, the index of subset 0 at
    // the upper end and that of subset 3 at the lower end are still one too far, so they are clamped.
    p                = copysignf(fminf(p, octet.half - 0.75f), y);
    const float most = 0.5f * octet.half - 1.0f;
    float       error[STATES];
    codes = 0;
#pragma unroll
    for (int q = 0; q < STATES; ++q) {
        const float g     = fmaf(p, 0.25f, 0.25f * (octet.half - 0.5f - (float) q));
        const float up    = __fadd_rn(q == 0 ? fminf(g, most) : q == 3 ? fmaxf(g, 0.0f) : g, ROUNDER);
        const float z     = fmaf(4.0f, __fsub_rn(up, ROUNDER), (float) q + 0.5f - octet.half); // level 4 g + q
        const float k     = fabsf(z);
        const float level = fmaxf(fmaxf(k, fmaf(2.0f, k, -octet.twice)), fmaf(3.0f, k, -octet.thrice));
        error[q]          = fmaf(-distance.is, copysignf(level, z), c);
        if (CODES) {
            codes |= ((__float_as_uint(up) << 2 & 255) | (uint32_t) q) << 8 * q;
        }
    }
    return { error[0], error[1], error[2], error[3] };
}

__device__ int subset(int p, int x) {
    return 2 * (x ^ p >> 1) + (p & 1);
}

__device__ int least_state(const float (&cost)[STATES]) {
    int least = 0;
#pragma unroll
    for (int w = 1; w < STATES; ++w) { // Ties go to the smaller state.
        least = cost[w] < cost[least] ? w : least;
    }
    return least;
}

// Errors of STEPS places in registers, so that the search waits for them once.
struct Errors {
    float4 of[STEPS];

    // error [STEPS] with a stride from one place to the next
    __device__ Errors(const float4 * error, int stride) {
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
            of[i] = error[i * stride];
        }
    }
};

// Extends cost by a place with an error per subset. Bit w of the result says whether state w's branch comes from the
// larger state.
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

// A lane of PATH_LANES starts in state 0 with the least final cost of the lane before.
__device__ void begin_lane(float (&cost)[STATES]) {
    cost[0] = least_of(cost);
    cost[1] = cost[2] = cost[3] = INFINITY;
}

// Fills the distances of n scales with codes code(i).
template <typename Code> __device__ void fill_distances(const EncodeShared & s, int n, const Code & code) {
    const int n_octets = s.size / 8;
#pragma unroll 1
    for (int i = (int) threadIdx.x; i < n * n_octets; i += THREADS) {
        const float is = __fmul_rn(row_scale((uint32_t) code(i / n_octets)), s.octet[i % n_octets].step);
        s.distance[i]  = { is, __fdiv_rn(1.0f, is) };
    }
    __syncthreads();
}

// Extends paths in the first warp, after all warps have prepared errors. A place has 1 << bits entries, of which
// prepare(place, entry) returns the first n, and a lane reads entry `mine`. step(place, errors) extends the lane's path
// by STEPS places.
template <typename Prepare, typename Step>
__device__ void walk(const EncodeShared & s, int bits, int n, int mine, const Prepare & prepare, const Step & step) {
    const int places = 8 * s.n_path, at_once = s.entries >> bits;
    const int entry = (int) threadIdx.x & ((1 << bits) - 1); // the same in all places of a thread
#pragma unroll 1
    for (int t0 = 0; t0 < places; t0 += at_once) {
#pragma unroll 1
        for (int t = (int) threadIdx.x >> bits; entry < n && t < min(at_once, places - t0); t += THREADS >> bits) {
            s.nearest[(t << bits) + entry] = prepare(t0 + t, entry);
        }
        __syncthreads();
#pragma unroll 1
        for (int i = 0; threadIdx.x < WARP && i < at_once && t0 + i < places; i += STEPS) {
            step(t0 + i, Errors(s.nearest + (i << bits) + mine, 1 << bits));
        }
        __syncthreads();
    }
}

// Replaces the best scales of n rows without a path by those near them whose paths have the least cost.
template <bool LANES>
__device__ void choose_path_scales(EncodeShared & s, const HeadCodec & codec, int n) {
    static_assert(TRELLIS_TRIED == 4, "two bits of an entry are the scale");
    const int  me = (int) threadIdx.x, n_of = n * TRELLIS_TRIED, n_octets = s.size / 8;
    const auto code = [&](int i) { return s.scale[i / TRELLIS_TRIED] - TRELLIS_BELOW + i % TRELLIS_TRIED; };
    const auto may  = [&](int i) { return i < n_of && code(i) >= 1 && code(i) <= SCALE_MOST; };
    fill_distances(s, n_of, code);
    float cost[STATES] = {};
    walk(
        s, s.row_bits + 2, n_of, min(me, n_of - 1),
        [&](int t, int i) {
            const int coefficient = s.order[t];
            uint32_t  none;
            return nearest<false>(s.octet[coefficient / 8], s.c[i / TRELLIS_TRIED * s.size + coefficient],
                                  s.distance[i * n_octets + coefficient / 8], none);
        },
        [&](int t, const Errors & errors) {
#pragma unroll
            for (int x = 0; x < STEPS; ++x) {
                if (LANES && (t + x) % s.n_path == 0) {
                    begin_lane(cost);
                }
                extend(errors.of[x], cost);
            }
        });
#pragma unroll 1
    for (int i = me; i < n_of * 8; i += THREADS) {
        s.errors[i] = may(i / 8) ? lane_error(codec, s.c + i / 8 / TRELLIS_TRIED * s.size,
                                              row_scale((uint32_t) code(i / 8)), i % 8, TRELLIS_BITS) :
                                   0.0f;
    }
    __syncthreads();
    if (me < WARP) {
        const float total = may(me) ? __fadd_rn(least_of(cost), of_lanes(s.errors + 8 * me)) : INFINITY;
        const int   first = me / TRELLIS_TRIED * TRELLIS_TRIED;
        int         best  = -1;
        float       least = INFINITY;
#pragma unroll
        for (int i = 0; i < TRELLIS_TRIED; ++i) { // Ties go to the smaller code.
            const float of_i = __shfl_sync(ALL, total, first + i);
            best             = of_i < least ? i : best;
            least            = of_i < least ? of_i : least;
        }
        __syncwarp(); // All lanes of a row have read its scale.
        if (me < n_of && me == first && best >= 0) {
            s.scale[me / TRELLIS_TRIED] += best - TRELLIS_BELOW;
        }
    }
    __syncthreads();
}

// Stores the codes of the paths of least cost, from the last place to the first. STATES lanes have the same row, and
// each of them loads and stores a part of its places. `cost` has the costs of paths by last state, and `ended` is as in
// find_paths.
template <bool LANES>
__device__ void walk_back(const EncodeShared & s, int n, int mine, const float (&cost)[STATES], uint32_t ended) {
    const int me    = (int) threadIdx.x;
    const int first = me / STATES * STATES;
    float     total = cost[0]; // cost of a path that ends where it begins
    int       ends  = 0;
#pragma unroll
    for (int w = 1; w < STATES; ++w) {
        total = w == me % STATES ? cost[w] : total;
    }
    float least = __shfl_sync(ALL, total, first);
#pragma unroll
    for (int w = 1; !LANES && w < STATES; ++w) { // Ties go to the smaller state.
        const float of_w = __shfl_sync(ALL, total, first + w);
        ends             = of_w < least ? w : ends;
        least            = of_w < least ? of_w : least;
    }
    int w = LANES ? __shfl_sync(ALL, least_state(cost), first) : ends;
    ended = __shfl_sync(ALL, ended, first);
    __syncwarp();
    uint32_t * codes = s.codes + mine * s.size;
#pragma unroll 1
    for (int t0 = 8 * s.n_path - STEPS; t0 >= 0; t0 -= STEPS) {
        const uint32_t nibbles = s.decisions[(t0 / 8 * STATES << s.row_bits) + STATES * mine + ends];
        int            at[STEPS / STATES];
        uint32_t       levels[STEPS / STATES], code[STEPS / STATES] = {}, of[STEPS];
#pragma unroll
        for (int i = 0; i < STEPS / STATES; ++i) {
            at[i]     = s.order[t0 + i * STATES + me % STATES];
            levels[i] = me / STATES < n ? codes[at[i]] : 0; // A code is read only by the lane that replaces it.
        }
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
            of[i] = __shfl_sync(ALL, levels[i / STATES], first + i % STATES);
        }
#pragma unroll
        for (int i = STEPS; i-- > 0;) {
            const int      x = w & 1, p = w >> 1 | (int) (nibbles >> (4 * i + w) & 1) << 1;
            const uint32_t level = of[i] >> 8 * subset(p, x) & 255;
            code[i / STATES]     = i % STATES == me % STATES ? (level ^ 2 * (p >> 1) ^ (p & 1)) >> 1 : code[i / STATES];
            w                    = p;
            if (LANES && (t0 + i) % s.n_path == 0) {
                w = (int) (ended & 3);
                ended >>= 2;
            }
        }
#pragma unroll
        for (int i = 0; i < STEPS / STATES; ++i) {
            if (me / STATES < n) {
                codes[at[i]] = code[i];
            }
        }
    }
}

// Stores the codes of the paths of least cost at the rows' scales. There is a lane per row and state in which a closed
// path may begin and end. With PATH_LANES, only the first state's path is used.
template <bool LANES> __device__ void find_paths(EncodeShared & s, int n) {
    const int me = (int) threadIdx.x, n_octets = s.size / 8, mine = min(me / STATES, n - 1);
    fill_distances(s, n, [&](int r) { return s.scale[r]; });
    float    cost[STATES];
    uint32_t ended = 0; // two bits for the final state of each lane of the path
#pragma unroll
    for (int w = 0; w < STATES; ++w) {
        cost[w] = w == me % STATES ? 0.0f : INFINITY;
    }
    walk(
        s, s.row_bits, n, mine,
        [&](int t, int r) {
            const int coefficient = s.order[t];
            return nearest<true>(s.octet[coefficient / 8], s.c[r * s.size + coefficient],
                                 s.distance[r * n_octets + coefficient / 8], s.codes[r * s.size + coefficient]);
        },
        [&](int t, const Errors & errors) {
            uint32_t nibbles = 0;
#pragma unroll
            for (int x = 0; x < STEPS; ++x) {
                if (LANES && (t + x) % s.n_path == 0) {
                    ended = ended << 2 | (uint32_t) least_state(cost);
                    begin_lane(cost);
                }
                nibbles |= extend(errors.of[x], cost) << 4 * x;
            }
            if (me < STATES << s.row_bits) {
                s.decisions[(t / 8 * STATES << s.row_bits) + me] = nibbles;
            }
        });
    if (me >= WARP) {
        return;
    }
    walk_back<LANES>(s, n, mine, cost, ended);
}

// Sets the bits of `mask` in the word at `at` to those of `bits`. No other thread changes or reads these bits. Neither
// instruction waits for the word.
__device__ void put(uint8_t * at, uint32_t bits, uint32_t mask) {
    auto * word = reinterpret_cast<unsigned *>(at);
    atomicAnd(word, ~(mask & ~bits));
    atomicOr(word, bits & mask);
}

// Writes the codes [rank] of cell c to its tile, or zeros unless it is live.
__device__ void store_codes(const HeadCodec & codec, const uint32_t * codes, bool live, uint8_t * tile, int c) {
    // A word holds four coefficients of a key, but one of a value.
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
            for (int x = 0; live && x < each; ++x) {
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

__device__ float folded(const float (&x)[1]) {
    return x[0];
}

// Returns the sum of x in the order of warp_sum.
template <int N> __device__ float folded(const float (&x)[N]) {
    float half[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
        half[i] = x[i] + x[i + N / 2];
    }
    return folded(half);
}

// Sums each element of x, in its first `rows` rows, over all lanes in the order of warp_sum. Lane l returns the sum of
// element l. `room` is the warp's part of EncodeShared::sums.
__device__ float sum_of_lanes(const float (&x)[ROWS_MOST][TOGETHER], int rows, float * room) {
    const int lane = (int) threadIdx.x % WARP, stride = sum_stride(rows);
    __syncwarp(); // All lanes have read the last sums.
#pragma unroll
    for (int r = 0; r < ROWS_MOST; ++r) {
        if (r < rows) {
            *reinterpret_cast<float4 *>(room + lane * stride + TOGETHER * r) = { x[r][0], x[r][1], x[r][2], x[r][3] };
        }
    }
    __syncwarp();
    float of[WARP];
#pragma unroll
    for (int i = 0; i < WARP; ++i) {
        of[i] = room[i * stride + min(lane, TOGETHER * rows - 1)];
    }
    return folded(of);
}

// A row of a KV head and a side. Its elements x are rounded and stored at `exact`. If x is nullptr, `exact` has them
// already.
struct EncodedRow {
    const float * x;
    uint16_t *    exact;
    int64_t       cell;
};

// The work of a block, rows of a KV head and a side.
struct EncodeJob {
    const Encode &    a;
    const HeadCodec & codec;
    int               h, n; // KV head, number of rows
    bool              value;
    bool              quantized; // whether some bands have codes

    __device__ uint8_t * tile(int64_t cell) const {
        const Layer & l = a.layer;
        return value ? a.v_tiles + cell / TILE * a.v_stride + l.v_offset[h] :
                       a.k_tiles + cell / TILE * a.k_stride + l.k_offset[h];
    }
};

// Reads the rows, rounds them to halves, and stores the halves of rows that were floats.
template <typename Row> __device__ void read_rows(const EncodeJob & job, const EncodeShared & s, const Row & row) {
    const int d = job.codec.d, lane = (int) threadIdx.x % WARP;
#pragma unroll 1
    for (int r = (int) threadIdx.x / WARP; r < job.n; r += WARPS) {
        const EncodedRow of     = row(r);
        bool             finite = true;
#pragma unroll 1
        for (int j = lane; j < d; j += WARP) {
            const uint16_t half  = of.x == nullptr ? of.exact[j] : exact_half(of.x[j]);
            s.xs[r * s.size + j] = from_half(half);
            finite               = finite && (of.x == nullptr ? half != HALF_NAN : isfinite(of.x[j]));
        }
        finite = __ballot_sync(ALL, finite) == ALL;
#pragma unroll 1
        for (int j = lane; of.x != nullptr && j < d; j += WARP) {
            of.exact[j] = finite ? to_half(s.xs[r * s.size + j]) : HALF_NAN;
        }
        if (lane == 0) {
            s.flags[r] = finite ? X_FINITE : 0;
        }
    }
}

// Computes the rows' coefficients. A warp has every fourth row of the basis, TOGETHER at a time.
__device__ void multiply_basis(const EncodeJob & job, const EncodeShared & s, int row_bits) {
    const HeadCodec & codec = job.codec;
    const uint16_t *  basis = codec.encode.halves; // [rank][d]
    const int         d = codec.d, rank = codec.rank;
    const int         lane = (int) threadIdx.x % WARP, warp = (int) threadIdx.x / WARP;
#pragma unroll 1
    for (int i0 = warp; i0 < rank; i0 += TOGETHER * WARPS) {
        float total[ROWS_MOST][TOGETHER] = {};
#pragma unroll 1
        for (int j = COLUMNS * lane; j < d; j += ROW) {
            float e[TOGETHER][COLUMNS];
#pragma unroll
            for (int i = 0; i < TOGETHER; ++i) {
                const auto of = *reinterpret_cast<const FourHalves *>(basis + min(i0 + i * WARPS, rank - 1) * d + j);
#pragma unroll
                for (int y = 0; y < COLUMNS; ++y) {
                    e[i][y] = from_half(of.of[y]);
                }
            }
#pragma unroll
            for (int r = 0; r < ROWS_MOST; ++r) {
                if (r < job.n) {
                    const float4 x = *reinterpret_cast<const float4 *>(s.xs + r * s.size + j);
#pragma unroll
                    for (int i = 0; i < TOGETHER; ++i) {
                        float sum   = fmaf(e[i][0], x.x, total[r][i]);
                        sum         = fmaf(e[i][1], x.y, sum);
                        sum         = fmaf(e[i][2], x.z, sum);
                        total[r][i] = fmaf(e[i][3], x.w, sum);
                    }
                }
            }
        }
        const float sum = sum_of_lanes(total, 1 << row_bits, s.sums + warp * WARP * sum_stride(1 << row_bits));
        const int   r = lane / TOGETHER, i = i0 + lane % TOGETHER * WARPS;
        if (r < job.n && i < rank) {
            s.c[r * s.size + i] = codec.offset == nullptr ? sum : __fsub_rn(sum, codec.offset[i]);
        }
    }
}

__device__ bool is_quantized(const HeadCodec & codec) {
    bool quantized = false;
    for (int b = 0; b < codec.n_bands; ++b) {
        quantized = quantized || codec.bands[b].bits != 16;
    }
    return quantized;
}

// Sets the flags of row r, and its scale to the smallest one that reaches all its coefficients. A warp calls this.
// from_floats says that the row has not been stored before.
__device__ void first_scale(const EncodeJob & job, const EncodeShared & s, int r, bool from_floats) {
    const HeadCodec & codec  = job.codec;
    const int         lane   = (int) threadIdx.x % WARP;
    float *           c      = s.c + r * s.size;
    bool              finite = true, zero = true;
    float             reach = 0.0f;
#pragma unroll 1
    for (int b = 0; b < codec.n_bands; ++b) {
        const Band & band = codec.bands[b];
        const float  full = __fmul_rn(band.ratio, half_range(band.bits));
#pragma unroll 1
        for (int j = lane; j < band.n; j += WARP) {
            const float x = c[band.first + j];
            finite        = finite && isfinite(x);
            zero          = zero && x == 0.0f;
            reach         = band.bits == 16 ? reach : fmaxf(reach, __fdiv_rn(fabsf(x), full));
        }
    }
    reach               = warp_max(reach);
    const bool x_finite = (s.flags[r] & X_FINITE) != 0;
    finite              = x_finite && __ballot_sync(ALL, finite) == ALL;
    const bool live     = finite && __ballot_sync(ALL, zero) != ALL;
    __syncwarp(); // All lanes have read the coefficients and the flags.
    for (int j = lane; !live && j < codec.rank; j += WARP) {
        c[j] = 0.0f; // The search runs on zeros, and its codes are not used.
    }
    // The scale is at most eight codes above that of the power of two.
    int k0 = min(max(SCALE_ONE + 8 * ((int) (__float_as_uint(reach) >> 23) - 127), 1), (int) SCALE_MOST);
#pragma unroll 1
    while (k0 < SCALE_MOST && row_scale((uint32_t) k0) < reach) {
        ++k0;
    }
    if (lane == 0) {
        s.scale[r] = live && job.quantized ? k0 : SCALE_ONE;
        s.flags[r] = (x_finite ? X_FINITE : 0) | (finite ? FINITE : 0) | (live ? LIVE : 0);
        if (!finite && (from_floats || x_finite)) { // store_and_attend has counted the others
            atomicAdd(job.a.layer.n_bad, 1ull);
        }
    }
}

// Chooses the scale of least error without a path, among the first one and smaller ones.
__device__ void choose_scales(const EncodeJob & job, const EncodeShared & s) {
    const int me = (int) threadIdx.x;
#pragma unroll 1
    for (int i = me; i < job.n * CANDIDATES * 8; i += THREADS) {
        const int r = i / (CANDIDATES * 8), code = s.scale[r] - i / 8 % CANDIDATES;
        if (code >= 1) {
            s.errors[i] = lane_error(job.codec, s.c + r * s.size, row_scale((uint32_t) code), i % 8, 0);
        }
    }
    __syncthreads();
    if (me < job.n) {
        const float * errors = s.errors + me * CANDIDATES * 8;
        const int     k0     = s.scale[me];
        int           best   = k0;
        float         least  = of_lanes(errors);
        for (int i = 1; i < CANDIDATES && k0 - i >= 1; ++i) { // Ties go to the larger scale.
            const float error = of_lanes(errors + i * 8);
            best              = error < least ? k0 - i : best;
            least             = error < least ? error : least;
        }
        s.scale[me] = (s.flags[me] & LIVE) != 0 ? best : SCALE_ONE;
    }
    __syncthreads();
}

// Stores the scale of row r and its halves, and computes its codes outside the path. A warp calls this.
__device__ void quantize_bands(const EncodeJob & job, const EncodeShared & s, int r, int64_t cell) {
    const HeadCodec & codec = job.codec;
    const bool        live = (s.flags[r] & LIVE) != 0, finite = (s.flags[r] & FINITE) != 0;
    const int         code = live ? s.scale[r] : 0;
    const int         in   = (int) (cell % TILE); // cell in its tile
    const int         lane = (int) threadIdx.x % WARP;
    uint8_t *         tile = job.tile(cell);
    if (lane == 0) {
        tile[in] = (uint8_t) (finite ? code : SCALE_NAN);
    }
#pragma unroll 1
    for (int i = 0; i < codec.n_bands; ++i) {
        const Band & band    = codec.bands[i];
        const float  scale   = row_scale((uint32_t) code);
        const float  inverse = live ? __fdiv_rn(1.0f, __fmul_rn(scale, band.ratio)) : 0.0f;
#pragma unroll 1
        for (int j = lane; j < band.n; j += WARP) {
            const float x = s.c[r * s.size + band.first + j]; // 0 if the row is not live
            if (band.bits == 16) {
                uint8_t * half                      = tile + TILE * band.offset + 2 * (j * TILE + in);
                *reinterpret_cast<uint16_t *>(half) = to_half(fminf(fmaxf(x, -HALF_MAX), HALF_MAX));
            } else if (!on_path(codec, band)) {
                s.codes[r * s.size + band.first + j] =
                    live ? (uint32_t) quantize(x, inverse, half_range(band.bits)) : 0;
            }
        }
    }
}

// Encodes rows row(i), i < n <= 1 << row_bits, of a KV head and a side into their cells. LANES says that the path is
// PATH_LANES.
template <bool LANES, typename Row>
__device__ void encode_rows(const Encode & a, const Row & row, int row_bits, int n, int h, bool value) {
    const HeadCodec & codec = (value ? a.layer.v : a.layer.k)[h];
    const EncodeJob   job{ a, codec, h, n, value, is_quantized(codec) };
    const int         warp = (int) threadIdx.x / WARP;
    EncodeShared      s(block_memory, a.layer, row_bits);

    fill_path(codec, s);
    read_rows(job, s, row);
    __syncthreads();
    multiply_basis(job, s, row_bits);
    __syncthreads();
#pragma unroll 1
    for (int r = warp; r < n; r += WARPS) {
        first_scale(job, s, r, row(r).x != nullptr);
    }
    __syncthreads();
    if (job.quantized) {
        choose_scales(job, s);
    }
    if (codec.path != PATH_NONE) {
        choose_path_scales<LANES>(s, codec, n);
        find_paths<LANES>(s, n);
    }
#pragma unroll 1
    for (int r = warp; r < n; r += WARPS) {
        quantize_bands(job, s, r, row(r).cell);
    }
    __syncthreads();
#pragma unroll 1
    for (int r = 0; r < n; ++r) {
        const int64_t cell = row(r).cell;
        store_codes(codec, s.codes + r * s.size, (s.flags[r] & LIVE) != 0, job.tile(cell), (int) (cell % TILE));
    }
}

} // namespace

} // namespace subkv::cuda
