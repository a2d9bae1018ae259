// capi_store.cpp: subkv_store.h.
#include "capi.h"
#include "model_digest.h"
#include "prefix_store.h"
#include "sha256.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

using namespace subkv;

struct subkv_store : PrefixStore {
    using PrefixStore::PrefixStore;
};

struct subkv_store_found {
    std::unique_ptr<PrefixFound>   found;
    std::vector<subkv_store_point> points;
    subkv_store_prompt             prompt;
};

namespace {

constexpr const char * SUBJECT        = "SUBKV_STORE";
constexpr double       DIGEST_SECONDS = 60; // timeout of a model's digest

std::vector<uint8_t> copied(const subkv_store_bytes & bytes) {
    const auto * data = (const uint8_t *) bytes.data;
    check_array(data, (int64_t) bytes.size, "subkv_store_bytes: data");
    return { data, data + bytes.size };
}

// Throws Invalid if libllama has not connected.
const LlamaCalls & llama() {
    if (!llama_calls()) {
        fail("context: expected one that libllama created after libsubkv was loaded, found none");
    }
    return *llama_calls();
}

StoreIdentity digest_of(const StateIdentity & identity) {
    const std::string text = identity.text();
    Sha256            digest;
    digest.update(text.data(), text.size());
    return digest.digest();
}

// Waits for the digest of the model.
StateIdentity identity_of(const llama_context & ctx, bool whole) {
    return llama().state_identity(ctx, model_digest(llama().loaded_model(&ctx), DIGEST_SECONDS), whole);
}

bool put_states(subkv_store * store, const uint8_t * identity, const subkv_store_prompt & prompt, StoreStates && states,
                bool wait) {
    not_null(store, "subkv_store_put: store");
    not_null(identity, "subkv_store_put: identity");
    check_array(prompt.tokens, prompt.n_tokens, "subkv_store_put: prompt.tokens");
    check_array(prompt.points, prompt.n_points, "subkv_store_put: prompt.points");
    Prefix prefix;
    prefix.identity    = hex_digits(identity, SUBKV_STORE_IDENTITY);
    prefix.tokens      = { prompt.tokens, prompt.tokens + prompt.n_tokens };
    prefix.n_removable = prompt.n_removable;
    prefix.states      = std::move(states);
    std::vector<subkv_store_point> points(prompt.points, prompt.points + prompt.n_points);
    points.erase(std::remove_if(points.begin(), points.end(),
                                [&](auto & p) { return p.n_tokens < 0 || p.n_tokens > prompt.n_tokens; }),
                 points.end());
    thin(points, prompt.n_tokens, prompt.n_removable);
    for (const auto & given : points) {
        auto & point = prefix.points.emplace_back();
        point        = { given.n_tokens, given.pos_min, given.pos_max, {} };
        for (size_t j = 0; j < N_POINT_DATA; ++j) {
            point.data[j] = copied(given.data[j]);
        }
    }
    return store->put(std::move(prefix), wait);
}

subkv_store_bytes shown(const std::vector<uint8_t> & bytes) {
    return { bytes.data(), bytes.size() };
}

} // namespace

extern "C" subkv_store * subkv_store_open(const char * folder, uint64_t max_bytes) {
    clear_error();
    return guarded<subkv_store *>(
        SUBJECT, nullptr, [&] { return new subkv_store(&not_null(folder, "subkv_store_open: folder"), max_bytes); });
}

extern "C" void subkv_store_close(subkv_store * store) {
    delete store;
}

extern "C" bool subkv_store_identity(const llama_context * ctx, uint8_t * identity) {
    clear_error();
    return guarded(SUBJECT, [&] {
        not_null(ctx, "subkv_store_identity: ctx");
        not_null(identity, "subkv_store_identity: identity");
        StateIdentity parts;
        parts.add("moved", "no");
        parts.add(identity_of(*ctx, false));
        const auto digest = digest_of(parts);
        std::memcpy(identity, digest.data(), digest.size());
    });
}

extern "C" const subkv_identity_part * subkv_state_identity(const llama_context * ctx, int32_t * n_parts) {
    clear_error();
    return guarded("state", (const subkv_identity_part *) nullptr, [&] {
        thread_local StateIdentity                    identity;
        thread_local std::vector<subkv_identity_part> parts;
        not_null(ctx, "subkv_state_identity: ctx");
        not_null(n_parts, "subkv_state_identity: n_parts");
        identity = identity_of(*ctx, true);
        parts.clear();
        for (const auto & part : identity.parts) {
            parts.push_back({ part.name.c_str(), part.value.c_str() });
        }
        *n_parts = (int32_t) parts.size();
        return (const subkv_identity_part *) parts.data();
    });
}

extern "C" bool subkv_model_digest(const llama_context * ctx, double seconds, char out[65]) {
    return guarded("model", [&] {
        not_null(ctx, "subkv_model_digest: ctx");
        not_null(out, "subkv_model_digest: out");
        std::memcpy(out, model_digest(llama().loaded_model(ctx), seconds).c_str(), 65);
    });
}

extern "C" int64_t subkv_store_removable(const llama_context * ctx) {
    return guarded<int64_t>(SUBJECT, 0, [&] {
        not_null(ctx, "subkv_store_removable: ctx");
        return llama().n_removable(*ctx);
    });
}

extern "C" int32_t subkv_store_room(const subkv_store * store, uint64_t n_bytes) {
    return guarded<int32_t>(SUBJECT, -1, [&] { return not_null(store, "subkv_store_room: store").room(n_bytes); });
}

