#version 450
// encode.comp: computes c = E x - offset, quantizes c as kernels/ref/encode.cpp and trellis.cpp define, and stores the
// rows in half precision. There is one workgroup per token, KV head and side (K or V).
//
// A word of a tile has codes of several cells, which other workgroups may write at the same time. No two cells share a
// bit, so the shader clears and sets bits atomically.
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#define TABLES_ACCESS
#include "tables.glsl"

layout(local_size_x = 128) in;

layout(constant_id = 0) const uint PATH_LANES = 0; // 1 in a latent layer (trellis.h)

layout(std430, binding = 1) readonly buffer K { float k[]; };
layout(std430, binding = 2) readonly buffer V { float v[]; };
layout(std430, binding = 3) buffer KTiles { uint k_tiles[]; };
layout(std430, binding = 4) buffer VTiles { uint v_tiles[]; };
layout(std430, binding = 5) readonly buffer Cells { uvec2 cells[]; };
layout(std430, binding = 6) writeonly buffer Fresh { uint fresh[]; };

layout(push_constant) uniform Push {
    uint k_at, k_head, k_token, v_at, v_head, v_token;
    uint k_tiles_at, k_stride, v_tiles_at, v_stride;
    uint cells_at; // counts cells
    uint fresh_at;
} p;

const uint  THREADS = 128, LANES = 8, CANDIDATES = 11;
const uint  STATES = 4, TRELLIS_BITS = 6, TRELLIS_TRIED = 4, N_LINES = 5; // as in trellis.h
const int   TRELLIS_BELOW = 2;
const float HALF_MAX = 65504.0;
const float FAR      = 3.0e38; // cost of states that cannot be reached
const uint  X_BAD = 1, C_BAD = 2, C_LIVE = 4; // bits of `flags`

shared float xs[MAX_HEAD_SIZE];
shared float c[MAX_HEAD_SIZE];
shared uint  codes[MAX_HEAD_SIZE];
shared float room[THREADS];
shared vec4  errors[THREADS];                        // errors of the nearest levels of a place
shared uint  decisions[STATES * MAX_HEAD_SIZE / LANES]; // a nibble per place of four paths, with a bit per state
shared uint  flags;

void put(bool value, uint at, uint bits, uint mask) {
    if (value) {
        atomicAnd(v_tiles[at], ~mask);
        atomicOr(v_tiles[at], bits);
    } else {
        atomicAnd(k_tiles[at], ~mask);
        atomicOr(k_tiles[at], bits);
    }
}

float quantize(float x, float inverse, float zero) {
    return min(max(roundEven(fma(x, inverse, zero)), 0.0), 2.0 * zero);
}

// Returns lane `lane` of the squared error with scale s in bands of more than `beyond` bits. It sums coefficients j
// with j % 8 == lane in ascending order.
float lane_error(Head head, float s, uint lane, uint beyond) {
    precise float error = 0.0;
    for (uint i = 0; i < head.n_bands; ++i) {
        const Band band = band_of(head, i);
        if (band.bits == 16 || band.bits <= beyond) {
            continue;
        }
        precise float step    = s * band.ratio;
        precise float inverse = 1.0 / step;
        const float   zero    = half_range(band.bits);
        for (uint j = lane; j < band.n; j += LANES) {
            const float   x = c[band.first + j];
            precise float e = fma(-step, quantize(x, inverse, zero) - zero, x);
            error           = fma(e, e, error);
        }
    }
    return error;
}

float of_lanes(uint l) {
    precise float e = ((room[l] + room[l + 4]) + (room[l + 2] + room[l + 6])) +
                      ((room[l + 1] + room[l + 5]) + (room[l + 3] + room[l + 7]));
    return e;
}

// Returns the scale code of c, which is the same in all threads.
uint choose_scale(Head head) {
    const uint me        = gl_LocalInvocationID.x;
    float      reach     = 0.0;
    bool       quantized = false;
    for (uint i = 0; i < head.n_bands; ++i) {
        const Band band = band_of(head, i);
        if (band.bits == 16) {
            continue;
        }
        quantized          = true;
        precise float full = band.ratio * half_range(band.bits);
        for (uint j = me; j < band.n; j += THREADS) {
            precise float r = abs(c[band.first + j]) / full;
            reach           = max(reach, r);
        }
    }
    if (!quantized) {
        return SCALE_ONE;
    }
    room[me] = reach;
    for (uint step = THREADS / 2; step > 0; step /= 2) {
        barrier();
        if (me < step) {
            room[me] = max(room[me], room[me + step]);
        }
    }
    barrier();
    reach   = room[0];
    uint k0 = 1;
    while (k0 < SCALE_MOST && row_scale(k0) < reach) {
        ++k0;
    }
    barrier();
    const uint candidate = me / LANES;
    if (candidate < CANDIDATES && k0 > candidate) {
        room[me] = lane_error(head, row_scale(k0 - candidate), me % LANES, 0);
    }
    barrier();
    uint  best       = k0;
    float best_error = 0.0;
    for (uint i = 0; i < CANDIDATES && k0 > i; ++i) { // Ties go to the larger scale.
        const float e = of_lanes(i * LANES);
        if (i == 0 || e < best_error) {
            best       = k0 - i;
            best_error = e;
        }
    }
    return best;
}

