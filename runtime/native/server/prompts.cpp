// prompts.cpp: which evaluated prompts llama-server stores on disk (SUBKV_STORE), reads again and moves, and when. Part of
// libsubkv-server.
//
// A prompt is stored when its slot loses it, while all slots are idle, and before the server frees its contexts. A copy of
// a slot's states takes time in which no request is served; a thread of the store writes it to the disk. A request gets
// the prompt that saves the most evaluation: that of its slot, one in memory or one on disk. If text of the request
// follows another beginning there, its rows can move (SUBKV_STORE_MOVED).
#include "llama-subkv-server.h"
#include "token_runs.h"

// (of llama.cpp's tools/server)
#include "server-common.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <limits>
#include <list>
#include <map>
#include <memory>
#include <new>
#include <utility>
#include <vector>

extern bool llama_subkv_store_due(void); // the patch of server-queue.cpp declares it in this form

namespace llama_subkv_server {
namespace {

constexpr int64_t MIN_TOKENS    = SUBKV_STORE_LEAST_TOKENS; // a shorter prompt is not stored, a smaller gain not taken
constexpr size_t  MAX_POINTS    = 6;                        // checkpoints of a stored prompt
constexpr double  SHARE         = 0.1;                      // fraction of evaluation or idle time for copies of states
constexpr double  FIRST_PACE    = 1e-9;                     // seconds to copy a byte, initial estimate
constexpr double  SMOOTHING     = 0.5;
constexpr double  RETRY_SECONDS = 1; // pending writes may be complete then

// Used only by the thread that drives the contexts.
struct Copies {
    std::map<int, llama_tokens> tokens; // of a slot's prompt when it was last stored or restored
    double                      pace = FIRST_PACE;
    double                      paid = 0; // evaluation time that earlier copies have used up
    double                      wake = 0; // on the clock of now(), or 0 if nothing is to be stored
};

Copies copies;

// The origin of the text of the prompts in memory (llama_subkv_text), by the address of their states, which they keep
// while they are in a list.
std::map<const uint8_t *, llama_subkv_text> origins;

// The rows that a slot still gets while it evaluates a request.
struct MovedRun {
    struct Free {
        void operator()(llama_subkv_run * run) const { llama_subkv_run_free(run); }
    };

