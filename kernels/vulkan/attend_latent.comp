#version 450
// attend_latent.comp: attend.glsl's op for a layer of latent attention, whose values are the first coefficients of its
// keys. A workgroup processes ROWS query rows and a tile at a time. It decodes CHUNK coefficients of all cells to
// shared memory and multiplies them by the queries. Then it decodes them again and multiplies them by the weights. The
// sums stay in `partial`, because no device has registers for ROWS times 512.
//
// All arithmetic is f32. Shared memory stays below 16 KiB, which every device supports.
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require // as in attend.glsl
#include "tables.glsl"

layout(local_size_x = 128) in;

layout(constant_id = 0) const uint ROWS = 16; // 4, 8 or 16

#define PARTIAL_ACCESS
#include "attend_sources.glsl"
#include "mask.glsl"
#include "levels.glsl"

uint word_of(bool value, uint at) {
    return k_tiles[at];
}

const bool PATH_LANES = true;
#include "octets.glsl"

const uint THREADS = 128, CHUNK = 32, PITCH = TILE + 1, PARTS = 8; // PITCH avoids bank conflicts.
const uint HALF = ROWS / 2;    // rows per thread for logits, because each half of the threads has half of the rows
const uint QUARTER = ROWS / 4; // rows per thread for sums

shared float xs[CHUNK * PITCH];
shared float qs[ROWS * CHUNK];
shared float weights[ROWS * TILE]; // first logits, then weights
shared float tops[ROWS * PARTS];
shared float keep[ROWS]; // factor for the earlier sums
shared uint  visible[TILE / 32]; // bits of cells that some row sees
shared uint  lost_rows;          // bits of rows whose result is NaN

// Decodes CHUNK coefficients of all cells, from `first` on. As values, those that are not finite become zeros, because
// as keys they have made the result of every row that sees them NaN, and weight 0 times infinity must not reach the
// others.
void stage(bool values, Head head, uint tile, uint first) {
    const uint cell = gl_LocalInvocationID.x % TILE, half_ = gl_LocalInvocationID.x / TILE;
    for (uint octet = half_; octet < CHUNK / 8; octet += THREADS / TILE) {
        float x[8];
        decode_octet(false, head, tile, cell, first / 8 + octet, x);
        [[unroll]] for (uint i = 0; i < 8; ++i) {
            xs[(8 * octet + i) * PITCH + cell] = values && !finite(x[i]) ? 0.0 : x[i];
        }
    }
}

