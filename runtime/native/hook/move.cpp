// move.cpp: see llama-subkv-programs.h. Part of libllama.
#include "llama-subkv-programs.h"

#include "llama-subkv-body.h"
#include "llama-subkv-cells.h"
#include "llama-subkv-library.h"
#include "llama-subkv-sequences.h"
#include "releases.h"
#include "variables.h"

#include "llama-batch.h"
#include "llama-context.h"
#include "llama-model.h"

#include <memory>
#include <new>

// Rows of one tensor, position by position.
struct llama_subkv_run {
    struct side {
        int32_t              il;
        bool                 value;
        size_t               row; // bytes
        std::vector<uint8_t> data;
    };

    subkv::StateIdentity     identity; // of the cache's states
    llama_pos                first;
    std::vector<llama_token> tokens; // as cells store them, for models whose embeddings read them
    std::vector<side>        sides;
};

namespace llama_subkv {

// The K/V cache whose rows may move, and the operations on its cells.
struct mover {
    // Returns "" if rows may move
    static std::string refusal(const llama_context & ctx) {
        const auto * memory = ctx.get_memory();
        if (!memory || !llama_subkv::coded(memory)) {
            return "the cache is not coded";
        }
        const auto   all = caches_of(memory);
        const auto & kv  = *all.base;
        if (all.recurrent) {
            return "the model keeps recurrent state";
        }
        if (all.swa || all.index) {
            return all.swa ? "the model has sliding windows" : "the model has an indexer";
        }
        if (!access::hook(kv)->facts().shifts) {
            return "the bases are adaptive";
        }
        if (access::hparams(kv).n_pos_per_embd() > 1 || !kv.get_can_shift() || access::other(kv)) {
            return "llama.cpp cannot shift positions of this model";
        }
        return "";
    }

    explicit mover(llama_context & ctx) : kv(*caches_of(ctx.get_memory()).base), coded(kv) {
        if (const auto why = refusal(ctx); !why.empty()) {
            throw std::runtime_error(why);
        }
        ctx.synchronize();
        apply_deferred(ctx);
    }

    // Calls use(tensor, layer, value) for every tensor of a stream, in the order of states.
    template <typename F> void each_side(uint32_t stream, F use) const {
        for (const bool value : { false, true }) {
            for (const auto & layer : access::layers(kv)) {
                if (auto * t = value ? layer.v_stream[stream] : layer.k_stream[stream]) {
                    use(t, (int32_t) layer.il, value);
                }
            }
        }
    }

    std::unique_ptr<llama_subkv_run> of_sequence(llama_seq_id seq, llama_pos first, llama_pos n) const {
        demand_sequence(seq);
        demand_positions(first, n);
        const uint32_t              stream = access::seq_to_stream(kv)[seq];
        std::vector<subkv::PosCell> found;
        reader(kv).find(seq, first, first + n, found);
        demand_all((int64_t) found.size(), n);
        auto                  rows = new_run(first);
        std::vector<uint32_t> cells;
        for (const auto & cell : found) {
            cells.push_back((uint32_t) cell.cell);
            rows->tokens.push_back(token_of(access::v_cells(kv)[stream].ext_get(cells.back())));
        }
        each_side(stream, [&](ggml_tensor * t, int32_t il, bool value) {
            rows->sides.push_back({ il, value, t->nb[1], coded.get(t, cells) });
        });
        return rows;
    }