    int64_t                                to, n; // tokens of the request
    std::unique_ptr<llama_subkv_run, Free> rows;
};

struct MovedRuns {
    int                 id_task;
    std::list<MovedRun> runs;
};

std::map<int, MovedRuns> moved_runs; // by slot

double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

subkv_store_bytes bytes_of(const std::vector<uint8_t> & of) {
    return { of.data(), of.size() };
}

// The tokens of a prompt without pictures, else none.
llama_tokens text_of(const server_tokens & tokens) {
    auto text = tokens.get_text_tokens();
    return text.size() == tokens.size() ? text : llama_tokens();
}

int64_t n_common(const server_prompt & prompt, const server_tokens & requested) {
    return (int64_t) prompt.tokens.get_common_prefix(requested);
}

} // namespace

void context_created(llama_context * ctx, const llama_context * draft) {
    llama_subkv_usage_set(ctx);
    llama_subkv_store_begin(ctx, draft);
    copies.tokens.clear();
    llama_subkv_moves(ctx, draft, true);
}

//
// a prompt is stored
//

namespace {

using States = std::array<std::vector<uint8_t>, 2>; // in the context, in the draft model's

// Returns false if a context does not give its state. Throws std::bad_alloc.
bool read_states(llama_context * ctx, llama_context * draft, llama_seq_id seq, States & states) {
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
}

double seconds_evaluated(const llama_context * ctx) {
    const auto perf = llama_perf_context(ctx);
    return (perf.t_p_eval_ms + perf.t_eval_ms) / 1000;
}

// A copy of n_bytes took these seconds: the next ones are due after so much more evaluation.
void pay(const llama_context * ctx, double n_bytes, double seconds) {
    copies.pace = (1 - SMOOTHING) * copies.pace + SMOOTHING * seconds / std::max(n_bytes, 1.0);
    copies.paid = std::min(copies.paid + seconds / SHARE, seconds_evaluated(ctx));
}

// The checkpoint (of several in ascending order) whose loss costs least. Cost: tokens in the gap, which an edit there
// would evaluate again, divided by the tokens behind the checkpoint. Edits usually start at user messages, so a
// checkpoint there costs eight times as much.
size_t cheapest(const std::vector<const common_prompt_checkpoint *> & points, const common_chat_msg_spans & spans,
                int64_t n_tokens) {
    size_t least  = 0;
    double lowest = std::numeric_limits<double>::infinity();
    for (size_t i = 0; i < points.size(); ++i) {
        const int64_t before = i > 0 ? points[i - 1]->n_tokens : 0;
        const int64_t after  = i + 1 < points.size() ? points[i + 1]->n_tokens : n_tokens;
        const double  gap  = (double) (after - before) / (double) std::max<int64_t>(n_tokens - points[i]->n_tokens, 1);
        const double  cost = spans.is_user_start((int32_t) points[i]->n_tokens) ? 8 * gap : gap;
        if (cost < lowest) {
            least  = i;
            lowest = cost;
        }
    }
    return least;
}

// The points are selected here, because the store does not know where messages begin.
std::vector<subkv_store_point> points_of(const server_prompt & prompt, const server_task * task) {
    std::vector<const common_prompt_checkpoint *> chosen;
    for (const auto & point : prompt.checkpoints) {
        chosen.push_back(&point);
    }
    const auto spans = task ? task->params.message_spans : common_chat_msg_spans{};
    while (chosen.size() > MAX_POINTS) {
        chosen.erase(chosen.begin() + (std::ptrdiff_t) cheapest(chosen, spans, prompt.n_tokens()));
    }
    std::vector<subkv_store_point> points;
    for (const auto * point : chosen) {
        points.push_back({ point->n_tokens,
                           point->pos_min,
                           point->pos_max,
                           { bytes_of(point->data_tgt), bytes_of(point->data_dft), bytes_of(point->data_spec) } });
    }
    return points;
}

// Stores a prompt of a slot, unless it was stored before or may not be stored. If `data` does not have its states, they are
// read from the contexts. At the end it waits for space, and what was stored before may have been dropped since.
void store(int id, const server_prompt & prompt, const server_task * task, const server_prompt_data & data,
           llama_context * ctx, llama_context * draft, bool at_end) {
    const llama_tokens tokens = text_of(prompt.tokens);
    const auto         n      = (int64_t) tokens.size();
    if (n < MIN_TOKENS || (!at_end && copies.tokens[id] == tokens) || !llama_subkv_store_accepts(ctx, draft, id, n)) {
        return;
    }
    const auto   points = points_of(prompt, task);
    const double start  = now();
    try {
        States states = { data.main, data.drft };
        if (data.main.empty() && !read_states(ctx, draft, id, states)) {
            return;
        }
        const auto n_bytes = (double) (states[0].size() + states[1].size());
        if (llama_subkv_store_put(ctx, draft, id, { tokens.data(), n, {}, points.data(), (int64_t) points.size(), -1 },
                                  std::move(states), at_end)) {
            copies.tokens[id] = tokens;
        }
        if (data.main.empty() && !at_end) { // at the end the call may have waited for the disk
            pay(ctx, n_bytes, now() - start);
        }
    } catch (const std::bad_alloc &) { // a prompt need not be stored
    }
}

// Seconds until the prompt of an idle slot should be stored, so that a killed server loses little, or a negative number if
// it is stored or may not be. The copy is due at once if it takes less than SHARE of the evaluation time since the last
// copy, else when the slots have been idle for 1 / SHARE times as long as it takes.
double wait_for(const slot_view & slot, double idle) {
    const llama_tokens tokens = text_of(slot.prompt->tokens);
    const auto         n      = (int64_t) tokens.size();
    if (n < MIN_TOKENS || (slot.task && slot.task->need_embd()) || copies.tokens[slot.id] == tokens ||
        !llama_subkv_store_accepts(slot.ctx, slot.draft, slot.id, n)) {
        return -1;
    }
    uint64_t n_bytes = 0;
    for (auto * of : { slot.ctx, slot.draft }) {
        n_bytes += of ? llama_state_seq_get_size_ext(of, slot.id, LLAMA_STATE_SEQ_FLAGS_NONE) : 0;
    }
    const int32_t room = llama_subkv_store_room(n_bytes);
    if (room <= 0) {
        return room == 0 ? RETRY_SECONDS : -1;
    }
    const double needed    = (double) n_bytes * copies.pace / SHARE;
    const double evaluated = seconds_evaluated(slot.ctx);
    copies.paid            = std::min(copies.paid, evaluated); // the counters may have been reset
    return needed <= evaluated - copies.paid ? 0 : std::max(0.0, needed - idle);
}

// Stores the prompt of a slot that is about to lose it, in memory (or nullptr) and on disk.
void save(const slot_view & slot, server_prompt_cache * memory) {
    if (!memory || !slot.save(*memory)) { // which calls put()
        put(slot.id, *slot.prompt, slot.task, {}, slot.ctx, slot.draft);
    }
}

} // namespace

void put(int id, const server_prompt & prompt, const server_task * task, const server_prompt_data & data,
         llama_context * ctx, llama_context * draft) {
    if (!llama_subkv_store_on()) {
        return;
    }
    if (!data.main.empty()) {
        origins[data.main.data()] = llama_subkv_text_of(ctx, draft, id);
    }
    store(id, prompt, task, data, ctx, draft, false);
}

void put_idle(const std::vector<slot_view> & slots, llama_context * ctx) {
    llama_subkv_usage_set(ctx); // a GPU counts rows that are not finite itself
    moved_runs.clear();         // of requests that ended early
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
        const double wait = wait_for(slot, idle);
        if (wait == 0 && !done) {
            put(slot.id, *slot.prompt, slot.task, {}, slot.ctx, slot.draft);
            done = true;
        } else if (wait >= 0) {
            next = next < 0 ? wait : std::min(next, wait);
        }
    }
    copies.wake = next < 0 ? 0 : now() + next;
    copies.paid = next < 0 ? seconds_evaluated(ctx) : copies.paid;
}