extern "C" bool subkv_store_put(subkv_store * store, const uint8_t * identity, const subkv_store_prompt * prompt,
                                bool wait) {
    clear_error();
    return guarded(SUBJECT, false, [&] {
        not_null(prompt, "subkv_store_put: prompt");
        return put_states(store, identity, *prompt, { copied(prompt->state[0]), copied(prompt->state[1]) }, wait);
    });
}

extern "C" bool subkv_store_flush(subkv_store * store, double seconds) {
    return guarded(SUBJECT, false, [&] { return not_null(store, "subkv_store_flush: store").flush(seconds); });
}

extern "C" subkv_store_found * subkv_store_get(subkv_store * store, const uint8_t * identity,
                                               const subkv_store_query * query) {
    clear_error();
    return guarded(SUBJECT, (subkv_store_found *) nullptr, [&]() -> subkv_store_found * {
        not_null(store, "subkv_store_get: store");
        not_null(identity, "subkv_store_get: identity");
        not_null(query, "subkv_store_get: query");
        check_array(query->tokens, query->n_tokens, "subkv_store_get: query.tokens");
        if (query->n_held < 0) {
            fail("subkv_store_get: query.n_held: expected 0 or more tokens, found %lld", (long long) query->n_held);
        }
        PrefixQuery prefix_query;
        prefix_query.identity          = hex_digits(identity, SUBKV_STORE_IDENTITY);
        prefix_query.tokens            = { query->tokens, query->tokens + query->n_tokens };
        prefix_query.n_held            = query->n_held;
        prefix_query.n_max             = query->n_max;
        prefix_query.n_removable       = query->n_removable;
        prefix_query.seconds_per_token = query->seconds_per_token;
        prefix_query.seconds           = query->seconds;
        prefix_query.n_moved           = query->n_moved;
        auto found                     = store->get(prefix_query);
        if (!found) {
            return nullptr;
        }
        auto out   = std::make_unique<subkv_store_found>();
        out->found = std::move(found);
        for (const auto & point : out->found->prefix.points) {
            out->points.push_back({ point.n_tokens,
                                    point.pos_min,
                                    point.pos_max,
                                    { shown(point.data[0]), shown(point.data[1]), shown(point.data[2]) } });
        }
        const auto & prefix = out->found->prefix;
        out->prompt         = {
            prefix.tokens.data(), (int64_t) prefix.tokens.size(), { shown(prefix.states[0]), shown(prefix.states[1]) },
            out->points.data(),   (int64_t) out->points.size(),   prefix_query.n_removable
        };
        return out.release();
    });
}

extern "C" const subkv_store_prompt * subkv_store_found_prompt(const subkv_store_found * found) {
    return guarded<const subkv_store_prompt *>(
        SUBJECT, nullptr, [&] { return &not_null(found, "subkv_store_found_prompt: found").prompt; });
}

extern "C" int64_t subkv_store_found_reach(const subkv_store_found * found) {
    return guarded<int64_t>(SUBJECT, -1,
                            [&] { return not_null(found, "subkv_store_found_reach: found").found->n_reached; });
}

extern "C" void subkv_store_found_free(subkv_store * store, subkv_store_found * found, bool refused) {
    guarded(SUBJECT, [&] {
        if (found && refused) {
            not_null(store, "subkv_store_found_free: store").reject(found->found->name);
        }
    });
    delete found;
}

extern "C" int64_t subkv_store_common(subkv_store * store, const uint8_t * identity, const int32_t * tokens,
                                      int64_t n_tokens) {
    clear_error();
    return guarded<int64_t>(SUBJECT, 0, [&] {
        not_null(store, "subkv_store_common: store");
        not_null(identity, "subkv_store_common: identity");
        check_array(tokens, n_tokens, "subkv_store_common: tokens");
        return store->common(hex_digits(identity, SUBKV_STORE_IDENTITY), { tokens, tokens + n_tokens });
    });
}

extern "C" const char * subkv_store_failure(subkv_store * store) {
    return guarded(SUBJECT, (const char *) nullptr, [&] {
        thread_local std::string failure;
        failure = not_null(store, "subkv_store_failure: store").failure();
        return failure.c_str();
    });
}

extern "C" void subkv_store_get_stats(const subkv_store * store, subkv_store_stats * stats) {
    guarded(SUBJECT, [&] {
        not_null(stats, "subkv_store_get_stats: stats") = not_null(store, "subkv_store_get_stats: store").stats();
    });
}

//
// for libllama
//

namespace {

std::string content_of(const LoadedModel & model, double seconds, bool & is_final) {
    clear_error();
    is_final = true;
    return guarded("model", std::string(), [&] {
        try {
            return model_digest(model, seconds);
        } catch (const NotYet &) {
            is_final = false;
            throw;
        }
    });
}

bool put_states_of_libllama(subkv_store * store, const uint8_t * identity, const subkv_store_prompt * prompt,
                            StoreStates && states, bool wait) {
    clear_error();
    return guarded(SUBJECT, false, [&] { return put_states(store, identity, *prompt, std::move(states), wait); });
}

} // namespace

StoreCalls subkv::store_calls() {
    return { subkv_store_open,
             subkv_store_room,
             subkv_store_flush,
             subkv_store_get,
             subkv_store_found_prompt,
             subkv_store_found_reach,
             subkv_store_found_free,
             subkv_store_get_stats,
             put_states_of_libllama,
             content_of,
             digest_of };
}
