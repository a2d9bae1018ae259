// decode.cuh: the shared memory of the decode kernel (attend_decode.cu), and its products of a step's keys and values.
#pragma once

#include "plan.cuh"
#include "products.cuh"
#include "queries.cuh"
#include "tiles.cuh"

namespace subkv::cuda {

constexpr int MOST_TILES = 2; // maximum tiles at a time

constexpr int EXCHANGE_PITCH = 40; // words of a fourth of the exchanged bytes: 32, padded against bank conflicts
constexpr int WEIGHT_PITCH   = 2 * TILE + 16; // bytes of a column
constexpr int QUARTERS       = 4;             // quarters of a tile's cells, registers q and q + 4 (tiles.h) of values

struct Job {
    Combine c;                // attend reads `a` and the exact keys
    int     n_exact;          // blocks of a token and KV head for exact keys
    int     tiles;            // tiles at a time
    bool    both;             // whether keys and values have separate memory, so that copies overlap
    int     k_bytes, v_bytes; // bytes from one tile to the next in shared memory

    HeadTiles of_head[DECODE_HEADS];
};

// A block's work: split number `part` of a token's cells and a KV head.
struct Split {
    int             h, cells;
    int64_t         token, stream;
    int64_t         row;    // number of the first of the group's query rows
    int64_t         first;  // cell
    int64_t         result; // number of the first partial result
    const uint8_t * k_tiles;
    const uint8_t * v_tiles; // of the first cell

    __device__ Split(const Job & job, int head, int64_t of_token, int64_t part) :
        h(head), token(of_token), stream((unsigned) of_token / (unsigned) job.c.a.n_tps) {
        const Attend &    a       = job.c.a;
        const int64_t     n_tok   = a.n_stream * a.n_tps;
        const HeadTiles & of_head = job.of_head[h];
        row                       = h * n_tok + token;
        first                     = part * a.split;
        cells                     = (int) (least(a.n_kv, first + a.split) - first);
        result                    = (part * a.layer.n_head_kv * n_tok + row) * a.layer.n_group;
        k_tiles                   = a.k_tiles + stream * a.k_stream + of_head.k_offset + first / TILE * a.k_stride;
        v_tiles                   = a.v_tiles + stream * a.v_stream + of_head.v_offset + first / TILE * a.v_stride;
    }
};

// Shared memory of a block, for 4 * F query rows.
template <int F> struct Shared {
    Plan *     plan;
    Queries<F> queries;
    uint32_t * exchange; // [WARPS][4][EXCHANGE_PITCH], in the memory of `weights`
    uint8_t *  weights;  // [F][8][WEIGHT_PITCH] columns of right factors
    float *    plain;    // [4 * F][2 * TILE] exp(l - top), 0 in zero rows, for halves
    float *    sums;     // [F][octets of values][WARP]
    float *    room;     // [WARPS][4 * F + 1]
    uint8_t *  k;        // [tiles][k_bytes]
    uint8_t *  v;        // [tiles][v_bytes]
    int        octets;   // octets of values
    size_t     bytes;

    __device__ explicit Shared(const Queries<F> & of) : queries(of) {} // The caller sets the other parts.

    __host__ __device__ Shared(unsigned char * base, const Job & job) : queries(nullptr, job.c.a.layer.width_k) {
        constexpr size_t EXCHANGE = WARPS * 4 * EXCHANGE_PITCH * sizeof(uint32_t);
        constexpr size_t WHOLE    = F * (8 * WEIGHT_PITCH + 4 * 2 * TILE * sizeof(float));
        octets                    = job.c.a.layer.width_v / 8;
        Carve shared{ base };
        plan              = shared.take<Plan>(1);
        const int width_k = job.c.a.layer.width_k;
        queries           = Queries<F>(shared.take<uint32_t>((size_t) Queries<F>::size(width_k)), width_k);
        weights           = shared.take<uint8_t>(WHOLE > EXCHANGE ? WHOLE : EXCHANGE);
        exchange          = reinterpret_cast<uint32_t *>(weights);
        plain             = reinterpret_cast<float *>(weights + F * 8 * WEIGHT_PITCH);
        sums              = shared.take<float>((size_t) F * octets * WARP);
        room              = shared.take<float>(WARPS * (4 * F + 1));
        const size_t of_k = (size_t) job.tiles * job.k_bytes, of_v = (size_t) job.tiles * job.v_bytes;
        k     = shared.take<uint8_t>(job.both || of_k > of_v ? of_k : of_v);
        v     = job.both ? shared.take<uint8_t>(of_v) : k;
        bytes = shared.used;
    }
};

// Reads the lane's words of an octet's lines.
struct Lines {
    const uint8_t * at;