void put_all(const std::vector<slot_view> & slots, llama_context * ctx) {
    moved_runs.clear();
    for (const auto & slot : slots) {
        if (ctx && llama_subkv_store_on()) {
            store(slot.id, *slot.prompt, slot.task, {}, slot.ctx, slot.draft, true);
        }
    }
    llama_subkv_store_flush();
    llama_subkv_usage_set(nullptr);
}

//
// a prompt is read
//

namespace {

// Number of leading tokens of a request that need no evaluation after a prompt is restored.
int64_t reach(const server_prompt & prompt, const server_tokens & requested, int64_t n_removable) {
    const int64_t n = n_common(prompt, requested);
    if (n_removable < 0 || prompt.n_tokens() - n <= n_removable) {
        return n;
    }
    int64_t most = 0;
    for (const auto & point : prompt.checkpoints) {
        most = point.n_tokens <= n ? std::max<int64_t>(most, point.n_tokens) : most;
    }
    return most;
}

// The same for the slot's own prompt. The server removes a tail without a checkpoint if the cells that the remaining
// tokens attend to are there.
int64_t reach(const slot_view & slot, const server_tokens & requested) {
    const int64_t   n       = n_common(*slot.prompt, requested);
    const llama_pos n_swa   = llama_model_n_swa(llama_get_model(slot.ctx));
    const llama_pos pos_min = llama_memory_seq_pos_min(llama_get_memory(slot.ctx), slot.id);
    const bool      all     = pos_min == 0 || pos_min < slot.prompt->tokens.pos_next(n) - n_swa;
    return all ? n : reach(*slot.prompt, requested, 0);
}

// Cells that a slot can have beside those of busy slots that share its cells, and of idle ones if with_idle is set.
int64_t n_room(const slot_view & slot, const std::vector<slot_view> & slots, bool with_idle) {
    int64_t n = llama_n_ctx_seq(slot.ctx);
    if (slot.draft) {
        n = std::min<int64_t>(n, llama_n_ctx_seq(slot.draft));
    }
    if (llama_n_ctx_seq(slot.ctx) < llama_n_ctx(slot.ctx)) { // every slot has its own cells
        return n;
    }
    for (const auto & other : slots) {
        n -= other.id != slot.id && (with_idle || other.is_processing) ? other.prompt->n_tokens() : 0;
    }
    return n;
}

// Clears idle slots, those that are unused for the longest time first, until `slot` can have n cells.
void make_room(const slot_view & slot, const std::vector<slot_view> & slots, server_prompt_cache * memory, int64_t n) {
    while (n_room(slot, slots, true) < n) {
        const slot_view * oldest = nullptr;
        for (const auto & other : slots) {
            const bool is_idle = other.id != slot.id && !other.is_processing && !other.prompt->tokens.empty();
            if (is_idle && (!oldest || other.t_last_used < oldest->t_last_used)) {
                oldest = &other;
            }
        }
        if (!oldest) {
            return;
        }
        save(*oldest, memory);
        oldest->clear();
    }
}

// Takes the prompt with the most leading tokens of a request out of the cache in memory. It must have more than n_held,
// which becomes its number.
std::list<server_prompt_cache_state> take_best(server_prompt_cache & memory, const server_tokens & requested,
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

server_prompt prompt_of(const subkv_store_prompt & stored, bool has_mtmd) {
    server_prompt prompt;
    prompt.tokens = server_tokens(llama_tokens(stored.tokens, stored.tokens + stored.n_tokens), has_mtmd);
    for (int64_t i = 0; i < stored.n_points; ++i) {
        const auto & point = stored.points[i];
        const auto   bytes = [&](int j) {
            const auto * data = (const uint8_t *) point.data[j].data;
            return std::vector<uint8_t>(data, data + point.data[j].size);
        };
        auto & copy    = prompt.checkpoints.emplace_back();
        copy.n_tokens  = point.n_tokens;
        copy.pos_min   = point.pos_min;
        copy.pos_max   = point.pos_max;
        copy.data_tgt  = bytes(0);
        copy.data_dft  = bytes(1);
        copy.data_spec = bytes(2);
    }
    return prompt;
}

int64_t n_common(const subkv_store_prompt & stored, const server_tokens & requested) {
    int64_t n = 0;
    while (n < stored.n_tokens && n < (int64_t) requested.size() && requested[(size_t) n] == stored.tokens[n]) {
        ++n;
    }
    return n;
}

// Replaces the prompt of a slot. Returns false if a context refuses its state; the slot is then empty.
bool replace(const slot_view & slot, server_prompt && prompt, const subkv_store_bytes & state,
             const subkv_store_bytes & of_draft, llama_subkv_text text) {
    const auto set = [&](llama_context * ctx, const subkv_store_bytes & of) {
        return !ctx || (of.size > 0 && llama_state_seq_set_data_ext(ctx, (const uint8_t *) of.data, of.size, slot.id,
                                                                    LLAMA_STATE_SEQ_FLAGS_NONE) == of.size);
    };
    if (!set(slot.ctx, state) || !set(slot.draft, of_draft)) {
        slot.clear();
        return false;
    }
    llama_subkv_text_set(slot.ctx, slot.draft, slot.id, text);
    *slot.prompt = std::move(prompt);
    return true;
}

// Gives a slot a prompt that was found on disk. Returns false if the slot is empty then, or still has its own prompt because
// memory is short.
bool restore(const slot_view & slot, subkv_store_found * found, bool has_mtmd) {
    const auto & stored = *llama_subkv_store_prompt(found);
    try {
        if (replace(slot, prompt_of(stored, has_mtmd), stored.state[0], stored.state[1],
                    llama_subkv_store_text(found))) {
            copies.tokens[slot.id] = llama_tokens(stored.tokens, stored.tokens + stored.n_tokens);
            return true;
        }
    } catch (const std::bad_alloc &) {
    }
    return false;
}

// Gives a slot the only prompt of a list that was taken from the cache in memory. The list keeps it if the slot will
// remove a tail of it, and if the slot refuses it.
void restore(const slot_view & slot, std::list<server_prompt_cache_state> & taken, const server_tokens & requested) {
    auto &     prompt = taken.front().prompt;
    const auto state = bytes_of(taken.front().data.main), of_draft = bytes_of(taken.front().data.drft);
    const auto origin = origins[taken.front().data.main.data()]; // used only with a store
    if (prompt.n_tokens() - n_common(prompt, requested) >= MIN_TOKENS) {
        replace(slot, prompt.clone(), state, of_draft, origin);
    } else if (replace(slot, std::move(prompt), state, of_draft, origin)) {
        taken.clear();
    }
}

// Returns prompts to the cache in memory, which drops what exceeds its limit.
void give_back(server_prompt_cache & memory, std::list<server_prompt_cache_state> & taken) {
    memory.states.splice(memory.states.end(), taken);
    memory.update();
    std::map<const uint8_t *, llama_subkv_text> present;
    for (const auto & state : memory.states) {
        present[state.data.main.data()] = origins[state.data.main.data()];
    }
    origins = std::move(present);
}

// Copies rows that will move to the slot for a request (last section). Returns whether there are any. caches: prompts in
// memory, or nullptr; stored: a prompt that was read from the disk, or nullptr; n_first: leading tokens of the request that
// the slot will have.
bool plan_moves(const slot_view & slot, const std::vector<slot_view> & slots,
                std::initializer_list<const std::list<server_prompt_cache_state> *> caches,
                const subkv_store_prompt * stored, const server_task & task, int64_t n_first);

} // namespace

// The prompt that saves the most evaluation replaces the slot's own in these steps:
//   1. What the slot's own prompt saves is counted. Another one must save more; where upstream would leave the slot as it
//      is, MIN_TOKENS more.
//   2. The best prompt in memory is taken out of the cache there, which could drop it in step 4.
//   3. The store is asked for a prompt on disk that saves more than both.
//   4. The slot's prompt is saved if the slot loses it, or at least MIN_TOKENS of it.
//   5. Rows that will move are copied, because the next steps may free their cells.
//   6. Idle slots that share the cells are cleared as far as the new prompt needs, and the slot gets it.
// Prompts in memory do not tell which adapter evaluated them: a server with LoRA weights follows upstream.
bool prepare(const slot_view & slot, const std::vector<slot_view> & slots, server_prompt_cache * memory,
             const server_task & task, bool updates) {
    if (slot.is_processing) { // the request waits, and the slot needs its prompt
        return true;
    }
    const bool completes = task.type == SERVER_TASK_TYPE_COMPLETION || task.type == SERVER_TASK_TYPE_INFILL;
    const bool has_lora  = std::any_of(slots.begin(), slots.end(), [](auto & other) { return other.has_lora; });
    if (!completes || !task.params.cache_prompt || has_lora) {
        return false;
    }
    const server_tokens & requested   = task.tokens;
    const int64_t         n_removable = llama_subkv_store_removable(slot.ctx);
    const int64_t         n_max       = n_room(slot, slots, false);
    const int64_t         n_own       = reach(slot, requested);

    int64_t                              n_in_memory = n_own + (updates ? 0 : MIN_TOKENS - 1);
    std::list<server_prompt_cache_state> taken;
    if (memory) {
        taken = take_best(*memory, requested, n_removable, n_max, n_in_memory);
    }
    const int64_t      n_held = taken.empty() ? n_own : n_in_memory;
    const llama_tokens text   = text_of(requested);
    auto *             found =
        llama_subkv_store_on() && !text.empty() ?
            llama_subkv_store_get(slot.ctx, slot.draft, text.data(), (int64_t) text.size(), n_held, n_max, -1) :
            nullptr;

    const int64_t n_lost = slot.prompt->n_tokens() - n_common(*slot.prompt, requested);
    if (updates || found || !taken.empty() || (llama_subkv_store_on() && n_lost >= MIN_TOKENS)) {
        SRV_TRC("%s", "updating prompt cache\n");
        save(slot, memory);
    }

    const auto * stored = found ? llama_subkv_store_prompt(found) : nullptr;
    if (plan_moves(slot, slots, { memory ? &memory->states : nullptr, &taken }, stored, task,
                   stored ? n_common(*stored, requested) : n_held)) {
        make_room(slot, slots, memory, (int64_t) requested.size());
    }

    bool is_restored = false;
    if (found) {
        make_room(slot, slots, memory, stored->n_tokens);
        is_restored = restore(slot, found, requested.has_mtmd);
        llama_subkv_store_free(found, is_restored);
    }
    if (!is_restored && !taken.empty()) {
        make_room(slot, slots, memory, taken.front().prompt.n_tokens());
        restore(slot, taken, requested);
    }
    if (memory) {
        give_back(*memory, taken);
    }
    return true;
}

// Not before a picture. A prompt that the slot has completely loses its last token, which is evaluated for its logits.
void resume(const slot_view & slot, int & n_past, llama_pos & pos_next) {
    const server_tokens & tokens = slot.prompt->tokens;
    const bool            all    = n_past > 0 && n_past == slot.task->n_tokens();
    llama_pos             to     = llama_subkv_resume(slot.ctx, slot.id, pos_next);
    for (const auto * ctx : { slot.ctx, slot.draft }) {
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

//
// text moves behind another beginning
//

namespace {

// The evaluated prompt that saves the most evaluation if its runs of the request's tokens move.
class Source {
public:
    using rows_fn = std::function<llama_subkv_run *(int32_t first, int32_t n)>;

    // n_first: leading tokens of the request that need no evaluation
    Source(const llama_tokens & requested, int64_t n_first) : requested(requested), n_first(n_first) {}

    // `rows` copies the rows of n positions of this prompt.
    void consider(const llama_tokens & prompt, rows_fn rows) {
        if (prompt.empty()) {
            return;
        }
        // the last token is evaluated for its logits
        auto found = subkv::find_runs(prompt.data(), (int64_t) prompt.size(), requested.data(),
                                      (int64_t) requested.size() - 1, n_first);
        if (subkv::n_saved(found) > n_saved()) {
            runs    = std::move(found);
            read_fn = std::move(rows);
        }
    }

    int64_t n_saved() const { return subkv::n_saved(runs); }

    // The rows of the runs without their first tokens, which are evaluated again. Returns none if rows cannot be copied.
    std::list<MovedRun> read() const {
        std::list<MovedRun> res;
        for (const auto & run : runs) {
            const auto n    = run.n - subkv::N_RUN_BEGINS;
            auto *     rows = read_fn((int32_t) (run.from + subkv::N_RUN_BEGINS), (int32_t) n);
            if (!rows) {
                return {};
            }
            res.push_back({ run.to + subkv::N_RUN_BEGINS, n, decltype(MovedRun::rows)(rows) });
        }
        return res;
    }

private:
    const llama_tokens &         requested;
    const int64_t                n_first;
    std::vector<subkv::TokenRun> runs;
    rows_fn                      read_fn;
};

// The slots' prompts, those in memory and those on disk are searched for text of the request.
bool plan_moves(const slot_view & slot, const std::vector<slot_view> & slots,
                std::initializer_list<const std::list<server_prompt_cache_state> *> caches,
                const subkv_store_prompt * stored, const server_task & task, int64_t n_first) {
    moved_runs.erase(slot.id);
    llama_context *    ctx       = slot.ctx;
    const llama_tokens requested = text_of(task.tokens);
    if ((int64_t) requested.size() - 1 - n_first < subkv::LEAST_RUN || !llama_subkv_moves(ctx, slot.draft, false)) {
        return false;
    }
    const auto of_state = [ctx](const void * data, size_t size) {
        return [=](int32_t first, int32_t n) { return llama_subkv_run_of_state(ctx, data, size, first, n); };
    };
    const auto is_known = [](const llama_subkv_text & text) { // else the store would refuse what is moved
        return text.unknown == llama_subkv_text().unknown || !llama_subkv_store_on();
    };
    Source     source(requested, n_first);
    const auto consider_stored = [&](const subkv_store_prompt & prompt) {
        source.consider(llama_tokens(prompt.tokens, prompt.tokens + prompt.n_tokens),
                        of_state(prompt.state[0].data, prompt.state[0].size));
    };
    for (const auto & other : slots) {
        const bool is_free = other.id == slot.id || !other.is_processing;
        if (is_free && is_known(llama_subkv_text_of(ctx, nullptr, other.id)) &&
            llama_memory_seq_pos_max(llama_get_memory(ctx), other.id) + 1 == other.prompt->n_tokens()) {
            source.consider(text_of(other.prompt->tokens), [ctx, id = other.id](int32_t first, int32_t n) {
                return llama_subkv_run_of_sequence(ctx, id, first, n);
            });
        }
    }
    for (const auto * cache : caches) {
        if (!cache) {
            continue;
        }
        for (const auto & state : *cache) {
            if (is_known(origins[state.data.main.data()])) {
                source.consider(text_of(state.prompt.tokens), of_state(state.data.main.data(), state.data.main.size()));
            }
        }
    }
    if (stored) {
        consider_stored(*stored);
    }
    subkv_store_found * found =
        llama_subkv_store_on() ? llama_subkv_store_get(ctx, nullptr, requested.data(), (int64_t) requested.size(),
                                                       n_first, std::numeric_limits<int64_t>::max(), source.n_saved()) :
                                 nullptr;
    if (found) {
        consider_stored(*llama_subkv_store_prompt(found));
    }
    auto runs = source.read();
    if (found) {
        llama_subkv_store_free(found, true);
    }
    if (runs.empty()) {
        return false;
    }
    moved_runs[slot.id] = { task.id, std::move(runs) };
    return true;
}

} // namespace

bool has_moves(int id) {
    return moved_runs.count(id) > 0;
}

bool append_moved(const slot_view & slot, int n_batched, int64_t & n_moved) {
    const auto    pending  = moved_runs.find(slot.id);
    auto &        runs     = pending->second.runs;
    const int64_t n        = slot.prompt->n_tokens();
    const bool    is_other = pending->second.id_task != slot.task->id;
    runs.remove_if([&](const auto & run) { return is_other || run.to < n; });
    if (runs.empty()) {
        moved_runs.erase(pending);
        return false;
    }
    if (runs.front().to > n || n_batched > 0) {
        return runs.front().to == n;
    }
    const auto run = std::move(runs.front());
    runs.pop_front();
    if (!llama_subkv_append(slot.ctx, slot.id, (llama_pos) n, run.rows.get())) {
        return false;
    }
    const int64_t end = llama_subkv_resume(slot.ctx, slot.id, (llama_pos) (n + run.n));
    slot.cut((llama_pos) end);
    for (int64_t i = n; i < end; ++i) {
        slot.prompt->tokens.push_back(slot.task->tokens[(size_t) i]);
    }
    n_moved = end - n;
    SRV_INF("slot %d: %d evaluated tokens are moved to %d\n", slot.id, (int) n_moved, (int) n);
    return false;
}

} // namespace llama_subkv_server

bool llama_subkv_store_due(void) {
    const auto & wake = llama_subkv_server::copies.wake;
    return wake > 0 && llama_subkv_server::now() >= wake;
}
