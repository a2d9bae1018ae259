// attend.cpp: attention to coded cells and to the exact window.
#include "backend.h"

#include <algorithm>
#include <cmath>

namespace subkv::backend {

namespace {

// Cells per split: whole steps of the kernels, so that splits of different threads are independent.
constexpr int64_t SPLIT = 4 * STEP;
constexpr int64_t BLOCK = 32; // tokens attended in one call

// One head, a block of tokens of one stream, and a split.
struct Unit {
    const Attention & a;
    int64_t           h, split, stream, t0, n, row;

    Unit(const Attention & of, int64_t unit) : a(of) {
        const int64_t n_block = (a.n_tokens + BLOCK - 1) / BLOCK;
        h                     = unit % a.n_head_kv;
        split                 = unit / a.n_head_kv % (a.n_split + 1);
        t0                    = unit / a.n_head_kv / (a.n_split + 1) % n_block * BLOCK;
        stream                = unit / a.n_head_kv / (a.n_split + 1) / n_block;
        n                     = std::min(BLOCK, a.n_tokens - t0);
        row                   = a.row(split, h, stream, t0);
        std::fill(a.m(row), a.m(row) + n * a.n_group, -INFINITY);
        std::fill(a.z(row), a.z(row) + n * a.n_group, 0.0f);
        std::fill(a.acc(row), a.acc(row) + n * a.n_group * a.width, 0.0f);
    }

