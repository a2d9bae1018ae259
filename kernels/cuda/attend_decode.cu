// attend_decode.cu: one token per stream, all query heads of a KV head per read of its codes, cells split over blocks.
//
// A block takes one or two tiles at a time, whole, through shared memory. Codes become bytes (levels.cuh) and are multiplied
// by tensor cores (products.cuh): keys, 8 cells, with the high and low bytes of four query rows; values, 8 coefficients,
// with those of the rows' weights. So a lane ends with the logits of one query row and the sums of one coefficient of it.
//   keys     a warp has cells 16 * warp to + 15 of every tile and all octets, a lane one of them: what its cell's codes
//            decide on stays in its registers. Bytes change lanes through shared memory, two octets at a time.
//   values   a warp has a fourth of the octets, which follow each other, and all cells; lane l coefficient l / 4 of each,
//            and bytes 4 * (l % 2) to + 3 of all lines of tile l % 4 / 2, in which order weights are kept.
#include "mask.cuh"
#include "products.cuh"
#include "runs.cuh"
#include "tiles.cuh"

namespace subkv::cuda {

namespace {

constexpr int MOST_TILES = 2; // at a time
constexpr int FOUR       = 4; // query rows of a product's eight columns: row 4 * i + g has columns 2 * g (high), 2 * g + 1

constexpr int TURN_PITCH   = 40;               // words of a fourth of the bytes that change lanes: 32, and against conflicts
constexpr int WEIGHT_PITCH = 2 * TILE + 16;    // bytes of a column
constexpr int QUARTERS     = 4;                // of a tile's cells: registers q and q + 4 (tiles.h) of values

struct Job {
    Attend a;
    int    tiles;            // at a time
    bool   both;             // keys and values have memory of their own, so that copies run ahead
    int    k_bytes, v_bytes; // from one tile to the next in shared memory
};

// Shared memory of a block, for 4 * F query rows.
template <int F> struct Shared {
    Runs *     keys;
    Runs *     values;  // [WARPS]
    uint32_t * queries; // [F][pairs][WARP] right factors
    float *    step;    // [4 * F] of the queries
    uint32_t * centre;  // [4 * F]: twice what the zeros of bytes add up to, in steps, modulo 2^32
    uint32_t * turn;    // [WARPS][4][TURN_PITCH], while there are no weights
    uint8_t *  weights; // [F][8][WEIGHT_PITCH] columns of right factors
    float *    plain;   // [4 * F][2 * TILE] exp(l - top), 0 in zero rows, for halves
    float *    sums;    // [F][octets of values][WARP]
    float *    room;    // [WARPS][4 * F + 1]
    uint8_t *  k;       // [tiles][k_bytes]
    uint8_t *  v;       // [tiles][v_bytes]
    int        pairs;   // of octets of keys
    int        octets;  // of values
    size_t     bytes;

    __host__ __device__ Shared(unsigned char * base, const Job & job) {
        constexpr size_t TURN  = WARPS * 4 * TURN_PITCH * sizeof(uint32_t);
        constexpr size_t WHOLE = F * (8 * WEIGHT_PITCH + 4 * 2 * TILE * sizeof(float));
        pairs                  = (job.a.layer.width_k / 8 + 1) / 2;
        octets                 = job.a.layer.width_v / 8;
        Carve shared{ base };
        keys               = shared.take<Runs>(WARPS + 1);
        values             = keys + 1;
        queries            = shared.take<uint32_t>((size_t) F * pairs * WARP);
        step               = shared.take<float>(4 * F);
        centre             = shared.take<uint32_t>(4 * F);
        weights            = shared.take<uint8_t>(WHOLE > TURN ? WHOLE : TURN);
        turn               = reinterpret_cast<uint32_t *>(weights);
        plain              = reinterpret_cast<float *>(weights + F * 8 * WEIGHT_PITCH);
        sums               = shared.take<float>((size_t) F * octets * WARP);
        room               = shared.take<float>(WARPS * (4 * F + 1));
        const size_t of_k  = (size_t) job.tiles * job.k_bytes, of_v = (size_t) job.tiles * job.v_bytes;
        k                  = shared.take<uint8_t>(job.both || of_k > of_v ? of_k : of_v);
        v                  = job.both ? shared.take<uint8_t>(of_v) : k;
        bytes              = shared.used;
    }
};

// A warp has every fourth query row. Rows that are not there are zeros.
template <int F>
__device__ void quantize_queries(const Shared<F> & s, const HeadCodec & codec, const float * qt, int64_t width, int G) {
    const int lane = (int) threadIdx.x % WARP;
#pragma unroll 1
    for (int i = (int) threadIdx.x; i < F * s.pairs * WARP; i += THREADS) {
        s.queries[i] = 0;
    }
    __syncthreads();
#pragma unroll 1
    for (int g = (int) threadIdx.x / WARP; g < 4 * F; g += WARPS) {
        const float * row     = qt + g * width;
        float         largest = 0.0f;
#pragma unroll 1
        for (int b = 0; g < G && b < codec.n_bands; ++b) {
            const Band & band = codec.bands[b];
            const float  unit = band.bits == 16 ? 0.0f : level_step(codec, band);
            const int    end  = band.first + band.n;
#pragma unroll 1
            for (int i = band.first + lane; i < end; i += WARP) {
                largest = fmaxf(largest, fabsf(row[i] * unit));
            }
        }
        const float step    = warp_max(largest) * QUERY_STEP;
        const float inverse = step > 1e-30f ? __fdividef(1.0f, step) : 0.0f;
        uint32_t    centre  = 0;
#pragma unroll 1
        for (int b = 0; g < G && b < codec.n_bands; ++b) {
            const Band & band = codec.bands[b];
            const int    zero = level_zero(band.bits, on_path(codec, band));
            const float  unit = level_step(codec, band);
            const int    n    = band.bits == 16 ? 0 : band.n / 4;
#pragma unroll 1
            for (int w = lane; w < n; w += WARP) { // words, as read_levels orders them
                const int octet = band.first / 8 + w / 2;
                uint32_t  high = 0, low = 0;
                for (int i = 0; i < 4; ++i) {
                    const int j     = 8 * octet + 2 * (w % 2) + i / 2 + 4 * (i % 2);
                    const int value = __float2int_rn(row[j] * unit * inverse);
                    const int upper = (value + 128) >> 8; // both bytes are signed
                    high |= (uint32_t) (upper & 255) << 8 * i;
                    low |= (uint32_t) (value & 255) << 8 * i;
                    centre += (uint32_t) (value * zero);
                }
                uint32_t * to = s.queries + (g / FOUR * s.pairs + octet / 2) * WARP + 8 * (g % FOUR);
                to[2 * (octet % 2) + w % 2]     = high;
                to[2 * (octet % 2) + w % 2 + 4] = low;
            }
        }
        for (int to = WARP / 2; to > 0; to /= 2) {
            centre += __shfl_xor_sync(ALL, centre, to);
        }
        if (lane == 0) {
            s.step[g]   = step;
            s.centre[g] = centre;
        }
    }
    __syncthreads();
}

// The lane's words of an octet's lines.
struct Lines {
    const uint8_t * at;