// A place of the path.
struct Place {
    Octet octet;
    uint  coefficient;
};

Place place_of(Head head, uint t) {
    const Octet octet = octet_of(head, t % head.n_path);
    return Place(octet, octet.first + t / head.n_path);
}

// Returns the index of the nearest level to the place's coefficient in each subset of the levels, a byte each, and
// their errors.
uint nearest(Place place, float s, out vec4 error) {
    const uint    bits = place.octet.bits;
    const float   x    = c[place.coefficient];
    precise float step = s * place.octet.step;
    precise float inverse = 1.0 / step;
    precise float y    = x * inverse;
    const float   size = abs(y);
    precise float p    = size;
    for (uint n = 1; n < N_LINES; ++n) {
        const vec2    line = line_of(bits, n);
        precise float at   = fma(size, line.x, line.y);
        p                  = min(p, at);
    }
    p = y < 0.0 ? -p : p;
    const uvec2 bends = bends_of(bits);
    const int   half_ = 1 << bits;
    uint        all   = 0;
    [[unroll]] for (int q = 0; q < 4; ++q) {
        precise float g = roundEven(fma(p, 0.25, 0.25 * (float(half_ - q) - 0.5)));
        const int     i = 4 * int(min(max(g, 0.0), 0.5 * float(half_) - 1.0)) + q;
        const int     k = i < half_ ? half_ - 1 - i : i - half_;
        const int     m = k + max(k - int(bends.x), 0) + max(k - int(bends.y), 0);
        precise float e = fma(-step, float(i < half_ ? -1 - m : m) + 0.5, x);
        error[q]        = e;
        all |= uint(i) << 8 * q;
    }
    return all;
}

uint subset(uint p, uint x) {
    return 2 * (x ^ p >> 1) + (p & 1u);
}

// Extends cost by one place. Bit w of the result says whether the branch into state w comes from the larger state.
uint extend(vec4 error, inout vec4 cost) {
    vec4 next;
    uint from_larger = 0;
    [[unroll]] for (uint w = 0; w < STATES; ++w) {
        const uint    x = w & 1u, p = w >> 1;
        const float   from_p = error[subset(p, x)], from_other = error[subset(p | 2u, x)];
        precise float a = fma(from_p, from_p, cost[p]);
        precise float b = fma(from_other, from_other, cost[p | 2u]);
        from_larger |= (b < a ? 1u : 0u) << w;
        next[w] = b < a ? b : a;
    }
    cost = next;
    return from_larger;
}

uint least_state(vec4 cost) {
    uint least = 0;
    [[unroll]] for (uint w = 1; w < STATES; ++w) { // Ties go to the smaller state.
        least = cost[w] < cost[least] ? w : least;
    }
    return least;
}

// Returns whether a lane begins at place t. It starts in state 0 with the least final cost of the lane before.
bool begins_lane(Head head, uint t) {
    return PATH_LANES != 0 && t % head.n_path == 0;
}

vec4 begin_lane(vec4 cost) {
    return vec4(min(min(cost.x, cost.y), min(cost.z, cost.w)), FAR, FAR, FAR);
}

// Returns the scale code, the same in all threads, near `middle`, which is the best one without a trellis. All threads
// prepare THREADS / TRELLIS_TRIED places at a time, and then one thread per scale extends its paths.
uint choose_path_scale(Head head, uint middle) {
    const uint AT_ONCE = THREADS / TRELLIS_TRIED;
    const uint me = gl_LocalInvocationID.x, n = head.n_path * LANES;
    const int  first = int(middle) - TRELLIS_BELOW, mine = first + int(me % TRELLIS_TRIED);
    vec4       cost = vec4(0.0);
    for (uint t0 = 0; t0 < n; t0 += AT_ONCE) {
        const uint t = t0 + me / TRELLIS_TRIED;
        if (t < n && mine >= 1 && mine <= int(SCALE_MOST)) {
            vec4 error;
            nearest(place_of(head, t), row_scale(uint(mine)), error);
            errors[me] = error;
        }
        barrier();
        for (uint i = 0; me < TRELLIS_TRIED && i < AT_ONCE && t0 + i < n; ++i) {
            if (begins_lane(head, t0 + i)) {
                cost = begin_lane(cost);
            }
            extend(errors[TRELLIS_TRIED * i + me], cost);
        }
        barrier();
    }
    const int candidate = first + int(me / LANES);
    if (me / LANES < TRELLIS_TRIED && candidate >= 1 && candidate <= int(SCALE_MOST)) {
        room[me] = lane_error(head, row_scale(uint(candidate)), me % LANES, TRELLIS_BITS);
    }
    barrier();
    if (me < TRELLIS_TRIED) {
        precise float all = min(min(cost.x, cost.y), min(cost.z, cost.w)) + of_lanes(LANES * me);
        errors[me].x      = mine >= 1 && mine <= int(SCALE_MOST) ? all : FAR;
    }
    barrier();
    uint  best  = middle;
    float least = FAR;
    for (int i = 0; i < int(TRELLIS_TRIED); ++i) { // Ties go to the smaller code.
        if (errors[i].x < least) {
            best  = uint(first + i);
            least = errors[i].x;
        }
    }
    barrier();
    return best;
}

