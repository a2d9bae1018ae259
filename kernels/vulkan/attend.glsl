// attend.glsl: attention of ROWS query rows of a KV head to the coded cells of a split. A workgroup processes a tile at
// a time. It computes logits with one thread per cell, and then sums of values with COEFFICIENTS per thread. It reads
// codes once for all rows.
//
// With keys.glsl and values.glsl, all arithmetic is f32. With INTEGER_DOT, it uses keys_dot.glsl and values_dot.glsl,
// which round queries and weights to two bytes each, as in kernels/cuda/decode.cuh, and multiply four levels at a time.
//
// Loops over rows and coefficients must be unrolled, because they index registers, and in a real loop a driver selects
// every register by a cascade of comparisons.
#include "tables.glsl"

layout(local_size_x = 64) in; // TILE

layout(constant_id = 0) const uint ROWS         = 8; // at most 8
layout(constant_id = 1) const uint COEFFICIENTS = 2;
const uint N_ACC = ROWS * COEFFICIENTS; // glslc treats equal products in array sizes as different

#include "attend_sources.glsl"
#include "mask.glsl"
#include "levels.glsl"

const uint PARTS = 8; // parts of a tile
#ifdef INTEGER_DOT
const uint RANKED   = ROWS + 1; // rows of `put`: logits, then the scales of values
const bool RELATIVE = true;     // weights are relative to the tile's largest logit
#else
const uint RANKED   = ROWS;  // logits
const bool RELATIVE = false; // weights are relative to the largest logit so far
#endif

shared float tops[RANKED * PARTS];
shared uint  lost_rows; // bits of rows whose result is NaN

// Returns the largest number of a row.
float top_of(uint r) {
    float top = HIDDEN;
    for (uint i = 0; i < PARTS; ++i) {
        top = max(top, tops[r * PARTS + i]);
    }
    return top;
}

// Returns the choices (levels.glsl) at place n_path - x of cell c. They precede the first place, so lane j becomes lane
// j + 1.
uvec2 choices_before(Head head, uint tile, uint c, uint x) {
    const Octet octet = octet_of(head, head.n_path - x);
    uint        words[2];
    [[unroll]] for (uint half_ = 0; half_ < 2; ++half_) {
        const Field f = field_of(octet.bits, 4 * half_ + c / 16, 0);
        words[half_]  = k_tiles[tile + octet.at + f.line * LINE_WORDS + c % 16] >> f.shift & ONES;
    }
    return uvec2(words[0] << 8 | words[1] >> 24, words[1] << 8 | words[0] >> 24);
}

#ifdef INTEGER_DOT
#    include "keys_dot.glsl"
#    include "values_dot.glsl"
#else
#    include "keys.glsl"
#    include "values.glsl"
#endif

// The work of a split, query rows r0 to r0 + n_rows - 1 of a stream and KV head.
struct Work {
    uint h, stream, r0, n_rows;
    uint first; // number of the first query row
};

// Reads the mask's values for a cell and every row, or HIDDEN. Returns whether any row sees the cell.
bool read_biases(Work w, uint cell, uint c_end, out float bias[ROWS]) {
    const int pos        = cell < c_end ? cell_pos[p.cell_pos_at + w.stream * p.n_kv + cell] : 0;
    bool      is_visible = false;
    [[unroll]] for (uint r = 0; r < ROWS; ++r) {
        bias[r] = HIDDEN;
        if (cell < c_end && r < w.n_rows) {
            const uint token = w.stream * p.n_tps + (w.r0 + r) / tables[N_GROUP];
            if (!is_exact(pos, token_pos(token))) {
                bias[r] = mask_value(p.mask_at + token * p.n_kv + cell, p.mask_half);
            }
        }
        is_visible = is_visible || bias[r] != HIDDEN;
    }
    return is_visible;
}

// Converts products to logits, and stores them with put(). Returns the bits of rows that the cell makes NaN.
uint put_logits(Work w, uint me, const float bias[ROWS], bool bad_k, inout float logit[ROWS]) {
    const uint group = tables[N_GROUP];
    uint       lost  = 0;
    [[unroll]] for (uint r = 0; r < ROWS; ++r) {
        if (bias[r] == HIDDEN) {
            logit[r] = HIDDEN;
        } else {
            const float slope = slope_of(w.h * group + (w.r0 + r) % group);
            const float shift = queries[p.shift_at + w.first + r];
            const bool  bad   = bad_k || bias[r] == LOST || !finite(shift) || !finite(logit[r] + shift);
            logit[r]          = bad ? HIDDEN : capped(logit[r] + shift, p.softcap) + slope * bias[r];
            lost |= (bad ? 1u : 0u) << r;
        }
        put(r * TILE + me, logit[r]);
    }
    return lost;
}

// Finds the largest number of each part of a row.
void find_tops(uint me) {
    barrier();
    for (uint i = me; i < RANKED * PARTS; i += TILE) {
        float top = HIDDEN;
        for (uint c = 0; c < TILE / PARTS; ++c) {
            top = max(top, get(i * (TILE / PARTS) + c));
        }
        tops[i] = top;
    }
    barrier();
}

