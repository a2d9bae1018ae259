// attend_decode.cu: one token per stream, all query heads of a KV head per read of its codes, cells split over blocks.
//
// A block copies the rows of a tile of cells to shared memory while it works on the tile before. Logits: one thread per
// cell, four codes at a time against queries in two signed bytes (dp4a); a code is the sum of its bit planes, so every
// plane is a dot product of its own. Values: one thread per four coefficients and every n-th cell, sums in registers.
#include "entries.cuh"

namespace subkv::cuda {

namespace {

constexpr int STAGES = 2;

// Words that hold any row of `bytes`, wherever it begins; odd, so that the rows of 32 cells lie in 32 banks. Reading a word
// that begins at the last byte may touch one more.
__host__ __device__ inline int row_words(int bytes) {
    return ((bytes + 3 + 3) / 4 + 1) | 1;
}

// The four bytes from byte `at` of a row on that begins `skew` bytes into `words`.
__device__ inline uint32_t word_at(const uint32_t * words, int skew, int at) {
    const int byte = skew + at;
    return __funnelshift_r(words[byte / 4], words[byte / 4 + 1], 8 * (byte % 4));
}

// Rows of cells [c0, c0 + n) of a head -> shared memory, row_words apart.
__device__ void copy_rows(const uint8_t * rows, int64_t stride, int row_bytes, int64_t c0, int n, int pitch,
                          uint32_t * to) {
    int cell = (int) threadIdx.x / pitch;
    int word = (int) threadIdx.x % pitch;
    while (cell < n) {
        const auto      row   = (uintptr_t) (rows + (c0 + cell) * stride);
        const uintptr_t from  = row / 4 * 4 + 4 * (uintptr_t) word;
        const auto      bytes = (int64_t) (row + (uintptr_t) row_bytes) - (int64_t) from;
        if (bytes > 0) {
            copy_word(to + cell * pitch + word, (const uint8_t *) from, bytes < 4 ? (int) bytes : 4);
        }
        cell += THREADS / pitch;
        word += THREADS % pitch;
        if (word >= pitch) {
            word -= pitch;
            ++cell;
        }
    }
}

// A query in bytes: two per coefficient, value = step * (128 * high + low), in the order of the entries.
template <int G> struct Queries {
    Entry * entries;
    int     n;
    int *   high; // [n][G]
    int *   low;
    float * step;   // [G]
    float * centre; // [G]: what the zero points add up to, in steps
};

template <int G>
__device__ void quantize_queries(const Queries<G> & q, const HeadCodec & codec, const float * qt, int64_t width,
                                 float * steps, float * room) {
    for (int i = (int) threadIdx.x; i < codec.rank; i += THREADS) {
        const Place p = place_of(codec, i);
        steps[i]      = p.half != 0 ? 0.0f : p.step;
    }
    __syncthreads();
    for (int g = 0; g < G; ++g) {
        float largest = 0.0f;
        for (int i = (int) threadIdx.x; i < codec.rank; i += THREADS) {
            largest = fmaxf(largest, fabsf(qt[g * width + i] * steps[i]));
        }
        largest = block_max(largest, room);
        if (threadIdx.x == 0) {
            q.step[g] = largest * ROUNDING;
        }
    }
    __syncthreads();
    for (int g = 0; g < G; ++g) {
        const float inverse = q.step[g] > 0.0f ? 1.0f / q.step[g] : 0.0f;
        float       centre  = 0.0f;
        for (int e = (int) threadIdx.x; e < q.n; e += THREADS) {
            const Entry & entry = q.entries[e];
            const float   zero  = entry.zero - (entry.mask == SIGNED ? 128.0f : 0.0f);
            uint32_t      high = 0, low = 0;
            for (int i = 0; i < 4 && entry.mask != 0; ++i) {
                const int j = entry.first[i];
                if (j < 0) {
                    continue;
                }
                const int value = (int) rintf(qt[g * width + j] * steps[j] * inverse);
                const int top   = (value + 64) >> 7;
                high |= (uint32_t) (uint8_t) (int8_t) top << (8 * i);
                low |= (uint32_t) (uint8_t) (int8_t) (value - 128 * top) << (8 * i);
                centre += (float) value * zero;
            }
            q.high[e * G + g] = (int) high;
            q.low[e * G + g]  = (int) low;
        }
        // a sum of multiples of a half below 2^24 per thread; between threads it is rounded like the logit itself
        centre = warp_sum(centre);
        if (threadIdx.x % WARP == 0) {
            room[threadIdx.x / WARP] = centre;
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            q.centre[g] = (room[0] + room[1]) + (room[2] + room[3]);
        }
        __syncthreads();
    }
}

// Dot products of a cell's key with the group's queries, without scale * shift: in [G].
template <int G>
__device__ void dots(const Queries<G> & q, const float * qt, int64_t width, const uint32_t * words, int skew, float s,
                     float (&logit)[G]) {
    int   whole[G]  = {};
    float halves[G] = {};
    for (int e = 0; e < q.n; ++e) {
        const Entry &  entry = q.entries[e];
        const uint32_t word  = word_at(words, skew, entry.at);
        if (entry.mask == 0) {
            const float a = from_half((uint16_t) word), b = from_half((uint16_t) (word >> 16));
            for (int g = 0; g < G; ++g) {
                const float * row = qt + g * width + entry.first[0];
                halves[g]         = fmaf(row[0], a, fmaf(row[1], b, halves[g]));
            }
            continue;
        }
        uint32_t codes = word >> entry.shift & entry.mask * 0x01010101u;
        codes ^= entry.mask == SIGNED ? 0x80808080u : 0u; // less 128
        for (int g = 0; g < G; ++g) {
            const int high = __dp4a((int) codes, q.high[e * G + g], 0);
            const int low  = __dp4a((int) codes, q.low[e * G + g], 0);
            whole[g] += (128 * high + low) * (1 << entry.up);
        }
    }
    for (int g = 0; g < G; ++g) {
        logit[g] = s * q.step[g] * ((float) whole[g] - q.centre[g]) + (s > 0.0f ? halves[g] : 0.0f);
    }
}

// Shared memory of a block, tile cells at a time.
template <int G> struct Shared {
    uint32_t * k; // [STAGES][tile][k_pitch]
    uint32_t * v; // [STAGES][tile][v_pitch]
    Queries<G> q;
    Entry *    values;
    float *    steps;  // [MAX_HEAD_SIZE] of K's bands, then of V's
    float *    weight; // [tile][G] exp(l - m) * scale of the value
    float *    plain;  // [tile][G] exp(l - m), 0 in zero rows
    float *    room;   // [WARPS * G]
    float *    out;    // [THREADS][4 * G]: sums of the threads, at the end; over queries and weights
    size_t     bytes;

    __host__ __device__ Shared(unsigned char * base, int tile, int k_pitch, int v_pitch) {
        Carve shared{ base };
        q.entries = shared.take<Entry>(MAX_ENTRIES);
        values    = shared.take<Entry>(MAX_ENTRIES);
        q.high    = shared.take<int>((size_t) MAX_ENTRIES * G);
        q.low     = shared.take<int>((size_t) MAX_ENTRIES * G);
        q.step    = shared.take<float>(G);
        q.centre  = shared.take<float>(G);
        q.n       = 0;
        steps     = shared.take<float>(MAX_HEAD_SIZE);
        weight    = shared.take<float>((size_t) tile * G);
        plain     = shared.take<float>((size_t) tile * G);
        room      = shared.take<float>((size_t) WARPS * G);
        out       = reinterpret_cast<float *>(q.high);
        static_assert(THREADS * 4 * G <= 2 * MAX_ENTRIES * G + MAX_HEAD_SIZE + 2 * 16 * G, "16: the smallest tile");
        k     = shared.take<uint32_t>((size_t) STAGES * tile * k_pitch);
        v     = shared.take<uint32_t>((size_t) STAGES * tile * v_pitch);
        bytes = shared.used;
    }
};

struct Job {
    Attend a;
    int    tile, k_pitch, v_pitch;
};

template <int G> __global__ void decode_kernel(Job job) {
    const Attend &    a      = job.a;
    const Layer &     l      = a.layer;
    const int         h      = (int) blockIdx.x; // heads first: their rows share sectors
    const int64_t     part   = blockIdx.y;
    const int64_t     token  = blockIdx.z;
    const int64_t     stream = token / a.n_tps;
    const HeadCodec & k      = l.k[h];
    const HeadCodec & v      = l.v[h];
    const int64_t     n_tok  = a.n_stream * a.n_tps;
    const float *     qt     = a.qt + (h * n_tok + token) * G * l.width_k;
    const uint8_t *   k_rows = a.k_rows + stream * a.k_stream + l.k_offset[h];
    const uint8_t *   v_rows = a.v_rows + stream * a.v_stream + l.v_offset[h];
    const int64_t     c_end  = least(a.n_kv, (part + 1) * a.split);
    const int         me     = (int) threadIdx.x;
    const int         warp   = me / WARP;

    Shared<G>  s(block_memory, job.tile, job.k_pitch, job.v_pitch);
    const auto fetch = [&](int64_t c0, int stage) {
        if (c0 < c_end) {
            const int n = (int) least(job.tile, c_end - c0);
            copy_rows(k_rows, a.k_stride, k.row_bytes, c0, n, job.k_pitch, s.k + stage * job.tile * job.k_pitch);
            copy_rows(v_rows, a.v_stride, v.row_bytes, c0, n, job.v_pitch, s.v + stage * job.tile * job.v_pitch);
        }
        copies_commit();
    };
    fetch(part * a.split, 0);
    s.q.n        = fill_entries(k, s.q.entries);
    const int nv = fill_entries(v, s.values);
    __syncthreads();
    quantize_queries(s.q, k, qt, l.width_k, s.steps, s.room);

    // threads of values: unit = four coefficients, lane = every n_lanes-th cell
    const int n_lanes = max(1, THREADS / max(1, nv));
    const int per     = THREADS / n_lanes;
    float     m[G], z[G], acc[2][4][G] = {}; // two rounds: up to 2 * THREADS entries
    for (int g = 0; g < G; ++g) {
        m[g] = -INFINITY;
        z[g] = 0.0f;
    }
    int stage = 0;
    for (int64_t c0 = part * a.split; c0 < c_end; c0 += job.tile, stage ^= 1) {
        fetch(c0 + job.tile, stage ^ 1);
        copies_done<1>();
        __syncthreads();
        const int        n       = (int) least(job.tile, c_end - c0);
        const uint32_t * k_words = s.k + stage * job.tile * job.k_pitch;
        const uint32_t * v_words = s.v + stage * job.tile * job.v_pitch;

        float logit[G];
        for (int g = 0; g < G; ++g) {
            logit[g] = -INFINITY;
        }
        if (me < n) {
            const float bias = coded_bias(a, token, c0 + me);
            if (bias != -INFINITY) {
                const uint32_t * words = k_words + me * job.k_pitch;
                const int        skew  = (int) ((uintptr_t) (k_rows + (c0 + me) * a.k_stride) % 4);
                dots(s.q, qt, l.width_k, words, skew, row_scale(word_at(words, skew, 0) & 255), logit);
                for (int g = 0; g < G; ++g) {
                    const float shift = a.shift[(h * n_tok + token) * G + g];
                    logit[g]          = capped(logit[g] + shift, l.softcap) + l.slope[h * G + g] * bias;
                }
            }
        }
        for (int g = 0; g < G; ++g) {
            const float top = warp_max(logit[g]);
            if (me % WARP == 0) {
                s.room[warp * G + g] = top;
            }
        }
        __syncthreads();
        const int   skew  = (int) ((uintptr_t) (v_rows + (c0 + me) * a.v_stride) % 4);
        const float scale = me < n ? row_scale(word_at(v_words + me * job.v_pitch, skew, 0) & 255) : 0.0f;
        float       keep[G];
        for (int g = 0; g < G; ++g) {
            float top = m[g];
            for (int i = 0; i < WARPS; ++i) {
                top = fmaxf(top, s.room[i * G + g]);
            }
            keep[g]       = m[g] == -INFINITY ? 0.0f : expf(m[g] - top);
            const float p = logit[g] == -INFINITY ? 0.0f : expf(logit[g] - top);
            m[g]          = top;
            z[g]          = z[g] * keep[g] + p;
            if (me < n) {
                s.weight[me * G + g] = p * scale;
                s.plain[me * G + g]  = scale > 0.0f ? p : 0.0f;
            }
        }
        __syncthreads();
#pragma unroll
        for (int round = 0; round < 2; ++round) {
            const int e    = me % per + round * THREADS;
            const int lane = me / per;
            for (int i = 0; i < 4; ++i) {
                for (int g = 0; g < G; ++g) {
                    acc[round][i][g] *= keep[g];
                }
            }
            if (e >= nv || lane >= n_lanes) {
                continue;
            }
            const Entry entry = s.values[e];
            for (int c = lane; c < n; c += n_lanes) {
                const auto     row  = (uintptr_t) (v_rows + (c0 + c) * a.v_stride);
                const uint32_t word = word_at(v_words + c * job.v_pitch, (int) (row % 4), entry.at);
                if (entry.mask == 0) {
                    const float x[2] = { from_half((uint16_t) word), from_half((uint16_t) (word >> 16)) };
                    for (int g = 0; g < G; ++g) {
                        const float p = s.plain[c * G + g];
                        for (int i = 0; p > 0.0f && i < 2; ++i) { // a hidden cell's halves may be infinite
                            acc[round][i][g] = fmaf(p, x[i], acc[round][i][g]);
                        }
                    }
                    continue;
                }
                const uint32_t codes = word >> entry.shift & entry.mask * 0x01010101u;
                for (int i = 0; i < 4; ++i) {
                    // 2^23 + code as a float is the code below the exponent 0x4B
                    const float u = __uint_as_float(__byte_perm(codes, 0x4B000000u, 0x7440u + (unsigned) i)) -
                                    8388608.0f - entry.zero;
                    for (int g = 0; g < G; ++g) {
                        acc[round][i][g] = fmaf(s.weight[c * G + g], u, acc[round][i][g]);
                    }
                }
            }
        }
        __syncthreads();
    }

    // sums of the threads -> coefficients, in a fixed order: the low planes have every coefficient once, so have the high
    const int64_t row   = ((part * l.n_head_kv + h) * n_tok + token) * G;
    const auto    merge = [&](int first, bool high) {
        for (int x = me; x < 4 * G * min(per, nv - first); x += THREADS) {
            const int     g = x % G, i = x / G % 4, e = x / G / 4;
            const Entry & entry = s.values[first + e];
            const int     j     = entry.first[i];
            if ((entry.up > 0) != high || j < 0) {
                continue;
            }
            float total = 0.0f;
            for (int lane = 0; lane < n_lanes; ++lane) {
                total += s.out[((lane * per + e) * 4 + i) * G + g];
            }
            float & sum = a.acc[(row + g) * l.width_v + j];
            total *= place_of(v, j).step;
            sum = high ? sum + (float) (1 << entry.up) * total : total;
        }
    };
    for (int round = 0; round * THREADS < nv; ++round) {
        __syncthreads();
        for (int i = 0; i < 4; ++i) {
            for (int g = 0; g < G; ++g) {
                s.out[(me * 4 + i) * G + g] = round == 0 ? acc[0][i][g] : acc[1][i][g];
            }
        }
        __syncthreads();
        merge(round * THREADS, false);
        __syncthreads();
        merge(round * THREADS, true);
    }
    for (int g = 0; g < G; ++g) {
        const float total = warp_sum(z[g]);
        if (me % WARP == 0) {
            s.room[warp * G + g] = total;
        }
    }
    __syncthreads();
    for (int g = 0; g < G; ++g) {
        if (me == g) {
            a.m[row + g] = m[g];
            a.z[row + g] = (s.room[g] + s.room[G + g]) + (s.room[2 * G + g] + s.room[3 * G + g]);
        }
    }
}

template <int G> const char * run(const Attend & a, void * stream) {
    Job        job   = { a, THREADS, row_words(a.layer.row_bytes_k), row_words(a.layer.row_bytes_v) };
    const auto bytes = [&] { return Shared<G>(nullptr, job.tile, job.k_pitch, job.v_pitch).bytes; };
    while (job.tile > 16 && bytes() > most_shared() / 2) { // two blocks of a multiprocessor hide each other's waits
        job.tile /= 2;
    }
    return launch(decode_kernel<G>,
                  dim3((unsigned) a.layer.n_head_kv, (unsigned) a.n_split, (unsigned) (a.n_stream * a.n_tps)), bytes(),
                  stream, job);
}

} // namespace

const char * attend_decode(const Attend & args, void * stream) {
    if (args.n_tps != 1) {
        return "attend_decode: one token per stream expected";
    }
    switch (args.layer.n_group) {
        case 1: return run<1>(args, stream);
        case 2: return run<2>(args, stream);
        case 3: return run<3>(args, stream);
        case 4: return run<4>(args, stream);
        case 5: return run<5>(args, stream);
        case 6: return run<6>(args, stream);
        case 7: return run<7>(args, stream);
        case 8: return run<8>(args, stream);
        default: return "attend_decode: at most 8 query heads per KV head expected";
    }
}

} // namespace subkv::cuda
