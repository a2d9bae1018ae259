// attend_decode.cu: one token per stream, all query heads of a KV head per read of its codes, cells split over blocks.
//
// A block takes one or two tiles at a time. It copies them to shared memory whole: keys while it works on values, values
// while it works on keys. Codes stay integers, four to a dp4a: logits with queries, one thread per cell; sums of values
// with weights, which a lane holds for a quarter of the cells, two registers (tiles.h) of each tile. Its sums of one
// coefficient of a fourth of the octets, which follow each other on the path, stay in registers to the end.
#include "mask.cuh"
#include "tiles.cuh"

namespace subkv::cuda {

namespace {

constexpr int MOST_TILES = THREADS / TILE;     // at a time
constexpr int PER_WARP   = MAX_OCTETS / WARPS; // octets of values

// The queries of four coefficients: step * (256 * high + low), a byte each.
template <int G> struct alignas(G % 2 == 0 ? 16 : 8) Words {
    int      high[G];
    uint32_t low[G];
};

template <int G> struct Queries {
    Octets     octets;
    Words<G> * words;  // [2 * octets.n]
    float *    step;   // [G]
    uint32_t * centre; // [G]: twice what the zero points add up to, in steps, modulo 2^32
};

template <int G>
__device__ void quantize_queries(const Queries<G> & q, const float * qt, int64_t width, float * room) {
    for (int g = (int) threadIdx.x; g < G; g += THREADS) {
        q.centre[g] = 0;
    }
    for (int g = 0; g < G; ++g) {
        const float * row     = qt + g * width;
        float         largest = 0.0f;
        for (int i = (int) threadIdx.x; i < 8 * q.octets.n; i += THREADS) {
            const Octet octet = q.octets.octet[i / 8];
            largest           = fmaxf(largest, octet.bits == 16 ? 0.0f : fabsf(row[i] * octet.step));
        }
        const float step    = block_max(largest, room) * QUERY_STEP;
        const float inverse = step > 1e-30f ? 1.0f / step : 0.0f;
        uint32_t    centre  = 0;
        for (int w = (int) threadIdx.x; w < 2 * q.octets.n; w += THREADS) {
            const Octet octet = q.octets.octet[w / 2];
            uint32_t    high = 0, low = 0;
            for (int i = 0; i < 4 && octet.bits != 16; ++i) {
                const int value = (int) rintf(row[4 * w + i] * octet.step * inverse);
                high |= (uint32_t) (value >> 8 & 255) << (8 * i);
                low |= (uint32_t) (value & 255) << (8 * i);
                centre += (uint32_t) (value * zero_of(octet));
            }
            q.words[w].high[g] = (int) high;
            q.words[w].low[g]  = low;
        }
        if (centre != 0) {
            atomicAdd(q.centre + g, centre);
        }
        if (threadIdx.x == 0) {
            q.step[g] = step;
        }
    }
    __syncthreads();
}

// Dot products of the key of cell c with the group's queries: in [G].
template <int G>
__device__ void dots(const Queries<G> & q, const float * qt, int64_t width, const uint8_t * tile, int c,
                     float (&logit)[G]) {
    int      high[G]   = {};
    uint32_t low[G]    = {};
    float    halves[G] = {};
    uint32_t one[2] = {}, two[2] = {}; // choices
    if (q.octets.n_path > 0) {
        choices_at(q.octets, tile, -1, c, one);
        choices_at(q.octets, tile, -2, c, two);
    }
    for (int o = 0; o < q.octets.n; ++o) {
        const Octet     octet = q.octets.octet[o];
        const uint8_t * lines = tile + octet.at;
        if (octet.bits == 16) {
            for (int j = 0; j < 8; ++j) {
                const float x = from_half(*half_of(lines, j, c));
                for (int g = 0; g < G; ++g) {
                    halves[g] = fmaf(qt[g * width + 8 * o + j], x, halves[g]);
                }
            }
            continue;
        }
        uint32_t codes[2];
        read_bytes(octet, tile, c / 16, 4 * (c % 16), one, two, codes);
        for (int half = 0; half < 2; ++half) {
            const Words<G> words = q.words[2 * o + half];
            for (int g = 0; g < G; ++g) {
                high[g] = dot(codes[half], words.high[g], high[g]);
                low[g]  = dot(codes[half], words.low[g], low[g]);
            }
        }
    }
    const float s = row_scale(tile[c]);
    for (int g = 0; g < G; ++g) { // exact: twice 256 codes' distance from their zero, of 255 times 32767, fits
        const auto twice = (int) (2 * (256 * (uint32_t) high[g] + low[g]) - q.centre[g]);
        logit[g]         = 0.5f * s * q.step[g] * (float) twice + (s > 0.0f ? halves[g] : 0.0f);
    }
}

// Weights of a tile's values. High and low bytes of integers, of every query head; also as they are, of halves.
template <int G> struct Weights {
    uint8_t * high;  // [tiles][G][TILE]
    uint8_t * low;   // [tiles][G][TILE]
    float *   plain; // [tiles][G][TILE] exp(l - top), 0 in zero rows
};

// The octets whose values a warp sums.
struct Share {
    int first, n;
    int place; // of its first octet on the path; NO_PLACE: none is there

