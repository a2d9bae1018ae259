// capi.cpp: attaches layouts and observers to the next context, and reports statistics of a context.
#include "capi.h"
#include "log_line.h"
#include "observer.h"
#include "automatic.h"
#include "resolve.h"
#include "subkv_research.h"

#include <atomic>
#include <utility>

using namespace subkv;

namespace {

// For the next context that a thread creates.
struct Pending {
    CacheChoice      cache;
    subkv_observer * observer = nullptr;
    bool             ordinary = false;
};

thread_local Pending pending;

// Runs inside llama_init_from_model, on the thread that called it.
std::shared_ptr<CacheHook> cache_of_next_context(const CacheDesc & desc) {
    if (desc.sliding) {
        return nullptr;
    }
    if (!pending.cache.layout && !pending.observer) {
        const std::string & k     = desc.request.type_k;
        const std::string & v     = desc.request.type_v;
        const bool          coded = k.compare(0, 5, "subkv") == 0 || v.compare(0, 5, "subkv") == 0; // precedes the call
        return pending.ordinary && !coded ? nullptr : automatic_cache(desc);
    }
    if (!desc.no_cache.empty()) { // the caller checks the context and cancels
        return nullptr;
    }
    const Pending request = std::exchange(pending, {}); // a memory's other caches have none
    pending.ordinary      = request.ordinary;
    try {
        const std::string & why = desc.unsupported.empty() ? desc.unobserved : desc.unsupported;
        if (!request.cache.layout && !why.empty()) {
            throw Invalid({ SUBKV_ERROR_UNSUPPORTED, "model " + desc.arch, "cannot be calibrated because " + why });
        }
        return std::make_shared<Cache>(desc, request.cache, request.observer);
    } catch (const Invalid & e) {
        reject(e.error);
        throw;
    } catch (const std::bad_alloc &) {
        reject_for(SUBKV_ERROR_MEMORY, "K/V cache", "out of memory");
        throw;
    } catch (const std::exception & e) {
        reject("%s", e.what());
        throw;
    }
}

} // namespace

const Cache * subkv::cache_of(llama_context * ctx, RowSizes * sizes) {
    not_null(ctx, "context");
    const LlamaCalls * llama = llama_calls(); // without one, no context has asked for a cache
    const auto *       cache = llama ? static_cast<const Cache *>(llama->cache_of(ctx, sizes)) : nullptr;
    return cache && cache->facts().coded ? cache : nullptr;
}

const Ops & subkv::usable_ops() {
    if (ops_error()) {
        throw Invalid(ops_error());
    }
    return ops();
}

const Cache & subkv::coding(llama_context * ctx, int32_t il, int32_t head_kv, int32_t seq) {
    const Cache *      cache = cache_of(ctx);
    const LayerCodec * layer = cache ? cache->layout()->layer(il) : nullptr;
    if (!layer || head_kv < 0 || head_kv >= layer->n_head_kv || seq < 0 || seq >= cache->n_seq()) {
        fail("context: a coded head and a sequence expected, layer %d, head %d, sequence %d found", il, head_kv, seq);
    }
    return *cache;
}

extern "C" bool subkv_attach(subkv_layout * layout, const subkv_cache_params * params) {
    pending = {};
    if (!layout) {
        return true;
    }
    clear_error(); // an error after the context's creation is of that creation
    return guarded("subkv_attach", [&] {
        CacheRequest asked;
        if (params) {
            asked.n_sink     = params->n_sink;
            asked.n_recent   = params->n_recent;
            asked.n_rollback = params->n_rollback;
        }
        asked.adapt = params && params->adapt ? params->adapt : "none";
        bases_of(asked.adapt, "adapt"); // refuses unknown options
        pending.cache = with_bases(layout->p, asked);
    });
}

extern "C" void subkv_attach_ordinary(void) {
    pending          = {};
    pending.ordinary = true;
}

extern "C" bool subkv_observe(subkv_observer * obs) {
    const bool done = guarded("observer", [&] {
        not_null(obs, "subkv_observe: obs");
        usable_ops();
        pending.observer = obs;
    });
    if (!done) {
        pending = {};
    }
    return done;
}

extern "C" bool subkv_get_stats(llama_context * ctx, subkv_stats * out) {
    return guarded("context", [&] {
        RowSizes      rows;
        const Cache * cache = cache_of(ctx, &rows);
        if (!cache) {
            fail("context: a coefficient cache expected, an ordinary one found");
        }
        cache->stats(rows, not_null(out, "subkv_get_stats: out"));
    });
}

extern "C" int64_t subkv_read_rows(llama_context * ctx, int32_t il, int32_t head_kv, bool value, int32_t seq,
                                   int32_t first, int64_t n, float * x, int32_t * version_of) {
    return guarded<int64_t>("context", -1, [&] {
        const Cache & cache = coding(ctx, il, head_kv, seq);
        if (value && cache.layout()->layer(il)->latent) {
            fail("context: a head with values of its own expected, layer %d of latent attention found; its values are "
                 "the first elements of its keys",
                 il);
        }
        if (first < 0 || n < 0 || n > INT32_MAX - first || !x || !version_of) {
            fail("context: positions from 0 on and room for their rows expected, %d and %lld more found", first,
                 (long long) n);
        }
        int64_t coded = -1;
        llama_calls()->rows(ctx, il, [&](const CellReader & cells, const ggml_tensor * k, const ggml_tensor * v) {
            coded = cache.read(cells, value ? v : k, il, head_kv, value, seq, first, n, x, version_of);
        });
        return coded;
    });
}

extern "C" const char * subkv_context_fingerprint(llama_context * ctx) {
    return guarded<const char *>("context", nullptr, [&]() -> const char * {
        const Cache * cache = cache_of(ctx);
        return cache ? cache->layout()->fingerprint.c_str() : nullptr;
    });
}

extern "C" const char * subkv_context_devices(llama_context * ctx) {
    return guarded<const char *>("context", nullptr, [&]() -> const char * {
        const Cache * cache = cache_of(ctx);
        return cache ? cache->devices().c_str() : nullptr;
    });
}

extern "C" int32_t subkv_resume(llama_context * ctx, int32_t seq, int32_t pos) {
    return guarded<int32_t>("context", pos, [&] {
        not_null(ctx, "subkv_resume: ctx");
        return llama_calls() ? llama_calls()->resume(ctx, seq, pos) : pos;
    });
}

extern "C" bool subkv_take_refusal(llama_context * ctx, int32_t seq) {
    return guarded<bool>("context", false, [&] {
        not_null(ctx, "subkv_take_refusal: ctx");
        return llama_calls() && llama_calls()->take_refusal(*ctx, seq);
    });
}

extern "C" const char * subkv_kernel_name(void) {
    return guarded<const char *>("kernels", nullptr, [] { return usable_ops().name; });
}

extern "C" const char * subkv_device_kernel_name(void) {
    return device_kernels();
}

//
// for libllama
//

namespace {

std::atomic<const LlamaCalls *> connected{ nullptr };

} // namespace

const LlamaCalls * subkv::llama_calls() {
    return connected;
}

extern "C" SUBKV_API const SubkvCalls * subkv_connect(const LlamaCalls * llama) {
    static const SubkvCalls calls = { cache_of_next_context, [] { pending = {}; }, subkv_last_error,
                                      subkv_get_stats,       subkv_kernel_name,    subkv_device_kernel_name,
                                      store_calls() };
    connected                     = llama;
    set_log(llama->log);
    return &calls;
}
