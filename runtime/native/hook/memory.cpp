// memory.cpp: a memory of llama.cpp with coded cells. Part of libllama.
#include "llama-subkv-cells.h"
#include "llama-subkv-graph.h"
#include "llama-subkv-library.h"
#include "llama-subkv-programs.h"
#include "llama-subkv-sequences.h"
#include "llama-subkv-state.h"

#include "llama-kv-cache-dsa.h"
#include "llama-kv-cache-iswa.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-hybrid.h"
#include "llama-memory-recurrent.h"
#include "llama-batch.h"
#include "llama-context.h"
#include "llama-impl.h"
#include "llama-model.h"
#include "variables.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#if __has_include("llama-kv-cache-msa.h") // memories that earlier versions do not have (cmake/canary.py)
#    include "llama-kv-cache-msa.h"
#    define HAS_MSA
#endif
#if __has_include("llama-kv-cache-dsa-iswa.h")
#    include "llama-kv-cache-dsa-iswa.h"
#    define HAS_DSA_ISWA
#endif
#if __has_include("llama-memory-hybrid-idx.h")
#    include "llama-memory-hybrid-idx.h"
#    define HAS_HYBRID_IDX
#endif

namespace llama_subkv {

// The memory of a context whose cells have a hook, or whose prompts are stored. It holds llama.cpp's memory, checks all
// parts before a change, and then changes coded cells and llama.cpp's memory together. It also notes for each sequence
// what its cells do not show, namely which operation was refused although the program believes in it, and from where on
// its text was not evaluated in place.
class memory : public llama_memory_i {
public:
    memory(std::unique_ptr<llama_memory_i> of, llama_context & ctx) :
        inner(std::move(of)), ctx(ctx), parts(caches_of(inner.get())), base(parts.base), is_coded(base && coded(*base)),
        recurrent(static_cast<llama_memory_recurrent *>(parts.recurrent)) {}

    llama_memory_context_ptr init_batch(llama_batch_allocr & balloc, uint32_t n_ubatch, bool embd_all) override;
    llama_memory_context_ptr init_full() override { return inner->init_full(); }
    llama_memory_context_ptr init_update(llama_context * lctx, bool optimize) override;

    bool get_can_shift() const override;

    void clear(bool data) override;
    bool seq_rm(llama_seq_id seq, llama_pos p0, llama_pos p1) override;
    void seq_cp(llama_seq_id src, llama_seq_id dst, llama_pos p0, llama_pos p1) override;
    void seq_keep(llama_seq_id seq) override;
    void seq_add(llama_seq_id seq, llama_pos p0, llama_pos p1, llama_pos shift) override;
    void seq_div(llama_seq_id seq, llama_pos p0, llama_pos p1, int d) override;

    llama_pos seq_pos_min(llama_seq_id seq) const override { return pos_min(*inner, seq); }
    llama_pos seq_pos_max(llama_seq_id seq) const override { return inner->seq_pos_max(seq); }

    std::map<ggml_backend_buffer_type_t, size_t> memory_breakdown() const override;

    void state_write(llama_io_write_i & io, llama_seq_id seq, llama_state_seq_flags flags) const override;
    void state_read(llama_io_read_i & io, llama_seq_id seq, llama_state_seq_flags flags) override;

    // Checks the removal of [p0, p1), and changes p1 as may_remove does. Returns false if the removal is refused, and
    // reports it.
    bool can_remove(llama_seq_id seq, llama_pos p0, llama_pos & p1) const;

    // What the cells of a sequence do not show.
    struct notes {
        // From this position on a program believes in an operation that was refused, or NO_POSITION if none was. Until
        // these positions are removed, no token is decoded and no state is written.
        llama_pos        refused = NO_POSITION;
        llama_subkv_text text;
    };

    std::map<llama_seq_id, notes> noted;

    // From position p0 on, rows are behind another text after an operation.
    void note_moved(llama_seq_id seq, llama_pos p0) {
        noted[seq].text.moved = std::min(noted[seq].text.moved, std::max(p0, 0));
    }

    // After an operation that was refused with a report.
    void note_refused(llama_seq_id seq, llama_pos p0);

