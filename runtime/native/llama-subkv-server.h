// llama-subkv-server.h: llama-server's prompts in the store of SUBKV_STORE. Its hunks include it where server-task.h is.
#pragma once

#include "llama-subkv-store.h"

// (of llama.cpp's tools/server)
#include "server-task.h"

#include <algorithm>
#include <vector>

namespace llama_subkv_server {

// Stores what slot `seq` holds, unless there are pictures in it. main, drft: its states.
inline void put(const server_prompt & prompt, const server_prompt_data & data, llama_context * ctx,
                llama_context * draft, int seq, bool wait = false) {
    if (!llama_subkv_store_on()) {
        return;
    }
    const llama_tokens tokens = prompt.tokens.get_text_tokens();
    if (tokens.size() != prompt.tokens.size()) {
        return;
    }
    const auto bytes = [](const std::vector<uint8_t> & of) { return subkv_store_bytes{ of.data(), of.size() }; };
    std::vector<subkv_store_point> points;
    for (const auto & held : prompt.checkpoints) {
        points.push_back({ held.n_tokens,
                           held.pos_min,
                           held.pos_max,
                           { bytes(held.data_tgt), bytes(held.data_dft), bytes(held.data_spec) } });
    }
    llama_subkv_store_put(ctx, draft, seq,
                          { tokens.data(),
                            (int64_t) tokens.size(),
                            { bytes(data.main), bytes(data.drft) },
                            points.data(),
                            (int64_t) points.size(),
                            -1 },
                          wait);
}

// The same of a slot whose states nobody has, before its context is freed.
inline void put_last(const server_prompt & prompt, llama_context * ctx, llama_context * draft, int seq) {
    if (!ctx || prompt.tokens.empty() || !llama_subkv_store_on()) {
        return;
    }
    server_prompt_data data;
    const auto         state = [&](llama_context * of, std::vector<uint8_t> & to) {
        to.resize(of ? llama_state_seq_get_size_ext(of, seq, LLAMA_STATE_SEQ_FLAGS_NONE) : 0);
        return !of ||
               llama_state_seq_get_data_ext(of, to.data(), to.size(), seq, LLAMA_STATE_SEQ_FLAGS_NONE) == to.size();
    };
    if (state(ctx, data.main) && state(draft, data.drft)) {
        put(prompt, data, ctx, draft, seq, true);
    }
}

// Is a text worth storing that a slot loses when it goes on from this part of its tokens?
inline bool loses(const server_prompt & prompt, float kept) {
    return (1.0f - kept) * (float) prompt.tokens.size() >= 32.0f && llama_subkv_store_on();
}

// Before the context of the slots is freed, to end or to sleep.
template <typename Slots> void put_all(const Slots & slots, llama_context * ctx, llama_context * draft) {
    for (const auto & slot : slots) {
        put_last(slot.prompt, ctx, draft, slot.id);
    }
    llama_subkv_store_flush();
}

// How many tokens of `wanted` need no evaluation where `prompt` is in the slot.
inline int64_t reach(const server_prompt & prompt, const server_tokens & wanted, int64_t n_removable) {
    const auto n = (int64_t) prompt.tokens.get_common_prefix(wanted);
    if (n_removable < 0 || (int64_t) prompt.tokens.size() - n <= n_removable) {
        return n;
    }
    int64_t most = 0;
    for (const auto & held : prompt.checkpoints) {
        most = held.n_tokens <= n ? std::max<int64_t>(most, held.n_tokens) : most;
    }
    return most;
}

// Puts a stored prompt into slot `seq`, if one spares more than what the slot holds and than `other`, of the cache in
// memory, or nullptr. false: nothing has changed, or the slot is empty.
inline bool load(server_prompt & prompt, const server_prompt * other, const server_tokens & wanted, llama_context * ctx,
                 llama_context * draft, int seq) {
    if (!llama_subkv_store_on()) {
        return false;
    }
    const llama_tokens tokens = wanted.get_text_tokens();
    if (tokens.size() != wanted.size()) {
        return false;
    }
    const int64_t n_removable = llama_subkv_store_removable(ctx);
    const int64_t n_held = std::max(reach(prompt, wanted, n_removable), other ? reach(*other, wanted, n_removable) : 0);
    auto *        found  = llama_subkv_store_get(ctx, draft, seq, tokens.data(), (int64_t) tokens.size(), n_held);
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
        prompt.tokens = server_tokens(llama_tokens(stored.tokens, stored.tokens + stored.n_tokens), wanted.has_mtmd);
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
    llama_subkv_store_free(found, !done);
    return done;
}

} // namespace llama_subkv_server