    __device__ uint32_t operator()(int i) const { return *reinterpret_cast<const uint32_t *>(at + i * LINE); }
};

// Calls `of` with a function of q that returns the choices of quarter q of the octet at `place`. `tile` points to the
// lane's word of line 0.
template <typename F> __device__ inline void read_choices(const Place & place, const uint8_t * tile, const F & of) {
    by_width(place.kind, [&](auto width) {
        if constexpr (width.bits <= TRELLIS_BITS) {
            const Lines lines{ tile + place.at };
            of([&](int q) { return choices_of<width.bits>(lines, q); });
        }
    });
}

// Integer products of keys with the high and the low bytes of a query row, for cell 16 * warp + lane / 4 of each tile,
// and then for the cell 8 cells later.
template <int F> struct Products {
    int sum[F][MOST_TILES][4] = {};
};

template <int BITS, int F>
__device__ inline void multiply_run(Width<BITS>, const Shared<F> & s, const Run & run, int q, const uint8_t * at,
                                    uint32_t * give, const Sixteen * take, Choices & before, Products<F> & products) {
    const Levels     levels = levels_of_width<BITS>(run.on_path());
    const uint32_t * right  = s.queries.words + run.first() / 2 * WARP + (int) threadIdx.x % WARP;
    Lines            lines{ at };
    const auto       take_pair = [&] {
        __syncwarp();
        const Sixteen all = *take;
        __syncwarp();
#pragma unroll
        for (int f = 0; f < F; ++f) {
            add_product_16(products.sum[f][0], all.of[0], all.of[1], right[f * s.queries.pairs * WARP]);
            add_product_16(products.sum[f][1], all.of[2], all.of[3], right[f * s.queries.pairs * WARP]);
        }
    };
    const auto give_octet = [&](uint32_t * to) {
        uint32_t words[2];
        if constexpr (BITS <= 4) {
            nibble_levels<BITS>(nibbles_of<BITS>(lines, q), levels, before, words);
        } else {
            uint32_t low, high;
            bytes_of<BITS>(lines, q, low, high);
            byte_levels<BITS>(low, high, levels, before, words);
        }
        lines.at += BITS * LINE;
        to[0]              = words[0];
        to[EXCHANGE_PITCH] = words[1];
    };
    unsigned odd = run.first() % 2, left = run.n();
#pragma unroll 1
    while (left > 0) {
        if (BITS <= 4 && odd == 0) {
#pragma unroll 1
            for (; left > 1; left -= 2) {
                give_octet(give);
                give_octet(give + 2 * EXCHANGE_PITCH);
                take_pair();
                right += WARP;
            }
        }
        if (left > 0) { // The pair's other octet is in another run, or missing.
            uint32_t * other      = give + (odd == 0 ? 2 * EXCHANGE_PITCH : 0);
            other[0]              = 0;
            other[EXCHANGE_PITCH] = 0;
            give_octet(give + (odd == 0 ? 0 : 2 * EXCHANGE_PITCH));
            take_pair();
            right += odd * WARP;
            odd = 1 - odd;
            left -= 1;
        }
    }
}

// Multiplies a warp's keys by the queries. The second tile is to_second bytes behind the first one. If there is none,
// to_second is 0, and the first one is read twice.
template <int F> __device__ inline void multiply_keys(const Shared<F> & s, int to_second, Products<F> & products) {
    const int lane = (int) threadIdx.x % WARP, q = (int) threadIdx.x / WARP;
    const int c = lane % 16; // A lane reads cells 16 * q + c and passes their bytes to the lanes that multiply them.
    const uint8_t * tile = s.k + lane / 16 * to_second + 4 * c;
    uint32_t *      room = s.exchange + q * 4 * EXCHANGE_PITCH;
    uint32_t *      give = room + c % 8 * 4 + lane / 16 * 2 + c / 8;
    const Sixteen * take = reinterpret_cast<const Sixteen *>(room + lane % 4 * EXCHANGE_PITCH + lane / 4 * 4);

    Choices before;
#pragma unroll 1
    for (int i = 1; i >= 0 && s.plan->keys.runs.on_path; --i) {
        uint32_t x = 0;
        read_choices(s.plan->keys.runs.before[i], tile, [&](auto at) { x = at(q); });
        before = { s.plan->keys.runs.before[i].wrapped ? x << 8 | x >> 28 | (x >> 20 & 16) : x, before.one };
    }
#pragma unroll 1
    for (int i = 0; i < s.plan->keys.runs.n; ++i) {
        const Run run = s.plan->keys.runs.run[i];
        by_width(run.kind(),
                 [&](auto width) { multiply_run(width, s, run, q, tile + run.at(), give, take, before, products); });
    }
}

// Adds the products of 16-bit bands, which are query rows FOUR * f + lane % FOUR < G times the halves of the lane's
// four cells in a quarter of the tiles.
template <int F>
__device__ inline void add_halves(const Shared<F> & s, const float * q, int64_t width, int G, const uint8_t * tiles,
                                  int to_second, int quarter, float (&sum)[F][MOST_TILES][2]) {
    const int cell = 16 * quarter + (int) threadIdx.x % WARP / 4;
#pragma unroll 1
    for (int i = 0; i < s.plan->keys.runs.n; ++i) {
        const Run run = s.plan->keys.runs.run[i];
#pragma unroll 1
        for (int j = 0; run.halves() && j < 8 * run.n(); ++j) {
            const uint16_t * x = half_of(tiles + run.at(), j, cell);
#pragma unroll
            for (int t = 0; t < MOST_TILES; ++t) {
#pragma unroll
                for (int f = 0; f < F; ++f) {
                    const int   g      = FOUR * f + (int) threadIdx.x % FOUR;
                    const float factor = g < G ? q[g * width + 8 * run.first() + j] : 0.0f;
                    sum[f][t][0]       = fmaf(factor, from_half(x[t * to_second / 2]), sum[f][t][0]);
                    sum[f][t][1]       = fmaf(factor, from_half(x[t * to_second / 2 + 8]), sum[f][t][1]);
                }
            }
        }
    }
}

// A query row's softmax over the previous cells, and its factors for the current ones.
struct Softmax {
    float m = -INFINITY, z = 0.0f;
    float keep;         // factor for the earlier sums
    float factor;       // factor for twice a sum of integers
    float plain_factor; // factor for plain weights
};

// The right factors of a lane, which are the weights of the cells in its words of registers q and q + 4.
template <int F> struct Weights {
    uint32_t word[F][QUARTERS][2];
    int      total[F]; // sum of the weights of row lane % 4
};

template <int F> __device__ inline Weights<F> read_weights(const Shared<F> & s) {
    constexpr uint32_t ONES[2] = { BYTES, BYTES };
    const int          lane    = (int) threadIdx.x % WARP;
    Weights<F>         weights;
#pragma unroll
    for (int f = 0; f < F; ++f) {
        const auto * from =
            reinterpret_cast<const Sixteen *>(s.weights + (8 * f + lane / 4) * WEIGHT_PITCH + lane % 4 * (TILE / 2));
        const Sixteen words[2] = { from[0], from[1] };
        int           sum[4]   = {};
#pragma unroll
        for (int q = 0; q < QUARTERS; ++q) {
            weights.word[f][q][0] = words[q / 2].of[q % 2 * 2];
            weights.word[f][q][1] = words[q / 2].of[q % 2 * 2 + 1];
            add_deep_product<false>(sum, ONES, ONES, weights.word[f][q]);
        }
        weights.total[f] = 256 * sum[0] + sum[1];
    }
    return weights;
}

// The codes of one coefficient of values in N octets of one width, in all quarters of the cells.
template <int BITS, int N> struct ValueCodes {
    uint32_t nibbles[N][QUARTERS];          // codes of up to 4 bits
    uint32_t low[QUARTERS], high[QUARTERS]; // bytes of wider codes

    template <int WIDTH> __device__ void read(const uint8_t * at, bool last) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
            const Lines lines{ n == 0 || last ? at : at + WIDTH * LINE };
#pragma unroll
            for (int q = 0; q < QUARTERS; ++q) {
                if constexpr (BITS <= 4) {
                    nibbles[n][q] = nibbles_of<WIDTH>(lines, q);
                } else {
                    bytes_of<WIDTH>(lines, q, low[q], high[q]);
                }
            }
        }
    }

    __device__ void levels(int n, int q, const Levels & levels, Choices & before, uint32_t (&words)[2]) const {
        if constexpr (BITS <= 4) {
            nibble_levels<BITS>(nibbles[n][q], levels, before, words);
        } else {
            byte_levels<BITS>(low[q], high[q], levels, before, words);
        }
    }
};

