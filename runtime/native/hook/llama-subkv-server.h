// llama-subkv-server.h: for llama-server: stored prompts (SUBKV_STORE) and cache metrics. The patched files of
// tools/server include it.
#pragma once

#include "llama-subkv-moves.h"
#include "llama-subkv-programs.h"

// (of llama.cpp's tools/server)
#include "server-task.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <list>
#include <map>
#include <memory>
#include <vector>

namespace llama_subkv_server {

constexpr size_t  N_STORED   = 6;                               // checkpoints that the store keeps per prompt
constexpr int     NO_TASK    = std::numeric_limits<int>::min(); // the id of no task
constexpr int64_t MIN_TOKENS = SUBKV_STORE_LEAST_TOKENS;

// Called after the server has created a context; its slots are empty.
inline void context_created(llama_context * ctx, const llama_context * draft) {
    llama_subkv_usage_set(ctx);
    llama_subkv_store_begin(ctx, draft);
    llama_subkv_moves(ctx, draft, true);
}

// The fields in /props.
inline json kv_cache() {
    const auto usage = llama_subkv_usage_get();
    const auto times = [&](double bits) { // how many times smaller than a cache of a type with these bits per element
        const double n_bytes = (double) usage.bytes_f16 * bits / 16.0;
        return usage.bytes > 0 && n_bytes > 0 ? json(n_bytes / (double) usage.bytes) : json(nullptr);
    };
    return json{
        { "type", usage.type },
        { "bits", usage.bits },
        { "bytes", usage.bytes },
        { "bytes_f16", usage.bytes_f16 },
        { "times_smaller", { { "f16", times(16.0) }, { "q8_0", times(8.5) } } },
        { "layers", { { "coded", usage.n_coded }, { "sliding", usage.n_sliding }, { "other", usage.n_other } } },
        { "sliding_window", usage.n_swa > 0 ? json(usage.n_swa) : json(nullptr) },
        { "n_cells", usage.n_cells },
        { "n_zero_rows", usage.n_bad },
        { "kernel", usage.kernel.empty() ? json(nullptr) : json(usage.kernel) },
    };
}

using checkpoints = std::vector<const common_prompt_checkpoint *>;

// Index of the checkpoint (in ascending order) whose loss costs least. Cost: tokens in the gap, which an edit there
// would evaluate again, divided by the tokens behind the checkpoint. Edits usually start at user messages, so a
// checkpoint there costs eight times as much. Checkpoints of task `id_task` stay; held.size(): there are no others.
inline size_t cheapest(const checkpoints & held, const common_chat_msg_spans & spans, int64_t n_tokens, int id_task) {
    size_t least  = held.size();
    double lowest = 0;
    for (size_t i = 0; i < held.size(); ++i) {
        const int64_t before = i > 0 ? held[i - 1]->n_tokens : 0;
        const int64_t after  = i + 1 < held.size() ? held[i + 1]->n_tokens : n_tokens;
        const double  gap    = (double) (after - before) / (double) std::max<int64_t>(n_tokens - held[i]->n_tokens, 1);
        const double  cost   = spans.is_user_start((int32_t) held[i]->n_tokens) ? 8 * gap : gap;
        if (held[i]->id_task != id_task && (least == held.size() || cost < lowest)) {
            least  = i;
            lowest = cost;
        }
    }
    return least;
}

inline subkv_store_bytes bytes_of(const std::vector<uint8_t> & of) {
    return { of.data(), of.size() };
}

// Stores a slot's prompt, unless it has images. data: its states, in memory; empty: read them from the contexts.
template <typename Slot>
void put(const Slot & slot, const server_prompt_data & data, llama_context * ctx, llama_context * draft,
         bool at_end = false) {
    if (!llama_subkv_store_on()) {
        return;
    }
    if (!data.main.empty()) {
        texts_in_memory()[data.main.data()] = llama_subkv_text_of(ctx, draft, slot.id);
    }
    const server_prompt & prompt = slot.prompt;
    const llama_tokens    tokens = prompt.tokens.get_text_tokens();
    if (tokens.size() != prompt.tokens.size()) {
        return;
    }
    checkpoints held;
    for (const auto & point : prompt.checkpoints) {
        held.push_back(&point);
    }
    const auto & task = slot.task ? slot.task : slot.task_prev;
    while (held.size() > N_STORED) { // chosen here, because the store has no message boundaries
        const auto spans = task ? task->params.message_spans : common_chat_msg_spans{};
        held.erase(held.begin() + (std::ptrdiff_t) cheapest(held, spans, (int64_t) tokens.size(), NO_TASK));
    }
    std::vector<subkv_store_point> points;
    for (const auto * point : held) {
        points.push_back({ point->n_tokens,
                           point->pos_min,
                           point->pos_max,
                           { bytes_of(point->data_tgt), bytes_of(point->data_dft), bytes_of(point->data_spec) } });
    }
    llama_subkv_store_put(ctx, draft, slot.id,
                          { tokens.data(),
                            (int64_t) tokens.size(),
                            { bytes_of(data.main), bytes_of(data.drft) },
                            points.data(),
                            (int64_t) points.size(),
                            -1 },
                          at_end);
}

// Stores the slots' prompts while all slots are idle: one prompt per call, so that requests need not wait.
template <typename Slots> void put_idle(const Slots & slots, llama_context * ctx, llama_context * draft) {
    llama_subkv_usage_set(ctx); // a GPU counts rows that are not finite itself
    all_moves().clear();        // of requests that ended early
    if (!llama_subkv_store_on()) {
        return;
    }
    int64_t last = 0;
    for (const auto & slot : slots) {
        last = std::max(last, slot.t_last_used);
    }
    const double idle = 1e-6 * (double) (ggml_time_us() - last);
    double       next = -1;
    bool         done = false;
    for (const auto & slot : slots) {
        const llama_tokens tokens = slot.prompt.tokens.get_text_tokens();
        if (tokens.size() != slot.prompt.tokens.size() || (slot.task_prev && slot.task_prev->need_embd())) {
            continue;
        }
        const double wait = llama_subkv_store_wait(ctx, draft, slot.id, tokens.data(), (int64_t) tokens.size(), idle);
        if (wait == 0 && !done) {
            put(slot, {}, ctx, draft);
            done = true;
        } else if (wait >= 0) {
            next = next < 0 ? wait : std::min(next, wait);
        }
    }
    llama_subkv_store_wake(ctx, next);
}

// Stores the prompts of all slots before the server frees the context (shutdown or sleep).
template <typename Slots> void put_all(const Slots & slots, llama_context * ctx, llama_context * draft) {
    all_moves().clear();
    for (const auto & slot : slots) {
        if (ctx && !slot.prompt.tokens.empty()) {
            put(slot, {}, ctx, draft, true);
        }
    }
    llama_subkv_store_flush();
    llama_subkv_usage_set(nullptr);
}

// Number of tokens of `requested` that need no evaluation after `prompt` is restored.
inline int64_t reach(const server_prompt & prompt, const server_tokens & requested, int64_t n_removable) {
    const auto n = (int64_t) prompt.tokens.get_common_prefix(requested);
    if (n_removable < 0 || (int64_t) prompt.tokens.size() - n <= n_removable) {
        return n;
    }
    int64_t most = 0;
    for (const auto & held : prompt.checkpoints) {
        most = held.n_tokens <= n ? std::max<int64_t>(most, held.n_tokens) : most;
    }
    return most;
}

// Lowers n_past and pos_next, the next position, to where evaluation resumes (llama_subkv_resume), but not before a
// picture. A prompt that the slot has completely loses its last token, which is evaluated for its logits.
template <typename Slot> void resume(const Slot & slot, int & n_past, llama_pos & pos_next) {
    const server_tokens & tokens = slot.prompt.tokens;
    const bool            all    = n_past > 0 && n_past == slot.task->n_tokens();
    llama_pos             to     = llama_subkv_resume(slot.ctx_tgt, slot.id, pos_next);
    for (const auto * ctx : { slot.ctx_tgt, slot.ctx_dft }) {
        const llama_pos last = to - (all && to == pos_next ? 1 : 0);
        to                   = ctx && !llama_subkv_removable(ctx, slot.id, last) ? 0 : to;
    }
    if (to == 0) {
        n_past   = 0;
        pos_next = 0;
    }
    while (pos_next > to && n_past > 0 && tokens[(size_t) n_past - 1] != LLAMA_TOKEN_NULL) {
        --n_past;
        --pos_next;
    }
}

// The same for the slot's own prompt. The server removes a tail without a checkpoint if the cells that the remaining
// tokens attend to are there.
template <typename Slot> int64_t reach(const Slot & slot, const server_tokens & requested) {
    const auto      n       = (int64_t) slot.prompt.tokens.get_common_prefix(requested);
    const llama_pos n_swa   = llama_model_n_swa(llama_get_model(slot.ctx_tgt));
    const llama_pos pos_min = llama_memory_seq_pos_min(llama_get_memory(slot.ctx_tgt), slot.id);
    const bool      all     = pos_min == 0 || pos_min < slot.prompt.tokens.pos_next(n) - n_swa;
    return all ? n : reach(slot.prompt, requested, 0);
}

// Stores the prompt of a slot that is about to lose it, in memory (or nullptr) and on disk.
template <typename Slot> void keep(const Slot & slot, server_prompt_cache * memory) {
    if (!memory || !slot.prompt_save(*memory)) { // which calls put()
        put(slot, {}, slot.ctx_tgt, slot.ctx_dft);
    }
}

// Cells that a slot can have. Slots that share its cells give theirs up if they are idle; with_idle: they do not.
template <typename Slot, typename Slots> int64_t n_room(const Slot & slot, const Slots & slots, bool with_idle) {
    int64_t n = llama_n_ctx_seq(slot.ctx_tgt);
    if (slot.ctx_dft) {
        n = std::min<int64_t>(n, llama_n_ctx_seq(slot.ctx_dft));
    }
    if (llama_n_ctx_seq(slot.ctx_tgt) < llama_n_ctx(slot.ctx_tgt)) { // every slot has its own cells
        return n;
    }
    for (const auto & other : slots) {
        n -= other.id != slot.id && (with_idle || other.is_processing()) ? other.prompt.n_tokens() : 0;
    }
    return n;
}

// Clears idle slots, those that are unused for the longest time first, until `slot` can have n cells.
template <typename Slot, typename Slots>
void make_room(const Slot & slot, Slots & slots, server_prompt_cache * memory, int64_t n) {
    while (n_room(slot, slots, true) < n) {
        auto oldest = slots.end();
        for (auto it = slots.begin(); it != slots.end(); ++it) {
            const bool idle = it->id != slot.id && !it->is_processing() && !it->prompt.tokens.empty();
            if (idle && (oldest == slots.end() || it->t_last_used < oldest->t_last_used)) {
                oldest = it;
            }
        }
        if (oldest == slots.end()) {
            return;
        }
        keep(*oldest, memory);
        oldest->prompt_clear();
    }
}

// Replaces the prompt of a slot. false: the slot is empty.
template <typename Slot>
bool replace(Slot & slot, server_prompt && prompt, const subkv_store_bytes & state, const subkv_store_bytes & of_draft,
             llama_subkv_text text) {
    const auto set = [&](llama_context * ctx, const subkv_store_bytes & of) {
        return !ctx || (of.size > 0 && llama_state_seq_set_data_ext(ctx, (const uint8_t *) of.data, of.size, slot.id,
                                                                    LLAMA_STATE_SEQ_FLAGS_NONE) == of.size);
    };
    if (!set(slot.ctx_tgt, state) || !set(slot.ctx_dft, of_draft)) {
        slot.prompt_clear();
        return false;
    }
    llama_subkv_text_set(slot.ctx_tgt, slot.ctx_dft, slot.id, text);
    slot.prompt = std::move(prompt);
    return true;
}

inline server_prompt prompt_of(const subkv_store_prompt & stored, bool has_mtmd) {
    server_prompt prompt;
    prompt.tokens = server_tokens(llama_tokens(stored.tokens, stored.tokens + stored.n_tokens), has_mtmd);
    for (int64_t i = 0; i < stored.n_points; ++i) {
        const auto & point = stored.points[i];
        const auto   bytes = [&](int j) {
            const auto * data = (const uint8_t *) point.data[j].data;
            return std::vector<uint8_t>(data, data + point.data[j].size);
        };
        auto & held    = prompt.checkpoints.emplace_back();
        held.n_tokens  = point.n_tokens;
        held.pos_min   = point.pos_min;
        held.pos_max   = point.pos_max;
        held.data_tgt  = bytes(0);
        held.data_dft  = bytes(1);
        held.data_spec = bytes(2);
    }
    return prompt;
}

// The prompt on disk that saves evaluation beyond n_held tokens; nullptr: none.
template <typename Slot>
subkv_store_found * find(const Slot & slot, const server_tokens & requested, int64_t n_held, int64_t n_max) {
    if (!llama_subkv_store_on()) {
        return nullptr;
    }
    const llama_tokens tokens = requested.get_text_tokens();
    return tokens.size() == requested.size() ? llama_subkv_store_get(slot.ctx_tgt, slot.ctx_dft, tokens.data(),
                                                                     (int64_t) tokens.size(), n_held, n_max, -1) :
                                               nullptr;
}

inline int64_t common_prefix(const server_tokens & requested, const subkv_store_prompt & stored) {
    int64_t n = 0;
    while (n < stored.n_tokens && n < (int64_t) requested.size() && requested[(size_t) n] == stored.tokens[n]) {
        ++n;
    }
    return n;
}

// Takes the prompt with the most leading tokens of a request out of the cache in memory. n_held: tokens of the request
// that it must exceed; becomes its number.
inline std::list<server_prompt_cache_state> take_best(server_prompt_cache & memory, const server_tokens & requested,
                                                      int64_t n_removable, int64_t n_max, int64_t & n_held) {
    std::list<server_prompt_cache_state> res;
    auto                                 best = memory.states.end();
    for (auto it = memory.states.begin(); it != memory.states.end(); ++it) {
        const int64_t n = reach(it->prompt, requested, n_removable);
        if (n > n_held && it->prompt.n_tokens() <= n_max) {
            best   = it;
            n_held = n;
        }
    }
    if (best != memory.states.end()) {
        res.splice(res.end(), memory.states, best);
    }
    return res;
}

// Gives an idle slot the prompt that saves the most evaluation of a request: its own, one in memory (or nullptr), or
// one on disk; first saves a prompt that loses tokens. updates: upstream saves the slot's prompt; else another one must
// save MIN_TOKENS tokens more than the slot's. false: upstream decides.
template <typename Slot, typename Slots>
bool prepare(Slot & slot, Slots & slots, server_prompt_cache * memory, const server_task & task, bool updates) {
    if (slot.is_processing()) { // the request waits, and the slot needs its prompt
        return true;
    }
    const bool completes = task.type == SERVER_TASK_TYPE_COMPLETION || task.type == SERVER_TASK_TYPE_INFILL;
    const bool adapted   = std::any_of(slots.begin(), slots.end(), [](auto & other) { return !other.lora.empty(); });
    if (!completes || !task.params.cache_prompt || adapted) { // prompts in memory do not tell their adapters
        return false;
    }
    const server_tokens & requested   = task.tokens;
    const int64_t         n_removable = llama_subkv_store_removable(slot.ctx_tgt);
    const int64_t         n_max       = n_room(slot, slots, false);
    const int64_t         n_own       = reach(slot, requested);

    int64_t                              n_held = n_own + (updates ? 0 : MIN_TOKENS - 1);
    std::list<server_prompt_cache_state> best; // outside the cache, which may drop it to save the slot's prompt
    if (memory) {
        best = take_best(*memory, requested, n_removable, n_max, n_held);
    }
    auto *        found = find(slot, requested, best.empty() ? n_own : n_held, n_max);
    const int64_t lost  = slot.prompt.n_tokens() - (int64_t) slot.prompt.tokens.get_common_prefix(requested);
    if (updates || found || !best.empty() || (llama_subkv_store_on() && lost >= MIN_TOKENS)) {
        SRV_TRC("%s", "updating prompt cache\n");
        keep(slot, memory);
    }
    const auto * stored = found ? llama_subkv_store_prompt(found) : nullptr;
    const auto   n_kept = stored ? common_prefix(requested, *stored) : best.empty() ? n_own : n_held;
    if (plan_moves(slot, slots, { memory ? &memory->states : nullptr, &best }, stored, task, n_kept)) {
        make_room(slot, slots, memory, (int64_t) requested.size());
    }
    bool done = false;
    if (found) {
        make_room(slot, slots, memory, stored->n_tokens);
        try {
            done = replace(slot, prompt_of(*stored, requested.has_mtmd), stored->state[0], stored->state[1],
                           llama_subkv_store_text(found));
        } catch (const std::bad_alloc &) { // the slot keeps its prompt
        }
        llama_subkv_store_free(found, slot.id, done);
    }
    if (!done && !best.empty()) {
        auto &        prompt = best.front().prompt;
        const auto    state = bytes_of(best.front().data.main), of_draft = bytes_of(best.front().data.drft);
        const int64_t tail = prompt.n_tokens() - (int64_t) prompt.tokens.get_common_prefix(requested);
        const auto    text = texts_in_memory()[best.front().data.main.data()]; // used only with a store
        make_room(slot, slots, memory, prompt.n_tokens());
        if (tail >= MIN_TOKENS) { // the slot will remove it; memory keeps it
            replace(slot, prompt.clone(), state, of_draft, text);
        } else if (replace(slot, std::move(prompt), state, of_draft, text)) {
            best.clear();
        }
    }
    if (memory) {
        memory->states.splice(memory->states.end(), best);
        memory->update();
        std::map<const uint8_t *, llama_subkv_text> held;
        for (const auto & state : memory->states) {
            held[state.data.main.data()] = texts_in_memory()[state.data.main.data()];
        }
        texts_in_memory() = std::move(held);
    }
    return true;
}

} // namespace llama_subkv_server