    const std::unique_ptr<llama_memory_i> inner;

private:
    // llama.cpp itself reports a sequence that does not exist.
    bool is_known(llama_seq_id seq) const {
        return is_coded && seq >= 0 && (size_t) seq < access::seq_to_stream(*base).size();
    }

    // The other sequences that share cells of a sequence at positions [first, last).
    std::set<llama_seq_id> sharing(llama_seq_id seq, llama_pos first, llama_pos last) const;
    // Ends the notes about positions that a sequence no longer has. `open` says that its positions from p0 on were
    // removed.
    void        forget_removed(llama_seq_id seq, llama_pos p0, bool open);
    std::string refusal(llama_seq_id seq, const char * what) const; // why nothing can be done with it, or "" if it can

    llama_context &                ctx;
    const caches                   parts; // of inner
    llama_kv_cache * const         base;  // nullptr if the memory is only recurrent state
    const bool                     is_coded;
    llama_memory_recurrent * const recurrent;
};

} // namespace llama_subkv

//
// memories: a K/V cache, one of full attention and one of sliding windows, either beside recurrent state; one of latent
// attention beside an indexer's keys
//

llama_subkv::caches llama_subkv::caches_of(const llama_memory_i * memory) {
    if (const auto * decorated = dynamic_cast<const llama_subkv::memory *>(memory)) {
        memory = decorated->inner.get();
    }
#ifdef HAS_HYBRID_IDX
    if (const auto * indexed = dynamic_cast<const llama_memory_hybrid_idx *>(memory)) {
        return { indexed->get_mem_attn(), nullptr, indexed->get_mem_idx(), indexed->get_mem_recr() };
    }
#endif
    llama_memory_i * recurrent = nullptr;
    if (const auto * hybrid = dynamic_cast<const llama_memory_hybrid *>(memory)) {
        memory    = hybrid->get_mem_attn();
        recurrent = hybrid->get_mem_recr();
    } else if (const auto * hybrid_iswa = dynamic_cast<const llama_memory_hybrid_iswa *>(memory)) {
        memory    = hybrid_iswa->get_mem_attn();
        recurrent = hybrid_iswa->get_mem_recr();
    }
    if (const auto * iswa = dynamic_cast<const llama_kv_cache_iswa *>(memory)) {
        return { iswa->get_base(), iswa->get_swa(), nullptr, recurrent };
    }
    if (const auto * dsa = dynamic_cast<const llama_kv_cache_dsa *>(memory)) {
        return { dsa->get_mla(), nullptr, dsa->get_lid(), recurrent };
    }
#ifdef HAS_DSA_ISWA
    if (const auto * dsa_iswa = dynamic_cast<const llama_kv_cache_dsa_iswa *>(memory)) {
        return { dsa_iswa->get_dsa()->get_mla(), dsa_iswa->get_swa(), dsa_iswa->get_dsa()->get_lid(), recurrent };
    }
#endif
#ifdef HAS_MSA
    if (const auto * msa = dynamic_cast<const llama_kv_cache_msa *>(memory)) {
        return { msa->get_base(), nullptr, msa->get_idx(), recurrent };
    }
#endif
    // A memory is const where its state is written, but its owner has it as llama_memory_i *.
    return { const_cast<llama_kv_cache *>(dynamic_cast<const llama_kv_cache *>(memory)), nullptr, nullptr, recurrent };
}

std::vector<subkv::CacheHook *> llama_subkv::caches::hooks() const {
    std::vector<subkv::CacheHook *> res;
    for (const auto * kv : all()) {
        if (kv && access::hook(*kv)) {
            res.push_back(access::hook(*kv));
        }
    }
    return res;
}

