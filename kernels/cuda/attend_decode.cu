// attend_decode.cu: one token per stream, all query heads of a KV head per read of its codes, cells split over blocks.
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

// A block's work: split number `part` of a token's cells and a KV head.
template <int F> __device__ void attend_cells(const Job & job, int h, int64_t token, int64_t part) {
    const Attend & a      = job.c.a;
    const Layer &  l      = a.layer;
    const int      G      = l.n_group;
    const int64_t  row    = h * a.n_stream + token; // number of the first of G rows
    const float *  qt     = a.qt + row * G * l.width_k;
    const int64_t  first  = part * a.split;
    const int      cells  = (int) (least(a.n_kv, first + a.split) - first);
    const int      step   = job.tiles * TILE; // cells
    const int      warp   = (int) threadIdx.x / WARP;
    const int      lane   = (int) threadIdx.x % WARP;
    const int      mine   = lane / 16 * TILE + 16 * warp + lane % 16;  // cell of the step: this thread reads its mask
    const int      k_next = job.tiles == MOST_TILES ? job.k_bytes : 0; // offset of the second tile
    const int      v_next = job.tiles == MOST_TILES ? job.v_bytes : 0;

    const Shared<F> s(block_memory, job);
    const auto      copy_all = [&](void * to, const void * from, int bytes) {
        const int at = (int) threadIdx.x * (int) sizeof(Sixteen);
        copy_part((uint8_t *) to + at, (const uint8_t *) from + at, bytes - at, THREADS);
    };
    copy_all(s.plan, (const Plan *) l.plan + h, (int) sizeof(Plan));
    constexpr int WORD = (int) sizeof(uint32_t);
    copy_all(s.queries.words, a.words + row * Queries<F>::size(l.width_k), Queries<F>::size(l.width_k) * WORD);
    float shift[F], slope[F];
#pragma unroll
    for (int f = 0; f < F; ++f) {
        const int g  = FOUR * f + lane % FOUR;
        const int of = g < G ? g : 0;
        shift[f]     = a.shift[row * G + of];
        slope[f]     = l.slope[h * G + of];
    }
    const int32_t query = a.tokens[token].pos;
    copies_done<0>();
    __syncthreads();
    const Plan &    plan    = *s.plan;
    const int       octet   = plan.first_octet(warp); // first octet of values of this warp
    const int       end     = plan.first_octet(warp + 1);
    const uint8_t * k_tiles = a.k_tiles + token * a.k_stream + plan.k_offset + first / TILE * a.k_stride;
    const uint8_t * v_tiles = a.v_tiles + token * a.v_stream + plan.v_offset + first / TILE * a.v_stride;
    // each thread copies from one of the tiles
    const int       copiers    = job.tiles == MOST_TILES ? THREADS / MOST_TILES : THREADS;
    const int       copied     = (int) threadIdx.x / copiers * TILE; // first cell of its tile in the next steps
    const int       place      = (int) threadIdx.x % copiers * (int) sizeof(Sixteen);
    const uint8_t * k_from     = k_tiles + copied / TILE * a.k_stride + place;
    const uint8_t * v_from     = v_tiles + copied / TILE * a.v_stride + place;
    uint8_t * const k_to       = s.k + copied / TILE * job.k_bytes + place;
    uint8_t * const v_to       = s.v + copied / TILE * job.v_bytes + place;
    const auto      fetch_keys = [&](int c0) {
        copy_part(k_to, k_from, c0 + copied < cells ? plan.k_bytes - place : 0, copiers);
        k_from += job.tiles * a.k_stride;
    };
    const auto fetch_values = [&](int c0) {
        copy_part(v_to, v_from, c0 + copied < cells ? plan.v_bytes - place : 0, copiers);
        v_from += job.tiles * a.v_stride;
    };

    fetch_keys(0);
    if (job.both) {
        fetch_values(0);
    }
#pragma unroll 1
    for (int i = octet; i < end; ++i) {
#pragma unroll
        for (int f = 0; f < F; ++f) {
            s.sums[(f * s.octets + i) * WARP + lane] = 0.0f;
        }
    }

    Softmax rows[F]; // element f: row FOUR * f + lane % FOUR
    // the places of cell 16 * warp + lane / 4 among the words of quarter 2 * (warp % 2), of query row lane % FOUR
    uint8_t * const weight_at = s.weights + 2 * (lane % FOUR) * WEIGHT_PITCH + lane / 16 * (TILE / 2) + warp % 2 * 16 +
                                lane / 4 % 4 * 2 + warp / 2;
    const int32_t * position  = a.cell_pos + token * a.n_kv + first + mine;
    int64_t         masked    = token * a.n_kv + first + mine; // index into the mask
    const uint8_t * v_scale   = v_tiles + lane / 16 * a.v_stride + mine % TILE;
    for (int c0 = 0; c0 < cells; c0 += step) {
        float bias = -INFINITY, scale = 0.0f, key_scale = 0.0f;
        if (mine < step && c0 + mine < cells) {
            const int32_t key  = *position; // no read waits for another one
            const float   seen = mask_value(a, masked);
            // the value's scale; its copy to shared memory may still be pending
            scale = row_scale(*v_scale);
            bias  = is_exact(a, key, query) ? -INFINITY : seen;
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
        __syncthreads(); // keys are loaded
        Products<F> products;
        multiply_keys(s, k_next, products);

        if (bias != -INFINITY) {
            key_scale = row_scale(s.k[lane / 16 * k_next + mine % TILE]);
        }
        float logit[F][MOST_TILES][2] = {}, top[F];
        if (plan.keys.halves) {
            add_halves(s, qt, l.width_k, G, k_next, logit);
        }
#pragma unroll
        for (int f = 0; f < F; ++f) {
            top[f] = -INFINITY;
        }
#pragma unroll
        for (int t = 0; t < MOST_TILES; ++t) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {                           // cell 16 * warp + 8 * e + lane / 4 of tile t
                const int   of         = 16 * t + 8 * e + lane / 4; // lane that read it
                const float cell_bias  = __shfl_sync(ALL, bias, of);
                const float cell_scale = __shfl_sync(ALL, key_scale, of);
#pragma unroll
                for (int f = 0; f < F; ++f) {
                    const int g = FOUR * f + lane % FOUR;
                    // exact: 2 * 256 codes * 255 * 32639 fits 32 bits
                    const auto twice = (int) (2 * (256 * (uint32_t) products.sum[f][t][2 * e] +
                                                   (uint32_t) products.sum[f][t][2 * e + 1]) -
                                              s.queries.centre[g]);
                    float &    x     = logit[f][t][e];
                    x      = cell_scale * (0.5f * s.queries.step[g]) * (float) twice + (cell_scale > 0.0f ? x : 0.0f) +
                             shift[f];
                    x      = capped(finite_or_nan(x), l.softcap) + slope[f] * cell_bias;
                    x      = g < G && cell_bias != -INFINITY ? x : -INFINITY;
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
        const float top_scale = warp_max(fmaxf(scale, 0.0f)); // not of values that are NaN
        if (lane == 0) {
            s.room[warp * (4 * F + 1) + 4 * F] = top_scale;
        }
        __syncthreads(); // all reads of keys are done
        if (job.both) {
            fetch_keys(c0 + step);
        } else {
            fetch_values(c0);
        }

        const auto largest = [&](int i) { // largest logit of these cells
            constexpr int N = 4 * F + 1;
            return fmaxf(fmaxf(s.room[i], s.room[N + i]), fmaxf(s.room[2 * N + i], s.room[3 * N + i]));
        };
        const float weight_step = largest(4 * F) * WEIGHT_STEP;
        scale                   = scale > 0.0f ? __fdividef(scale, weight_step) : scale; // 0 and NaN stay
#pragma unroll
        for (int f = 0; f < F; ++f) {
            Softmax &   row  = rows[f];
            const float old  = row.m;
            const float here = largest(FOUR * f + lane % FOUR);
            row.m            = fmaxf(old, here);
            const float m    = row.m == -INFINITY ? 0.0f : row.m;
            row.keep         = exponential(old - m);
            row.plain_factor = exponential(here - m);
            row.factor       = 0.5f * weight_step * row.plain_factor;
            row.z *= row.keep;
            top[f] = here == -INFINITY ? 0.0f : here;
        }
#pragma unroll
        for (int t = 0; t < MOST_TILES; ++t) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const float cell_scale = __shfl_sync(ALL, scale, 16 * t + 8 * e + lane / 4);
#pragma unroll
                for (int f = 0; f < F; ++f) {
                    const float p     = exponential(logit[f][t][e] - top[f]);
                    rows[f].z         = fmaf(p, rows[f].plain_factor, rows[f].z);
                    rows[f].z         = p > 0.0f ? fmaf(cell_scale, 0.0f, rows[f].z) : rows[f].z; // NaN if the value is
                    const auto weight = (uint32_t) __float2int_rn(p * cell_scale);
                    uint8_t *  to     = weight_at + 8 * f * WEIGHT_PITCH + t * TILE + e * 8;
                    to[0]             = (uint8_t) (weight >> 8);
                    to[WEIGHT_PITCH]  = (uint8_t) weight;
                    if (plan.v_halves != 0) {
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
        __syncthreads(); // values and weights are ready
        add_values(s, plan.values[warp], v_next, rows);
        __syncthreads(); // all reads of values are done
        if (job.both) {
            fetch_values(c0 + step);
        } else {
            fetch_keys(c0 + step);
        }
    }

    const HeadCodec & v   = l.v[h];
    const int64_t     out = (part * l.n_head_kv * a.n_stream + row) * G;
#pragma unroll 1
    for (int b = 0; b < v.n_bands; ++b) {
        const Band & band       = v.bands[b];
        const float  value_step = band.bits == 16 ? 1.0f : level_step(v, band);
#pragma unroll 1
        for (int o = max(octet, band.first / 8); o < min(end, (band.first + band.n) / 8); ++o) {
#pragma unroll 1
            for (int g = lane % FOUR; g < G; g += FOUR) {
                a.acc[(out + g) * l.width_v + 8 * o + lane / 4] =
                    value_step * s.sums[(g / FOUR * s.octets + o) * WARP + lane];
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
            a.z[out + g]    = (s.room[g] + s.room[N + g]) + (s.room[2 * N + g] + s.room[3 * N + g]);
            a.m[out + g]    = state_top(rows[f].m, a.z[out + g]);
        }
    }
}

// Blocks of a KV head and token (one per stream): first the splits of the cells, then the parts of the exact keys.
template <int F> __global__ void __launch_bounds__(THREADS, DECODE_BLOCKS) decode_kernel(Job job) {
    const int     h     = (int) blockIdx.x;
    const int64_t token = blockIdx.z, part = blockIdx.y;
    if (part < job.c.a.n_split) {
        attend_cells<F>(job, h, token, part);
    } else {
        attend_exact(job.c, h, token, (int) (part - job.c.a.n_split));
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
    Job job{ b, ExactParts(b).n_blocks(l), MOST_TILES, true, tile_bytes(l.row_bytes_k), tile_bytes(l.row_bytes_v) };
    job.both  = shared_bytes<F>(job) <= most / 4;
    job.tiles = shared_bytes<F>(job) <= most / 2 ? MOST_TILES : 1;
    return job;
}

template <int F> const char * run(const Combine & b, void * stream) {
    const Attend & a   = b.a;
    const Job      job = job_of<F>(b, most_shared());
    const dim3     grid((unsigned) a.layer.n_head_kv, (unsigned) (a.n_split + job.n_exact), (unsigned) a.n_stream);
    return launch(decode_kernel<F>, grid, shared_bytes<F>(job), stream, job);
}

bool fits_decode(const Layer & l, size_t most) {
    constexpr int F = DECODE_GROUP / FOUR;
    Combine       b = {};
    b.a.layer       = l;
    return l.n_group <= DECODE_GROUP && !l.latent && l.d_k <= DECODE_HEAD && l.d_v <= DECODE_HEAD &&
           shared_bytes<F>(job_of<F>(b, most)) <= most;
}

} // namespace

bool suits_decode(const Attend & args) {
    return args.n_tps == 1 && fits_decode(args.layer, most_shared());
}

bool suits_decode(const Layer & layer, int device) {
    return fits_decode(layer, most_shared(device));
}

size_t plan_bytes() {
    return sizeof(Plan);
}

void make_plan(const HeadCodec & k, const HeadCodec & v, int64_t k_offset, int64_t v_offset, void * plan) {
    const Plan made(k, v, k_offset, v_offset);
    std::memcpy(plan, &made, sizeof(made));
}

int64_t n_at_once(int device) {
    int n = 0;
    return cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, device) == cudaSuccess ? DECODE_BLOCKS * n : 256;
}

const char * attend_decode(const Combine & args, void * stream) {
    if (!suits_decode(args.a)) {
        return "attend_decode: one token per stream, at most 8 query heads per KV head and small tiles expected";
    }
    return args.a.layer.n_group <= FOUR ? run<1>(args, stream) : run<2>(args, stream);
}

} // namespace subkv::cuda