// Stores the codes of the path of least cost at scale s. There is one thread per state in which a closed path may begin
// and end. With PATH_LANES, only the first thread's path is used.
void find_path(Head head, float s) {
    const uint me = gl_LocalInvocationID.x, n = head.n_path * LANES, WORDS = MAX_HEAD_SIZE / LANES;
    vec4       cost = mix(vec4(FAR), vec4(0.0), equal(uvec4(0, 1, 2, 3), uvec4(me)));
    uint       ended = 0; // two bits for the final state of each lane
    for (uint t0 = 0; t0 < n; t0 += THREADS) {
        if (t0 + me < n) {
            const Place place = place_of(head, t0 + me);
            vec4        error;
            codes[place.coefficient] = nearest(place, s, error); // all four levels, until one is chosen
            errors[me]               = error;
        }
        barrier();
        for (uint i = 0; me < STATES && i < THREADS && t0 + i < n; i += LANES) { // n is a multiple of LANES.
            uint nibbles = 0;
            for (uint x = 0; x < LANES; ++x) {
                if (begins_lane(head, t0 + i + x)) {
                    ended = ended << 2 | least_state(cost);
                    cost  = begin_lane(cost);
                }
                nibbles |= extend(errors[i + x], cost) << 4 * x;
            }
            decisions[me * WORDS + (t0 + i) / LANES] = nibbles;
        }
        barrier();
    }
    if (me < STATES) {
        room[me] = me < 2 ? (me == 0 ? cost.x : cost.y) : (me == 2 ? cost.z : cost.w);
    }
    barrier();
    if (me != 0) {
        return;
    }
    uint ends = 0;
    for (uint w = 1; PATH_LANES == 0 && w < STATES; ++w) { // Ties go to the smaller state.
        ends = room[w] < room[ends] ? w : ends;
    }
    uint w = PATH_LANES != 0 ? least_state(cost) : ends, t = n;
    for (uint lane = LANES; lane-- > 0; ended >>= 2) {
        for (uint i = head.n_path; i-- > 0;) {
            --t;
            const uint nibble = decisions[ends * WORDS + t / LANES] >> 4 * (t % LANES);
            const uint x = w & 1u, p = w >> 1 | (nibble >> w & 1u) << 1;
            const uint at = octet_of(head, i).first + lane;
            codes[at]     = ((codes[at] >> 8 * subset(p, x) & 255u) ^ 2 * (p >> 1) ^ (p & 1u)) >> 1;
            w             = p;
        }
        w = PATH_LANES != 0 ? ended & 3u : w;
    }
}

// Writes the codes of cell `cell` of the tile that begins at word `tile`.
void store_codes(Head head, bool value, uint tile, uint cell) {
    // A word holds four coefficients of a key, but one of a value.
    const uint each = value ? 1 : 4, words = 8 / each;
    const uint ones = value ? 1u << 8 * (cell % 4) : 0x01010101u;
    for (uint b = 0; b < head.n_bands; ++b) {
        const Band band = band_of(head, b);
        if (band.bits == 16) {
            continue;
        }
        for (uint i = gl_LocalInvocationID.x; i < band.n / each; i += THREADS) {
            const uint j    = i % words; // word of the octet
            const uint rho  = value ? cell / 8 : 4 * j + cell / 16;
            const uint at   = tile + band.at + i / words * band.bits * LINE_WORDS +
                              (value ? 2 * j + cell % 8 / 4 : cell % 16);
            uint       word = 0;
            for (uint x = 0; x < each; ++x) {
                word |= codes[band.first + i * each + x] << 8 * (value ? cell % 4 : x);
            }
            for (uint x = 0; x < n_fields(band.bits, rho); ++x) {
                const Field f    = field_of(band.bits, rho, x);
                const uint  mask = ones * ((1u << f.width) - 1u);
                put(value, at + f.line * LINE_WORDS, (word >> f.from & mask) << f.shift, mask << f.shift);
            }
        }
    }
}

