// attend_decode.cu: a few tokens per stream, each with blocks of its own; all query heads of a KV head per read of its
// codes, cells split over blocks.
//
// A block loads one or two complete tiles at a time to shared memory. Codes become bytes (levels.cuh), and tensor cores
// multiply them (products.cuh): keys (8 cells) by the high and low bytes of four query rows; values (8 coefficients) by
// the bytes of the rows' weights. So a lane ends with the logits of one query row and the sums of one coefficient of
// it.
//   keys     a warp has cells 16 * warp to + 15 of every tile and all octets; a lane has one cell and keeps its choices in
//            registers. Bytes move between lanes through shared memory, two octets at a time.
//   values   a warp has a contiguous fourth of the octets and all cells; lane l has coefficient l / 4 of each octet, and
//            bytes 4 * (l % 2) to + 3 of all lines of tile l % 4 / 2; weights are stored in this order.
#include "decode.cuh"
#include "exact_part.cuh"

#include <algorithm>
#include <cstring>

namespace subkv::cuda {

namespace {

// A block's copy of adjacent numbers to shared memory.
__device__ inline void copy_all(void * to, const void * from, int bytes) {
    const int at = (int) threadIdx.x * (int) sizeof(Sixteen);
    copy_part((uint8_t *) to + at, (const uint8_t *) from + at, bytes - at, THREADS);
}

// Copies of a step's tiles to shared memory; a thread copies from one of them.
class TileCopies {
public:
    template <int F>
    __device__ TileCopies(const Job & job, const Shared<F> & s, const HeadTiles & of_head, const uint8_t * k_tiles,
                          const uint8_t * v_tiles) :
        both_(job.both), copiers_(job.tiles == MOST_TILES ? THREADS / MOST_TILES : THREADS),
        cell_((int) threadIdx.x / copiers_ * TILE), place_((int) threadIdx.x % copiers_ * (int) sizeof(Sixteen)),
        k_left_(of_head.k_bytes - place_), v_left_(of_head.v_bytes - place_), k_step_(job.tiles * job.c.a.k_stride),
        v_step_(job.tiles * job.c.a.v_stride), k_from_(k_tiles + cell_ / TILE * job.c.a.k_stride + place_),
        v_from_(v_tiles + cell_ / TILE * job.c.a.v_stride + place_), k_to_(s.k + cell_ / TILE * job.k_bytes + place_),
        v_to_(s.v + cell_ / TILE * job.v_bytes + place_) {}

    // Starts the copies of keys or values for the step whose first cell is c0, of `cells`.
    __device__ void start(bool values, int c0, int cells) {
        const int left = values ? v_left_ : k_left_;
        copy_part(values ? v_to_ : k_to_, values ? v_from_ : k_from_, c0 + cell_ < cells ? left : 0, copiers_);
        (values ? v_from_ : k_from_) += values ? v_step_ : k_step_;
    }

