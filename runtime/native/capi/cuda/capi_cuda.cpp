// capi_cuda.cpp: coded cells in another program's memory (subkv_cuda.h).
#include "error.h"
#include "layer_tables.h"
#include "row_codec.h"
#include "subkv_cuda.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <type_traits>
#include <vector>

using namespace subkv;

// What the device makes of a layer with n_group query heads per KV head.
struct OfGroup {
    int32_t    n_group = 0;
    bool       decodes = false, makes_rows = false;
    BlockSteps steps = {};
};

struct subkv_cuda_layer {
    std::unique_ptr<LayerTables> tables;
    int64_t                      k_row_bytes, v_row_bytes; // of a cell, all heads
    int                          device;
    bool                         placed = false;

    // Asks the device once, and not for every token.
    OfGroup of_group(const cuda::Layer & l) const {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (known_.n_group != l.n_group) {
            known_ = { l.n_group, cuda::suits_decode(l, device), cuda::suits_prompt(l, device),
                       cuda::block_steps(l, device) };
        }
        return known_;
    }

private:
    mutable std::mutex mutex_;
    mutable OfGroup    known_;
};

namespace {

constexpr int64_t ALIGNMENT   = 64;    // of the parts of scratch, in bytes
constexpr int64_t MOST_TOKENS = 65535; // limit of a grid's y

// Appends a side's heads. Throws Invalid.
void add_heads(const subkv_cuda_head * heads, int32_t n, int32_t d, bool value, LayerCodec & to) {
    constexpr const char *   FUNCTION = "subkv_cuda_layer_new";
    std::vector<HeadCodec> & codecs   = value ? to.v : to.k;
    std::vector<size_t> &    offsets  = value ? to.v_offset : to.k_offset;
    size_t &                 total    = value ? to.v_row_bytes : to.k_row_bytes;
    for (int32_t h = 0; h < n; ++h) {
        const subkv_cuda_head & head  = heads[h];
        HeadCodec               codec = row_codec(FUNCTION, head.bands, head.ratio, head.n_bands);
        if (codec.rank > d) {
            fail("%s: bands: expected at most %d coefficients, found %d", FUNCTION, (int) d, (int) codec.rank);
        }
        codec.value         = value;
        codec.d             = d;
        codec.encode.halves = &not_null(head.encode, "subkv_cuda_layer_new: encode");
        codec.decode.halves = &not_null(head.decode, "subkv_cuda_layer_new: decode");
        codec.offset        = head.offset;
        codecs.push_back(codec);
        offsets.push_back(total);
        total += (size_t) codec.row_bytes;
        if (!value) {
            to.gamma.push_back(head.gamma);
            to.centre.push_back(
                { head.mean ? std::vector<uint16_t>(head.mean, head.mean + d) : std::vector<uint16_t>{}, {} });
        }
    }
}

// Throws Invalid for a launch's error message.
void check(const char * function, const char * error) {
    if (error) {
        fail("%s: expected a launch, found %s", function, error);
    }
}

// Returns a layer that can run, and makes its device the current one, which another library of CUDA's runtime may not
// have told ours. Throws Invalid.
const subkv_cuda_layer & placed(const subkv_cuda_layer * layer, const char * function) {
    if (!layer || !layer->placed) {
        fail("%s: layer: expected one with tables (subkv_cuda_place_tables), found %s", function,
             layer ? "none yet" : "NULL");
    }
    check(function, cuda::use_device(layer->device));
    return *layer;
}

cuda::Layer layer_of(const subkv_cuda_layer & layer, const subkv_cuda_queries & q) {
    cuda::Layer l = layer.tables->layer();
    l.n_group     = q.n_group;
    l.scale       = q.scale;
    l.softcap     = q.softcap;
    return l;
}

// The kernels' arguments, without results and scratch. Throws Invalid.
cuda::Combine arguments(const char * function, const subkv_cuda_layer * of, const subkv_cuda_queries * queries) {
    const subkv_cuda_layer &   layer = placed(of, function);
    const subkv_cuda_queries & q     = not_null(queries, function);
    if (q.cells.n_stream < 1 || q.n_tps < 1 || q.n_tps * q.cells.n_stream > MOST_TOKENS || q.n_kv < 1 ||
        q.n_kv > q.cells.n_cells || q.cells.n_cells % TILE != 0 || q.n_slots < 1 || q.n_group < 1 ||
        q.n_group > MAX_GROUP) {
        fail("%s: sizes: expected 1 to %d tokens, cells in whole tiles, a slot and 1 to %d query heads per KV head, "
             "found %lld, %lld of %lld, %d and %d",
             function, (int) MOST_TOKENS, MAX_GROUP, (long long) (q.n_tps * q.cells.n_stream), (long long) q.n_kv,
             (long long) q.cells.n_cells, (int) q.n_slots, (int) q.n_group);
    }
    cuda::Combine  c               = {};
    cuda::Attend & a               = c.a;
    a.layer                        = layer_of(layer, q);
    const cuda::Layer & l          = a.layer;
    const OfGroup       of_group   = layer.of_group(l);
    const bool          few        = of_group.decodes && q.n_tps <= cuda::DECODE_TOKENS;
    const int64_t       row_blocks = few ? q.n_tps : quotient_up(q.n_tps, tokens_of_block(q.n_group));
    BlockSteps          steps      = of_group.steps;
    steps.waves                    = few ? steps.waves : 1;
    a.q                            = q.q;
    a.q_head                       = l.d_k;
    a.q_token                      = (int64_t) l.n_head_kv * q.n_group * l.d_k;
    a.k_tiles                      = q.cells.k;
    a.v_tiles                      = q.cells.v;
    a.k_stride                     = TILE * layer.k_row_bytes;
    a.v_stride                     = TILE * layer.v_row_bytes;
    a.k_stream                     = q.cells.n_cells * layer.k_row_bytes;
    a.v_stream                     = q.cells.n_cells * layer.v_row_bytes;
    a.mask                         = q.mask;
    a.mask_half                    = true;
    a.cell_pos                     = q.positions;
    a.tokens                       = (const TokenRow *) q.tokens;
    a.n_sink                       = q.n_sink;
    a.n_recent                     = q.n_recent;
    a.n_kv                         = q.n_kv;
    a.n_stream                     = q.cells.n_stream;
    a.n_tps                        = q.n_tps;
    a.split                        = cells_of_split(steps, q.n_kv, row_blocks * a.n_stream * l.n_head_kv, q.n_kv);
    a.n_split                      = quotient_up(q.n_kv, a.split);
    c.fresh                        = q.fresh;
    c.window                       = q.window;
    c.slots                        = (const SlotRow *) q.slots;
    c.slots_of_seq                 = q.n_slots;
    c.sinks                        = q.sinks;
    c.out_stride                   = (int64_t) l.n_head_kv * q.n_group * l.d_v;
    return c;
}

// Sets the places of partial results and scratch in memory at `base`, and returns its bytes.
int64_t place_scratch(cuda::Combine & c, uint8_t * base) {
    cuda::Attend &      a      = c.a;
    const cuda::Layer & l      = a.layer;
    const int64_t       n_tok  = a.n_stream * a.n_tps;
    const int64_t       n_rows = n_tok * l.n_head_kv * l.n_group;
    int64_t             used   = 0;
    const auto          take   = [&](auto *& part, int64_t n) {
        part = (std::remove_reference_t<decltype(part)>) (base + used);
        used += quotient_up(n * (int64_t) sizeof(*part), ALIGNMENT) * ALIGNMENT;
    };
    take(a.m, a.n_split * n_rows);
    take(a.z, a.n_split * n_rows);
    take(a.acc, a.n_split * n_rows * l.width_v);
    take(a.qt, n_rows * l.width_k);
    take(a.shift, n_rows);
    take(a.words, n_tok * l.n_head_kv * cuda::query_words(l));
    take(a.exact, cuda::exact_floats(l, n_rows, a.n_tps, c.slots_of_seq));
    return used;
}

cuda::Prompt prompt_of(const cuda::Combine & c) {
    cuda::Prompt p = {};
    p.c            = c;
    p.n_slots      = c.slots_of_seq;
    p.n_rows       = c.a.n_kv + p.n_slots + c.a.n_tps;
    p.n_heads      = c.a.layer.n_head_kv;
    return p;
}

} // namespace

