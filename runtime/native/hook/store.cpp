// store.cpp: see llama-subkv-programs.h. Part of libllama.
#include "llama-subkv-programs.h"

#include "llama-subkv-library.h"
#include "llama-subkv.h"
#include "variables.h"

#include "llama-context.h"
#include "llama-model.h"

#include <algorithm>
#include <chrono>
#include <cinttypes>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <set>
#include <sstream>
#include <utility>
#include <vector>

static constexpr uint64_t MIB           = 1 << 20;
static constexpr int64_t  DEFAULT_MIB   = 4096;
static constexpr int64_t  MAX_MIB       = 1 << 30;
static constexpr double   GET_SECONDS   = 20; // maximum time that a request waits for the disk
static constexpr double   CLOSE_SECONDS = 30;
static constexpr double   SHARE         = 0.1;  // fraction of evaluation or idle time for copies of states
static constexpr double   PACE          = 1e-9; // seconds to copy a byte, initial estimate
static constexpr double   SMOOTHING     = 0.5;
static constexpr double   RETRY_SECONDS = 1; // pending writes may be complete then
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

    // used only by the thread that drives the contexts
    std::map<int32_t, std::vector<int32_t>> stored; // tokens of a sequence when it was last stored or restored
    std::set<const subkv_store_found *>     moved;  // prompts that were read and may have moved rows
    double                                  pace = PACE;
    double                                  paid = 0; // evaluation time that earlier copies have used up
    double                                  wake = 0; // on the clock of now(); 0: there is nothing to store
};

double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

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

// Never closed: a thread that waits for a disk may outlive all other objects.
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

// The digest of a model's bytes as they were loaded; "": unknown. seconds: to wait for it; the first call starts to compute
// it in a thread.
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

// false: prompts of these contexts are not stored. moved: of prompts with moved rows; a server without SUBKV_STORE_MOVED
// does not read them.
bool identity_of(process_store & store, const llama_context * ctx, const llama_context * draft, bool moved,
                 subkv::StoreIdentity & identity) {
    subkv::StateIdentity whole;
    whole.add("moved", moved ? "yes" : "no");
    for (const auto * one : { ctx, draft }) {
        if (!one) {
            continue;
        }
        if (!llama_subkv::storable(*one)) {
            return false;
        }
        const auto content = content_of(store, one->get_model(), GET_SECONDS);
        if (content.empty()) {
            return false;
        }
        whole.add(llama_subkv::state_identity(*one, content, false));
    }
    identity = store.calls->digest(whole);
    return true;
}

// The identity of a sequence's prompt. false: it is not stored.
bool identity_of_sequence(process_store & store, const llama_context * ctx, const llama_context * draft,
                          llama_seq_id seq, subkv::StoreIdentity & identity) {
    const auto text  = llama_subkv_text_of(ctx, draft, seq);
    const bool moved = text.moved != llama_subkv::NO_POSITION;
    return text.unknown == llama_subkv::NO_POSITION && (!moved || llama_subkv_moves(ctx, draft, false)) &&
           identity_of(store, ctx, draft, moved, identity);
}

// true: a sequence consists of exactly n tokens, also in a draft model's context.
bool holds(llama_context * ctx, llama_context * draft, llama_seq_id seq, int64_t n) {
    return llama_memory_seq_pos_max(llama_get_memory(ctx), seq) + 1 == n &&
           (!draft || llama_memory_seq_pos_max(llama_get_memory(draft), seq) + 1 == n);
}

const std::vector<int32_t> & stored(const process_store & store, llama_seq_id seq) {
    static const std::vector<int32_t> none;
    const auto                        it = store.stored.find(seq);
    return it == store.stored.end() ? none : it->second;
}

double seconds_evaluated(const llama_context * ctx) {
    const auto perf = llama_perf_context(ctx);
    return (perf.t_p_eval_ms + perf.t_eval_ms) / 1000;
}