    // Waits for the copies before the last ones, or if keys and values share their memory, for all.
    __device__ void wait() const {
        if (both_) {
            copies_done<1>();
        } else {
            copies_done<0>();
        }
        __syncthreads();
    }

private:
    bool            both_;
    int             copiers_, cell_, place_; // cell_: first one of its tile in a step
    int             k_left_, v_left_;        // bytes of a tile from the thread's place on
    int64_t         k_step_, v_step_;
    const uint8_t * k_from_;
    const uint8_t * v_from_;
    uint8_t *       k_to_;
    uint8_t *       v_to_;
};

// Numbers of a thread's query rows: element f is row FOUR * f + lane % FOUR.
template <int F> struct QueryRows {
    float shift[F], slope[F];

    __device__ QueryRows(const Attend & a, int h, int64_t row) {
        const int G = a.layer.n_group;
#pragma unroll
        for (int f = 0; f < F; ++f) {
            const int g  = FOUR * f + (int) threadIdx.x % FOUR;
            const int of = g < G ? g : 0;
            shift[f]     = a.shift[row * G + of];
            slope[f]     = a.layer.slope[h * G + of];
        }
    }
};

// Of the thread's cell of a step, which other lanes need.
struct Cell {
    float bias, key_scale, scale;
};

// The logits of these rows and cells 16 * warp + 8 * e + lane / 4 of tile t, and their maxima.
template <int F> struct Logits {
    float of[F][MOST_TILES][2], top[F];
};

// logits: the sums of halves
template <int F>
__device__ inline void make_logits(const Shared<F> & s, const Layer & l, const Cell & cell, const QueryRows<F> & query,
                                   const Products<F> & products, Logits<F> & logits) {
    const int lane = (int) threadIdx.x % WARP;
#pragma unroll
    for (int f = 0; f < F; ++f) {
        logits.top[f] = -INFINITY;
    }
#pragma unroll
    for (int t = 0; t < MOST_TILES; ++t) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int   of         = 16 * t + 8 * e + lane / 4; // lane that read the cell
            const float cell_bias  = __shfl_sync(ALL, cell.bias, of);
            const float cell_scale = __shfl_sync(ALL, cell.key_scale, of);
#pragma unroll
            for (int f = 0; f < F; ++f) {
                const int g = FOUR * f + lane % FOUR;
                // exact: 2 * 256 codes * 255 * 32639 fits 32 bits
                const auto twice =
                    (int) (2 * (256 * (uint32_t) products.sum[f][t][2 * e] + (uint32_t) products.sum[f][t][2 * e + 1]) -
                           s.queries.centre[g]);
                float & x = logits.of[f][t][e];
                x         = cell_scale * (0.5f * s.queries.step[g]) * (float) twice + (cell_scale > 0.0f ? x : 0.0f) +
                            query.shift[f];
                x         = capped(finite_or_nan(x), l.softcap) + query.slope[f] * cell_bias;
                x         = g < l.n_group && cell_bias != -INFINITY ? x : -INFINITY;
                logits.top[f] = fmaxf(logits.top[f], x);
            }
        }
    }
}

// A warp's maxima for the other warps: of its logits, and of its cells' scales.
template <int F> __device__ inline void share_maxima(const Shared<F> & s, const Logits<F> & logits, float scale) {
    const int lane = (int) threadIdx.x % WARP;
    float *   room = s.room + (int) threadIdx.x / WARP * (4 * F + 1);
#pragma unroll
    for (int f = 0; f < F; ++f) {
        float top = logits.top[f];
        for (int to = FOUR; to < WARP; to *= 2) {
            top = fmaxf(top, __shfl_xor_sync(ALL, top, to));
        }
        if (lane < FOUR) {
            room[FOUR * f + lane] = top;
        }
    }
    const float top_scale = warp_max(fmaxf(scale, 0.0f)); // not of values that are NaN
    if (lane == 0) {
        room[4 * F] = top_scale;
    }
}

// Moves the rows' states to a step's cells. Returns the unit of its weights; logits.top: of all warps.
template <int F> __device__ inline float move_rows(const Shared<F> & s, Logits<F> & logits, Softmax (&rows)[F]) {
    const auto largest = [&](int i) {
        constexpr int N = 4 * F + 1;
        return fmaxf(fmaxf(s.room[i], s.room[N + i]), fmaxf(s.room[2 * N + i], s.room[3 * N + i]));
    };
    const float weight_step = largest(4 * F) * WEIGHT_STEP;
#pragma unroll
    for (int f = 0; f < F; ++f) {
        Softmax &   row  = rows[f];
        const float old  = row.m;
        const float here = largest(FOUR * f + (int) threadIdx.x % FOUR);
        row.m            = fmaxf(old, here);
        const float m    = row.m == -INFINITY ? 0.0f : row.m;
        row.keep         = exponential(old - m);
        row.plain_factor = exponential(here - m);
        row.factor       = 0.5f * weight_step * row.plain_factor;
        row.z *= row.keep;
        logits.top[f] = here == -INFINITY ? 0.0f : here;
    }
    return weight_step;
}