    // A state lists the cells of one stream, in any order of positions.
    std::unique_ptr<llama_subkv_run> of_state(llama_io_read_i & io, llama_pos first, llama_pos n) const {
        demand_positions(first, n);
        row_reader body = read_body(kv, io, 0);
        body.check(kv, 0);
        auto                 rows = new_run(first);
        std::vector<int64_t> at((size_t) n, -1); // its cell, by position
        rows->tokens.resize((size_t) n);
        uint32_t n_cells = 0;
        body.value<uint32_t>(); // streams
        for (uint32_t stream = 0; stream < access::n_stream(kv) && n_cells == 0; ++stream) {
            n_cells = body.value<uint32_t>();
        }
        for (uint32_t i = 0; i < n_cells; ++i) {
            const auto pos = body.value<llama_pos>() - first;
            body.value<uint32_t>(); // one sequence
            const auto ext = llama_subkv::has_cell_ext(kv) ? body.value<llama_kv_cell_ext>() : llama_kv_cell_ext{};
            body.value<llama_seq_id>();
            if (pos >= 0 && pos < n) {
                at[(size_t) pos]           = i;
                rows->tokens[(size_t) pos] = token_of(ext);
            }
        }
        demand_all(n - std::count(at.begin(), at.end(), -1), n);
        body.take(2 * sizeof(uint32_t)); // values by cell, layers
        each_side(0, [&](ggml_tensor * t, int32_t il, bool value) {
            body.take(sizeof(int32_t) + sizeof(uint64_t)); // type, size of a row
            const size_t         row = t->nb[1];
            const uint8_t *      all = body.take(n_cells * row);
            std::vector<uint8_t> data((size_t) n * row);
            for (size_t i = 0; i < at.size(); ++i) {
                std::copy_n(all + (size_t) at[i] * row, row, data.data() + i * row);
            }
            rows->sides.push_back({ il, value, row, std::move(data) });
        });
        return rows;
    }

    void append(llama_seq_id seq, llama_pos pos, const llama_subkv_run & rows) const {
        demand_sequence(seq);
        demand_positions(pos, (llama_pos) rows.tokens.size());
        if (rows.identity != access::hook(kv)->facts().identity) {
            throw std::runtime_error("rows of this cache's bases and window expected, others found");
        }
        if (kv.seq_pos_max(seq) + 1 != pos) {
            throw std::runtime_error(
                format("position %d expected behind the sequence's last one, %d found", kv.seq_pos_max(seq) + 1, pos));
        }
        llama_batch_allocr balloc(access::hparams(kv).n_pos_per_embd());
        llama_ubatch       ubatch = balloc.ubatch_reserve((uint32_t) rows.tokens.size(), 1);
        ubatch.seq_id_unq[0]      = seq;
        for (size_t i = 0; i < rows.tokens.size(); ++i) {
            ubatch.token[i]    = rows.tokens[i];
            ubatch.pos[i]      = rows.first + (llama_pos) i;
            ubatch.n_seq_id[i] = 1;
            ubatch.seq_id[i]   = &seq;
        }
        const auto slots = kv.find_slot(ubatch, false);
        if (slots.empty()) {
            throw std::runtime_error(format("%zu free cells expected, fewer found", rows.tokens.size()));
        }
        // These positions have no cells, but a graph may still use their rows.
        access::hook(kv)->remove(seq, pos, subkv::MAX_POSITION, reader(kv));
        kv.apply_ubatch(slots, ubatch);
        auto & cells = access::v_cells(kv)[slots.strm[0]];
        for (const uint32_t cell : slots.idxs[0]) {
            if (pos != rows.first) {
                cells.pos_add(cell, pos - rows.first); // llama.cpp rotates its key
            }
        }
        try {
            write(slots.strm[0], slots.idxs[0], rows);
        } catch (...) {
            kv.seq_rm(seq, pos, -1);
            throw;
        }
    }

private:
    std::unique_ptr<llama_subkv_run> new_run(llama_pos first) const {
        return std::make_unique<llama_subkv_run>(llama_subkv_run{ access::hook(kv)->facts().identity, first, {}, {} });
    }

    void write(uint32_t stream, const std::vector<uint32_t> & cells, const llama_subkv_run & rows) const {
        auto side = rows.sides.begin();
        each_side(stream, [&](ggml_tensor * t, int32_t il, bool value) {
            GGML_ASSERT(side->il == il && side->value == value && side->row == t->nb[1]);
            coded.set(t, cells, side->data);
            ++side;
        });
    }

    void demand_sequence(llama_seq_id seq) const {
        if (seq < 0 || seq >= (llama_seq_id) access::n_seq_max(kv)) {
            throw std::runtime_error(format("sequence 0 to %u expected, %d found", access::n_seq_max(kv) - 1, seq));
        }
    }