llama_subkv::batch_caches llama_subkv::caches_of(const llama_memory_context_i * mctx) {
    if (auto * hybrid = dynamic_cast<const llama_memory_hybrid_context *>(mctx)) {
        return { hybrid->get_attn(), nullptr };
    }
    if (auto * hybrid_iswa = dynamic_cast<const llama_memory_hybrid_iswa_context *>(mctx)) {
        return { hybrid_iswa->get_attn()->get_base(), nullptr };
    }
    if (auto * iswa = dynamic_cast<const llama_kv_cache_iswa_context *>(mctx)) {
        return { iswa->get_base(), nullptr };
    }
    if (auto * dsa = dynamic_cast<const llama_kv_cache_dsa_context *>(mctx)) {
        return { dsa->get_mla(), dsa->get_lid() };
    }
#ifdef HAS_DSA_ISWA
    if (auto * dsa_iswa = dynamic_cast<const llama_kv_cache_dsa_iswa_context *>(mctx)) {
        return { dsa_iswa->get_dsa()->get_mla(), dsa_iswa->get_dsa()->get_lid() };
    }
#endif
#ifdef HAS_MSA
    if (auto * msa = dynamic_cast<const llama_kv_cache_msa_context *>(mctx)) {
        return { msa->get_base(), msa->get_idx() };
    }
#endif
    return { static_cast<const llama_kv_cache_context *>(mctx), nullptr };
}

//
// an indexer's keys
//

bool llama_subkv::is_index(const llama_kv_cache & kv) {
    return &access::hparams(kv) != &access::model(kv).hparams; // it has its own sizes
}

ggml_type llama_subkv::index_type(const llama_kv_cache & kv, ggml_type type) {
    const char * name = std::getenv("SUBKV_INDEXER");
    if (!name || !*name || std::strcmp(name, "f16") == 0) {
        return type;
    }
    if (std::strcmp(name, "q8_0") != 0) {
        throw std::runtime_error(format("SUBKV_INDEXER: f16 or q8_0 expected, '%.60s' found", name));
    }
    const auto size = (int64_t) access::model(kv).hparams.indexer_head_size;
    if (size % ggml_blck_size(GGML_TYPE_Q8_0) != 0) {
        throw std::runtime_error(format("SUBKV_INDEXER=q8_0: indexer keys of a multiple of %d elements expected, %d "
                                        "found; SUBKV_INDEXER=f16 keeps them in f16",
                                        (int) ggml_blck_size(GGML_TYPE_Q8_0), (int) size));
    }
    return GGML_TYPE_Q8_0;
}

bool llama_subkv::same_cells(const llama_kv_cache & kv, const llama_kv_cache & index) {
    for (uint32_t s = 0; s < access::n_stream(kv); ++s) {
        const auto &a = access::v_cells(kv)[s], &b = access::v_cells(index)[s];
        for (uint32_t i = 0; i < a.size(); ++i) {
            if (a.is_empty(i) != b.is_empty(i) || (!a.is_empty(i) && a.pos_get(i) != b.pos_get(i))) {
                return false;
            }
        }
        for (llama_seq_id seq = 0; seq < (llama_seq_id) access::n_seq_max(kv); ++seq) {
            if (cells_of(a, seq) != cells_of(b, seq)) {
                return false;
            }
        }
    }
    return true;
}

bool llama_subkv::same_slots(const llama_kv_cache_context & rows, const llama_kv_cache_context & index) {
    const auto &slots = access::sinfos(rows), &of_index = access::sinfos(index);
    bool        same = slots.size() == of_index.size();
    for (size_t i = 0; same && i < slots.size(); ++i) {
        same = slots[i].strm == of_index[i].strm && slots[i].idxs == of_index[i].idxs;
    }
    if (!same) {
        access::hook(access::kv(rows))
            ->report("decode: an indexer's keys in the cells of their tokens expected, others found; clear the "
                     "cache and decode again");
    }
    return same;
}

//
// the decorated memory
//

static llama_subkv::memory * decorated(const llama_context * ctx) {
    return ctx ? dynamic_cast<llama_subkv::memory *>(ctx->get_memory()) : nullptr;
}

std::unique_ptr<llama_memory_i> llama_subkv::decorate(std::unique_ptr<llama_memory_i> inner, llama_context & ctx) {
    const bool noted = !caches_of(inner.get()).hooks().empty() || subkv::prompt_folder();
    return noted ? std::make_unique<memory>(std::move(inner), ctx) : std::move(inner);
}

llama_subkv::undecorated::undecorated(llama_context * ctx) : ctx(decorated(ctx) ? ctx : nullptr) {
    if (this->ctx) {
        whole = access::memory(*ctx).release();
        access::memory(*ctx).reset(static_cast<class memory *>(whole)->inner.get());
    }
}

