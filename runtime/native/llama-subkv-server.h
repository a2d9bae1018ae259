// llama-subkv-server.h: for llama-server: stored prompts (SUBKV_STORE), cache metrics, and the check of request
// headers. The patched files of tools/server include it.
#pragma once

#include "llama-subkv-store.h"
#include "llama-subkv-usage.h"

// (of llama.cpp's tools/server)
#include "server-task.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <limits>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_set>
#include <vector>

namespace llama_subkv_server {

constexpr size_t N_STORED = 6;                               // checkpoints that the store keeps per prompt
constexpr int    NO_TASK  = std::numeric_limits<int>::min(); // the id of no task

// Called after the server has created a context; its slots are empty.
inline void made(llama_context * ctx) {
    llama_subkv_usage_set(ctx);
    llama_subkv_store_on();
}

// The fields in /props.
inline json kv_cache() {
    const auto usage = llama_subkv_usage_get();
    return json{
        { "type", usage.type },
        { "bits", usage.bits },
        { "bytes", usage.bytes },
        { "bytes_f16", usage.bytes_f16 },
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

// Frees a place for another checkpoint of a coded cache, created by task `id_task`. false: an ordinary cache, no
// change.
inline bool make_room(std::list<common_prompt_checkpoint> & held, const common_chat_msg_spans & spans, int id_task,
                      int64_t n_tokens, size_t n_most, const llama_context * ctx) {
    if (!llama_subkv_is_coded(ctx)) {
        return false;
    }
    while (held.size() >= n_most) {
        checkpoints all;
        for (const auto & point : held) {
            all.push_back(&point);
        }
        const size_t least = cheapest(all, spans, n_tokens, id_task);
        if (least == all.size()) {
            break;
        }
        held.erase(std::next(held.begin(), (std::ptrdiff_t) least));
    }
    return true;
}

// Stores a slot's prompt, unless it has images. data: its states; empty: read them from the contexts.
template <typename Slot>
void put(const Slot & slot, const server_prompt_data & data, llama_context * ctx, llama_context * draft,
         bool at_end = false) {
    if (!llama_subkv_store_on()) {
        return;
    }
    const server_prompt & prompt = slot.prompt;
    const llama_tokens    tokens = prompt.tokens.get_text_tokens();
    if (tokens.size() != prompt.tokens.size()) {
        return;
    }
    const auto  bytes = [](const std::vector<uint8_t> & of) { return subkv_store_bytes{ of.data(), of.size() }; };
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
                           { bytes(point->data_tgt), bytes(point->data_dft), bytes(point->data_spec) } });
    }
    llama_subkv_store_put(ctx, draft, slot.id,
                          { tokens.data(),
                            (int64_t) tokens.size(),
                            { bytes(data.main), bytes(data.drft) },
                            points.data(),
                            (int64_t) points.size(),
                            -1 },
                          at_end);
}

// true: a slot that keeps only this fraction of its tokens loses enough of them to store its prompt first.
inline bool loses(const server_prompt & prompt, float kept) {
    return (1.0f - kept) * (float) prompt.tokens.size() >= 32.0f && llama_subkv_store_on();
}

// Stores the slots' prompts while all slots are idle: one prompt per call, so that requests need not wait.
template <typename Slots> void put_idle(const Slots & slots, llama_context * ctx, llama_context * draft) {
    llama_subkv_usage_set(ctx); // a GPU counts rows that are not finite itself
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
    for (const auto & slot : slots) {
        if (ctx && !slot.prompt.tokens.empty()) {
            put(slot, {}, ctx, draft, true);
        }
    }
    llama_subkv_store_flush();
    llama_subkv_usage_set(nullptr);
}

// Number of tokens of `requested` that need no evaluation in a slot with `prompt`.
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

// Restores a stored prompt in slot `seq` if it saves more evaluation than the slot's prompt and than `other` (a prompt
// of the cache in memory, or nullptr). false: the slot is unchanged, or empty.
inline bool load(server_prompt & prompt, const server_prompt * other, const server_tokens & requested,
                 llama_context * ctx, llama_context * draft, int seq) {
    if (!llama_subkv_store_on()) {
        return false;
    }
    const llama_tokens tokens = requested.get_text_tokens();
    if (tokens.size() != requested.size()) {
        return false;
    }
    const int64_t n_removable = llama_subkv_store_removable(ctx);
    const int64_t n_held =
        std::max(reach(prompt, requested, n_removable), other ? reach(*other, requested, n_removable) : 0);
    auto * found = llama_subkv_store_get(ctx, draft, seq, tokens.data(), (int64_t) tokens.size(), n_held);
    if (!found) {
        return false;
    }
    const subkv_store_prompt & stored = *llama_subkv_store_prompt(found);
    const auto                 set    = [&](llama_context * to, const subkv_store_bytes & state) {
        return !to || (state.size > 0 && llama_state_seq_set_data_ext(to, (const uint8_t *) state.data, state.size, seq,
                                                                      LLAMA_STATE_SEQ_FLAGS_NONE) == state.size);
    };
    const bool done = set(ctx, stored.state[0]) && set(draft, stored.state[1]);
    prompt.clear();
    if (done) {
        prompt.tokens = server_tokens(llama_tokens(stored.tokens, stored.tokens + stored.n_tokens), requested.has_mtmd);
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
    } else {
        for (auto * of : { ctx, draft }) {
            if (of) {
                llama_memory_seq_rm(llama_get_memory(of), seq, -1, -1);
            }
        }
    }
    llama_subkv_store_free(found, seq, !done);
    return done;
}

// The result for a request that waits for these tasks while the server shuts down. Without it the request would wait
// until its client disconnects, and the server with it.
inline server_task_result_ptr ended(const std::unordered_set<int> & tasks) {
    auto result      = std::make_unique<server_task_result_error>();
    result->id       = tasks.empty() ? -1 : *tasks.begin();
    result->err_type = ERROR_TYPE_UNAVAILABLE;
    result->err_msg  = "the server is shutting down";
    return result;
}

// Returns when no request waits for a result, or after a second. Call it before the HTTP server stops, which cuts
// streams before their last chunk.
inline void until_answered(std::mutex & mutex, const std::unordered_set<int> & waiting) {
    for (int i = 0; i < 100; ++i) {
        {
            const std::lock_guard<std::mutex> lock(mutex);
            if (waiting.empty()) {
                return;
            }
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
}

// Request, Response: of cpp-httplib. true: the request is rejected, the response is set.
template <typename Request, typename Response> bool refuses(const Request & request, Response & response) {
    const auto why = llama_subkv_refusal(request.get_header_value("Host"), request.get_header_value("Origin"));
    if (!why.empty()) {
        response.status = 403;
        response.set_content(safe_json_to_str(json{ { "error", format_error_response(why, ERROR_TYPE_PERMISSION) } }),
                             "application/json; charset=utf-8");
    }
    return !why.empty();
}

} // namespace llama_subkv_server
