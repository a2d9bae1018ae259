// compute.cpp: the CPU backend computes a whole graph. Nodes that store to coded tensors, or attend to them, are replaced
// by custom nodes that write where the original nodes would have written.

#include "backend.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <deque>

namespace subkv::backend {

namespace {

// Rows whose products do not depend on the other thread: cells of a split, whole steps of the kernels.
constexpr int64_t SPLIT = 4 * STEP;
constexpr int64_t BLOCK = 32; // tokens attended in one call

//
// SET_ROWS: src 0 rows F32 [n_embd, n_tokens], 1 cells, 2 the cache
//

void encode_op(ggml_tensor * dst, int ith, int nth, void * userdata) {
    const ggml_tensor * op    = (const ggml_tensor *) userdata;
    const Coded         c     = coded(op);
    const ggml_tensor * x     = dst->src[0];
    const ggml_tensor * idx   = dst->src[1];
    const int64_t       n     = x->ne[1];
    const int64_t       d     = c.value ? c.codec->d_v : c.codec->d_k;
    const auto *        cells = (const int64_t *) idx->data;
    for (int64_t h = ith; h < c.codec->n_head_kv; h += nth) { // no two threads may be in one tile of a head
        ops().encode(c.codec->head(h, c.value), (const float *) x->data + h * d, (int64_t) (x->nb[1] / sizeof(float)),
                     n, cells, (uint8_t *) c.root->data + c.codec->tile_offset(h, c.value), c.tile_bytes());
    }
}

//
// FLASH_ATTN_EXT: src 0 q F32 [d, n_tokens, n_head, n_stream], 1 k, 2 v, 3 mask F16 [n_kv, n_tokens, 1, n_stream],
// 4 sinks
//

struct Attention {
    const ggml_tensor * op;
    float *             partial; // per split, KV head, stream and token: m, z [n_group], acc [n_group][width]
    int64_t             n_split, n_head_kv, n_group, n_tokens, n_stream, n_kv, width;
    float               scale, max_bias, softcap;

    explicit Attention(const ggml_tensor * t) : op(t), partial(nullptr) {
        const Coded k = coded(t->src[1]);
        n_head_kv     = k.codec->n_head_kv;
        n_group       = t->src[0]->ne[2] / n_head_kv;
        n_tokens      = t->src[0]->ne[1];
        n_stream      = t->src[0]->ne[3];
        n_kv          = t->src[1]->ne[1];
        n_split       = (n_kv + SPLIT - 1) / SPLIT;
        width         = k.codec->d_v;
        scale         = ((const float *) t->op_params)[0];
        max_bias      = ((const float *) t->op_params)[1];
        softcap       = ((const float *) t->op_params)[2];
    }

