// attend_decode.cu: attention of a few tokens per stream to coded cells. Each token has its own blocks, over which its
// cells are split. A block reads the codes of a KV head once for all query heads.
//
// A block loads one or two complete tiles at a time to shared memory. Codes become bytes (levels.cuh), which tensor
// cores multiply (products.cuh): eight cells of keys by the high and low bytes of four query rows, and eight
// coefficients of values by the bytes of these rows' weights. Each lane gets the logits of one query row and the sums
// of one of its coefficients.
//   keys     A warp has all octets of 16 cells of every tile, from 16 * warp on. A lane has one cell and keeps its
//            choices (levels.cuh) in registers. Bytes move between lanes through shared memory, two octets at a time.
//   values   A warp has all cells of a contiguous fourth of the octets. Lane l has coefficient l / 4 of each octet, and
//            four bytes from 4 * (l % 2) on of all lines of tile l % 4 / 2. Weights are stored in this order.
#include "pairs.cuh"
#include "softmax.cuh"

#include <algorithm>
#include <cstring>

namespace subkv::cuda {

namespace {

// Copies a step's tiles to shared memory. A thread copies from one of them.
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

    // Starts to copy the keys or values of the step whose first cell is c0, of the `cells` cells of the split.
    __device__ void start(bool values, int c0, int cells) {
        const int left = values ? v_left_ : k_left_;
        copy_part(values ? v_to_ : k_to_, values ? v_from_ : k_from_, c0 + cell_ < cells ? left : 0, copiers_);
        (values ? v_from_ : k_from_) += values ? v_step_ : k_step_;
    }

    // Waits for all copies, or only for those before the last ones if keys and values have separate memory.
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
    int             copiers_, cell_, place_; // cell_ is the first cell of the thread's tile in a step
    int             k_left_, v_left_;        // bytes of a tile from the thread's place on
    int64_t         k_step_, v_step_;
    const uint8_t * k_from_;
    const uint8_t * v_from_;
    uint8_t *       k_to_;
    uint8_t *       v_to_;
};

// Stores the maxima of a warp's logits and of its cells' scales for the other warps.
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
    const float top_scale = warp_max(fmaxf(scale, 0.0f)); // Scales of NaN do not count.
    if (lane == 0) {
        room[4 * F] = top_scale;
    }
}

// Updates the rows' states for a step's cells, and sets logits.top to the maxima of all warps. Returns the weights'
// unit.
template <int F> __device__ inline float move_rows(const Shared<F> & s, Logits<F> & logits, Softmax (&rows)[F]) {
    const auto largest = [&](int i) {
        constexpr int N = 4 * F + 1;
        return fmaxf(fmaxf(s.room[i], s.room[N + i]), fmaxf(s.room[2 * N + i], s.room[3 * N + i]));
    };
    const float weight_step = largest(4 * F) * WEIGHT_STEP;
#pragma unroll
    for (int f = 0; f < F; ++f) {
        logits.top[f] = move_row(rows[f], largest(FOUR * f + (int) threadIdx.x % FOUR), weight_step);
    }
    return weight_step;
}

// Attends to a split, which is a block's work.
template <int F> __device__ void attend_cells(const Job & job, const Split & split) {
    const Attend & a      = job.c.a;
    const Layer &  l      = a.layer;
    const int      cells  = split.cells;
    const int      step   = job.tiles * TILE; // cells
    const int      warp   = (int) threadIdx.x / WARP;
    const int      lane   = (int) threadIdx.x % WARP;
    const int      mine   = lane / 16 * TILE + 16 * warp + lane % 16;  // cell of the step whose mask this thread reads
    const int      k_next = job.tiles == MOST_TILES ? job.k_bytes : 0; // offset of the second tile
    const int      v_next = job.tiles == MOST_TILES ? job.v_bytes : 0;

    const Shared<F> s(block_memory, job);
    copy_plan<F>(a, split, s.plan, s.queries.words);
    TileCopies copies(job, s, job.of_head[split.h], split.k_tiles, split.v_tiles);
#pragma unroll 1
    for (int side = 0; side <= (job.both ? 1 : 0); ++side) {
        copies.start(side == 1, 0, cells);
    }
    const QueryRows<F> query_rows(a, split.h, split.row);
    const int32_t      query = a.tokens[split.token].pos;
#pragma unroll 1
    for (int i = (int) threadIdx.x; i < F * s.octets * WARP; i += THREADS) {
        s.sums[i] = 0.0f;
    }

    Softmax         rows[F];
    const int32_t * position = a.cell_pos + split.stream * a.n_kv + split.first + mine;
    int64_t         masked   = split.token * a.n_kv + split.first + mine; // index into the mask
    const uint8_t * v_scale  = split.v_tiles + lane / 16 * a.v_stride + mine % TILE;
    for (int c0 = 0; c0 < cells; c0 += step) {
        Cell cell{ -INFINITY, 0.0f, 0.0f };
        if (mine < step && c0 + mine < cells) {
            const int32_t key  = *position; // No read waits for another one.
            const float   seen = mask_value(a, masked);
            // The copy of the value's scale to shared memory may still be pending.
            cell.scale = row_scale(*v_scale);
            cell.bias  = is_exact(a, key, query) ? -INFINITY : seen;
        }
        cell.scale = cell.bias == -INFINITY ? 0.0f : cell.scale;
        position += step;
        masked += step;
        v_scale += job.tiles * a.v_stride;

        copies.wait(); // Keys are loaded, and plan and queries before the first keys.
        Products<F> products;
        multiply_keys(s, k_next, products);
        if (cell.bias != -INFINITY) {
            cell.key_scale = row_scale(s.k[lane / 16 * k_next + mine % TILE]);
        }
        Logits<F> logits = {};
        if (s.plan->keys.runs.halves) {
            add_halves(s, a.qt + split.row * l.n_group * l.width_k, l.width_k, l.n_group, s.k, k_next, warp, logits.of);
        }
        make_logits(s, l, cell, query_rows, products, logits);
        share_maxima(s, logits, cell.scale);
        __syncthreads(); // all reads of keys are done
        copies.start(!job.both, job.both ? c0 + step : c0, cells);

        const float weight_step = move_rows(s, logits, rows);
        // Scales of 0 and NaN stay.
        store_weights(s, warp, logits, cell.scale > 0.0f ? __fdividef(cell.scale, weight_step) : cell.scale, rows);
        copies.wait(); // values and weights are ready
        add_values(s, s.plan->values[warp], s.v, v_next, rows);
        __syncthreads(); // all reads of values are done
        copies.start(job.both, c0 + step, cells);
    }
    copies_done<0>(); // a split without cells has not waited for its plan
    __syncthreads();
    store_split(s, a, split.result, rows);
}

