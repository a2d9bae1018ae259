// llama-subkv-server.h: what the patched files of tools/server call: the prompts of llama-server's slots (prompts.cpp) and
// the cache in /props (props.cpp).
#pragma once

#include "llama-subkv-programs.h"

// (of llama.cpp's tools/server)
#include "server-task.h"

#include <cstdint>
#include <functional>
#include <vector>

namespace llama_subkv_server {

// A slot, whose type only server-context.cpp knows.
struct slot_view {
    int                 id;
    llama_context *     ctx;
    llama_context *     draft; // of a draft model, or nullptr
    server_prompt *     prompt;
    const server_task * task; // the slot's request, or its last one, or nullptr if there is none
    int64_t             t_last_used;
    bool                is_processing;
    bool                has_lora;

    std::function<bool(server_prompt_cache &)> save;  // stores a copy of its prompt in memory; false if it does not fit
    std::function<void()>                      clear; // removes its prompt
    std::function<void(llama_pos)>             cut;   // removes its cells from this position on
};

template <typename Slot> slot_view view_of(Slot & slot) {
    return { slot.id,
             slot.ctx_tgt,
             slot.ctx_dft,
             &slot.prompt,
             slot.task ? slot.task.get() : slot.task_prev.get(),
             slot.t_last_used,
             slot.is_processing(),
             !slot.lora.empty(),
             [&slot](server_prompt_cache & memory) { return slot.prompt_save(memory); },
             [&slot] { slot.prompt_clear(); },
             [&slot](llama_pos from) { slot.mem.seq_rm(slot.id, from, -1); } };
}

template <typename Slots> std::vector<slot_view> views_of(Slots & slots) {
    std::vector<slot_view> views;
    for (auto & slot : slots) {
        views.push_back(view_of(slot));
    }
    return views;
}

// The server has created its contexts; its slots are empty.
void context_created(llama_context * ctx, const llama_context * draft);

// A slot's prompt has moved to the cache in memory, and is stored on disk as well. data: its states.
void put(int id, const server_prompt & prompt, const server_task * task, const server_prompt_data & data,
         llama_context * ctx, llama_context * draft);

template <typename Slot>
void put(const Slot & slot, const server_prompt_data & data, llama_context * ctx, llama_context * draft) {
    put(slot.id, slot.prompt, slot.task ? slot.task.get() : slot.task_prev.get(), data, ctx, draft);
}

// All slots are idle: stores one prompt at most, so that requests need not wait.
void put_idle(const std::vector<slot_view> & slots, llama_context * ctx);

template <typename Slots> void put_idle(Slots & slots, llama_context * ctx) {
    put_idle(views_of(slots), ctx);
}

// The server is about to free its contexts (shutdown or sleep): stores the prompts of all slots.
void put_all(const std::vector<slot_view> & slots, llama_context * ctx);

template <typename Slots> void put_all(Slots & slots, llama_context * ctx) {
    put_all(views_of(slots), ctx);
}

// Called when the server has chosen a slot for a request. Gives the slot the prompt that saves the most evaluation.
// `updates` says that upstream would save the slot's prompt, and look for a better one in `memory` (or nullptr).
// Returns false if upstream decides.
bool prepare(const slot_view & slot, const std::vector<slot_view> & slots, server_prompt_cache * memory,
             const server_task & task, bool updates);

template <typename Slot, typename Slots>
bool prepare(Slot & slot, Slots & slots, server_prompt_cache * memory, const server_task & task, bool updates) {
    return prepare(view_of(slot), views_of(slots), memory, task, updates);
}

// The server has found that the first n_past tokens of a request are the slot's. Lowers n_past and pos_next, the next
// position, to where evaluation resumes.
void resume(const slot_view & slot, int & n_past, llama_pos & pos_next);

template <typename Slot> void resume(Slot & slot, int & n_past, llama_pos & pos_next) {
    resume(view_of(slot), n_past, pos_next);
}

// A token of a slot's prompt is about to join a batch that has n_batched of its tokens: appends the rows of moved text
// that begins there, n_moved tokens. true: the slot's tokens in the batch must be evaluated before that.
bool has_moves(int id);
bool append_moved(const slot_view & slot, int n_batched, int64_t & n_moved);

template <typename Slot, typename Metrics> bool moves(Slot & slot, int n_batched, Metrics & metrics) {
    if (!has_moves(slot.id)) {
        return false;
    }
    int64_t    n_moved = 0;
    const bool waits   = append_moved(view_of(slot), n_batched, n_moved);
    slot.stats.n_prompt_cached += (uint64_t) n_moved;
    metrics.add_prompt_cached((uint64_t) n_moved);
    return waits;
}

// The fields in /props.
json kv_cache();

} // namespace llama_subkv_server