    __device__ explicit Share(const Octets & octets) {
        const int warp = (int) threadIdx.x / WARP;
        first          = warp * octets.n / WARPS;
        n              = (warp + 1) * octets.n / WARPS - first;
        place          = NO_PLACE;
        for (int i = n; i-- > 0;) {
            const int here = octets.octet[first + i].place;
            place          = here != NO_PLACE ? here : place;
        }
    }
};

// Adds a tile's values to the sums of this lane: coefficient lane % 8 of the warp's octets, over the cells of registers
// lane / 8 and lane / 8 + 4. factor [G]: of twice an integer; plain_factor [G].
template <int G>
__device__ void add_values(const Octets & octets, Share share, const uint8_t * tile, const Weights<G> & weights,
                           const float (&factor)[G], const float (&plain_factor)[G], float (&acc)[PER_WARP][G]) {
    const int j = (int) threadIdx.x % 8, quarter = (int) threadIdx.x % WARP / 8;
    uint64_t  high[2][G], low[2][G];
    int       total[G];
    for (int g = 0; g < G; ++g) {
        uint32_t sum = 0, low_sum = 0;
        for (int half = 0; half < 2; ++half) {
            const int at  = g * TILE + 8 * (4 * half + quarter);
            high[half][g] = *reinterpret_cast<const uint64_t *>(weights.high + at);
            low[half][g]  = *reinterpret_cast<const uint64_t *>(weights.low + at);
            sum           = dot(high[half][g], (uint64_t) 0x0101010101010101u, sum);
            low_sum       = dot(low[half][g], (uint64_t) 0x0101010101010101u, low_sum);
        }
        total[g] = (int) (256 * sum + low_sum);
    }
    uint64_t one[2] = {}, two[2] = {}; // choices
    if (share.place != NO_PLACE) {
        choices_at(octets, tile, share.place - 1, j, quarter, one);
        choices_at(octets, tile, share.place - 2, j, quarter, two);
    }
#pragma unroll
    for (int i = 0; i < PER_WARP; ++i) {
        if (i >= share.n) {
            continue;
        }
        const Octet     octet = octets.octet[share.first + i];
        const uint8_t * lines = tile + octet.at;
        if (octet.bits == 16) {
            for (int c = 0; c < 16; ++c) {
                const int   cell = 8 * quarter + c % 8 + c / 8 * (TILE / 2);
                const float x    = from_half(*half_of(lines, j, cell));
                for (int g = 0; g < G; ++g) {
                    const float p = weights.plain[g * TILE + cell];
                    acc[i][g] += p > 0.0f ? plain_factor[g] * p * x : 0.0f; // a hidden cell's halves may be infinite
                }
            }
            continue;
        }
        uint64_t codes[2];
        read_bytes(octet, tile, quarter, 8 * j, one, two, codes);
        const int zero = zero_of(octet);
        for (int g = 0; g < G; ++g) {
            const uint32_t x = dot(codes[1], high[1][g], dot(codes[0], high[0][g], 0u));
            const uint32_t y = dot(codes[1], low[1][g], dot(codes[0], low[0][g], 0u));
            // exact: 16 codes of 255 times 65535 are below 2^29
            acc[i][g] = fmaf(factor[g], (float) ((int) (512 * x + 2 * y) - zero * total[g]), acc[i][g]);
        }
    }
}

// Shared memory of a block.
template <int G> struct Shared {
    uint8_t *  k; // [tiles][k_bytes]
    uint8_t *  v; // [tiles][v_bytes]
    Queries<G> q;
    Octets     values;
    Weights<G> weights;
    float *    room; // [WARPS][G + 1]
    size_t     bytes;

    __host__ __device__ Shared(unsigned char * base, int tiles, int k_bytes, int v_bytes) {
        Carve shared{ base };
        q.octets      = Octets::take(shared);
        values        = Octets::take(shared);
        q.words       = shared.take<Words<G>>(2 * MAX_OCTETS);
        q.step        = shared.take<float>(G);
        q.centre      = shared.take<uint32_t>(G);
        weights.high  = shared.take<uint8_t>((size_t) tiles * G * TILE);
        weights.low   = shared.take<uint8_t>((size_t) tiles * G * TILE);
        weights.plain = shared.take<float>((size_t) tiles * G * TILE);
        room          = shared.take<float>((size_t) WARPS * (G + 1));
        k             = shared.take<uint8_t>((size_t) tiles * k_bytes);
        v             = shared.take<uint8_t>((size_t) tiles * v_bytes);
        bytes         = shared.used;
    }
};

struct Job {
    Attend a;
    int    tiles;            // at a time
    int    k_bytes, v_bytes; // of a head's largest tile
};

template <int G> __global__ void decode_kernel(Job job) {
    const Attend &    a      = job.a;
    const Layer &     l      = a.layer;
    const int         h      = (int) blockIdx.x;
    const int64_t     part   = blockIdx.y;
    const int64_t     token  = blockIdx.z;
    const int64_t     stream = token / a.n_tps;
    const HeadCodec & k      = l.k[h];
    const HeadCodec & v      = l.v[h];
    const int64_t     n_tok  = a.n_stream * a.n_tps;
    const float *     qt     = a.qt + (h * n_tok + token) * G * l.width_k;
    const int64_t     c_end  = least(a.n_kv, (part + 1) * a.split);
    const int         step   = job.tiles * TILE; // cells
    const int         me     = (int) threadIdx.x;
    const int         warp   = me / WARP;
    const int         lane   = me % WARP;
    const int         c      = me % TILE; // the cell of this thread, in tile `mine` of those at hand
    const int         mine   = me / TILE;

    Shared<G>       s(block_memory, job.tiles, job.k_bytes, job.v_bytes);
    const uint8_t * k_tiles = a.k_tiles + stream * a.k_stream + l.k_offset[h];
    const uint8_t * v_tiles = a.v_tiles + stream * a.v_stream + l.v_offset[h];
    const auto      fetch   = [&](const HeadCodec & codec, const uint8_t * tiles, int64_t stride, int bytes, int64_t c0,
                                  uint8_t * to) {
        for (int t = 0; t < job.tiles && c0 + t * TILE < c_end; ++t) {
            for (int i = 16 * me; i < TILE * codec.row_bytes; i += 16 * THREADS) {
                copy_16(to + t * bytes + i, tiles + (c0 / TILE + t) * stride + i);
            }
        }
        copies_commit();
    };
    fetch(k, k_tiles, a.k_stride, job.k_bytes, part * a.split, s.k);
    fetch(v, v_tiles, a.v_stride, job.v_bytes, part * a.split, s.v);
    fill_octets(k, s.q.octets);
    fill_octets(v, s.values);
    __syncthreads();
    const Share share(s.values);
    quantize_queries(s.q, qt, l.width_k, s.room);

    float m[G], z[G], acc[PER_WARP][G] = {};
    for (int g = 0; g < G; ++g) {
        m[g] = -INFINITY;
        z[g] = 0.0f;
    }
    for (int64_t c0 = part * a.split; c0 < c_end; c0 += step) {
        const bool  there = me < step && c0 + me < c_end;
        const float bias  = there ? coded_bias(a, token, c0 + me) : -INFINITY;
        // of the value, which is still on its way to shared memory
        float scale = bias == -INFINITY ? 0.0f : row_scale(v_tiles[(c0 + me) / TILE * a.v_stride + c]);
        copies_done<1>(); // keys
        __syncthreads();
        float logit[G] = {};
        if (bias != -INFINITY) {
            dots(s.q, qt, l.width_k, s.k + mine * job.k_bytes, c, logit);
        }
        for (int g = 0; g < G; ++g) {
            const float shift = a.shift[(h * n_tok + token) * G + g];
            logit[g] = bias == -INFINITY ? bias : capped(logit[g] + shift, l.softcap) + l.slope[h * G + g] * bias;
            const float top = warp_max(logit[g]);
            if (lane == 0) {
                s.room[warp * (G + 1) + g] = top;
            }
        }
        const float top_scale = warp_max(scale);
        if (lane == 0) {
            s.room[warp * (G + 1) + G] = top_scale;
        }
        __syncthreads();
        fetch(k, k_tiles, a.k_stride, job.k_bytes, c0 + step, s.k);

        const auto largest = [&](int x) { // of these cells
            return fmaxf(fmaxf(s.room[x], s.room[G + 1 + x]), fmaxf(s.room[2 * (G + 1) + x], s.room[3 * (G + 1) + x]));
        };
        const float scale_unit = largest(G) * WEIGHT_STEP;
        scale                  = scale > 0.0f ? scale / scale_unit : 0.0f;
        float factor[G], plain_factor[G];
        for (int g = 0; g < G; ++g) {
            const float top   = largest(g);
            const float old   = m[g];
            m[g]              = fmaxf(old, top);
            const float keep  = old == -INFINITY ? 0.0f : expf(old - m[g]);
            plain_factor[g]   = top == -INFINITY ? 0.0f : expf(top - m[g]);
            factor[g]         = 0.5f * scale_unit * plain_factor[g];
            const float p     = logit[g] == -INFINITY ? 0.0f : expf(logit[g] - top);
            z[g]              = z[g] * keep + p * plain_factor[g];
            const auto weight = (uint32_t) rintf(p * scale);
            const int  at     = (mine * G + g) * TILE + c;
            for (int i = 0; i < PER_WARP; ++i) {
                acc[i][g] *= keep;
            }
            if (me < step) {
                s.weights.high[at]  = (uint8_t) (weight >> 8);
                s.weights.low[at]   = (uint8_t) weight;
                s.weights.plain[at] = scale > 0.0f ? p : 0.0f;
            }
        }
        copies_done<1>(); // values
        __syncthreads();
        for (int t = 0; t < job.tiles && c0 + t * TILE < c_end; ++t) {
            const int        at      = t * G * TILE;
            const Weights<G> weights = { s.weights.high + at, s.weights.low + at, s.weights.plain + at };
            add_values(s.values, share, s.v + t * job.v_bytes, weights, factor, plain_factor, acc);
        }
        __syncthreads();
        fetch(v, v_tiles, a.v_stride, job.v_bytes, c0 + step, s.v);
    }

    const int64_t row = ((part * l.n_head_kv + h) * n_tok + token) * G;
#pragma unroll
    for (int i = 0; i < PER_WARP; ++i) {
        const int o = share.first + i;
        if (i >= share.n) {
            continue;
        }
        for (int g = 0; g < G; ++g) {
            float sum = acc[i][g]; // of the quarters, too
            sum += __shfl_xor_sync(ALL, sum, 8);
            sum += __shfl_xor_sync(ALL, sum, 16);
            if (lane < 8) {
                a.acc[(row + g) * l.width_v + 8 * o + lane] = s.values.octet[o].step * sum;
            }
        }
    }
    for (int g = 0; g < G; ++g) {
        const float total = warp_sum(z[g]);
        if (lane == 0) {
            s.room[warp * (G + 1) + g] = total;
        }
    }
    __syncthreads();
    for (int g = 0; g < G && me == 0; ++g) {
        a.m[row + g] = m[g];
        a.z[row + g] = (s.room[g] + s.room[G + 1 + g]) + (s.room[2 * (G + 1) + g] + s.room[3 * (G + 1) + g]);
    }
}

template <int G> size_t shared_bytes(const Job & job) {
    return Shared<G>(nullptr, job.tiles, job.k_bytes, job.v_bytes).bytes;
}

Job job_of(const Attend & a) {
    return { a, MOST_TILES, TILE * a.layer.row_bytes_k, TILE * a.layer.row_bytes_v };
}

template <int G> const char * run(const Attend & a, void * stream) {
    Job job = job_of(a);
    if (shared_bytes<G>(job) > most_shared() / 2) { // two blocks of a multiprocessor hide each other's waits
        job.tiles = 1;
    }
    return launch(decode_kernel<G>,
                  dim3((unsigned) a.layer.n_head_kv, (unsigned) a.n_split, (unsigned) (a.n_stream * a.n_tps)),
                  shared_bytes<G>(job), stream, job);
}

} // namespace

bool suits_decode(const Attend & args) {
    Job job   = job_of(args);
    job.tiles = 1;
    return args.n_tps == 1 && args.layer.n_group <= DECODE_GROUP && shared_bytes<DECODE_GROUP>(job) <= most_shared();
}

const char * attend_decode(const Attend & args, void * stream) {
    if (!suits_decode(args)) {
        return "attend_decode: one token per stream, at most 8 query heads per KV head and small tiles expected";
    }
    switch (args.layer.n_group) {
        case 1: return run<1>(args, stream);
        case 2: return run<2>(args, stream);
        case 3: return run<3>(args, stream);
        case 4: return run<4>(args, stream);
        case 5: return run<5>(args, stream);
        case 6: return run<6>(args, stream);
        case 7: return run<7>(args, stream);
        default: return run<8>(args, stream);
    }
}

} // namespace subkv::cuda