void main() {
    const uint me = gl_LocalInvocationID.x, stream = gl_WorkGroupID.z;
    const uint mine = me % TILE, my_row = me / TILE * HALF;          // cell and first row for logits
    const uint column = me % CHUNK, my_sum = me / CHUNK * QUARTER;   // coefficient and first row for sums
    const uint group  = tables[N_GROUP], width = tables[WIDTH_K];
    const uint all    = p.n_tps * group; // rows of a stream
    const uint blocks = (all + ROWS - 1) / ROWS;
    const uint part   = gl_WorkGroupID.y / blocks;
    const uint r0     = gl_WorkGroupID.y % blocks * ROWS;
    const uint n_rows = min(ROWS, all - r0);
    const uint first  = stream * all + r0;
    const uint c_end  = min(p.n_kv, (part + 1) * p.split);
    const uint out_row = part * p.n_tokens * group + first;
    const Head head   = head_of(0, 0);
    const uint rank_v = head_of(1, 0).rank;

    float m[HALF], z[HALF];
    uint  lost = 0; // this thread's part of lost_rows
    if (me == 0) {
        lost_rows = 0;
    }
    [[unroll]] for (uint i = 0; i < HALF; ++i) {
        m[i] = HIDDEN;
        z[i] = 0.0;
    }
    bool begun = false;
    for (uint c0 = part * p.split; c0 < c_end; c0 += TILE) {
        const uint cell = c0 + mine;
        const int  pos  = cell < c_end ? cell_pos[p.cell_pos_at + stream * p.n_kv + cell] : 0;
        bool       is_visible = false;
        float      bias[HALF];
        [[unroll]] for (uint i = 0; i < HALF; ++i) {
            bias[i] = HIDDEN;
            if (cell < c_end && my_row + i < n_rows) {
                const uint token = stream * p.n_tps + (r0 + my_row + i) / group;
                if (!is_exact(pos, token_pos(token))) {
                    bias[i] = mask_value(p.mask_at + token * p.n_kv + cell, p.mask_half);
                }
            }
            is_visible = is_visible || bias[i] != HIDDEN;
        }
        barrier();
        if (me < TILE / 32) {
            visible[me] = 0;
        }
        barrier();
        if (is_visible) {
            atomicOr(visible[mine / 32], 1u << mine % 32);
        }
        barrier();
        if ((visible[0] | visible[1]) == 0) {
            continue;
        }
        const uint tile = p.k_tiles_at + stream * p.k_stream + c0 / TILE * p.k_stride + head.tile;
        if (me < TILE) {
            const uint code = k_tiles[tile + me / 4] >> 8 * (me % 4) & 255u;
            const bool shown = (visible[me / 32] >> me % 32 & 1u) != 0 && code != SCALE_NAN;
            scale[me]        = shown ? row_scale(code) : 0.0;
        }
        const bool bad_k = (k_tiles[tile + mine / 4] >> 8 * (mine % 4) & 255u) == SCALE_NAN; // for key and value

        float logit[HALF];
        [[unroll]] for (uint i = 0; i < HALF; ++i) {
            logit[i] = 0.0;
        }
        for (uint at = 0; at < head.rank; at += CHUNK) {
            barrier();
            stage(false, head, tile, at);
            for (uint i = me; i < ROWS * CHUNK; i += THREADS) {
                const uint r = i / CHUNK, j = at + i % CHUNK;
                qs[i] = r < n_rows && j < head.rank ? queries[p.qt_at + (first + r) * width + j] : 0.0;
            }
            barrier();
            for (uint j = 0; j < CHUNK; j += 4) {
                [[unroll]] for (uint x = 0; x < 4; ++x) {
                    const float key = xs[(j + x) * PITCH + mine];
                    [[unroll]] for (uint i = 0; i < HALF; ++i) {
                        logit[i] = fma(qs[(my_row + i) * CHUNK + j + x], key, logit[i]);
                    }
                }
            }
        }
        [[unroll]] for (uint i = 0; i < HALF; ++i) {
            const uint r = my_row + i;
            if (bias[i] == HIDDEN) {
                logit[i] = HIDDEN;
            } else {
                const float slope = slope_of((r0 + r) % group);
                const float shift = queries[p.shift_at + first + r];
                const bool  bad   = bad_k || bias[i] == LOST || !finite(shift) || !finite(logit[i] + shift);
                logit[i]          = bad ? HIDDEN : capped(logit[i] + shift, p.softcap) + slope * bias[i];
                lost |= (bad ? 1u : 0u) << r;
            }
            weights[r * TILE + mine] = logit[i];
        }
        barrier();
        for (uint i = me; i < ROWS * PARTS; i += THREADS) {
            float top = HIDDEN;
            for (uint c = 0; c < TILE / PARTS; ++c) {
                top = max(top, weights[i * (TILE / PARTS) + c]);
            }
            tops[i] = top;
        }
        barrier();
        [[unroll]] for (uint i = 0; i < HALF; ++i) {
            const uint r    = my_row + i;
            float      here = HIDDEN, kept = 1.0, weight = 0.0;
            for (uint x = 0; x < PARTS; ++x) {
                here = max(here, tops[r * PARTS + x]);
            }
            if (here != HIDDEN) {
                const float top = max(m[i], here);
                kept            = m[i] == HIDDEN ? 0.0 : exp(m[i] - top);
                weight          = logit[i] == HIDDEN ? 0.0 : exp(logit[i] - top);
                m[i]            = top;
                z[i]            = fma(z[i], kept, weight);
            }
            weights[r * TILE + mine] = weight;
            if (mine == 0) {
                keep[r] = kept;
            }
        }
        for (uint at = 0; at < rank_v; at += CHUNK) {
            barrier();
            stage(true, head, tile, at);
            barrier();
            float sums[QUARTER];
            [[unroll]] for (uint i = 0; i < QUARTER; ++i) {
                sums[i] = 0.0;
            }
            for (uint c = 0; c < TILE; c += 4) {
                [[unroll]] for (uint x = 0; x < 4; ++x) {
                    const float value = xs[column * PITCH + c + x];
                    [[unroll]] for (uint i = 0; i < QUARTER; ++i) {
                        sums[i] = fma(weights[(my_sum + i) * TILE + c + x], value, sums[i]);
                    }
                }
            }
            [[unroll]] for (uint i = 0; i < QUARTER; ++i) {
                const uint r = my_sum + i;
                if (r < n_rows && at + column < rank_v) {
                    const uint to = p.acc_at + (out_row + r) * p.width_v + at + column;
                    partial[to]   = begun ? fma(partial[to], keep[r], sums[i]) : sums[i];
                }
            }
        }
        begun = true;
    }

    for (uint i = me; !begun && i < n_rows * rank_v; i += THREADS) {
        partial[p.acc_at + (out_row + i / rank_v) * p.width_v + i % rank_v] = 0.0;
    }
    barrier();
    if (lost != 0) {
        atomicOr(lost_rows, lost);
    }
    barrier();
    [[unroll]] for (uint i = 0; i < HALF; ++i) {
        weights[(my_row + i) * TILE + mine] = z[i];
        if (mine == 0 && my_row + i < n_rows) {
            partial[p.m_at + out_row + my_row + i] = stored_top(m[i], (lost_rows >> my_row + i & 1u) != 0);
        }
    }
    barrier();
    if (me < n_rows) {
        float sum = 0.0;
        for (uint c = 0; c < TILE; ++c) {
            sum += weights[me * TILE + c];
        }
        partial[p.z_at + out_row + me] = (lost_rows >> me & 1u) != 0 ? NOT_A_NUMBER : sum;
    }
}