// Writes a split's states and sums. `lost` is this thread's part of lost_rows.
void store_split(Work w, uint me, uint out_row, Values values, uint lost, const float m[ROWS], const float z[ROWS],
                 const float acc[N_ACC]) {
    [[unroll]] for (uint x = 0; x < COEFFICIENTS; ++x) {
        [[unroll]] for (uint r = 0; r < ROWS; ++r) {
            if (values.bits[x] != 0 && r < w.n_rows) {
                partial[p.acc_at + (out_row + r) * p.width_v + me + x * TILE] =
                    values.step[x] * acc[r * COEFFICIENTS + x];
            }
        }
    }
    barrier();
    if (lost != 0) {
        atomicOr(lost_rows, lost);
    }
    [[unroll]] for (uint r = 0; r < ROWS; ++r) {
        put(r * TILE + me, z[r]);
    }
    barrier();
    if (me < w.n_rows) {
        float sum = 0.0;
        for (uint c = 0; c < TILE; ++c) {
            sum += get(me * TILE + c);
        }
        partial[p.z_at + out_row + me] = (lost_rows >> me & 1u) != 0 ? NOT_A_NUMBER : sum;
    }
    [[unroll]] for (uint r = 0; r < ROWS; ++r) {
        if (me == 0 && r < w.n_rows) {
            partial[p.m_at + out_row + r] = stored_top(m[r], (lost_rows >> r & 1u) != 0);
        }
    }
}

void main() {
    const uint me = gl_LocalInvocationID.x, h = gl_WorkGroupID.x, stream = gl_WorkGroupID.z;
    const uint group   = tables[N_GROUP];
    const uint all     = p.n_tps * group; // query rows per stream
    const uint blocks  = (all + ROWS - 1) / ROWS;
    const uint part    = gl_WorkGroupID.y / blocks;
    const uint r0      = gl_WorkGroupID.y % blocks * ROWS;
    const uint n_rows  = min(ROWS, all - r0);
    const uint first   = h * p.n_tokens * group + stream * all + r0; // rows of all streams are contiguous
    const Work w       = Work(h, stream, r0, n_rows, first);
    const uint c_end   = min(p.n_kv, (part + 1) * p.split);
    const uint k_head  = head_of(0, h).tile, v_head = head_of(1, h).tile;

    Values values;
    find_values(h, me, values);
    float        m[ROWS], z[ROWS], acc[N_ACC];
    uint         lost = 0; // this thread's part of lost_rows
    if (me == 0) {
        lost_rows = 0;
    }
    [[unroll]] for (uint r = 0; r < ROWS; ++r) {
        m[r] = HIDDEN;
        z[r] = 0.0;
        [[unroll]] for (uint x = 0; x < COEFFICIENTS; ++x) {
            acc[r * COEFFICIENTS + x] = 0.0;
        }
    }

    for (uint c0 = part * p.split; c0 < c_end; c0 += TILE) {
        float      bias[ROWS];
        const bool is_visible = read_biases(w, c0 + me, c_end, bias);
        const uint k_tile = p.k_tiles_at + stream * p.k_stream + c0 / TILE * p.k_stride + k_head;
        const uint v_tile = p.v_tiles_at + stream * p.v_stream + c0 / TILE * p.v_stride + v_head;
        float      logit[ROWS];
        float      scale = 0.0; // scale of the value, 0 if all rows mask it or it is NaN
        bool       bad_k = false, bad_v = false;
        if (is_visible) {
            dots(h, k_tile, me, first, n_rows, logit);
            const uint k_code = k_tiles[k_tile + me / 4] >> 8 * (me % 4) & 255u;
            const uint v_code = v_tiles[v_tile + me / 4] >> 8 * (me % 4) & 255u;
            bad_k             = k_code == SCALE_NAN;
            bad_v             = v_code == SCALE_NAN;
            scale             = bad_v ? 0.0 : row_scale(v_code);
        }
        lost |= put_logits(w, me, bias, bad_k, logit);
        if (RANKED > ROWS) {
            put(ROWS * TILE + me, scale);
        }
        find_tops(me);
        bool  any = false;
        float weight[ROWS], rise[ROWS]; // weight * rise is relative to the new maximum.
        [[unroll]] for (uint r = 0; r < ROWS; ++r) {
            const float here = top_of(r);
            weight[r]        = 0.0;
            rise[r]          = 0.0;
            if (here != HIDDEN) {
                any = true;
                const float top  = max(m[r], here);
                const float keep = m[r] == HIDDEN ? 0.0 : exp(m[r] - top);
                const float base = RELATIVE ? here : top;
                weight[r]        = logit[r] == HIDDEN ? 0.0 : exp(logit[r] - base);
                lost |= (bad_v && weight[r] > 0.0 ? 1u : 0u) << r;
                rise[r]          = RELATIVE ? exp(here - top) : 1.0;
                m[r]             = top;
                z[r]             = fma(z[r], keep, weight[r] * rise[r]);
                [[unroll]] for (uint x = 0; x < COEFFICIENTS; ++x) {
                    acc[r * COEFFICIENTS + x] *= keep;
                }
            }
        }
        if (any) {
            add_values(values, h, v_tile, me, weight, rise, scale, acc);
        }
    }

    const uint out_row = part * tables[N_HEAD_KV] * p.n_tokens * group + first;
    store_split(w, me, out_row, values, lost, m, z, acc);
}
