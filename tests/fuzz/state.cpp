// state.cpp: states of a context, as llama_state_seq_set_data and llama_state_set_data take them.
//
// SUBKV_FUZZ_MODEL: a folder of model.gguf and its layout.gguf (tests/fuzz/state_models.py writes it).
// SUBKV_FUZZ_ADAPT=1: use adaptive bases.
#include "llama.h"
#include "subkv.h"
#include "targets.h"

#include <algorithm>
#include <cmath>
#include <string>

namespace {

constexpr int32_t N_TOKENS = 20, N_OTHER = 6; // of sequences 0 and 1
constexpr char    MAGIC[] = "subkvst6";       // our head begins with it
constexpr size_t  N_FIXED = 8 + 64 + 32;      // magic, fingerprint, window; then a u64 of each sequence

// What an input is: a byte, then all of the state, or head, size of the first body u32, first body, second one, which
// get the checksums that fit.
enum Kind : uint8_t { PARTIAL = 1, WHOLE = 2, AS_IT_IS = 4, N_KINDS = 8 };

template <typename T> T value_at(const Bytes & bytes, size_t at) {
    T x = 0;
    if (at + sizeof(x) <= bytes.size()) {
        std::memcpy(&x, bytes.data() + at, sizeof(x));
    }
    return x;
}

template <typename T> void append(Bytes & to, const T & x) {
    to.insert(to.end(), (const uint8_t *) &x, (const uint8_t *) &x + sizeof(x));
}

void append(Bytes & to, const Bytes & bytes, size_t from = 0, size_t n = SIZE_MAX) {
    from = std::min(from, bytes.size());
    n    = std::min(n, bytes.size() - from);
    to.insert(to.end(), bytes.begin() + (long) from, bytes.begin() + (long) (from + n));
}

uint64_t checksum(const Bytes & bytes) {
    uint64_t sum = UINT64_C(0xcbf29ce484222325);
    for (const uint8_t byte : bytes) {
        sum = (sum ^ byte) * UINT64_C(0x100000001b3);
    }
    return sum;
}

// A context with a text in each of two sequences.
class Engine {
public:
    Engine() {
        const char * folder = std::getenv("SUBKV_FUZZ_MODEL");
        if (!folder) {
            std::fprintf(stderr, "SUBKV_FUZZ_MODEL: a folder of model.gguf and layout.gguf expected, nothing found\n");
            std::exit(2);
        }
        llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
        llama_backend_init();
        llama_model_params of_model = llama_model_default_params();
        of_model.n_gpu_layers       = 0;
        model = llama_model_load_from_file((std::string(folder) + "/model.gguf").c_str(), of_model);
        EXPECT(model);
        subkv_layout * layout = subkv_layout_load((std::string(folder) + "/layout.gguf").c_str());
        EXPECT(layout);

        subkv_cache_params cache = {};
        cache.n_sink             = -1;
        cache.n_recent           = 12;
        cache.n_rollback         = 4;
        const char * adapt       = std::getenv("SUBKV_FUZZ_ADAPT");
        adapts                   = adapt && std::strcmp(adapt, "1") == 0;
        if (adapts) {
            cache.adapt = "kv,kind=fd,rate=0.5,block=8,length=16,warm=8,max_chunks=3,gain=100,reuse=0,merge=1";
        }
        llama_context_params params = llama_context_default_params();
        params.n_ctx = params.n_batch = 512;
        params.n_ubatch               = 64;
        params.n_seq_max              = 2;
        params.n_threads = params.n_threads_batch = 1;
        params.offload_kqv                        = false;
        EXPECT(subkv_attach(layout, &cache));
        ctx = llama_init_from_model(model, params);
        if (!ctx) {
            std::fprintf(stderr, "%s\n", subkv_last_error());
            std::abort();
        }
        subkv_attach(nullptr, nullptr);
        memory  = llama_get_memory(ctx);
        n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
        EXPECT(decode(0, 0, N_TOKENS) && decode(1, 0, N_OTHER));
        for (const int kind : { 0, (int) WHOLE }) {
            valid[kind] = save(kind);
        }
        if (!adapts) {
            valid[PARTIAL] = save(PARTIAL);
        }
        begin();
    }

