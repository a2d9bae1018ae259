// prompt_store.cpp: the process's store of prompts on disk, for programs (llama-subkv-programs.h). libsubkv has the
// store itself. Part of libllama.
#include "llama-subkv-programs.h"

#include "llama-subkv-library.h"
#include "llama-subkv.h"
#include "variables.h"

#include "llama-context.h"
#include "llama-model.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

static constexpr uint64_t MIB           = 1 << 20;
static constexpr int64_t  DEFAULT_MIB   = 4096;
static constexpr int64_t  MAX_MIB       = 1 << 30;
static constexpr double   GET_SECONDS   = 20; // that a request waits for the disk at most
static constexpr double   CLOSE_SECONDS = 30;
static constexpr int64_t  LEAST_TOKENS  = SUBKV_STORE_LEAST_TOKENS;

//
// the store of the process
//

namespace {

struct process_store {
    const subkv::SubkvCalls * library = nullptr;
    const subkv::StoreCalls * calls   = nullptr; // of `library`
    subkv_store *             store   = nullptr;
    std::mutex                mutex;
    std::set<std::string>     unknown; // models whose digest cannot be computed, by path

    // What the identity of prompts depends on in a process: the context, the draft model's context or nullptr, in which
    // of them tokens attend to earlier ones only, and whether rows have moved.
    using known_key = std::tuple<const llama_context *, const llama_context *, int, bool>;

    // Only the thread that drives the contexts uses it.
    std::map<known_key, subkv::StoreIdentity> identities;
    std::set<const subkv_store_found *>       moved; // prompts that were read and may have moved rows
};

void open_store(process_store & to, const char * folder) {
    uint64_t mib = 0;
    try {
        mib = (uint64_t) subkv::number_of("SUBKV_STORE_MIB", 1, MAX_MIB, DEFAULT_MIB);
    } catch (const subkv::Invalid & e) {
        llama_subkv_log(std::string(e.what()) + "; prompts are not stored");
        return;
    }
    std::string why;
    to.library = llama_subkv_library(true, why);
    if (!to.library) {
        llama_subkv_log("SUBKV_STORE: libsubkv beside libllama expected, found none that loads: " + why +
                        "; prompts are not stored");
        return;
    }
    to.calls = &to.library->store;
    to.store = to.calls->open(folder, mib * MIB);
    if (!to.store) {
        llama_subkv_log(std::string(to.library->last_error()) + "; prompts are not stored");
        return;
    }
    llama_subkv_log(std::string("prompts are stored in ") + folder + ", at most " + std::to_string(mib) + " MiB");
}

// It is never closed, because a thread that waits for a disk may outlive all other objects.
process_store & the_store() {
    static process_store * store = [] {
        auto * opened = new process_store;
        if (const char * folder = subkv::prompt_folder()) {
            open_store(*opened, folder);
        }
        return opened;
    }();
    return *store;
}

// The digest of a model's bytes as they were loaded, or "" if it is not known after these seconds. The first call starts
// to compute it in a thread.
std::string content_of(process_store & store, const llama_model & model, double seconds) {
    const auto &                      source   = llama_subkv::source_of(model);
    bool                              is_final = false;
    std::string                       content  = store.calls->content({ source.path, source.files }, seconds, is_final);
    const std::lock_guard<std::mutex> lock(store.mutex);
    if (content.empty() && is_final && store.unknown.insert(source.path).second) {
        llama_subkv_log(std::string("SUBKV_STORE: ") + store.library->last_error() + "; its prompts are not stored");
    }
    return content;
}

// The identity of prompts of these contexts. Those with moved rows have another one, because a server without
// SUBKV_STORE_MOVED must not read them. Returns false if prompts are not stored.
bool identity_of(process_store & store, const llama_context * ctx, const llama_context * draft, bool moved,
                 subkv::StoreIdentity & identity) {
    int causal = 0;
    for (const auto * one : { ctx, draft }) {
        if (one && !llama_subkv::storable(*one)) {
            return false;
        }
        causal = 2 * causal + (one && one->get_cparams().causal_attn ? 1 : 0);
    }
    const process_store::known_key key   = { ctx, draft, causal, moved };
    const auto                     known = store.identities.find(key);
    if (known != store.identities.end()) {
        identity = known->second;
        return true;
    }
    subkv::StateIdentity parts;
    parts.add("moved", moved ? "yes" : "no");
    for (const auto * one : { ctx, draft }) {
        if (!one) {
            continue;
        }
        const auto content = content_of(store, one->get_model(), GET_SECONDS);
        if (content.empty()) {
            return false;
        }
        parts.add(llama_subkv::state_identity(*one, content, false));
    }
    identity              = store.calls->digest(parts);
    store.identities[key] = identity;
    return true;
}

// The identity of a sequence's prompt. Returns false if it is not to be stored.
bool identity_of_sequence(process_store & store, const llama_context * ctx, const llama_context * draft,
                          llama_seq_id seq, subkv::StoreIdentity & identity) {
    const auto text  = llama_subkv_text_of(ctx, draft, seq);
    const bool moved = text.moved != llama_subkv::NO_POSITION;
    return text.unknown == llama_subkv::NO_POSITION && (!moved || llama_subkv_moves(ctx, draft, false)) &&
           identity_of(store, ctx, draft, moved, identity);
}

// Whether a sequence consists of exactly n tokens, also in a draft model's context.
bool holds(const llama_context * ctx, const llama_context * draft, llama_seq_id seq, int64_t n) {
    return llama_memory_seq_pos_max(llama_get_memory(ctx), seq) + 1 == n &&
           (!draft || llama_memory_seq_pos_max(llama_get_memory(draft), seq) + 1 == n);
}

} // namespace

