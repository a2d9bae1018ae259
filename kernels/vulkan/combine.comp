#version 450
// combine.comp: merges the splits of attend, multiplies by D_v, adds the exact keys (window rows and rows of this
// ubatch) and attention sinks, and normalises. There is one workgroup per query head and token.
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require // as in attend.comp
#include "tables.glsl"

layout(local_size_x = 128) in;

layout(std430, binding = 1) readonly buffer Partial { float partial[]; };
layout(std430, binding = 2) readonly buffer Q { float q[]; };
layout(std430, binding = 3) readonly buffer Fresh { uint fresh[]; };
layout(std430, binding = 4) readonly buffer Window { uint window[]; };
layout(std430, binding = 5) readonly buffer Mask { uint mask[]; };
layout(std430, binding = 6) readonly buffer Tokens { int tokens[]; };
layout(std430, binding = 7) readonly buffer Slots { int slots[]; };
layout(std430, binding = 8) readonly buffer Sinks { float sinks[]; };
layout(std430, binding = 9) writeonly buffer Out { float result[]; };

layout(push_constant) uniform Push {
    uint  m_at, z_at, acc_at, width_v, n_split; // *_at are places in `partial`
    uint  q_at, q_head, q_token, fresh_at, window_at, mask_at, mask_half, tokens_at;
    uint  slots_at, slots_of_seq;
    uint  sinks_at, has_sinks, out_at, out_stride;
    uint  n_kv, n_tps, n_tokens;
    float scale, softcap;
} p;

#include "mask.glsl"
#include "slots.glsl"
#include "tokens.glsl"

const uint THREADS = 128, PER_THREAD = (MAX_HEAD_SIZE + THREADS - 1) / THREADS;

shared float coef[MAX_HEAD_SIZE];
shared float query[MAX_HEAD_SIZE];
shared float logits[THREADS]; // THREADS exact keys at a time
shared uint  rows[THREADS];   // first word of the key's row
shared float room[THREADS];
shared uint  lost; // 1 if the result is NaN

// Returns word i of a row that begins at `row`, in the window, or if the highest bit is set, in the fresh rows.
uint row_word(uint row, uint i) {
    return (row & 0x80000000u) != 0 ? fresh[(row & 0x7fffffffu) + i] : window[row + i];
}

uint me = gl_LocalInvocationID.x;

// The query row's softmax, and the thread's elements of the output, in private memory.
float m = HIDDEN, z = 0.0, o[PER_THREAD];
bool  fine = true; // whether no number that this thread has read makes the result NaN

// Merges the states of attend's splits, and their sums of coefficients in `coef`. `row` is the row in split 0.
void merge_splits(uint row, uint rank) {
    const uint stride = tables[N_HEAD_KV] * p.n_tokens * tables[N_GROUP]; // rows from one split to the next
    for (uint i = 0; i < p.n_split; ++i) {
        m = max(m, loaded_top(partial[p.m_at + row + i * stride]));
    }
    for (uint i = 0; m != HIDDEN && i < p.n_split; ++i) {
        const float of_part = partial[p.z_at + row + i * stride];
        fine                = fine && finite(of_part);
        z += exp(loaded_top(partial[p.m_at + row + i * stride]) - m) * of_part;
    }
    for (uint c = me; c < rank; c += THREADS) {
        float sum = 0.0;
        for (uint i = 0; m != HIDDEN && i < p.n_split; ++i) {
            const uint part = row + i * stride;
            sum += exp(loaded_top(partial[p.m_at + part]) - m) * partial[p.acc_at + part * p.width_v + c];
        }
        coef[c] = sum;
        fine    = fine && finite(sum);
    }
}

// Multiplies the coefficients by D_v.
void reconstruct(Head head, uint d_v) {
    [[unroll]] for (uint x = 0; x < PER_THREAD; ++x) {
        o[x] = 0.0;
    }
    for (uint i = 0; i < head.rank; ++i) {
        [[unroll]] for (uint x = 0; x < PER_THREAD; ++x) {
            const uint j = me + x * THREADS;
            if (j < d_v) {
                o[x] = fma(coef[i], table_half(head.decode, i * d_v + j), o[x]);
            }
        }
    }
}