llama_subkv::undecorated::~undecorated() {
    if (ctx) {
        (void) access::memory(*ctx).release();
        access::memory(*ctx).reset(whole);
    }
}

llama_subkv_text llama_subkv::text_of(const llama_context & ctx, llama_seq_id seq) {
    const auto * memory = decorated(&ctx);
    return memory && memory->noted.count(seq) ? memory->noted.at(seq).text : llama_subkv_text();
}

void llama_subkv::note_text(const llama_context & ctx, llama_seq_id seq, llama_subkv_text text) {
    if (auto * memory = decorated(&ctx)) {
        memory->noted[seq].text = text;
    }
}

bool llama_subkv::take_refusal(const llama_context & ctx, llama_seq_id seq) {
    auto *     memory = decorated(&ctx);
    const bool was    = memory && memory->noted.count(seq) && memory->noted[seq].refused != NO_POSITION;
    if (was) {
        memory->noted[seq].refused = NO_POSITION;
    }
    return was;
}

llama_pos llama_subkv::resume(const llama_context & ctx, llama_seq_id seq, llama_pos pos) {
    const auto * memory = decorated(&ctx);
    if (!memory) {
        return pos;
    }
    const auto found = memory->noted.find(seq);
    const auto kept  = found == memory->noted.end() ? pos : std::min(pos, found->second.refused);
    const auto to    = resume(memory->inner.get(), seq, kept);
    return removable(ctx, seq, to) ? to : 0;
}

bool llama_subkv::removable(const llama_context & ctx, llama_seq_id seq, llama_pos pos) {
    const auto * memory = decorated(&ctx);
    llama_pos    end    = -1;
    return !memory || memory->can_remove(seq, pos, end);
}

bool llama_subkv::note_refused(const llama_context & ctx, llama_seq_id seq, llama_pos p0) {
    auto * memory = decorated(&ctx);
    if (!memory || !coded(memory)) {
        return false;
    }
    for (llama_seq_id s = 0; s < (llama_seq_id) ctx.n_seq_max(); ++s) {
        if (seq < 0 || s == seq) {
            memory->note_refused(s, p0);
        }
    }
    return true;
}

std::set<llama_seq_id> llama_subkv::memory::sharing(llama_seq_id seq, llama_pos first, llama_pos last) const {
    std::set<llama_seq_id> found;
    if (!base || access::n_stream(*base) > 1 || seq < 0 ||
        seq >= (llama_seq_id) access::n_seq_max(*base)) { // with cells of its own
        return found;
    }
    const auto &                cells = access::v_cells(*base)[access::seq_to_stream(*base)[seq]];
    std::vector<subkv::PosCell> own;
    reader(*base).find_all(seq, first, last, own);
    for (const auto & cell : own) {
        for (llama_seq_id other = 0; other < (llama_seq_id) access::n_seq_max(*base); ++other) {
            if (other != seq && cells.seq_has((uint32_t) cell.cell, other)) {
                found.insert(other);
            }
        }
    }
    return found;
}

std::string llama_subkv::memory::refusal(llama_seq_id seq, const char * what) const {
    const auto found = noted.find(seq);
    if (found == noted.end() || found->second.refused == NO_POSITION) {
        return "";
    }
    const auto why =
        format("%s: positions of sequence %d as the program has them expected, from %d on others found, because an "
               "operation on them was refused; remove them from there on and decode them again",
               what, seq, found->second.refused);
    access::hook(*base)->report(why);
    return why;
}

void llama_subkv::memory::note_refused(llama_seq_id seq, llama_pos p0) {
    noted[seq].refused = std::min(noted[seq].refused, std::max(p0, 0));
    std::string why;
    if (const auto * library = llama_subkv_library(false, why)) { // programs do not ask for the reason
        llama_subkv_log(library->last_error());
    }
}