    __device__ uint32_t operator()(int i) const { return *reinterpret_cast<const uint32_t *>(at + i * LINE); }
};

// Choices that an octet makes: at the lane's words of line 0 of the tile. `of` is called for every q, with the word.
template <typename F> __device__ inline void read_choices(const Place & place, const uint8_t * tile, const F & of) {
    by_width(place.bits, [&](auto width) {
        if constexpr (width.bits <= TRELLIS_BITS) {
            const Lines lines{ tile + place.at };
            of([&](int q) { return choices_of<width.bits>(lines, q); });
        }
    });
}

// Integer products of a warp's keys with the queries: cells 16 * warp + lane / 4 and 8 more of each tile, high and low.
template <int F> struct Products {
    int sum[F][MOST_TILES][4] = {};
};

template <int BITS, int F>
__device__ inline void multiply_run(Width<BITS>, const Shared<F> & s, const Run & run, int q, const uint8_t * at,
                                    uint32_t * give, const Sixteen * take, Choices & before, Products<F> & products) {
    const Levels     levels = LEVELS[BITS - 2][run.on_path()];
    const uint32_t * right  = s.queries + run.first() / 2 * WARP + (int) threadIdx.x % WARP;
    Lines            lines{ at };
    const auto       take_pair = [&] {
        __syncwarp();
        const Sixteen all = *take;
        __syncwarp();
#pragma unroll
        for (int f = 0; f < F; ++f) {
            add_product_16(products.sum[f][0], all.word[0], all.word[1], right[f * s.pairs * WARP]);
            add_product_16(products.sum[f][1], all.word[2], all.word[3], right[f * s.pairs * WARP]);
        }
    };
    const auto give_octet = [&](uint32_t * to) {
        uint32_t words[2];
        read_levels<BITS>(lines, q, levels, before, words);
        lines.at += BITS * LINE;
        to[0]          = words[0];
        to[TURN_PITCH] = words[1];
    };
    unsigned odd = run.first() % 2, left = run.n();
#pragma unroll 1
    while (left > 0) {
        if (BITS <= 4 && odd == 0) {
#pragma unroll 1
            for (; left > 1; left -= 2) {
                give_octet(give);
                give_octet(give + 2 * TURN_PITCH);
                take_pair();
                right += WARP;
            }
        }
        if (left > 0) { // the other one of the pair is of another run, or not there
            uint32_t * other  = give + (odd == 0 ? 2 * TURN_PITCH : 0);
            other[0]          = 0;
            other[TURN_PITCH] = 0;
            give_octet(give + (odd == 0 ? 0 : 2 * TURN_PITCH));
            take_pair();
            right += odd * WARP;
            odd = 1 - odd;
            left -= 1;
        }
    }
}

// to_second: bytes from the first tile to the second one, 0 where one is at hand.
template <int F> __device__ inline void multiply_keys(const Shared<F> & s, int to_second, Products<F> & products) {
    const int       lane = (int) threadIdx.x % WARP, q = (int) threadIdx.x / WARP;
    const int       c    = lane % 16; // a lane reads of cell 16 * q + c, and gives its bytes to the lanes that multiply them
    const uint8_t * tile = s.k + lane / 16 * to_second + 4 * c;
    uint32_t *      room = s.turn + q * 4 * TURN_PITCH;
    uint32_t *      give = room + c % 8 * 4 + lane / 16 * 2 + c / 8;
    const Sixteen *   take = reinterpret_cast<const Sixteen *>(room + lane % 4 * TURN_PITCH + lane / 4 * 4);

    Choices before;
#pragma unroll 1
    for (int i = 1; i >= 0 && s.keys->on_path; --i) {
        uint32_t x = 0;
        read_choices(s.keys->before[i], tile, [&](auto at) { x = at(q); });
        before = { s.keys->before[i].turned ? x << 8 | x >> 28 | (x >> 20 & 16) : x, before.one };
    }
#pragma unroll 1
    for (int i = 0; i < s.keys->n; ++i) {
        const Run run = s.keys->run[i];
        by_width(run.bits(), [&](auto width) {
            multiply_run(width, s, run, q, tile + run.at(), give, take, before, products);
        });
    }
}

// Adds what halves give: dot products of query rows q [F], of lane % 4, with four cells' halves.
template <int F>
__device__ inline void add_halves(const Shared<F> & s, const float * const (&q)[F], int to_second,
                                  float (&sum)[F][MOST_TILES][2]) {
    const int cell = (int) threadIdx.x / WARP * 16 + (int) threadIdx.x % WARP / 4;
#pragma unroll 1
    for (int i = 0; i < s.keys->n; ++i) {
        const Run run = s.keys->run[i];
#pragma unroll 1
        for (int j = 0; run.bits() == 16 && j < 8 * run.n(); ++j) {
            const uint16_t * x = half_of(s.k + run.at(), j, cell);
#pragma unroll
            for (int t = 0; t < MOST_TILES; ++t) {
#pragma unroll
                for (int f = 0; f < F; ++f) {
                    const float factor = q[f][8 * run.first() + j];
                    sum[f][t][0]       = fmaf(factor, from_half(x[t * to_second / 2]), sum[f][t][0]);
                    sum[f][t][1]       = fmaf(factor, from_half(x[t * to_second / 2 + 8]), sum[f][t][1]);
                }
            }
        }
    }
}

// A row's softmax, of the cells so far and of those at hand.
struct Softmax {
    float m = -INFINITY, z = 0.0f;
    float keep;         // of what has been summed
    float factor;       // of twice a sum of integers
    float plain_factor; // of plain weights
};

// The right factors of a lane: weights of the cells of its words of registers q and q + 4.
template <int F> struct Weights {
    uint32_t word[F][QUARTERS][2];
    int      total[F]; // of row lane % 4: the sum of its weights
};

template <int F> __device__ inline Weights<F> read_weights(const Shared<F> & s) {
    constexpr uint32_t ONES[2] = { BYTES, BYTES };
    const int          lane    = (int) threadIdx.x % WARP;
    Weights<F>         weights;
#pragma unroll
    for (int f = 0; f < F; ++f) {
        const auto * from =
            reinterpret_cast<const Sixteen *>(s.weights + (8 * f + lane / 4) * WEIGHT_PITCH + lane % 4 * (TILE / 2));
        int sum[4] = {};
#pragma unroll
        for (int q = 0; q < QUARTERS; ++q) {
            weights.word[f][q][0] = from[q / 2].word[q % 2 * 2];
            weights.word[f][q][1] = from[q / 2].word[q % 2 * 2 + 1];
            add_deep_product<false>(sum, ONES, ONES, weights.word[f][q]);
        }
        weights.total[f] = 256 * sum[0] + sum[1];
    }
    return weights;
}

template <int BITS, int F>
__device__ inline void add_run(Width<BITS>, const Shared<F> & s, const Run & run, const uint8_t * at,
                               Choices (&before)[QUARTERS], const Weights<F> & weights, const Softmax (&rows)[F]) {
    constexpr int N      = BITS <= 4 ? 2 : 1; // octets at a time: 16 rows or 8
    const Levels  levels = LEVELS[BITS - 2][run.on_path()];
    float *       sums   = s.sums + run.first() * WARP + (int) threadIdx.x % WARP;
#pragma unroll 1
    for (int o = 0; o < run.n(); o += N, at += N * BITS * LINE, sums += N * WARP) {
        const bool last = N == 2 && o + 1 == run.n(); // the first octet once more in place of a second one
        uint32_t   line[N][BITS];
        uint32_t   choices[QUARTERS];
#pragma unroll
        for (int i = 0; i < BITS; ++i) {
            line[0][i]     = Lines{ at }(i);
            line[N - 1][i] = Lines{ last ? at : at + (N - 1) * BITS * LINE }(i);
        }
        int sum[F][4] = {};
#pragma unroll
        for (int q = 0; q < QUARTERS; ++q) {
            uint32_t words[2], words_8[2] = {};
            choices[q] = before[q].one;
            read_levels<BITS>([&](int i) { return line[0][i]; }, q, levels, before[q], words);
            if (N == 2) {
                read_levels<BITS>([&](int i) { return line[N - 1][i]; }, q, levels, before[q], words_8);
            }
#pragma unroll
            for (int f = 0; f < F; ++f) {
                add_deep_product<N == 2>(sum[f], words, words_8, weights.word[f][q]);
            }
        }
        const auto add = [&](int i) {
#pragma unroll
            for (int f = 0; f < F; ++f) { // exact: 128 levels of at most 255 halves times 65535 are below 2^31
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

// Adds values to the sums of this warp's octets.
template <int F>
__device__ inline void add_values(const Shared<F> & s, const Runs & runs, int to_second, const Softmax (&rows)[F]) {
    const int        lane = (int) threadIdx.x % WARP, j = lane / 4;
    const uint8_t *  tile = s.v + lane % 4 / 2 * to_second + lane % 2 * 4;
    const Weights<F> weights = read_weights(s);

    Choices before[QUARTERS];
#pragma unroll 1
    for (int i = 1; i >= 0 && runs.on_path; --i) {
        const Place place = runs.before[i];
        read_choices(place, tile + 8 * (place.turned ? (j + 7) % 8 : j), [&](auto at) {
#pragma unroll
            for (int q = 0; q < QUARTERS; ++q) {
                before[q] = { at(q), before[q].one };
            }
        });
    }
#pragma unroll 1
    for (int i = 0; i < runs.n; ++i) {
        const Run run = runs.run[i];
        by_width(run.bits(), [&](auto width) {
            add_run(width, s, run, tile + run.at() + 8 * j, before, weights, rows);
        });
#pragma unroll 1
        for (int o = 0; run.bits() == 16 && o < run.n(); ++o) {
#pragma unroll
            for (int f = 0; f < F; ++f) {
                const float * p   = s.plain + (FOUR * f + lane % 4) * 2 * TILE;
                float         sum = 0.0f;
#pragma unroll 1
                for (int c = 0; c < 2 * TILE; ++c) {
                    const uint8_t * of = s.v + c / TILE * to_second + run.at() + 16 * LINE * o;
                    sum += p[c] > 0.0f ? p[c] * from_half(*half_of(of, j, c % TILE)) : 0.0f; // hidden ones may be infinite
                }
                float & x = s.sums[(f * s.octets + run.first() + o) * WARP + lane];
                x         = fmaf(rows[f].plain_factor, sum, x * rows[f].keep);
            }
        }
    }
}

template <int F> __global__ void __launch_bounds__(THREADS, 4) decode_kernel(Job job) {
    const Attend &    a      = job.a;
    const Layer &     l      = a.layer;
    const int         G      = l.n_group;
    const int         h      = (int) blockIdx.x;
    const int64_t     part   = blockIdx.y;
    const int64_t     token  = blockIdx.z; // of a stream of its own
    const HeadCodec & k      = l.k[h];
    const HeadCodec & v      = l.v[h];
    const int64_t     row    = h * a.n_stream + token; // of G rows
    const float *     qt     = a.qt + row * G * l.width_k;
    const int64_t     first  = part * a.split;
    const int         cells  = (int) (least(a.n_kv, first + a.split) - first);
    const int         step   = job.tiles * TILE; // cells
    const int         warp   = (int) threadIdx.x / WARP;
    const int         lane   = (int) threadIdx.x % WARP;
    const int         mine   = lane / 16 * TILE + 16 * warp + lane % 16; // of the cells at hand, the one whose mask it reads
    const int         octet  = warp * (v.rank / 8) / WARPS;              // the first one of values of this warp
    const int         end    = (warp + 1) * (v.rank / 8) / WARPS;
    const int         k_next = job.tiles == MOST_TILES ? job.k_bytes : 0; // to the second tile
    const int         v_next = job.tiles == MOST_TILES ? job.v_bytes : 0;

    const Shared<F> s(block_memory, job);
    const uint8_t * k_tiles = a.k_tiles + token * a.k_stream + l.k_offset[h] + first / TILE * a.k_stride;
    const uint8_t * v_tiles = a.v_tiles + token * a.v_stream + l.v_offset[h] + first / TILE * a.v_stride;
    // a thread copies of one of the tiles
    const int       copiers  = job.tiles == MOST_TILES ? THREADS / MOST_TILES : THREADS;
    const int       copied   = (int) threadIdx.x / copiers * TILE; // cell of the next steps where its tile begins
    const int       place    = (int) threadIdx.x % copiers * (int) sizeof(Sixteen);
    const uint8_t * k_from   = k_tiles + copied / TILE * a.k_stride + place;
    const uint8_t * v_from   = v_tiles + copied / TILE * a.v_stride + place;
    uint8_t * const k_to     = s.k + copied / TILE * job.k_bytes + place;
    uint8_t * const v_to     = s.v + copied / TILE * job.v_bytes + place;
    const auto fetch_keys    = [&](int c0) {
        copy_part(k_to, k_from, c0 + copied < cells ? TILE * k.row_bytes - place : 0, copiers);
        k_from += job.tiles * a.k_stride;
    };
    const auto fetch_values = [&](int c0) {
        copy_part(v_to, v_from, c0 + copied < cells ? TILE * v.row_bytes - place : 0, copiers);
        v_from += job.tiles * a.v_stride;
    };

    fetch_keys(0);
    if (job.both) {
        fetch_values(0);
    }
    if (lane == 0 || threadIdx.x == 1) {
        const bool keys = lane == 1;
        fill_runs(keys ? k : v, keys ? 0 : octet, keys ? k.rank / 8 : end, keys ? *s.keys : s.values[warp]);
    }
#pragma unroll 1
    for (int i = octet; i < end; ++i) {
#pragma unroll
        for (int f = 0; f < F; ++f) {
            s.sums[(f * s.octets + i) * WARP + lane] = 0.0f;
        }
    }
    quantize_queries(s, k, qt, l.width_k, G);
    bool v_halves = false;
#pragma unroll 1
    for (int b = 0; b < v.n_bands; ++b) {
        v_halves |= v.bands[b].bits == 16;
    }

    Softmax       rows[F]; // of row FOUR * f + lane % FOUR
    float         shift[F], slope[F], query_step[F];
    uint32_t      centre[F];
    const float * q[F];
#pragma unroll
    for (int f = 0; f < F; ++f) {
        const int g   = FOUR * f + lane % FOUR;
        const int of  = g < G ? g : 0;
        shift[f]      = a.shift[row * G + of];
        slope[f]      = l.slope[h * G + of];
        query_step[f] = 0.5f * s.step[g];
        centre[f]     = s.centre[g];
        q[f]          = qt + of * l.width_k;
    }
    // the places of cell 16 * warp + lane / 4 among the words of quarter 2 * (warp % 2), of query row lane % FOUR
    uint8_t * const weight_at = s.weights + 2 * (lane % FOUR) * WEIGHT_PITCH + lane / 16 * (TILE / 2) + warp % 2 * 16 +
                                lane / 4 % 4 * 2 + warp / 2;
    const int32_t   query     = a.tokens[4 * token]; // its position
    const int32_t * position  = a.cell_pos + token * a.n_kv + first + mine;
    int64_t         masked    = token * a.n_kv + first + mine; // index of the mask
    const uint8_t * v_scale   = v_tiles + lane / 16 * a.v_stride + mine % TILE;
    for (int c0 = 0; c0 < cells; c0 += step) {
        float bias = -INFINITY, scale = 0.0f, key_scale = 0.0f;
        if (mine < step && c0 + mine < cells) {
            const int32_t key = *position;
            bias              = is_exact(a, key, query) ? -INFINITY : mask_value(a, masked);
            // of the value, which may still be on its way to shared memory
            scale = row_scale(*v_scale);
        }
        scale = bias == -INFINITY ? 0.0f : scale;
        position += step;
        masked += step;
        v_scale += job.tiles * a.v_stride;
        if (job.both) {
            copies_done<1>();
        } else {
            copies_done<0>();
        }
        __syncthreads(); // keys are there
        Products<F> products;
        multiply_keys(s, k_next, products);

        if (bias != -INFINITY) {
            key_scale = row_scale(s.k[lane / 16 * k_next + mine % TILE]);
        }
        float logit[F][MOST_TILES][2] = {}, top[F];
        if (s.keys->halves) {
            add_halves(s, q, k_next, logit);
        }
#pragma unroll
        for (int f = 0; f < F; ++f) {
            top[f] = -INFINITY;
        }
#pragma unroll
        for (int t = 0; t < MOST_TILES; ++t) {
#pragma unroll
            for (int e = 0; e < 2; ++e) { // cell 16 * warp + 8 * e + lane / 4 of tile t
                const int   of         = 16 * t + 8 * e + lane / 4; // the lane that has read it
                const float cell_bias  = __shfl_sync(ALL, bias, of);
                const float cell_scale = __shfl_sync(ALL, key_scale, of);
#pragma unroll
                for (int f = 0; f < F; ++f) {
                    const int g = FOUR * f + lane % FOUR;
                    // exact: twice 256 codes' distance from their zero, of 255 times 32639, fits
                    const auto twice = (int) (2 * (256 * (uint32_t) products.sum[f][t][2 * e] +
                                                   (uint32_t) products.sum[f][t][2 * e + 1]) -
                                              centre[f]);
                    float &    x     = logit[f][t][e];
                    x = cell_scale * query_step[f] * (float) twice + (cell_scale > 0.0f ? x : 0.0f) + shift[f];
                    x = capped(x, l.softcap) + slope[f] * cell_bias;
                    x = g < G && cell_bias != -INFINITY ? x : -INFINITY;
                    top[f] = fmaxf(top[f], x);
                }
            }
        }
#pragma unroll
        for (int f = 0; f < F; ++f) {
            for (int to = FOUR; to < WARP; to *= 2) {
                top[f] = fmaxf(top[f], __shfl_xor_sync(ALL, top[f], to));
            }
            if (lane < FOUR) {
                s.room[warp * (4 * F + 1) + FOUR * f + lane] = top[f];
            }
        }
        const float top_scale = warp_max(scale);
        if (lane == 0) {
            s.room[warp * (4 * F + 1) + 4 * F] = top_scale;
        }
        __syncthreads(); // nobody reads keys any more
        if (job.both) {
            fetch_keys(c0 + step);
        } else {
            fetch_values(c0);
        }

        const auto largest = [&](int i) { // of these cells
            constexpr int N = 4 * F + 1;
            return fmaxf(fmaxf(s.room[i], s.room[N + i]), fmaxf(s.room[2 * N + i], s.room[3 * N + i]));
        };
        const float unit = largest(4 * F) * WEIGHT_STEP;
        scale            = scale > 0.0f ? __fdividef(scale, unit) : 0.0f;
#pragma unroll
        for (int f = 0; f < F; ++f) {
            Softmax &   row   = rows[f];
            const float old   = row.m;
            const float here  = largest(FOUR * f + lane % FOUR);
            row.m             = fmaxf(old, here);
            const float m     = row.m == -INFINITY ? 0.0f : row.m;
            row.keep          = exponential(old - m);
            row.plain_factor  = exponential(here - m);
            row.factor        = 0.5f * unit * row.plain_factor;
            row.z            *= row.keep;
            top[f]            = here == -INFINITY ? 0.0f : here;
        }
#pragma unroll
        for (int t = 0; t < MOST_TILES; ++t) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const float cell_scale = __shfl_sync(ALL, scale, 16 * t + 8 * e + lane / 4);
#pragma unroll
                for (int f = 0; f < F; ++f) {
                    const float p      = exponential(logit[f][t][e] - top[f]);
                    rows[f].z          = fmaf(p, rows[f].plain_factor, rows[f].z);
                    const auto weight  = (uint32_t) __float2int_rn(p * cell_scale);
                    uint8_t *  to      = weight_at + 8 * f * WEIGHT_PITCH + t * TILE + e * 8;
                    to[0]              = (uint8_t) (weight >> 8);
                    to[WEIGHT_PITCH]   = (uint8_t) weight;
                    if (v_halves) {
                        s.plain[(FOUR * f + lane % FOUR) * 2 * TILE + t * TILE + 16 * warp + 8 * e + lane / 4] =
                            cell_scale > 0.0f ? p : 0.0f;
                    }
                }
            }
        }
        if (job.both) {
            copies_done<1>();
        } else {
            copies_done<0>();
        }
        __syncthreads(); // values and weights are there
        add_values(s, s.values[warp], v_next, rows);
        __syncthreads(); // nobody reads values any more
        if (job.both) {
            fetch_values(c0 + step);
        } else {
            fetch_keys(c0 + step);
        }
    }

    const int64_t out = (part * l.n_head_kv * a.n_stream + row) * G;
#pragma unroll 1
    for (int b = 0; b < v.n_bands; ++b) {
        const Band & band = v.bands[b];
        const float  unit = band.bits == 16 ? 1.0f : level_step(v, band);
#pragma unroll 1
        for (int o = max(octet, band.first / 8); o < min(end, (band.first + band.n) / 8); ++o) {
#pragma unroll 1
            for (int g = lane % FOUR; g < G; g += FOUR) {
                a.acc[(out + g) * l.width_v + 8 * o + lane / 4] =
                    unit * s.sums[(g / FOUR * s.octets + o) * WARP + lane];
            }
        }
    }
#pragma unroll
    for (int f = 0; f < F; ++f) {
        float z = rows[f].z;
        for (int to = FOUR; to < WARP; to *= 2) {
            z += __shfl_xor_sync(ALL, z, to);
        }
        if (lane < FOUR) {
            s.room[warp * (4 * F + 1) + FOUR * f + lane] = z;
        }
    }
    __syncthreads();
#pragma unroll
    for (int f = 0; f < F; ++f) {
        const int g = FOUR * f + lane;
        if (warp == 0 && lane < FOUR && g < G) {
            constexpr int N = 4 * F + 1;
            a.m[out + g]    = rows[f].m;
            a.z[out + g]    = (s.room[g] + s.room[N + g]) + (s.room[2 * N + g] + s.room[3 * N + g]);
        }
    }
}

// Memory of tiles whose second one lies in other banks.
int tile_bytes(int row_bytes) {
    return TILE * (row_bytes | 1);
}

template <int F> size_t shared_bytes(const Job & job) {
    return Shared<F>(nullptr, job).bytes;
}

// Four blocks of a multiprocessor hide each other's waits; two have to do where tiles are large.
template <int F> Job job_of(const Attend & a) {
    Job job{ a, MOST_TILES, true, tile_bytes(a.layer.row_bytes_k), tile_bytes(a.layer.row_bytes_v) };
    job.both  = shared_bytes<F>(job) <= most_shared() / 4;
    job.tiles = shared_bytes<F>(job) <= most_shared() / 2 ? MOST_TILES : 1;
    return job;
}

template <int F> const char * run(const Attend & a, void * stream) {
    const Job job = job_of<F>(a);
    return launch(decode_kernel<F>,
                  dim3((unsigned) a.layer.n_head_kv, (unsigned) a.n_split, (unsigned) (a.n_stream * a.n_tps)),
                  shared_bytes<F>(job), stream, job);
}

} // namespace

bool suits_decode(const Attend & args) {
    return args.n_tps == 1 && args.layer.n_group <= DECODE_GROUP &&
           shared_bytes<DECODE_GROUP / FOUR>(job_of<DECODE_GROUP / FOUR>(args)) <= most_shared();
}

const char * attend_decode(const Attend & args, void * stream) {
    if (!suits_decode(args)) {
        return "attend_decode: one token per stream, at most 8 query heads per KV head and small tiles expected";
    }
    return args.layer.n_group <= FOUR ? run<1>(args, stream) : run<2>(args, stream);
}

} // namespace subkv::cuda