// Returns the logit of exact key number i, or HIDDEN if the token does not attend to it exactly. Sets rows[me] to the
// beginning of the key's row.
float exact_logit(uint i, uint token, uint hq, uint h, uint d_k) {
    const uint width = exact_width();
    int        pos, cell;
    if (i < p.slots_of_seq) {
        i += token_first_slot(token);
        pos      = slot_pos(i);
        cell     = slot_cell(i);
        rows[me] = p.window_at + i * width;
    } else {
        i += token / p.n_tps * p.n_tps - p.slots_of_seq;
        pos      = token_pos(i);
        cell     = token_cell(i);
        rows[me] = (p.fresh_at + i * width) | 0x80000000u;
    }
    if (pos < 0 || cell < 0 || !is_exact(pos, token_pos(token))) {
        return HIDDEN;
    }
    const float bias = mask_value(p.mask_at + token * p.n_kv + uint(cell), p.mask_half);
    if (bias == HIDDEN) {
        return HIDDEN;
    }
    float dot = 0.0;
    for (uint j = 0; j < d_k / 2; ++j) {
        const vec2 pair = unpackHalf2x16(row_word(rows[me], h * d_k / 2 + j));
        dot             = fma(query[2 * j + 1], pair.y, fma(query[2 * j], pair.x, dot));
    }
    const bool bad = bias == LOST || !finite(dot);
    fine           = fine && !bad;
    return bad ? HIDDEN : capped(dot, p.softcap) + slope_of(hq) * bias;
}

// Adds n exact keys whose rows are in shared memory. `logit` is that of the thread's key.
void add_exact_values(float logit, uint n, uint h, uint d_v) {
    logits[me] = logit;
    room[me]   = logit;
    for (uint step = THREADS / 2; step > 0; step /= 2) {
        barrier();
        if (me < step) {
            room[me] = max(room[me], room[me + step]);
        }
    }
    barrier();
    if (room[0] == HIDDEN) {
        return;
    }
    const float top  = max(m, room[0]);
    const float keep = m == HIDDEN ? 0.0 : exp(m - top);
    m                = top;
    z *= keep;
    [[unroll]] for (uint x = 0; x < PER_THREAD; ++x) {
        o[x] *= keep;
    }
    for (uint i = 0; i < n; ++i) {
        if (logits[i] == HIDDEN) {
            continue;
        }
        const float weight = exp(logits[i] - m);
        z += weight;
        [[unroll]] for (uint x = 0; x < PER_THREAD; ++x) {
            const uint j = me + x * THREADS;
            if (j < d_v && weight > 0.0) { // A value of weight 0 may be infinite.
                const uint bits = half_bits(row_word(rows[i], (exact_value(h) + j) / 2), j);
                fine            = fine && finite_half(bits);
                o[x]            = fma(weight, unpackHalf2x16(bits).x, o[x]);
            }
        }
    }
}

// Adds the attention sink of the query head, normalises, and writes the output.
void store_output(uint hq, uint token, uint d_v) {
    float w = 1.0;
    if (p.has_sinks != 0) { // A sink is a logit without a value.
        const float sink = sinks[p.sinks_at + hq];
        const float top  = max(m, sink);
        w                = m == HIDDEN ? 0.0 : exp(m - top);
        z                = z * w + exp(sink - top);
    }
    w = z > 0.0 ? w / z : 0.0; // A token without visible keys gets zeros.
    if (!fine) {
        atomicOr(lost, 1u);
    }
    barrier();
    [[unroll]] for (uint x = 0; x < PER_THREAD; ++x) {
        const uint j = me + x * THREADS;
        if (j < d_v) {
            result[p.out_at + token * p.out_stride + hq * d_v + j] = lost != 0 ? NOT_A_NUMBER : w * o[x];
        }
    }
}

void main() {
    const uint hq = gl_WorkGroupID.x, token = gl_WorkGroupID.y, group = tables[N_GROUP], h = hq / group;
    const uint d_k = tables[D_K], d_v = tables[D_V];
    const Head head = head_of(1, h);

    if (me == 0) {
        lost = 0;
    }
    merge_splits((h * p.n_tokens + token) * group + hq % group, head.rank);
    for (uint j = me; j < d_k; j += THREADS) {
        query[j] = p.scale * q[p.q_at + hq * p.q_head + token * p.q_token + j];
    }
    barrier();
    reconstruct(head, d_v);
    const uint n_keys = p.slots_of_seq > 0 ? p.slots_of_seq + p.n_tps : 0;
    for (uint first = 0; first < n_keys; first += THREADS) {
        const uint n = min(THREADS, n_keys - first);
        add_exact_values(me < n ? exact_logit(first + me, token, hq, h, d_k) : HIDDEN, n, h, d_v);
        barrier();
    }
    store_output(hq, token, d_v);
}