void llama_subkv::memory::forget_removed(llama_seq_id seq, llama_pos p0, bool open) {
    for (auto it = noted.begin(); it != noted.end();) {
        auto & [of, notes] = *it;
        if (seq < 0 || of == seq) {
            if (open && p0 <= notes.refused) {
                notes.refused = NO_POSITION;
            }
            const llama_pos end = inner->seq_pos_max(of);
            for (auto * from : { &notes.text.moved, &notes.text.unknown }) {
                *from = *from <= end ? *from : NO_POSITION;
            }
        }
        const bool none = std::min({ notes.refused, notes.text.moved, notes.text.unknown }) == NO_POSITION;
        it              = none ? noted.erase(it) : std::next(it);
    }
}

llama_memory_context_ptr llama_subkv::memory::init_batch(llama_batch_allocr & balloc, uint32_t n_ubatch,
                                                         bool embd_all) {
    if (base && access::hook(*base)) {
        access::hook(*base)->set_causal(ctx.get_cparams().causal_attn);
    }
    if (!is_coded) {
        return inner->init_batch(balloc, n_ubatch, embd_all);
    }
    const auto & tokens = balloc.get_batch();
    for (int32_t i = 0; i < tokens.n_tokens && !noted.empty(); ++i) {
        for (int32_t j = 0; j < tokens.n_seq_id[i]; ++j) {
            if (const auto why = refusal(tokens.seq_id[i][j], "decode"); !why.empty()) {
                llama_subkv_log(why);
                return std::make_unique<llama_kv_cache_context>(LLAMA_MEMORY_STATUS_FAILED_COMPUTE);
            }
        }
    }
    auto failed = std::make_unique<llama_kv_cache_context>(LLAMA_MEMORY_STATUS_FAILED_PREPARE);
    if (recurrent && !in_step(*base, *recurrent, tokens)) {
        return failed;
    }
    // While llama.cpp searches for slots of several ubatches in the sliding half, a later one can remove cells of the
    // window of an earlier one for good.
    const uint32_t n_tokens = balloc.get_n_tokens();
    const bool     several  = n_tokens > n_ubatch || (n_tokens > 1 && (access::n_stream(*base) > 1 || embd_all));
    const auto     cells    = parts.swa && several ? access::v_cells(*parts.swa) : llama_kv_cells_vec();
    auto           batch    = inner->init_batch(balloc, n_ubatch, embd_all);
    if (parts.swa && several) {
        access::v_cells(*parts.swa) = cells;
    }
    if (llama_memory_status_is_fail(batch->get_status())) {
        return batch;
    }
    const auto found = caches_of(batch.get());
    const bool can =
        ready(*base, access::ubatches(*found.base)) && (!found.index || same_slots(*found.base, *found.index));
    return can ? std::move(batch) : std::move(failed);
}

namespace llama_subkv {

// An update of the memory copies cells between streams and rotates shifted keys.
class update : public llama_memory_context_i {
public:
    update(llama_memory_context_ptr inner, llama_context & ctx, const caches & parts) :
        inner(std::move(inner)), ctx(ctx), parts(parts) {}

    bool                 next() override { return inner->next(); }
    const llama_ubatch & get_ubatch() const override { return inner->get_ubatch(); }
    llama_memory_status  get_status() const override { return inner->get_status(); }

    bool apply() override {
        if (!parts.base->get_has_shift()) {
            return inner->apply();
        }
        // After an aborted shift it would be unknown which ordinary layers are rotated, and the next shift would rotate
        // them again. build_shift therefore puts coded layers first, and if they lack memory, no ordinary layer has
        // been rotated.
        const auto [stop, data] = access::abort_callback(ctx);
        if (has_ordinary_layers()) {
            ctx.set_abort_callback([](void * hook) { return ((const subkv::CacheHook *) hook)->lacks_memory(); },
                                   access::hook(*parts.base));
        }
        const bool done = inner->apply();
        ctx.set_abort_callback(stop, data);
        if (!parts.base->get_has_shift()) {
            access::hook(*parts.base)->rotated();
        }
        return done;
    }

private:
    bool has_ordinary_layers() const {
        for (const auto * kv : parts.all()) {
            for (size_t i = 0; kv && i < access::layers(*kv).size(); ++i) {
                if (row_bytes(*kv, access::layers(*kv)[i].il, false) == 0) {
                    return true;
                }
            }
        }
        return false;
    }

    llama_memory_context_ptr inner;
    llama_context &          ctx;
    const caches             parts;
};

} // namespace llama_subkv