// Stores the weights of the thread's logits. scale: of its cell's value, in units of the weights
template <int F>
__device__ inline void store_weights(const Shared<F> & s, const Logits<F> & logits, float scale, Softmax (&rows)[F]) {
    const int lane = (int) threadIdx.x % WARP, warp = (int) threadIdx.x / WARP;
    // the places of cell 16 * warp + lane / 4 among the words of quarter 2 * (warp % 2), of query row lane % FOUR
    uint8_t * const at     = s.weights + 2 * (lane % FOUR) * WEIGHT_PITCH + lane / 16 * (TILE / 2) + warp % 2 * 16 +
                             lane / 4 % 4 * 2 + warp / 2;
    const bool      halves = s.plan->v_halves != 0;
#pragma unroll
    for (int t = 0; t < MOST_TILES; ++t) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const float cell_scale = __shfl_sync(ALL, scale, 16 * t + 8 * e + lane / 4);
#pragma unroll
            for (int f = 0; f < F; ++f) {
                const float p     = exponential(logits.of[f][t][e] - logits.top[f]);
                rows[f].z         = fmaf(p, rows[f].plain_factor, rows[f].z);
                rows[f].z         = p > 0.0f ? fmaf(cell_scale, 0.0f, rows[f].z) : rows[f].z; // NaN if the value is
                const auto weight = (uint32_t) __float2int_rn(p * cell_scale);
                uint8_t *  to     = at + 8 * f * WEIGHT_PITCH + t * TILE + e * 8;
                to[0]             = (uint8_t) (weight >> 8);
                to[WEIGHT_PITCH]  = (uint8_t) weight;
                if (halves) {
                    s.plain[(FOUR * f + lane % FOUR) * 2 * TILE + t * TILE + 16 * warp + 8 * e + lane / 4] =
                        cell_scale > 0.0f ? p : 0.0f;
                }
            }
        }
    }
}

// Writes the sums of this warp's octets, and the rows' states. first: number of the first query row of the split
template <int F>
__device__ inline void store_split(const Shared<F> & s, const Attend & a, int64_t first, Softmax (&rows)[F]) {
    const int    G = a.layer.n_group, lane = (int) threadIdx.x % WARP, warp = (int) threadIdx.x / WARP;
    const Runs & runs = s.plan->values[warp];
#pragma unroll 1
    for (int i = 0; i < runs.n; ++i) {
        const Run   run        = runs.run[i];
        const float value_step = s.plan->value_step[run.band()];
#pragma unroll 1
        for (int o = run.first(); o < run.first() + run.n(); ++o) {
#pragma unroll
            for (int f = 0; f < F; ++f) {
                const int g = FOUR * f + lane % FOUR;
                if (g < G) {
                    a.acc[(first + g) * a.layer.width_v + 8 * o + lane / 4] =
                        value_step * s.sums[(f * s.octets + o) * WARP + lane];
                }
            }
        }
    }
    constexpr int N = 4 * F + 1;
#pragma unroll
    for (int f = 0; f < F; ++f) {
        float z = rows[f].z;
        for (int to = FOUR; to < WARP; to *= 2) {
            z += __shfl_xor_sync(ALL, z, to);
        }
        if (lane < FOUR) {
            s.room[warp * N + FOUR * f + lane] = z;
        }
    }
    __syncthreads();
#pragma unroll
    for (int f = 0; f < F; ++f) {
        const int g = FOUR * f + lane;
        if (warp == 0 && lane < FOUR && g < G) {
            const float z  = (s.room[g] + s.room[N + g]) + (s.room[2 * N + g] + s.room[3 * N + g]);
            a.z[first + g] = z;
            a.m[first + g] = state_top(rows[f].m, z);
        }
    }
}