extern "C" {

subkv_cuda_layer * subkv_cuda_layer_new(int32_t n_head_kv, int32_t d_k, int32_t d_v, const subkv_cuda_head * k,
                                        const subkv_cuda_head * v, int32_t device) {
    return guarded<subkv_cuda_layer *>("subkv_cuda_layer_new", nullptr, [&] {
        const auto is_size = [](int32_t d) { return d >= BAND_STEP && d % BAND_STEP == 0 && d <= MAX_HEAD_SIZE; };
        if (n_head_kv < 1 || n_head_kv > MAX_HEADS_KV || !is_size(d_k) || !is_size(d_v)) {
            fail("subkv_cuda_layer_new: expected 1 to %d KV heads, of multiples of %d to %d elements, found %d of %d "
                 "and %d",
                 (int) MAX_HEADS_KV, (int) BAND_STEP, MAX_HEAD_SIZE, (int) n_head_kv, (int) d_k, (int) d_v);
        }
        LayerCodec codec;
        codec.n_head_kv = n_head_kv;
        codec.d_k       = d_k;
        codec.d_v       = d_v;
        add_heads(&not_null(k, "subkv_cuda_layer_new: k"), n_head_kv, d_k, false, codec);
        add_heads(&not_null(v, "subkv_cuda_layer_new: v"), n_head_kv, d_v, true, codec);
        auto layer = std::make_unique<subkv_cuda_layer>();
        // The number of query heads is unknown until there are queries.
        layer->tables      = std::make_unique<LayerTables>(codec, n_head_kv * MAX_GROUP);
        layer->k_row_bytes = (int64_t) codec.k_row_bytes;
        layer->v_row_bytes = (int64_t) codec.v_row_bytes;
        layer->device      = device;
        if (const size_t lacks = cuda::lacks_shared(layer->tables->layer(), device)) {
            fail(
                "subkv_cuda_layer_new: expected heads that fit in the device's shared memory, found %d elements, which "
                "need %zu bytes more",
                (int) std::max(d_k, d_v), lacks);
        }
        return layer.release();
    });
}

void subkv_cuda_layer_free(subkv_cuda_layer * layer) {
    delete layer;
}

int64_t subkv_cuda_table_bytes(const subkv_cuda_layer * layer) {
    return guarded<int64_t>("subkv_cuda_table_bytes", -1, [&] {
        return (int64_t) not_null(layer, "subkv_cuda_table_bytes: layer").tables->n_bytes();
    });
}

bool subkv_cuda_place_tables(subkv_cuda_layer * layer, const void * device, void * copy) {
    return guarded("subkv_cuda_place_tables", [&] {
        not_null(layer, "subkv_cuda_place_tables: layer");
        if (!device || (uintptr_t) device % 32 != 0 || !copy || layer->placed) {
            fail("subkv_cuda_place_tables: expected memory at a multiple of 32 bytes and room for its content, once, "
                 "found %p",
                 device);
        }
        const std::vector<uint8_t> bytes = layer->tables->place((const uint8_t *) device);
        std::memcpy(copy, bytes.data(), bytes.size());
        layer->placed = true;
    });
}

bool subkv_cuda_encode(const subkv_cuda_layer * of, const subkv_cuda_cells * to, const float * k, const float * v,
                       const int64_t * cells, int64_t n_tok, uint16_t * fresh, void * stream) {
    return guarded("subkv_cuda_encode", [&] {
        const subkv_cuda_layer & layer = placed(of, "subkv_cuda_encode");
        const subkv_cuda_cells & tiles = not_null(to, "subkv_cuda_encode: to");
        cuda::Encode             e     = {};
        e.layer                        = layer.tables->layer();
        e.k                            = k;
        e.v                            = v;
        e.k_head                       = e.layer.d_k;
        e.v_head                       = e.layer.d_v;
        e.k_token                      = (int64_t) e.layer.n_head_kv * e.layer.d_k;
        e.v_token                      = (int64_t) e.layer.n_head_kv * e.layer.d_v;
        e.k_tiles                      = tiles.k;
        e.v_tiles                      = tiles.v;
        e.k_stride                     = TILE * layer.k_row_bytes;
        e.v_stride                     = TILE * layer.v_row_bytes;
        e.cells                        = cells;
        e.fresh                        = fresh;
        e.n_tok                        = n_tok;
        check("subkv_cuda_encode", cuda::encode(e, stream));
    });
}

int64_t subkv_cuda_scratch(const subkv_cuda_layer * layer, const subkv_cuda_queries * q) {
    return guarded<int64_t>("subkv_cuda_scratch", -1, [&] {
        cuda::Combine c = arguments("subkv_cuda_scratch", layer, q);
        return place_scratch(c, nullptr);
    });
}

bool subkv_cuda_attend(const subkv_cuda_layer * layer, const subkv_cuda_queries * q, void * scratch, float * out,
                       void * stream) {
    return guarded("subkv_cuda_attend", [&] {
        cuda::Combine c = arguments("subkv_cuda_attend", layer, q);
        place_scratch(c, (uint8_t *) scratch);
        c.out = out;
        check("subkv_cuda_attend", cuda::attend(c.a, stream));
        check("subkv_cuda_attend", cuda::combine(c, stream));
    });
}

bool subkv_cuda_suits_prompt(const subkv_cuda_layer * of, const subkv_cuda_queries * q) {
    return guarded("subkv_cuda_suits_prompt", false, [&] {
        const OfGroup of_group = of->of_group(arguments("subkv_cuda_suits_prompt", of, q).a.layer);
        const bool    many     = of_group.decodes ? q->n_tps > cuda::DECODE_TOKENS : q->n_tps >= PROMPT_TOKENS;
        return many && !q->sinks && q->softcap == 0.0f && of_group.makes_rows;
    });
}

bool subkv_cuda_prompt(const subkv_cuda_layer * layer, const subkv_cuda_queries * q, int64_t n_rows, uint16_t * k,
                       uint16_t * v, uint16_t * mask, void * stream) {
    return guarded("subkv_cuda_prompt", [&] {
        cuda::Prompt p = prompt_of(arguments("subkv_cuda_prompt", layer, q));
        if (n_rows < p.n_rows) {
            fail("subkv_cuda_prompt: n_rows: expected %lld or more, found %lld", (long long) p.n_rows,
                 (long long) n_rows);
        }
        p.n_rows = n_rows;
        p.k      = k;
        p.v      = v;
        p.mask   = mask;
        check("subkv_cuda_prompt", cuda::prompt_rows(p, stream));
        check("subkv_cuda_prompt", cuda::prompt_mask(p, stream));
    });
}

bool subkv_cuda_prompt_lost(const subkv_cuda_layer * layer, const subkv_cuda_queries * q, float * out, void * stream) {
    return guarded("subkv_cuda_prompt_lost", [&] {
        cuda::Prompt p = prompt_of(arguments("subkv_cuda_prompt_lost", layer, q));
        p.c.out        = out;
        check("subkv_cuda_prompt_lost", cuda::prompt_lost(p, stream));
    });
}
}