llama_memory_context_ptr llama_subkv::memory::init_update(llama_context * lctx, bool optimize) {
    auto res = inner->init_update(lctx, optimize);
    return is_coded ? std::make_unique<update>(std::move(res), *lctx, parts) : std::move(res);
}

bool llama_subkv::memory::get_can_shift() const {
    return (!is_coded || can_shift(*base)) && inner->get_can_shift();
}

void llama_subkv::memory::clear(bool data) {
    for (auto * hook : parts.hooks()) {
        hook->clear();
    }
    inner->clear(data);
    noted.clear();
}

bool llama_subkv::memory::can_remove(llama_seq_id seq, llama_pos p0, llama_pos & p1) const {
    if (!is_coded || (seq >= 0 && !is_known(seq))) {
        return true;
    }
    const auto [first, last] = positions(p0, p1);
    return (!recurrent || may_remove(*base, *recurrent, seq, p0, p1)) &&
           (!parts.swa || may_remove(*base, *parts.swa, seq, p0, p1)) &&
           access::hook(*base)->can_remove(seq, first, last, reader(*base));
}

bool llama_subkv::memory::seq_rm(llama_seq_id seq, llama_pos p0, llama_pos p1) {
    const auto [first, last] = positions(p0, p1);
    std::vector<llama_seq_id> gaps; // sequences with positions behind the removed ones
    bool                      open = true;
    for (llama_seq_id s = 0; s < (llama_seq_id) ctx.n_seq_max(); ++s) {
        if ((seq < 0 || s == seq) && last <= inner->seq_pos_max(s)) {
            open = false;
            if (first < last && inner->seq_pos_min(s) < last) {
                gaps.push_back(s);
            }
        }
    }
    if (!can_remove(seq, p0, p1) ||
        (is_coded && (seq < 0 || is_known(seq)) && !llama_subkv::seq_rm(*base, seq, p0, p1)) ||
        !inner->seq_rm(seq, p0, p1)) {
        return false;
    }
    for (const llama_seq_id s : gaps) {
        note_moved(s, first);
    }
    forget_removed(seq, first, open);
    return true;
}

void llama_subkv::memory::seq_cp(llama_seq_id src, llama_seq_id dst, llama_pos p0, llama_pos p1) {
    const auto [first, last] = positions(p0, p1);
    const bool apart         = base && access::n_stream(*base) > 1; // llama.cpp then copies everything
    if (is_known(src) && is_known(dst)) {
        if ((recurrent && !may_copy(*base, *recurrent, src, dst)) ||
            (parts.swa && !may_copy(*base, *parts.swa, src, dst, p0, p1)) ||
            !llama_subkv::seq_cp(*base, src, dst, p0, p1)) {
            note_refused(dst, apart ? 0 : first);
            return;
        }
    }
    const bool empty = apart || inner->seq_pos_max(dst) < 0;
    inner->seq_cp(src, dst, p0, p1);
    if (src == dst) {
        return;
    }
    const auto of_src = noted.count(src) ? noted[src] : notes();
    if (empty) {
        noted[dst] = of_src;
    } else { // its own positions may be in front of the copied ones, and behind them
        note_moved(dst, std::min(first, of_src.text.moved));
        noted[dst].refused      = std::min(noted[dst].refused, of_src.refused);
        noted[dst].text.unknown = std::min(noted[dst].text.unknown, of_src.text.unknown);
    }
    if (empty && first > 0 && !apart) {
        note_moved(dst, first);
    }
    forget_removed(dst, NO_POSITION, false);
}

void llama_subkv::memory::seq_keep(llama_seq_id seq) {
    if (is_known(seq)) {
        // llama.cpp keeps the cells of sequences in other streams and the snapshot that a removed tail selected, but
        // not their recurrent state.
        for (llama_seq_id other = 0; recurrent && other < (llama_seq_id) access::n_seq_max(*base); ++other) {
            if (other != seq) {
                seq_rm(other, -1, -1);
            }
        }
        access::hook(*base)->keep(seq, reader(*base));
    }
    inner->seq_keep(seq);
    for (llama_seq_id other = 0; other < (llama_seq_id) ctx.n_seq_max(); ++other) {
        if (other != seq && inner->seq_pos_max(other) < 0) {
            noted.erase(other);
        }
    }
}