// A block's work: split number `part` of a token's cells and a KV head.
template <int F> __device__ void attend_cells(const Job & job, int h, int64_t token, int64_t part) {
    const Attend & a      = job.c.a;
    const Layer &  l      = a.layer;
    const int64_t  stream = (unsigned) token / (unsigned) a.n_tps;
    const int64_t  n_tok  = a.n_stream * a.n_tps;
    const int64_t  row    = h * n_tok + token; // number of the first of the group's rows
    const int64_t  first  = part * a.split;
    const int      cells  = (int) (least(a.n_kv, first + a.split) - first);
    const int      step   = job.tiles * TILE; // cells
    const int      warp   = (int) threadIdx.x / WARP;
    const int      lane   = (int) threadIdx.x % WARP;
    const int      mine   = lane / 16 * TILE + 16 * warp + lane % 16;  // cell of the step: this thread reads its mask
    const int      k_next = job.tiles == MOST_TILES ? job.k_bytes : 0; // offset of the second tile
    const int      v_next = job.tiles == MOST_TILES ? job.v_bytes : 0;

    const Shared<F> s(block_memory, job);
    copy_all(s.plan, (const Plan *) l.plan + h, (int) sizeof(Plan));
    copy_all(s.queries.words, a.words + row * Queries<F>::size(l.width_k),
             Queries<F>::size(l.width_k) * (int) sizeof(uint32_t));
    const HeadTiles & of_head = job.of_head[h];
    const uint8_t *   k_tiles = a.k_tiles + stream * a.k_stream + of_head.k_offset + first / TILE * a.k_stride;
    const uint8_t *   v_tiles = a.v_tiles + stream * a.v_stream + of_head.v_offset + first / TILE * a.v_stride;
    TileCopies        copies(job, s, of_head, k_tiles, v_tiles);
#pragma unroll 1
    for (int side = 0; side <= (job.both ? 1 : 0); ++side) {
        copies.start(side == 1, 0, cells);
    }
    const QueryRows<F> query_rows(a, h, row);
    const int32_t      query = a.tokens[token].pos;
#pragma unroll 1
    for (int i = (int) threadIdx.x; i < F * s.octets * WARP; i += THREADS) {
        s.sums[i] = 0.0f;
    }

    Softmax         rows[F];
    const int32_t * position = a.cell_pos + stream * a.n_kv + first + mine;
    int64_t         masked   = token * a.n_kv + first + mine; // index into the mask
    const uint8_t * v_scale  = v_tiles + lane / 16 * a.v_stride + mine % TILE;
    for (int c0 = 0; c0 < cells; c0 += step) {
        Cell cell{ -INFINITY, 0.0f, 0.0f };
        if (mine < step && c0 + mine < cells) {
            const int32_t key  = *position; // no read waits for another one
            const float   seen = mask_value(a, masked);
            // the value's scale; its copy to shared memory may still be pending
            cell.scale = row_scale(*v_scale);
            cell.bias  = is_exact(a, key, query) ? -INFINITY : seen;
        }
        cell.scale = cell.bias == -INFINITY ? 0.0f : cell.scale;
        position += step;
        masked += step;
        v_scale += job.tiles * a.v_stride;

        copies.wait(); // keys are loaded, first plan and queries, too
        Products<F> products;
        multiply_keys(s, k_next, products);
        if (cell.bias != -INFINITY) {
            cell.key_scale = row_scale(s.k[lane / 16 * k_next + mine % TILE]);
        }
        Logits<F> logits = {};
        if (s.plan->keys.runs.halves) {
            add_halves(s, a.qt + row * l.n_group * l.width_k, l.width_k, l.n_group, k_next, logits.of);
        }
        make_logits(s, l, cell, query_rows, products, logits);
        share_maxima(s, logits, cell.scale);
        __syncthreads(); // all reads of keys are done
        copies.start(!job.both, job.both ? c0 + step : c0, cells);

        const float weight_step = move_rows(s, logits, rows);
        // 0 and NaN stay
        store_weights(s, logits, cell.scale > 0.0f ? __fdividef(cell.scale, weight_step) : cell.scale, rows);
        copies.wait(); // values and weights are ready
        add_values(s, s.plan->values[warp], v_next, rows);
        __syncthreads(); // all reads of values are done
        copies.start(job.both, c0 + step, cells);
    }
    copies_done<0>(); // a split without cells has not waited for its plan
    __syncthreads();
    store_split(s, a, (part * l.n_head_kv * n_tok + row) * l.n_group, rows);
}