template <int BITS, int F>
__device__ inline void add_run(Width<BITS>, const Shared<F> & s, const Run & run, const uint8_t * at,
                               Choices (&before)[QUARTERS], const Weights<F> & weights, const Softmax (&rows)[F]) {
    constexpr int N      = BITS <= 4 ? 2 : 1; // octets at a time, which are 16 or 8 rows of a product
    const Levels  levels = one_width<BITS> ? levels_of_width<BITS>(run.on_path()) : LEVELS[0][run.levels()];
    float *       sums   = s.sums + run.first() * WARP + (int) threadIdx.x % WARP;
#pragma unroll 1
    for (int o = 0; o < run.n(); o += N, sums += N * WARP) {
        const bool          last = N == 2 && o + 1 == run.n(); // Without a second octet, the first one is read again.
        ValueCodes<BITS, N> codes;
        by_width_of<BITS>(run.kind(), [&](auto width) {
            codes.template read<width.bits>(at, last);
            at += N * width.bits * LINE;
        });
        uint32_t choices[QUARTERS];
        int      sum[F][4] = {};
#pragma unroll
        for (int q = 0; q < QUARTERS; ++q) {
            uint32_t words[2], words_8[2] = {};
            choices[q] = before[q].one;
            codes.levels(0, q, levels, before[q], words);
            if (N == 2) {
                codes.levels(N - 1, q, levels, before[q], words_8);
            }
#pragma unroll
            for (int f = 0; f < F; ++f) {
                add_deep_product<N == 2>(sum[f], words, words_8, weights.word[f][q]);
            }
        }
        const auto add = [&](int i) {
#pragma unroll
            for (int f = 0; f < F; ++f) { // No overflow: 128 levels of at most 255 halves times 65535 are below 2^31.
                const auto twice = (int) (2 * (256 * (uint32_t) sum[f][2 * i] + (uint32_t) sum[f][2 * i + 1]) -
                                          (uint32_t) levels.zero * (uint32_t) weights.total[f]);
                float &    x     = sums[(f * s.octets + i) * WARP];
                x                = fmaf(rows[f].factor, (float) twice, x * rows[f].keep);
            }
        };
        add(0);
        if (N == 2 && !last) {
            add(1);
        }
#pragma unroll
        for (int q = 0; q < QUARTERS; ++q) {
            before[q].two = last ? choices[q] : before[q].two;
        }
    }
}