bool llama_subkv_store_on(void) {
    return the_store().store != nullptr;
}

void llama_subkv_store_begin(const llama_context * ctx, const llama_context * draft) {
    auto & store = the_store();
    {
        const std::lock_guard<std::mutex> lock(store.mutex);
        store.unknown.clear();
    }
    store.identities.clear();
    for (const auto * one : { ctx, draft }) {
        if (store.store && one && !llama_subkv::source_of(one->get_model()).path.empty()) {
            content_of(store, one->get_model(), 0);
        }
    }
}

int64_t llama_subkv_store_removable(const llama_context * ctx) {
    return llama_subkv::n_removable(*ctx);
}

llama_subkv_text llama_subkv_text_of(const llama_context * ctx, const llama_context * draft, int32_t seq) {
    auto text = llama_subkv::text_of(*ctx, seq);
    if (draft) {
        const auto other = llama_subkv::text_of(*draft, seq);
        text             = { std::min(text.moved, other.moved), std::min(text.unknown, other.unknown) };
    }
    return text;
}

void llama_subkv_text_set(llama_context * ctx, llama_context * draft, int32_t seq, llama_subkv_text text) {
    for (auto * one : { ctx, draft }) {
        if (one) {
            llama_subkv::note_text(*one, seq, text);
        }
    }
}

bool llama_subkv_store_accepts(const llama_context * ctx, const llama_context * draft, int32_t seq, int64_t n_tokens) {
    auto &               store = the_store();
    subkv::StoreIdentity identity;
    return store.store && holds(ctx, draft, seq, n_tokens) && identity_of_sequence(store, ctx, draft, seq, identity);
}

int32_t llama_subkv_store_room(uint64_t n_bytes) {
    const auto & store = the_store();
    return store.store ? store.calls->room(store.store, n_bytes) : -1;
}

bool llama_subkv_store_put(const llama_context * ctx, const llama_context * draft, int32_t seq,
                           subkv_store_prompt prompt, std::array<std::vector<uint8_t>, 2> && states, bool wait) {
    auto &               store = the_store();
    subkv::StoreIdentity identity;
    if (!store.store || !identity_of_sequence(store, ctx, draft, seq, identity)) {
        return false;
    }
    prompt.n_removable = llama_subkv::n_removable(*ctx);
    return store.calls->put_states(store.store, identity.data(), &prompt, std::move(states), wait);
}

subkv_store_found * llama_subkv_store_get(llama_context * ctx, llama_context * draft, const int32_t * tokens,
                                          int64_t n_tokens, int64_t n_held, int64_t n_max, int64_t n_moved) {
    auto & store = the_store();
    if (!store.store || n_tokens - 1 - n_held < LEAST_TOKENS) {
        return nullptr;
    }
    const auto          perf  = llama_perf_context(ctx);
    const double        per   = perf.n_p_eval > 0 ? perf.t_p_eval_ms / 1000 / perf.n_p_eval : 0;
    subkv_store_query   query = { tokens, n_tokens,    n_held, n_max, llama_subkv::n_removable(*ctx),
                                  per,    GET_SECONDS, n_moved };
    subkv_store_found * best  = nullptr;
    for (const bool moved : { false, true }) { // first the prompts as evaluated, then those with moved rows
        subkv::StoreIdentity identity;
        if ((moved && !llama_subkv_moves(ctx, draft, false)) || !identity_of(store, ctx, draft, moved, identity)) {
            break;
        }
        auto * found = store.calls->get(store.store, identity.data(), &query);
        if (found) {
            const int64_t n = store.calls->found_reach(found);
            store.calls->found_free(store.store, best, false);
            store.moved.erase(best);
            best = found;
            if (moved) {
                store.moved.insert(found);
            }
            (n_moved < 0 ? query.n_held : query.n_moved) = n_moved < 0 ? n : n - n_held;
        }
    }
    return best;
}

const subkv_store_prompt * llama_subkv_store_prompt(const subkv_store_found * found) {
    return the_store().calls->found_prompt(found);
}

llama_subkv_text llama_subkv_store_text(const subkv_store_found * found) {
    llama_subkv_text text;
    text.moved = the_store().moved.count(found) ? 0 : text.moved;
    return text;
}

void llama_subkv_store_free(subkv_store_found * found, bool accepted) {
    auto & store = the_store();
    if (!accepted) {
        const std::string why = store.library->last_error(); // "" if llama.cpp has logged it
        llama_subkv_log("SUBKV_STORE: the cache rejects a stored prompt" + (why.empty() ? why : ": " + why));
    }
    store.moved.erase(found);
    store.calls->found_free(store.store, found, !accepted);
}

void llama_subkv_store_flush(void) {
    auto & store = the_store();
    if (store.store && !store.calls->flush(store.store, CLOSE_SECONDS)) {
        llama_subkv_log("SUBKV_STORE: the disk takes too long; some prompts are not stored");
    }
}

bool llama_subkv_store_stats(subkv_store_stats & stats) {
    const auto & store = the_store();
    if (store.store) {
        store.calls->stats(store.store, &stats);
    }
    return store.store != nullptr;
}