// Blocks of a KV head and token: first the splits of the cells, then, with one token per stream, the parts of the exact
// keys.
template <int F> __global__ void __launch_bounds__(THREADS, DECODE_BLOCKS) decode_kernel(Job job) {
    const int     h     = (int) blockIdx.x;
    const int64_t token = blockIdx.z, part = blockIdx.y;
    if (part < job.c.a.n_split) {
        attend_cells<F>(job, h, token, part);
    } else {
        attend_exact<true>(job.c, h, token, (int) (part - job.c.a.n_split));
    }
}

// Bytes of a tile in shared memory, so that the second tile uses other banks.
int tile_bytes(int row_bytes) {
    return TILE * (row_bytes | 1);
}

template <int F> size_t shared_bytes(const Job & job) {
    const size_t exact = job.n_exact > 0 ? ExactShared(nullptr, job.c.a.layer).bytes : 0;
    return std::max(exact, Shared<F>(nullptr, job).bytes);
}

// Four blocks per multiprocessor hide each other's latency; large tiles only permit two. most: shared memory of a block
template <int F> Job job_of(const Combine & b, size_t most) {
    const Layer & l = b.a.layer;
    Job job{ b, ExactParts(b).n_blocks(l), MOST_TILES, true, tile_bytes(l.row_bytes_k), tile_bytes(l.row_bytes_v), {} };
    job.both  = shared_bytes<F>(job) <= most / 4;
    job.tiles = shared_bytes<F>(job) <= most / 2 ? MOST_TILES : 1;
    return job;
}

template <int F> const char * run(const Combine & b, void * stream) {
    const Attend & a   = b.a;
    Job            job = job_of<F>(b, most_shared());
    std::copy_n(a.layer.tiles, a.layer.n_head_kv, job.of_head);
    const dim3 grid((unsigned) a.layer.n_head_kv, (unsigned) (a.n_split + job.n_exact),
                    (unsigned) (a.n_stream * a.n_tps));
    return launch(decode_kernel<F>, grid, shared_bytes<F>(job), stream, job);
}

bool fits_decode(const Layer & l, size_t most) {
    constexpr int F = DECODE_GROUP / FOUR;
    Combine       b = {};
    b.a.layer       = l;
    return l.n_group <= DECODE_GROUP && l.n_head_kv <= DECODE_HEADS && !l.latent && l.d_k <= DECODE_HEAD &&
           l.d_v <= DECODE_HEAD && shared_bytes<F>(job_of<F>(b, most)) <= most;
}

} // namespace

bool suits_decode(const Attend & args) {
    return args.n_tps <= DECODE_TOKENS && fits_decode(args.layer, most_shared());
}

bool suits_decode(const Layer & layer, int device) {
    return fits_decode(layer, most_shared(device));
}

size_t plan_bytes() {
    return sizeof(Plan);
}

void make_plan(const HeadCodec & k, const HeadCodec & v, void * plan) {
    const Plan made(k, v);
    std::memcpy(plan, &made, sizeof(made));
}

int64_t n_at_once(int device) {
    int n = 0;
    return cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, device) == cudaSuccess ? DECODE_BLOCKS * n : 256;
}

const char * attend_decode(const Combine & args, void * stream) {
    if (!suits_decode(args.a)) {
        return "attend_decode: at most 8 tokens per stream, at most 8 query heads per KV head and small tiles expected";
    }
    return args.a.layer.n_group <= FOUR ? run<1>(args, stream) : run<2>(args, stream);
}

} // namespace subkv::cuda