    void demand_positions(llama_pos first, llama_pos n) const {
        if (first < 0 || n < 1 || n > (llama_pos) kv.get_size() || first > subkv::MAX_POSITION - n) {
            throw std::runtime_error(
                format("1 to %u positions from 0 on expected, %d from %d on found", kv.get_size(), n, first));
        }
    }

    static void demand_all(int64_t found, llama_pos n) {
        if (found != n) {
            throw std::runtime_error(format("rows of %d positions expected, %" PRId64 " found", n, found));
        }
    }

    llama_kv_cache & kv;
    const tiles      coded;
};

} // namespace llama_subkv

namespace {

// A state in memory.
class memory_reader : public llama_io_read_i {
public:
    memory_reader(const void * state, size_t size) : at((const uint8_t *) state), size(size) {}

    void read(void * data, size_t n) override {
        if (n > size - used) {
            throw std::runtime_error(format("state: %zu more bytes expected, %zu found", n, size - used));
        }
        std::copy_n(at + used, n, (uint8_t *) data);
        used += n;
    }

    void read_tensor(ggml_tensor *, size_t, size_t) override { GGML_ABORT("a state's rows are bytes"); }

    size_t n_bytes() override { return used; }

private:
    const uint8_t * at;
    size_t          size;
    size_t          used = 0;
};

// Returns the value of use(). On an exception it returns `failed`, and logs why.
template <typename T, typename F> T logged(T failed, F use) {
    try {
        return use();
    } catch (const std::bad_alloc &) {
        llama_subkv_log("SUBKV_STORE_MOVED: not enough memory; the prompt is evaluated");
    } catch (const std::exception & e) {
        llama_subkv_log(std::string("SUBKV_STORE_MOVED: ") + e.what() + "; the prompt is evaluated");
    }
    return failed;
}

} // namespace

bool llama_subkv_moves(const llama_context * ctx, const llama_context * draft, bool report) {
    const auto * hook      = llama_subkv::hook_of(ctx->get_memory());
    bool         requested = false;
    try {
        requested = hook ? hook->facts().moves : subkv::moved_of_environment();
    } catch (const subkv::Invalid & e) { // beside an ordinary cache, where nothing moves
        if (report) {
            llama_subkv_log(e.what());
        }
    }
    const auto why = draft ? "a draft model has a cache of its own" : llama_subkv::mover::refusal(*ctx);
    if (report && requested) {
        llama_subkv_log(why.empty() ? "text behind another beginning is moved, not evaluated" :
                                      "SUBKV_STORE_MOVED: nothing is moved, because " + why);
    }
    return requested && why.empty();
}

llama_subkv_run * llama_subkv_run_of_sequence(llama_context * ctx, int32_t seq, int32_t first, int32_t n) {
    return logged((llama_subkv_run *) nullptr,
                  [&] { return llama_subkv::mover(*ctx).of_sequence(seq, first, n).release(); });
}

llama_subkv_run * llama_subkv_run_of_state(llama_context * ctx, const void * state, size_t size, int32_t first,
                                           int32_t n) {
    return logged((llama_subkv_run *) nullptr, [&] {
        memory_reader io(state, size);
        uint32_t      magic;
        llama_seq_id  seq;
        io.read(&magic, sizeof(magic)); // llama.cpp's own, before the head of the cells
        io.read(&seq, sizeof(seq));
        return llama_subkv::mover(*ctx).of_state(io, first, n).release();
    });
}

void llama_subkv_run_free(llama_subkv_run * rows) {
    delete rows;
}

bool llama_subkv_append(llama_context * ctx, int32_t seq, int32_t pos, const llama_subkv_run * rows) {
    return logged(false, [&] {
        llama_subkv::mover(*ctx).append(seq, pos, *rows);
        auto text  = llama_subkv::text_of(*ctx, seq);
        text.moved = std::min(text.moved, pos);
        llama_subkv::note_text(*ctx, seq, text);
        return true;
    });
}