// Reads the choices before the first octet of these runs, for every quarter of the cells. `tile` points to the lane's
// bytes.
__device__ inline void read_value_choices(const Runs & runs, const uint8_t * tile, Choices (&before)[QUARTERS]) {
    const int j = (int) threadIdx.x % WARP / 4;
#pragma unroll 1
    for (int i = 1; i >= 0 && runs.on_path; --i) {
        const Place place = runs.before[i];
        read_choices(place, tile + 8 * (place.wrapped ? (j + 7) % 8 : j), [&](auto at) {
#pragma unroll
            for (int q = 0; q < QUARTERS; ++q) {
                before[q] = { at(q), before[q].one };
            }
        });
    }
}

// Returns the lane's bytes of the first tile or of the second one, which is to_second bytes behind it.
__device__ inline const uint8_t * value_bytes(const uint8_t * tiles, int to_second) {
    const int lane = (int) threadIdx.x % WARP;
    return tiles + lane % 4 / 2 * to_second + lane % 2 * 4;
}

// Adds the values of these runs to their sums.
template <int F>
__device__ inline void add_runs(const Shared<F> & s, const Runs & runs, const uint8_t * tiles, int to_second,
                                Choices (&before)[QUARTERS], const Weights<F> & weights, const Softmax (&rows)[F]) {
    const int       lane = (int) threadIdx.x % WARP, j = lane / 4;
    const uint8_t * tile = value_bytes(tiles, to_second);
#pragma unroll 1
    for (int i = 0; i < runs.n; ++i) {
        const Run run = runs.run[i];
        by_decoder(run.kind(),
                   [&](auto width) { add_run(width, s, run, tile + run.at() + 8 * j, before, weights, rows); });
#pragma unroll 1
        for (int o = 0; run.halves() && o < run.n(); ++o) {
#pragma unroll
            for (int f = 0; f < F; ++f) {
                const float * p   = s.plain + (FOUR * f + lane % 4) * 2 * TILE;
                float         sum = 0.0f;
#pragma unroll 1
                for (int c = 0; c < 2 * TILE; ++c) {
                    const uint8_t * of = tiles + c / TILE * to_second + run.at() + 16 * LINE * o;
                    // Masked halves may be infinite.
                    sum += p[c] > 0.0f ? p[c] * from_half(*half_of(of, j, c % TILE)) : 0.0f;
                }
                float & x = s.sums[(f * s.octets + run.first() + o) * WARP + lane];
                x         = fmaf(rows[f].plain_factor, sum, x * rows[f].keep);
            }
        }
    }
}

// Adds values to the sums of this warp's octets.
template <int F>
__device__ inline void add_values(const Shared<F> & s, const Runs & runs, const uint8_t * tiles, int to_second,
                                  const Softmax (&rows)[F]) {
    const Weights<F> weights = read_weights(s);
    Choices          before[QUARTERS];
    read_value_choices(runs, value_bytes(tiles, to_second), before);
    add_runs(s, runs, tiles, to_second, before, weights, rows);
}

} // namespace subkv::cuda
