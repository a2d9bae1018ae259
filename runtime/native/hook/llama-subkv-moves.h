// llama-subkv-moves.h: for llama-server: text that a slot, the cache in memory or the store has behind another beginning
// is moved, not evaluated (SUBKV_STORE_MOVED). Part of llama-subkv-server.h.
#pragma once

#include "llama-subkv-programs.h"
#include "token_runs.h"

// (of llama.cpp's tools/server)
#include "server-task.h"

#include <algorithm>
#include <functional>
#include <initializer_list>
#include <limits>
#include <list>
#include <map>
#include <memory>
#include <utility>
#include <vector>

namespace llama_subkv_server {

struct free_run {
    void operator()(llama_subkv_run * run) const { llama_subkv_run_free(run); }
};

using run_ptr = std::unique_ptr<llama_subkv_run, free_run>;

// The rows that a slot still gets while it evaluates a request.
struct pending_moves {
    struct run {
        int64_t to, n; // tokens of the request
        run_ptr rows;
    };

    int            id_task;
    std::list<run> runs;
};

inline std::map<int, pending_moves> & all_moves() { // by slot
    static std::map<int, pending_moves> all;
    return all;
}

// The text of the states in memory, by the address of their bytes, which they keep while they are in a list.
inline std::map<const uint8_t *, llama_subkv_text> & texts_in_memory() {
    static std::map<const uint8_t *, llama_subkv_text> all;
    return all;
}

// The evaluated prompt that saves the most evaluation if its runs move.
class move_source {
public:
    using rows_fn = std::function<llama_subkv_run *(int32_t first, int32_t n)>;

    // n_first: leading tokens of the request that need no evaluation
    move_source(const llama_tokens & asked, int64_t n_first) : asked(asked), n_first(n_first) {}

    // held: text of an evaluated prompt of n tokens; rows: reads its rows.
    void consider(const llama_tokens & held, size_t n, rows_fn rows) {
        if (held.size() != n) { // it has pictures
            return;
        }
        // the last token is evaluated for its logits
        auto found = subkv::find_runs(held.data(), (int64_t) n, asked.data(), (int64_t) asked.size() - 1, n_first);
        if (subkv::n_saved(found) > n_saved()) {
            runs    = std::move(found);
            read_fn = std::move(rows);
        }
    }

    int64_t n_saved() const { return subkv::n_saved(runs); }