    // false: refused
    bool decode(int32_t seq, int32_t pos, int32_t n) {
        llama_batch batch = llama_batch_init(n, 0, 1);
        for (batch.n_tokens = 0; batch.n_tokens < n; ++batch.n_tokens) {
            const int32_t i    = batch.n_tokens;
            batch.token[i]     = 10 + (pos + i) * 7 % (n_vocab - 20);
            batch.pos[i]       = pos + i;
            batch.n_seq_id[i]  = 1;
            batch.seq_id[i][0] = seq;
            batch.logits[i]    = i == n - 1;
        }
        const int32_t status = llama_decode(ctx, batch);
        llama_batch_free(batch);
        return status == 0;
    }

    Bytes save(int kind) {
        const llama_state_seq_flags flags = kind & PARTIAL ? LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY : 0;
        Bytes        bytes(kind & WHOLE ? llama_state_get_size(ctx) : llama_state_seq_get_size_ext(ctx, 0, flags));
        const size_t n = kind & WHOLE ? llama_state_get_data(ctx, bytes.data(), bytes.size()) :
                                        llama_state_seq_get_data_ext(ctx, bytes.data(), bytes.size(), 0, flags);
        EXPECT(n == bytes.size());
        return bytes;
    }

    bool restore(int kind, const Bytes & bytes) {
        const llama_state_seq_flags flags = kind & PARTIAL ? LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY : 0;
        const size_t n = kind & WHOLE ? llama_state_set_data(ctx, bytes.data(), bytes.size()) :
                                        llama_state_seq_set_data_ext(ctx, bytes.data(), bytes.size(), 0, flags);
        EXPECT(n <= bytes.size());
        return n > 0;
    }

    int32_t last(int32_t seq) const { return llama_memory_seq_pos_max(memory, seq); }

    // Restores the two texts. If the earlier input `changed` a sequence, decoding must give the first results again. A
    // refused state may only leave its sequences unchanged or empty.
    void begin() {
        if (!changed) {
            if (last(0) != N_TOKENS - 1 || last(1) != N_OTHER - 1) {
                EXPECT(restore(WHOLE, valid[WHOLE]));
            }
            return;
        }
        changed = false;
        llama_memory_clear(memory, true);
        EXPECT(restore(WHOLE, valid[WHOLE]));
        EXPECT(decode(0, N_TOKENS, 1));
        const float * found = llama_get_logits(ctx);
        if (expected.empty()) {
            expected.assign(found, found + n_vocab);
        }
        for (int32_t i = 0; i < n_vocab; ++i) {
            EXPECT(std::fabs(found[i] - expected[(size_t) i]) < 1e-3f);
        }
        EXPECT(restore(0, valid[0]) && last(0) == N_TOKENS - 1 && last(1) == N_OTHER - 1);
    }

    // A state of these parts, with checksums that fit.
    Bytes forge(int kind, const Bytes & parts) const {
        const Bytes & model_of = valid[kind];
        const auto    magic    = std::search(model_of.begin(), model_of.end(), MAGIC, MAGIC + 8);
        const size_t  before = (size_t) (magic - model_of.begin()), head = N_FIXED + (kind & WHOLE ? 2u : 1u) * 8;
        const size_t  body = value_at<uint32_t>(parts, head), first = head + 4;
        Bytes         out, covered;
        append(covered, parts, 0, head);
        append(covered, parts, first, body);
        append(out, model_of, 0, before);
        append(out, parts, 0, head);
        append(out, (uint64_t) (covered.size() - std::min(head, parts.size())));
        append(out, parts, first, body);
        append(out, checksum(covered));
        if (two_halves(kind)) {
            Bytes rest;
            append(rest, parts, first + body);
            append(out, (uint64_t) rest.size());
            append(out, rest);
            append(out, checksum(rest));
        }
        return out;
    }