void llama_subkv::memory::seq_add(llama_seq_id seq, llama_pos p0, llama_pos p1, llama_pos shift) {
    const auto [first, last] = positions(p0, p1);
    if (shift == 0 || first >= last) {
        inner->seq_add(seq, p0, p1, shift);
        return;
    }
    const auto from    = (llama_pos) std::max<int64_t>(0, std::min<int64_t>(first, (int64_t) first + shift));
    const auto refused = noted.count(seq) ? noted[seq].refused : NO_POSITION;
    if (is_known(seq) && refused != NO_POSITION && refused < last) {
        noted[seq].refused = std::min(noted[seq].refused, from); // it means positions that the sequence does not have
        return;
    }
    if (is_known(seq) && !llama_subkv::seq_add(ctx, parts, seq, p0, p1, shift)) {
        note_refused(seq, from);
        return;
    }
    for (const llama_seq_id other : is_coded ? std::set<llama_seq_id>() : sharing(seq, first, last)) {
        note_moved(other, from); // llama.cpp moves a shared cell in all of its sequences
    }
    inner->seq_add(seq, p0, p1, shift);
    note_moved(seq, from);
    forget_removed(-1, NO_POSITION, false);
}

void llama_subkv::memory::seq_div(llama_seq_id seq, llama_pos p0, llama_pos p1, int d) {
    const auto [first, last] = positions(p0, p1);
    if (is_known(seq) && d != 1 && first < last) {
        llama_subkv::seq_div(*base);
        note_refused(seq, first);
        return;
    }
    inner->seq_div(seq, p0, p1, d);
    if (d != 1) {
        note_moved(seq, first);
        for (const llama_seq_id other : sharing(seq, 0, NO_POSITION)) {
            note_moved(other, first);
        }
    }
    forget_removed(-1, NO_POSITION, false);
}

std::map<ggml_backend_buffer_type_t, size_t> llama_subkv::memory::memory_breakdown() const {
    auto bytes = inner->memory_breakdown();
    for (const auto * hook : parts.hooks()) {
        for (const auto & [buft, size] : hook->facts().bytes_beside) {
            bytes[buft] += size;
        }
    }
    return bytes;
}

void llama_subkv::memory::state_write(llama_io_write_i & io, llama_seq_id seq, llama_state_seq_flags flags) const {
    if (!is_coded) {
        inner->state_write(io, seq, flags);
        return;
    }
    for (llama_seq_id s = std::max(seq, 0); s < (seq < 0 ? (llama_seq_id) access::n_seq_max(*base) : seq + 1); ++s) {
        if (const auto why = refusal(s, "state"); !why.empty()) {
            throw std::runtime_error(why);
        }
    }
    apply_deferred(ctx);
    llama_subkv::state_write(*inner, io, seq, flags);
}

void llama_subkv::memory::state_read(llama_io_read_i & io, llama_seq_id seq, llama_state_seq_flags flags) {
    // The text of a state is unknown. A partial state has no rows, and the text remains as it was.
    for (llama_seq_id s = 0; s < (llama_seq_id) ctx.n_seq_max(); ++s) {
        if ((seq < 0 || s == seq) && !(flags & LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY)) {
            noted[s] = { NO_POSITION, { NO_POSITION, 0 } };
        }
    }
    const struct guard { // of sequences that are empty afterwards
        ~guard() { of.forget_removed(-1, NO_POSITION, false); }
        memory & of;
    } forgets{ *this };

    if (!is_coded) {
        inner->state_read(io, seq, flags);
        return;
    }
    apply_deferred(ctx);
#ifdef HAS_HYBRID_IDX
    if (auto * indexed = dynamic_cast<llama_memory_hybrid_idx *>(inner.get())) {
        for (llama_seq_id s = 0; s < (llama_seq_id) access::n_seq_max(*base); ++s) {
            indexed->seq_rm(s, 0, 0); // removes nothing, but makes llama.cpp compute the pooled keys again
        }
    }
#endif
    llama_subkv::state_read(*inner, io, seq, flags);
}