bool states_of(llama_context * ctx, llama_context * draft, llama_seq_id seq, subkv::StoreStates & states) {
    try {
        size_t i = 0;
        for (auto * of : { ctx, draft }) {
            auto & to = states[i++];
            to.resize(of ? llama_state_seq_get_size_ext(of, seq, LLAMA_STATE_SEQ_FLAGS_NONE) : 0);
            if (of &&
                llama_state_seq_get_data_ext(of, to.data(), to.size(), seq, LLAMA_STATE_SEQ_FLAGS_NONE) != to.size()) {
                return false;
            }
        }
        return true;
    } catch (const std::bad_alloc &) { // the copy is optional
        return false;
    }
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
    store.stored.clear();
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

void llama_subkv_store_put(llama_context * ctx, llama_context * draft, int32_t seq, subkv_store_prompt prompt,
                           bool at_end) {
    auto &                     store = the_store();
    const std::vector<int32_t> tokens(prompt.tokens, prompt.tokens + prompt.n_tokens);
    subkv::StoreIdentity       identity;
    if (!store.store || prompt.n_tokens < LEAST_TOKENS || (!at_end && stored(store, seq) == tokens) ||
        !holds(ctx, draft, seq, prompt.n_tokens) || !identity_of_sequence(store, ctx, draft, seq, identity)) {
        return;
    }
    prompt.n_removable = llama_subkv::n_removable(*ctx);
    bool taken         = false;
    if (prompt.state[0].size > 0) {
        taken = store.calls->put(store.store, identity.data(), &prompt, at_end);
    } else {
        const double       start = now();
        subkv::StoreStates states;
        if (states_of(ctx, draft, seq, states)) {
            const auto bytes = (double) (states[0].size() + states[1].size());
            taken = store.calls->put_states(store.store, identity.data(), &prompt, std::move(states), at_end);
            const double took = at_end ? 0 : now() - start; // at the end the call may have waited for the disk
            store.pace = at_end ? store.pace : (1 - SMOOTHING) * store.pace + SMOOTHING * took / std::max(bytes, 1.0);
            store.paid = std::min(store.paid + took / SHARE, seconds_evaluated(ctx));
        }
    }
    if (taken) {
        store.stored[seq] = tokens;
    }
}

double llama_subkv_store_wait(llama_context * ctx, llama_context * draft, int32_t seq, const int32_t * tokens,
                              int64_t n_tokens, double idle) {
    auto &               store = the_store();
    subkv::StoreIdentity identity;
    const auto &         last = stored(store, seq);
    const auto           n    = (size_t) n_tokens;
    if (!store.store || n_tokens < LEAST_TOKENS || (last.size() == n && std::equal(tokens, tokens + n, last.data())) ||
        !holds(ctx, draft, seq, n_tokens) || !identity_of_sequence(store, ctx, draft, seq, identity)) {
        return -1;
    }
    uint64_t n_bytes = 0;
    for (auto * of : { ctx, draft }) {
        n_bytes += of ? llama_state_seq_get_size_ext(of, seq, LLAMA_STATE_SEQ_FLAGS_NONE) : 0;
    }
    const int32_t room = store.calls->room(store.store, n_bytes);
    if (room <= 0) {
        return room == 0 ? RETRY_SECONDS : -1;
    }
    const double share = (double) n_bytes * store.pace / SHARE;
    store.paid         = std::min(store.paid, seconds_evaluated(ctx)); // its counters may have been reset
    return share <= seconds_evaluated(ctx) - store.paid ? 0 : std::max(0.0, share - idle);
}

void llama_subkv_store_wake(const llama_context * ctx, double seconds) {
    auto & store = the_store();
    store.wake   = seconds < 0 ? 0 : now() + seconds;
    store.paid   = seconds < 0 ? seconds_evaluated(ctx) : store.paid;
}

bool llama_subkv_store_due(void) {
    const auto & store = the_store();
    return store.wake > 0 && now() >= store.wake;
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
    for (const bool moved : { false, true }) { // evaluated prompts; those with moved rows
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

void llama_subkv_store_free(subkv_store_found * found, int32_t seq, bool restored) {
    auto & store = the_store();
    if (restored && seq >= 0) {
        const auto & prompt = *store.calls->found_prompt(found);
        store.stored[seq]   = { prompt.tokens, prompt.tokens + prompt.n_tokens };
    } else if (!restored) {
        const std::string why = store.library->last_error(); // "": llama.cpp has logged it
        llama_subkv_log("SUBKV_STORE: the cache rejects a stored prompt" + (why.empty() ? why : ": " + why));
    }
    store.moved.erase(found);
    store.calls->found_free(store.store, found, !restored);
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