// Reads the row, and computes its coefficients c and flags.
void multiply_basis(Head head, bool value, uint x_at) {
    const uint me = gl_LocalInvocationID.x;
    if (me == 0) {
        flags = 0;
    }
    barrier();
    for (uint j = me; j < head.d; j += THREADS) {
        xs[j] = value ? v[x_at + j] : k[x_at + j];
        if (!finite(xs[j])) {
            atomicOr(flags, X_BAD);
        }
    }
    barrier();
    for (uint first = 0; first < head.rank; first += THREADS / LANES) {
        const uint i     = first + me / LANES;
        float      total = 0.0;
        if (i < head.rank) {
            for (uint j = me % LANES; j < head.d / 2; j += LANES) {
                const vec2 e = unpackHalf2x16(tables[head.encode + i * (head.d / 2) + j]);
                total        = fma(e.y, xs[2 * j + 1], fma(e.x, xs[2 * j], total));
            }
        }
        room[me] = total;
        barrier();
        if (me % LANES == 0 && i < head.rank) {
            for (uint x = 1; x < LANES; ++x) {
                total += room[me + x];
            }
            if (head.offset != 0) {
                precise float less = total - uintBitsToFloat(tables[head.offset + i]);
                total              = less;
            }
            c[i] = total;
            atomicOr(flags, (finite(total) ? 0u : C_BAD) | (total != 0.0 ? C_LIVE : 0u));
        }
        barrier();
    }
}

// Stores the halves of 16-bit bands, and computes the codes outside the path at scale s. `within` is the cell in its
// tile.
void quantize_bands(Head head, bool value, uint tile, uint within, float s, bool live) {
    const uint me = gl_LocalInvocationID.x;
    for (uint b = 0; b < head.n_bands; ++b) {
        const Band    band    = band_of(head, b);
        precise float step    = s * band.ratio;
        precise float inverse = 1.0 / (live ? step : 1.0);
        for (uint j = me; j < band.n; j += THREADS) {
            const float x = live ? c[band.first + j] : 0.0;
            if (band.bits == 16) {
                const uint shift = within % 2 * 16;
                put(value, tile + band.at + (j * TILE + within) / 2, to_half(clamp(x, -HALF_MAX, HALF_MAX)) << shift,
                    0xffffu << shift);
            } else if (!live || band.place == NO_PLACE) {
                codes[band.first + j] = live ? uint(quantize(x, inverse, half_range(band.bits))) : 0;
            }
        }
    }
}

// Stores the row in half precision, or HALF_NAN if it is not finite.
void store_fresh(Head head, uint at, bool x_finite) {
    for (uint j = gl_LocalInvocationID.x; j < head.d / 2; j += THREADS) {
        uint pair = HALF_NAN | HALF_NAN << 16;
        if (x_finite) {
            pair = to_half(clamp(xs[2 * j], -HALF_MAX, HALF_MAX)) |
                   to_half(clamp(xs[2 * j + 1], -HALF_MAX, HALF_MAX)) << 16;
        }
        fresh[at + j] = pair;
    }
}

void main() {
    const uint token = gl_WorkGroupID.x, h = gl_WorkGroupID.y, me = gl_LocalInvocationID.x;
    const bool value = gl_WorkGroupID.z == 1;
    const Head head  = head_of(gl_WorkGroupID.z, h);
    const uint x_at  = value ? p.v_at + h * p.v_head + token * p.v_token : p.k_at + h * p.k_head + token * p.k_token;
    const uint cell  = cells[p.cells_at + token].x; // low half of an int64
    const uint within = cell % TILE;
    const uint tile  = head.tile + (value ? p.v_tiles_at + cell / TILE * p.v_stride :
                                            p.k_tiles_at + cell / TILE * p.k_stride);

    multiply_basis(head, value, x_at);
    const bool x_finite = (flags & X_BAD) == 0;
    const bool bad      = (flags & (X_BAD | C_BAD)) != 0;
    const bool live     = !bad && (flags & C_LIVE) != 0;
    if (me == 0 && bad) {
        atomicAdd(tables[N_BAD], 1);
    }
    uint code = bad ? SCALE_NAN : 0;
    if (live) {
        code = choose_scale(head);
        if (head.n_path > 0) {
            code = choose_path_scale(head, code);
            find_path(head, row_scale(code));
        }
    }
    if (me == 0) {
        put(value, tile + within / 4, code << 8 * (within % 4), 255u << 8 * (within % 4));
    }
    quantize_bands(head, value, tile, within, row_scale(code), live);
    barrier();
    store_codes(head, value, tile, within);
    store_fresh(head, p.fresh_at + token * exact_width() + (value ? exact_value(h) : h * tables[D_K]) / 2, x_finite);
}