// The blocks of a KV head and token attend to the splits of the cells, and then, with one token per stream, to the
// parts of the exact keys.
template <int F> __global__ void __launch_bounds__(THREADS, DECODE_BLOCKS) decode_kernel(Job job) {
    const int     h     = (int) blockIdx.x;
    const int64_t token = blockIdx.z, part = blockIdx.y;
    if (part >= job.c.a.n_split) {
        attend_exact<true>(job.c, h, token, (int) (part - job.c.a.n_split));
    } else if constexpr (PAIRS<F>) {
        attend_pairs<F>(job, Split(job, h, token, part));
    } else {
        attend_cells<F>(job, Split(job, h, token, part));
    }
}

// Returns the bytes of a tile in shared memory, which make the second tile use other banks.
int tile_bytes(int row_bytes) {
    return TILE * (row_bytes | 1);
}

template <int F> size_t shared_bytes(const Job & job) {
    const size_t exact = job.n_exact > 0 ? ExactShared(nullptr, job.c.a.layer).bytes : 0;
    return std::max(exact, Shared<F>(nullptr, job).bytes);
}

// Returns the bytes of a launch, whose blocks may read tiles in either way.
template <int F> size_t launch_bytes(const Job & job) {
    return std::max(shared_bytes<F>(job), PAIRS<F> ? PairsShared<F>(nullptr, job.c.a.layer).bytes : 0);
}

// Four blocks per multiprocessor hide each other's latency, but large tiles only permit two. A block may have `most`
// bytes of shared memory.
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
    return launch(decode_kernel<F>, grid, launch_bytes<F>(job), stream, job);
}

template <int F> BlockSteps steps_of(Combine b, int device) {
    b.slots_of_seq        = 1; // with blocks for exact keys
    const Job     job     = job_of<F>(b, most_shared(device));
    const int64_t most    = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device, 64 << 10);
    const int64_t kept    = attribute(cudaDevAttrReservedSharedMemoryPerBlock, device, 0);
    const int64_t fitting = most / ((int64_t) launch_bytes<F>(job) + kept);
    return { multiprocessors(device), std::min<int64_t>(std::max<int64_t>(1, fitting), DECODE_BLOCKS),
             (PAIRS<F> ? MOST_TILES : job.tiles) * TILE, PAIRS<F> ? WARPS : 1, DECODE_WAVES };
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

BlockSteps block_steps(const Layer & layer, int device) {
    Attend a = {};
    a.layer  = layer;
    a.n_tps  = 1;
    return !suits_decode(layer, device) ?
               BlockSteps{ multiprocessors(device), DECODE_BLOCKS, MOST_TILES * TILE, 1, 1 } :
           layer.n_group <= FOUR ? steps_of<1>(without_exact_keys(a), device) :
                                   steps_of<2>(without_exact_keys(a), device);
}

const char * attend_decode(const Combine & args, void * stream) {
    if (!suits_decode(args.a)) {
        return "attend_decode: at most 8 tokens per stream, at most 8 query heads per KV head and small tiles expected";
    }
    return args.a.layer.n_group <= FOUR ? run<1>(args, stream) : run<2>(args, stream);
}

} // namespace subkv::cuda