    // The input that forge() turns into the valid state.
    Bytes parts(int kind) const {
        const Bytes & state  = valid[kind];
        const auto    magic  = std::search(state.begin(), state.end(), MAGIC, MAGIC + 8);
        const size_t  before = (size_t) (magic - state.begin()), head = N_FIXED + (kind & WHOLE ? 2u : 1u) * 8;
        const size_t  at = before + head, size = value_at<uint64_t>(state, at);
        Bytes         out = { (uint8_t) kind };
        append(out, state, before, head);
        append(out, (uint32_t) size);
        append(out, state, at + 8, size);
        if (two_halves(kind)) {
            append(out, state, at + 8 + size + 8 + 8, state.size() - (at + 8 + size + 8 + 8) - 8);
        }
        return out;
    }

    bool changed = true; // since begin()

    bool has(int kind) const { return !valid[kind & (PARTIAL | WHOLE)].empty(); }

    Bytes valid[AS_IT_IS]; // PARTIAL, WHOLE or neither; empty: adaptive bases have no partial states

private:
    bool two_halves(int kind) const {
        const Bytes & state = valid[kind];
        const auto    magic = std::search(state.begin(), state.end(), MAGIC, MAGIC + 8);
        const size_t  at    = (size_t) (magic - state.begin()) + N_FIXED + (kind & WHOLE ? 2u : 1u) * 8;
        return at + 8 + value_at<uint64_t>(state, at) + 8 < state.size();
    }

    llama_model *      model   = nullptr;
    llama_context *    ctx     = nullptr;
    llama_memory_t     memory  = nullptr;
    int32_t            n_vocab = 0;
    bool               adapts  = false;
    std::vector<float> expected;
};

Engine & engine() {
    static auto * made = new Engine;
    return *made;
}

void run_state(const uint8_t * data, size_t n) {
    Engine & e = engine();
    if (n == 0 || data[0] >= N_KINDS || !e.has(data[0]) || (data[0] & (PARTIAL | WHOLE)) == (PARTIAL | WHOLE)) {
        return;
    }
    const int   kind = data[0] & (PARTIAL | WHOLE);
    const Bytes rest(data + 1, data + n);
    if (data[0] == (WHOLE | AS_IT_IS) && value_at<uint32_t>(rest, 0) > rest.size()) {
        return; // llama.cpp allocates the memory of an architecture's name before it checks the size
    }
    e.begin();
    const bool taken = e.restore(kind, data[0] & AS_IT_IS ? rest : e.forge(kind, rest));
    for (const int32_t seq : { 0, 1 }) {
        EXPECT(e.last(seq) >= -1 && e.last(seq) < 1 << 30);
    }
    if (!taken) {
        EXPECT(e.last(0) == -1 || e.last(0) == N_TOKENS - 1);
        EXPECT(e.last(1) == N_OTHER - 1 || (e.last(1) == -1 && kind == WHOLE));
    } else if (kind != PARTIAL) {
        const Bytes again = e.save(kind);
        EXPECT(e.restore(kind, again) && e.save(kind) == again);
    }
    // decoding takes ten times as long as a refusal, so only one refused state in 16 is checked
    e.changed = taken || checksum(rest) % 16 == 0;
    for (int32_t seq = 0; e.changed && seq < 2; ++seq) {
        e.decode(seq, e.last(seq) + 1, 1);
    }
}

std::vector<Bytes> seeds_state() {
    std::vector<Bytes> seeds;
    for (const int kind : { 0, (int) PARTIAL, (int) WHOLE }) {
        if (!engine().has(kind)) {
            continue;
        }
        seeds.push_back(engine().parts(kind));
        const Bytes rest(seeds.back().begin() + 1, seeds.back().end());
        EXPECT(engine().forge(kind, rest) == engine().valid[kind]);
        Bytes raw = { (uint8_t) (kind | AS_IT_IS) };
        append(raw, engine().valid[kind]);
        seeds.push_back(raw);
    }
    return seeds;
}

} // namespace

const Target TARGETS[] = { { "state", run_state, seeds_state } };
const size_t N_TARGETS = 1;