    static int64_t count(const Attention & a) {
        return a.n_stream * ((a.n_tokens + BLOCK - 1) / BLOCK) * (a.n_split + 1) * a.n_head_kv;
    }
};

struct Scratch {
    std::vector<float>            q, shift, bias, slope;
    std::vector<size_t>           which;
    std::vector<const uint16_t *> rows;
};

void attend_exact(const Unit & u, Scratch & s) {
    const Attention &               a     = u.a;
    const std::vector<Exact::Key> & keys  = a.exact->keys[(size_t) u.stream];
    const float *                   seen  = a.exact->bias[(size_t) u.stream].data();
    const int64_t                   d     = a.k.d();
    const size_t                    n_all = keys.size();
    s.which.clear();
    for (size_t i = 0; i < n_all; ++i) {
        for (int64_t t = u.t0; t < u.t0 + u.n; ++t) {
            if (seen[(size_t) t * n_all + i] != -INFINITY) {
                s.which.push_back(i);
                break;
            }
        }
    }
    const size_t n_keys = s.which.size();
    if (n_keys == 0) {
        return;
    }
    s.rows.resize(2 * n_keys);
    s.bias.resize(std::max(s.bias.size(), (size_t) u.n * n_keys));
    for (size_t i = 0; i < n_keys; ++i) {
        s.rows[i]          = keys[s.which[i]].k + u.h * d;
        s.rows[n_keys + i] = keys[s.which[i]].v + u.h * a.v.d();
        for (int64_t t = 0; t < u.n; ++t) {
            s.bias[(size_t) t * n_keys + i] = seen[(size_t) (u.t0 + t) * n_all + s.which[i]];
        }
    }
    s.q.resize((size_t) (u.n * a.n_group * d));
    for (int64_t r = 0; r < u.n * a.n_group; ++r) {
        const float * q = a.query(u.h * a.n_group + r % a.n_group, u.t0 + r / a.n_group, u.stream);
        std::transform(q, q + d, s.q.data() + r * d, [&](float x) { return a.scale * x; });
    }
    ExactArgs args   = {};
    args.d_k         = d;
    args.d_v         = a.v.d();
    args.n_keys      = (int64_t) n_keys;
    args.k           = s.rows.data();
    args.v           = s.rows.data() + n_keys;
    args.n_tok       = u.n;
    args.n_group     = a.n_group;
    args.q           = s.q.data();
    args.bias        = s.bias.data();
    args.bias_stride = (int64_t) n_keys;
    args.slope       = s.slope.data();
    args.softcap     = a.softcap;
    args.m           = a.m(u.row);
    args.z           = a.z(u.row);
    args.acc         = a.acc(u.row);
    args.acc_stride  = a.width;
    ops().attend_exact(args);
}

void attend_coded(const Unit & u, Scratch & s) {
    const Attention &               a     = u.a;
    const std::vector<Exact::Key> & keys  = a.exact->keys[(size_t) u.stream];
    const float *                   exact = a.exact->bias[(size_t) u.stream].data();
    const int64_t                   c0    = u.split * SPLIT;
    const int64_t                   c1    = std::min(a.n_kv, c0 + SPLIT);
    int64_t                         seen  = 0; // cells from c0 to the last that any token of the block sees
    s.bias.resize(std::max(s.bias.size(), (size_t) (BLOCK * SPLIT)));
    for (int64_t t = 0; t < u.n; ++t) {
        float * bias = s.bias.data() + t * SPLIT;
        a.bias(u.t0 + t, u.stream, c0, c1 - c0, bias);
        for (size_t i = 0; i < keys.size(); ++i) {
            const int64_t at = keys[i].cell - c0;
            if (at >= 0 && at < c1 - c0 && exact[(size_t) (u.t0 + t) * keys.size() + i] != -INFINITY) {
                bias[at] = -INFINITY;
            }
        }
        for (int64_t i = c1 - c0; i > seen; --i) {
            seen = bias[i - 1] != -INFINITY ? i : seen;
        }
    }
    if (seen == 0) {
        return;
    }
    const HeadCodec & key = a.k.codec->k[(size_t) u.h];
    s.q.resize((size_t) (u.n * a.n_group * key.rank));
    s.shift.resize((size_t) (u.n * a.n_group));
    for (int64_t g = 0; g < a.n_group; ++g) {
        const int64_t ldq = (int64_t) (a.q->nb[1] / sizeof(float));
        const float * q   = a.query(u.h * a.n_group + g, u.t0, u.stream);
        ops().project(key.decode, key.rank, key.d, q, ldq, u.n, a.scale * a.k.codec->gamma[(size_t) u.h],
                      s.q.data() + g * key.rank, a.n_group * key.rank);
        if (key.offset) {
            ops().project({ a.k.codec->centre[(size_t) u.h].mean.data() }, 1, key.d, q, ldq, u.n, a.scale,
                          s.shift.data() + g, a.n_group);
        }
    }
    const int64_t tile = ((a.first_stream + u.stream) * a.k.root->ne[1] + c0) / TILE;
    AttendArgs    args = {};
    args.k             = &key;
    args.v             = &a.v.codec->v[(size_t) u.h];
    args.k_stride      = a.k.tile_bytes();
    args.v_stride      = a.v.tile_bytes();
    args.k_tiles       = a.k.tiles(u.h) + tile * args.k_stride;
    args.v_tiles       = a.v.tiles(u.h) + tile * args.v_stride;
    args.n_cells       = std::min((seen + TILE - 1) / TILE * TILE, c1 - c0);
    args.n_tok         = u.n;
    args.n_group       = a.n_group;
    args.qt            = s.q.data();
    args.shift         = key.offset ? s.shift.data() : nullptr;
    args.bias          = s.bias.data();
    args.bias_stride   = SPLIT;
    args.slope         = s.slope.data();
    args.softcap       = a.softcap;
    args.m             = a.m(u.row);
    args.z             = a.z(u.row);
    args.acc           = a.acc(u.row);
    args.acc_stride    = a.width;
    ops().attend(args);
}

} // namespace

Attention::Attention(const ggml_tensor * of, const ggml_tensor * keys, const ggml_tensor * values,
                     const ggml_tensor * with_mask, const ggml_tensor * with_sinks) :
    q(of), mask(with_mask), sinks(with_sinks), k(coded(keys)), v(coded(values)) {
    n_head_kv    = k.codec->n_head_kv;
    n_group      = q->ne[2] / n_head_kv;
    n_tokens     = q->ne[1];
    n_stream     = q->ne[3];
    n_kv         = keys->ne[1];
    n_split      = (n_kv + SPLIT - 1) / SPLIT;
    width        = v.d();
    first_stream = (int64_t) (keys->view_offs / k.root->nb[2]);
}

float Attention::slope(int64_t h) const {
    const float n = std::exp2(std::floor(std::log2((float) q->ne[2])));
    return max_bias == 0.0f ? 1.0f :
           (float) h < n    ? std::exp2(-max_bias / n * (float) (h + 1)) :
                              std::exp2(-max_bias / n * ((float) h - n + 0.5f));
}

const float * Attention::query(int64_t h, int64_t t, int64_t stream) const {
    return (const float *) ((const char *) q->data + h * q->nb[2] + t * q->nb[1] + stream * q->nb[3]);
}

void Attention::bias(int64_t t, int64_t stream, int64_t first, int64_t n, float * out) const {
    const char * row = (const char *) mask->data + t * mask->nb[1] + stream % mask->ne[3] * mask->nb[3];
    if (mask->type == GGML_TYPE_F32) {
        std::copy_n((const float *) row + first, n, out);
        return;
    }
    const auto * halves = (const ggml_fp16_t *) row + first;
    std::transform(halves, halves + n, out, [](ggml_fp16_t x) { return x == 0 ? 0.0f : ggml_fp16_to_fp32(x); });
}

void attend_op(ggml_tensor *, int ith, int nth, void * userdata) {
    const auto & a = *(const Attention *) userdata;
    Scratch      scratch;
    for (int64_t i = ith; i < Unit::count(a); i += nth) {
        const Unit unit(a, i);
        scratch.slope.resize((size_t) a.n_group);
        for (int64_t g = 0; g < a.n_group; ++g) {
            scratch.slope[(size_t) g] = a.slope(unit.h * a.n_group + g);
        }
        if (unit.split == a.n_split) {
            attend_exact(unit, scratch);
        } else {
            attend_coded(unit, scratch);
        }
    }
}

void combine_op(ggml_tensor * dst, int ith, int nth, void * userdata) {
    const auto &        a     = *(const Attention *) userdata;
    const ggml_tensor * sinks = a.sinks;
    const int64_t       d     = a.v.d();
    const size_t        nb_h  = dst->nb[a.heads_first ? 1 : 2];
    const size_t        nb_t  = dst->nb[a.heads_first ? 2 : 1];
    std::vector<float>  coef((size_t) d), out((size_t) d);
    for (int64_t unit = ith; unit < a.rows(); unit += nth) {
        const int64_t     g      = unit % a.n_group;
        const int64_t     t      = unit / a.n_group % a.n_tokens;
        const int64_t     stream = unit / a.n_group / a.n_tokens % a.n_stream;
        const int64_t     h      = unit / a.n_group / a.n_tokens / a.n_stream;
        const HeadCodec & head   = a.v.codec->v[(size_t) h];
        const int64_t     hq     = h * a.n_group + g;
        const auto        row    = [&](int64_t s) { return a.row(s, h, stream, t) + g; };
        float             m      = sinks ? ((const float *) sinks->data)[hq] : -INFINITY;
        for (int64_t s = 0; s <= a.n_split; ++s) {
            m = std::max(m, *a.m(row(s)));
        }
        const auto weight = [&](int64_t s) { return *a.m(row(s)) == -INFINITY ? 0.0f : std::exp(*a.m(row(s)) - m); };
        float      z      = sinks ? std::exp(((const float *) sinks->data)[hq] - m) : 0.0f;
        std::fill(coef.begin(), coef.end(), 0.0f);
        std::fill(out.begin(), out.end(), 0.0f);
        for (int64_t s = 0; s < a.n_split; ++s) {
            const float w = weight(s);
            z += w * *a.z(row(s));
            for (int64_t j = 0; j < head.rank; ++j) {
                coef[(size_t) j] += w * a.acc(row(s))[j];
            }
        }
        ops().reconstruct(head.decode, head.rank, d, coef.data(), out.data());
        const float w = weight(a.n_split);
        z += w * *a.z(row(a.n_split));
        for (int64_t j = 0; j < d; ++j) {
            out[(size_t) j] += w * a.acc(row(a.n_split))[j];
        }
        std::transform(out.begin(), out.end(),
                       (float *) ((char *) dst->data + hq * nb_h + t * nb_t + stream * dst->nb[3]),
                       [&](float x) { return z > 0.0f ? x / z : 0.0f; });
    }
}

} // namespace subkv::backend
