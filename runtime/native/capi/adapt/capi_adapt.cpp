// capi_adapt.cpp: bases of a context (subkv_adapt.h).
#include "adaptive_source.h"
#include "capi.h"
#include "subkv_adapt.h"

using namespace subkv;

[[noreturn]] static void refuse_static(int32_t il, int32_t head_kv, bool value) {
    fail("context: a head with adaptive bases expected, layer %d, head %d, %s found", il, head_kv,
         value ? "values" : "keys");
}

// Returns nullptr if the context's bases are static.
static const ChunkedBases * chunks_of(const Cache & cache) {
    const auto * source = dynamic_cast<const AdaptiveSource *>(&cache.bases());
    return source ? &source->chunks() : nullptr;
}

extern "C" {

bool subkv_get_adapt_stats(llama_context * ctx, int32_t il, int32_t head_kv, bool value, subkv_adapt_stats * out) {
    return guarded("context", [&] {
        const Cache *        cache  = cache_of(ctx);
        const LayerCodec *   layer  = cache ? cache->layout()->layer(il) : nullptr;
        const ChunkedBases * chunks = layer ? chunks_of(*cache) : nullptr;
        subkv_adapt_stats    sum    = {};
        if (!chunks || head_kv < 0 || head_kv >= layer->n_head_kv || !chunks->stats(il, head_kv, value, sum)) {
            refuse_static(il, head_kv, value);
        }
        not_null(out, "subkv_get_adapt_stats: out") = sum;
    });
}

int64_t subkv_get_sketch_rows(llama_context * ctx, int32_t il, int32_t head_kv, bool value, int32_t seq, float * s,
                              int64_t n_out) {
    return guarded<int64_t>("context", -1, [&] {
        const Cache & cache = coding(ctx, il, head_kv, seq);
        // A sequence that adapts has the stream of its number (ChunkedBases::check).
        const ChunkedBases * chunks = chunks_of(cache);
        const ChunkUnit *    unit   = chunks ? chunks->layer(il)->unit((uint32_t) seq, head_kv, value) : nullptr;
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
