// capi_adapt.cpp: the adaptive coder of subkv_adapt.h and subkv_adapt_test.h.
#include "adapt_replay.h"
#include "capi.h"
#include "subkv_adapt_test.h"

#include <algorithm>
#include <memory>

using namespace subkv;

struct subkv_adapt {
    std::shared_ptr<const Layout> layout;
    AdaptReplay                   replay;
};

namespace {

std::unique_ptr<subkv_adapt> make(const subkv_layout * layout, const subkv_adapt_params * params, int32_t il,
                                  int32_t head_kv, bool value) {
    if (!layout || !params) {
        fail("adapt: expected a layout and parameters, found NULL");
    }
    const HeadCodec & codec = encoding_head("adapt", layout, il, head_kv, value);
    const Ops &       ops   = usable_ops();
    const AdaptParams p     = Adapter::checked(*params, codec.rank);
    return std::unique_ptr<subkv_adapt>(
        new subkv_adapt{ layout->p, AdaptReplay(ops, *layout->p->layer(il), head_kv, value, p, layout->p->n_sink) });
}

// true after body(); false: error set.
template <typename F> bool done(F body) {
    return guarded("adapt", false, [&] {
        body();
        return true;
    });
}

// Adapter::query or ::lift of a chunk in use.
bool with_chunk(const subkv_adapt & a, void (Adapter::*turn)(int32_t, const float *, float *) const, int32_t slot,
                const float * x, float * out) {
    return done([&] {
        const Adapter & adapter = a.replay.adapter();
        if (slot != 0 && adapter.chunk(slot) == nullptr) {
            fail("adapt: slot: expected 0 or a chunk in use, found %d", (int) slot);
        }
        (adapter.*turn)(slot, x, out);
    });
}

[[noreturn]] void refuse_static(int32_t il, int32_t head_kv, bool value) {
    fail("context: a head with adaptive bases expected, layer %d, head %d, %s found", il, head_kv,
         value ? "values" : "keys");
}

} // namespace

extern "C" {

subkv_adapt * subkv_adapt_new(const subkv_layout * layout, const subkv_adapt_params * params, int32_t il,
                              int32_t head_kv, bool value) {
    return guarded<subkv_adapt *>("adapt", nullptr, [&] { return make(layout, params, il, head_kv, value).release(); });
}

void subkv_adapt_free(subkv_adapt * adapt) {
    delete adapt;
}

bool subkv_adapt_push(subkv_adapt * adapt, const float * x, int64_t n) {
    return done([&] { adapt->replay.push(x, n); });
}

int64_t subkv_adapt_read(subkv_adapt * adapt, float * xhat, int32_t * chunk_of, float * rho) {
    return guarded<int64_t>("adapt", -1, [&] {
        adapt->replay.read(xhat, chunk_of, rho);
        return adapt->replay.size();
    });
}

bool subkv_adapt_query(const subkv_adapt * adapt, int32_t slot, const float * qt, float * out) {
    return with_chunk(*adapt, &Adapter::query, slot, qt, out);
}

bool subkv_adapt_lift(const subkv_adapt * adapt, int32_t slot, const float * e, float * out) {
    return with_chunk(*adapt, &Adapter::lift, slot, e, out);
}

int64_t subkv_adapt_save(const subkv_adapt * adapt, void * state, int64_t n) {
    return guarded<int64_t>("adapt", -1, [&] {
        const std::vector<uint8_t> bytes = adapt->replay.save();
        if (state && n >= (int64_t) bytes.size()) {
            std::copy(bytes.begin(), bytes.end(), static_cast<uint8_t *>(state));
        }
        return (int64_t) bytes.size();
    });
}

bool subkv_adapt_restore(subkv_adapt * adapt, const void * state, int64_t n) {
    return done([&] { adapt->replay.restore(static_cast<const uint8_t *>(state), (size_t) std::max<int64_t>(n, 0)); });
}

bool subkv_adapt_replay(const subkv_layout * layout, const subkv_adapt_params * params, int32_t il, int32_t head_kv,
                        bool value, const float * x, int64_t n, float * xhat, int32_t * chunk_of, float * rho,
                        subkv_adapt_stats * stats) {
    return done([&] {
        const auto adapt = make(layout, params, il, head_kv, value);
        adapt->replay.push(x, n);
        adapt->replay.read(xhat, chunk_of, rho);
        if (stats) {
            *stats = {};
            adapt->replay.adapter().add_stats(*stats);
        }
    });
}

void subkv_quantizer(int32_t bits, double * step, double * distortion) {
    *step       = quantizer_step(bits);
    *distortion = quantizer_distortion(bits);
}

bool subkv_get_adapt_stats(llama_context * ctx, int32_t il, int32_t head_kv, bool value, subkv_adapt_stats * out) {
    return done([&] {
        const Cache *      cache = cache_of(ctx);
        const LayerCodec * layer = cache ? cache->layout()->layer(il) : nullptr;
        subkv_adapt_stats  sum   = {};
        if (!layer || !cache->chunked() || head_kv < 0 || head_kv >= layer->n_head_kv ||
            !cache->chunked()->stats(il, head_kv, value, sum)) {
            refuse_static(il, head_kv, value);
        }
        *out = sum;
    });
}

int64_t subkv_get_sketch_rows(llama_context * ctx, int32_t il, int32_t head_kv, bool value, int32_t seq, float * s,
                              int64_t n_out) {
    return guarded<int64_t>("context", -1, [&] {
        const Cache & cache = coding(ctx, il, head_kv, seq);
        // a sequence that adapts has the stream of its number (ChunkedBases::check)
        const ChunkUnit * unit =
            cache.chunked() ? cache.chunked()->layer(il)->unit((uint32_t) seq, head_kv, value) : nullptr;
        if (!unit) {
            refuse_static(il, head_kv, value);
        }
        const HeadCodec & codec = cache.layout()->layer(il)->head(head_kv, value);
        const int64_t     most  = 2 * (int64_t) unit->adapter.params().rows * codec.rank;
        if (!s || n_out < most) {
            fail("context: room for %lld values of a sketch expected, %lld found", (long long) most,
                 (long long) (s ? n_out : 0));
        }
        return unit->adapter.sketch_rows(s);
    });
}

} // extern "C"