    int64_t rows() const { return n_head_kv * n_stream * n_tokens * n_group; }
    int64_t size() const { return n_split * rows() * (2 + width); }
    int64_t row(int64_t split, int64_t h, int64_t stream, int64_t t) const {
        return split * rows() + ((h * n_stream + stream) * n_tokens + t) * n_group;
    }
    float *       m(int64_t row) const { return partial + row; }
    float *       z(int64_t row) const { return partial + n_split * rows() + row; }
    float *       acc(int64_t row) const { return partial + 2 * n_split * rows() + row * width; }
    const float * query(int64_t h, int64_t t, int64_t stream) const {
        const ggml_tensor * q = op->src[0];
        return (const float *) ((const char *) q->data + h * q->nb[2] + t * q->nb[1] + stream * q->nb[3]);
    }
};

void attend_op(ggml_tensor *, int ith, int nth, void * userdata) {
    const auto &        a       = *(const Attention *) userdata;
    const Coded         k       = coded(a.op->src[1]);
    const Coded         v       = coded(a.op->src[2]);
    const ggml_tensor * mask    = a.op->src[3];
    const int64_t       n_block = (a.n_tokens + BLOCK - 1) / BLOCK;
    const int64_t       n_units = a.n_stream * n_block * a.n_split * a.n_head_kv;
    const int64_t       first   = (int64_t) (a.op->src[1]->view_offs / k.root->nb[1]); // cell of the first stream
    std::vector<float>  qt, shift, bias((size_t) (BLOCK * SPLIT));
    float               ones[MAX_GROUP];
    std::fill(ones, ones + MAX_GROUP, 1.0f);
    for (int64_t unit = ith; unit < n_units; unit += nth) {
        const int64_t h      = unit % a.n_head_kv;
        const int64_t split  = unit / a.n_head_kv % a.n_split;
        const int64_t t0     = unit / a.n_head_kv / a.n_split % n_block * BLOCK;
        const int64_t stream = unit / a.n_head_kv / a.n_split / n_block;
        const int64_t n      = std::min(BLOCK, a.n_tokens - t0);
        const int64_t row    = a.row(split, h, stream, t0);
        std::fill(a.m(row), a.m(row) + n * a.n_group, -INFINITY);
        std::fill(a.z(row), a.z(row) + n * a.n_group, 0.0f);
        std::fill(a.acc(row), a.acc(row) + n * a.n_group * a.width, 0.0f);

        const int64_t c0   = split * SPLIT;
        const int64_t c1   = std::min(a.n_kv, c0 + SPLIT);
        int64_t       seen = 0; // cells from c0 to the last that any token of the block sees
        for (int64_t t = 0; t < n; ++t) {
            const auto * in = (const ggml_fp16_t *) ((const char *) mask->data + (t0 + t) * mask->nb[1] +
                                                     stream % mask->ne[3] * mask->nb[3]) +
                              c0;
            for (int64_t i = 0; i < c1 - c0; ++i) {
                bias[(size_t) (t * SPLIT + i)] = in[i] == 0 ? 0.0f : ggml_fp16_to_fp32(in[i]);
                seen = bias[(size_t) (t * SPLIT + i)] != -INFINITY ? std::max(seen, i + 1) : seen;
            }
        }
        if (seen == 0) {
            continue;
        }
        const HeadCodec & key = k.codec->k[(size_t) h];
        qt.resize((size_t) (n * a.n_group * key.rank));
        shift.resize((size_t) (n * a.n_group));
        for (int64_t g = 0; g < a.n_group; ++g) {
            const int64_t ldq = (int64_t) (a.op->src[0]->nb[1] / sizeof(float));
            const float * q   = a.query(h * a.n_group + g, t0, stream);
            ops().project(key.decode, key.rank, key.d, q, ldq, n, a.scale * k.codec->gamma[(size_t) h],
                          qt.data() + g * key.rank, a.n_group * key.rank);
            if (key.offset) {
                ops().project({ k.codec->centre[(size_t) h].mean.data() }, 1, key.d, q, ldq, n, a.scale,
                              shift.data() + g, a.n_group);
            }
        }
        const int64_t cell = first + stream * k.root->ne[1] + c0;
        AttendArgs    args = {};
        args.k             = &key;
        args.v             = &v.codec->v[(size_t) h];
        args.k_stride      = k.tile_bytes();
        args.v_stride      = v.tile_bytes();
        args.k_tiles = (const uint8_t *) k.root->data + cell / TILE * args.k_stride + k.codec->tile_offset(h, false);
        args.v_tiles = (const uint8_t *) v.root->data + cell / TILE * args.v_stride + v.codec->tile_offset(h, true);
        args.n_cells = std::min((seen + TILE - 1) / TILE * TILE, c1 - c0);
        args.n_tok   = n;
        args.n_group = a.n_group;
        args.qt      = qt.data();
        args.shift   = key.offset ? shift.data() : nullptr;
        args.bias    = bias.data();
        args.bias_stride = SPLIT;
        args.slope       = ones;
        args.softcap     = a.softcap;
        args.m           = a.m(row);
        args.z           = a.z(row);
        args.acc         = a.acc(row);
        args.acc_stride  = a.width;
        ops().attend(args);
    }
}

// dst F32 [d_v, n_head, n_tokens, n_stream]
void combine_op(ggml_tensor * dst, int ith, int nth, void * userdata) {
    const auto &        a     = *(const Attention *) userdata;
    const Coded         v     = coded(a.op->src[2]);
    const ggml_tensor * sinks = a.op->src[4];
    const int64_t       d     = v.codec->d_v;
    std::vector<float>  coef((size_t) d), out((size_t) d);
    for (int64_t unit = ith; unit < a.rows(); unit += nth) {
        const int64_t     g      = unit % a.n_group;
        const int64_t     t      = unit / a.n_group % a.n_tokens;
        const int64_t     stream = unit / a.n_group / a.n_tokens % a.n_stream;
        const int64_t     h      = unit / a.n_group / a.n_tokens / a.n_stream;
        const HeadCodec & head   = v.codec->v[(size_t) h];
        const int64_t     hq     = h * a.n_group + g;
        float             m      = sinks ? ((const float *) sinks->data)[hq] : -INFINITY;
        for (int64_t s = 0; s < a.n_split; ++s) {
            m = std::max(m, *a.m(a.row(s, h, stream, t) + g));
        }
        float z = sinks ? std::exp(((const float *) sinks->data)[hq] - m) : 0.0f;
        std::fill(coef.begin(), coef.end(), 0.0f);
        std::fill(out.begin(), out.end(), 0.0f);
        for (int64_t s = 0; s < a.n_split; ++s) {
            const int64_t row = a.row(s, h, stream, t) + g;
            if (*a.m(row) == -INFINITY) {
                continue;
            }
            const float w = std::exp(*a.m(row) - m);
            z += w * *a.z(row);
            for (int64_t j = 0; j < head.rank; ++j) {
                coef[(size_t) j] += w * a.acc(row)[j];
            }
        }
        for (float & x : coef) {
            x = z > 0.0f ? x / z : 0.0f;
        }
        ops().reconstruct(head.decode, head.rank, d, coef.data(), out.data());
        std::copy(out.begin(), out.end(),
                  (float *) ((char *) dst->data + hq * dst->nb[1] + t * dst->nb[2] + stream * dst->nb[3]));
    }
}

bool is_view(const ggml_tensor * t) {
    return t->op == GGML_OP_NONE || t->op == GGML_OP_VIEW || t->op == GGML_OP_RESHAPE || t->op == GGML_OP_PERMUTE ||
           t->op == GGML_OP_TRANSPOSE;
}

bool touches_coded(const ggml_tensor * t) {
    return coded(t).codec ||
           std::any_of(t->src, t->src + GGML_MAX_SRC, [](const ggml_tensor * src) { return src && coded(src).codec; });
}

// A node that runs `function` in place of op and writes where it does.
ggml_tensor * replace(ggml_context * ctx, ggml_tensor * op, ggml_custom_op_t function, void * userdata) {
    ggml_tensor * t = ggml_custom_4d(ctx, op->type, op->ne[0], op->ne[1], op->ne[2], op->ne[3], op->src, 3, function,
                                     GGML_N_TASKS_MAX, userdata);
    t->data         = op->data;
    t->buffer       = op->buffer;
    t->flags |= op->flags; // the CPU backend skips nodes without GGML_TENSOR_FLAG_COMPUTE
    return t;
}

} // namespace

ggml_status compute(Context & context, ggml_cgraph * graph) {
    const int n_nodes = ggml_graph_n_nodes(graph);
    bool      any     = false;
    for (int i = 0; layout() && i < n_nodes && !any; ++i) {
        any = !is_view(ggml_graph_node(graph, i)) && touches_coded(ggml_graph_node(graph, i));
    }
    if (!any) {
        return ggml_backend_graph_compute(context.cpu.get(), graph);
    }
    const size_t n = 2 * (size_t) n_nodes + 16;
    context.memory.resize(n * ggml_tensor_overhead() + ggml_graph_overhead_custom(n, false));
    const ggml_context_ptr ctx(ggml_init({ context.memory.size(), context.memory.data(), true }));
    ggml_cgraph *          replaced = ggml_new_graph_custom(ctx.get(), n, false);
    std::deque<Attention>  attentions;
    int64_t                largest = 0;
    for (int i = 0; i < n_nodes; ++i) {
        ggml_tensor * t = ggml_graph_node(graph, i);
        if (is_view(t) || !touches_coded(t)) {
            ggml_graph_add_node(replaced, t);
        } else if (t->op == GGML_OP_SET_ROWS && coded(t).codec && t->ne[0] == coded(t).root->ne[0] &&
                   t->src[1]->type == GGML_TYPE_I64) {
            ggml_graph_add_node(replaced, replace(ctx.get(), t, encode_op, t));
        } else if (t->op == GGML_OP_FLASH_ATTN_EXT && coded(t->src[1]).codec && coded(t->src[2]).codec && t->src[3] &&
                   ((const float *) t->op_params)[1] == 0.0f) {
            attentions.emplace_back(t);
            largest = std::max(largest, attentions.back().size());
            ggml_graph_add_node(replaced, replace(ctx.get(), t, attend_op, &attentions.back()));
            ggml_graph_add_node(replaced, replace(ctx.get(), t, combine_op, &attentions.back()));
        } else {
            std::fprintf(stderr, "subkv: %s (%s) on coded cells: not supported\n", ggml_op_desc(t), t->name);
            return GGML_STATUS_FAILED;
        }
    }
    if ((int64_t) context.partial.size() < largest) {
        context.partial.resize((size_t) largest);
    }
    for (Attention & a : attentions) {
        a.partial = context.partial.data();
    }
    return ggml_backend_graph_compute(context.cpu.get(), replaced);
}

} // namespace subkv::backend