    // Of their first tokens, which are evaluated again, no rows.
    std::list<pending_moves::run> read() const {
        std::list<pending_moves::run> res;
        for (const auto & run : runs) {
            const auto n    = run.n - subkv::N_RUN_BEGINS;
            auto       rows = run_ptr(read_fn((int32_t) (run.from + subkv::N_RUN_BEGINS), (int32_t) n));
            if (!rows) {
                return {};
            }
            res.push_back({ run.to + subkv::N_RUN_BEGINS, n, std::move(rows) });
        }
        return res;
    }

private:
    const llama_tokens &         asked;
    const int64_t                n_first;
    std::vector<subkv::TokenRun> runs;
    rows_fn                      read_fn;
};

// Copies the rows of a request's runs before the slot and the other slots lose them. caches: prompts in memory (or
// nullptr); stored: one that the store has read (or nullptr). n_first: leading tokens of the request that the slot will
// have. true: rows follow.
template <typename Slot, typename Slots>
bool plan_moves(const Slot & slot, const Slots & slots,
                std::initializer_list<const std::list<server_prompt_cache_state> *> caches,
                const subkv_store_prompt * stored, const server_task & task, int64_t n_first) {
    all_moves().erase(slot.id);
    llama_context *    ctx   = slot.ctx_tgt;
    const llama_tokens asked = task.tokens.get_text_tokens();
    if (asked.size() != task.tokens.size() || (int64_t) asked.size() - 1 - n_first < subkv::LEAST_RUN ||
        !llama_subkv_moves(ctx, slot.ctx_dft, false)) {
        return false;
    }
    const auto of_state = [ctx](const void * data, size_t size) {
        return [=](int32_t first, int32_t n) { return llama_subkv_run_of_state(ctx, data, size, first, n); };
    };
    const auto known = [](const llama_subkv_text & text) { // else the store would not keep what is moved
        return text.unknown == llama_subkv_text().unknown || !llama_subkv_store_on();
    };
    const auto tokens_of = [](const subkv_store_prompt & prompt) {
        return llama_tokens(prompt.tokens, prompt.tokens + prompt.n_tokens);
    };
    move_source source(asked, n_first);
    for (const auto & other : slots) {
        const auto n = (size_t) other.prompt.n_tokens();
        if ((other.id == slot.id || !other.is_processing()) && known(llama_subkv_text_of(ctx, nullptr, other.id)) &&
            llama_memory_seq_pos_max(llama_get_memory(ctx), other.id) + 1 == (llama_pos) n) {
            source.consider(other.prompt.tokens.get_text_tokens(), n, [ctx, &other](int32_t first, int32_t n_rows) {
                return llama_subkv_run_of_sequence(ctx, other.id, first, n_rows);
            });
        }
    }
    for (const auto * cache : caches) {
        if (!cache) {
            continue;
        }
        for (const auto & state : *cache) {
            if (known(texts_in_memory()[state.data.main.data()])) {
                source.consider(state.prompt.tokens.get_text_tokens(), (size_t) state.prompt.n_tokens(),
                                of_state(state.data.main.data(), state.data.main.size()));
            }
        }
    }
    if (stored) {
        source.consider(tokens_of(*stored), (size_t) stored->n_tokens,
                        of_state(stored->state[0].data, stored->state[0].size));
    }
    subkv_store_found * found = llama_subkv_store_on() ?
                                    llama_subkv_store_get(ctx, nullptr, asked.data(), (int64_t) asked.size(), n_first,
                                                          std::numeric_limits<int64_t>::max(), source.n_saved()) :
                                    nullptr;
    if (found) {
        const auto & prompt = *llama_subkv_store_prompt(found);
        source.consider(tokens_of(prompt), (size_t) prompt.n_tokens,
                        of_state(prompt.state[0].data, prompt.state[0].size));
    }
    auto runs = source.read();
    if (found) {
        llama_subkv_store_free(found, -1, true);
    }
    if (runs.empty()) {
        return false;
    }
    all_moves()[slot.id] = { task.id, std::move(runs) };
    return true;
}

// Called before a token of a slot's prompt joins a batch that has n_batched of its tokens. Appends the rows of the run
// that begins there. true: the slot's tokens in the batch must be evaluated before that.
template <typename Slot, typename Metrics> bool moves(Slot & slot, int n_batched, Metrics & metrics) {
    const auto pending = all_moves().find(slot.id);
    if (pending == all_moves().end()) {
        return false;
    }
    auto &        runs  = pending->second.runs;
    const int64_t n     = slot.prompt.n_tokens();
    const bool    other = pending->second.id_task != slot.task->id;
    runs.remove_if([&](const auto & run) { return other || run.to < n; });
    if (runs.empty()) {
        all_moves().erase(pending);
        return false;
    }
    if (runs.front().to > n || n_batched > 0) {
        return runs.front().to == n;
    }
    const auto run = std::move(runs.front());
    runs.pop_front();
    if (!llama_subkv_append(slot.ctx_tgt, slot.id, (llama_pos) n, run.rows.get())) {
        return false;
    }
    const int64_t end = llama_subkv_resume(slot.ctx_tgt, slot.id, (llama_pos) (n + run.n));
    slot.mem.seq_rm(slot.id, (llama_pos) end, -1);
    for (int64_t i = n; i < end; ++i) {
        slot.prompt.tokens.push_back(slot.task->tokens[(size_t) i]);
    }
    slot.stats.n_prompt_cached += (uint64_t) (end - n);
    metrics.add_prompt_cached((uint64_t) (end - n));
    SRV_INF("slot %d: %d evaluated tokens are moved to %d\n", slot.id, (int) (end - n), (int) n);
    return false;
}

} // namespace llama_subkv_server
