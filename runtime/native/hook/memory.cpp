// memory.cpp: a memory of llama.cpp with coded cells. Part of libllama.
#include "llama-subkv-cells.h"

#include "llama-kv-cache-dsa.h"
#include "llama-kv-cache-iswa.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-hybrid.h"
#include "llama-memory-recurrent.h"
#include "llama-batch.h"
#include "llama-context.h"
#include "llama-impl.h"
#include "llama-model.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

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

// The memory of a context whose cells have a hook. It holds llama.cpp's memory, checks all parts before a change, and
// then changes coded cells and llama.cpp's memory together.
class llama_subkv::memory : public llama_memory_i {
public:
    memory(std::unique_ptr<llama_memory_i> of, llama_context & ctx) :
        inner(std::move(of)), ctx(ctx), parts(caches_of(inner.get())), base(*parts.base), is_coded(coded(base)),
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

    const std::unique_ptr<llama_memory_i> inner;

private:
    // A sequence of coded cells; llama.cpp reports one that does not exist.
    bool is_known(llama_seq_id seq) const { return is_coded && seq >= 0 && (size_t) seq < base.seq_to_stream.size(); }

    llama_context &                ctx;
    const caches                   parts; // of inner
    llama_kv_cache &               base;
    const bool                     is_coded;
    llama_memory_recurrent * const recurrent;
};

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
    // a memory is const where its state is written; its owner has it as llama_memory_i *
    return { const_cast<llama_kv_cache *>(dynamic_cast<const llama_kv_cache *>(memory)), nullptr, nullptr, recurrent };
}

std::vector<subkv::CacheHook *> llama_subkv::caches::hooks() const {
    std::vector<subkv::CacheHook *> res;
    for (const auto * kv : all()) {
        if (kv && kv->subkv_hook) {
            res.push_back(kv->subkv_hook.get());
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
    return &kv.hparams != &kv.model.hparams; // it has its own sizes
}

ggml_type llama_subkv::index_type(const llama_kv_cache & kv, ggml_type type) {
    const char * name = std::getenv("SUBKV_INDEXER");
    if (!name || !*name || std::strcmp(name, "f16") == 0) {
        return type;
    }
    if (std::strcmp(name, "q8_0") != 0) {
        throw std::runtime_error(format("SUBKV_INDEXER: f16 or q8_0 expected, '%.60s' found", name));
    }
    const auto size = (int64_t) kv.model.hparams.indexer_head_size;
    if (size % ggml_blck_size(GGML_TYPE_Q8_0) != 0) {
        throw std::runtime_error(format("SUBKV_INDEXER=q8_0: indexer keys of a multiple of %d elements expected, %d "
                                        "found; SUBKV_INDEXER=f16 keeps them in f16",
                                        (int) ggml_blck_size(GGML_TYPE_Q8_0), (int) size));
    }
    return GGML_TYPE_Q8_0;
}

bool llama_subkv::same_cells(const llama_kv_cache & kv, const llama_kv_cache & index) {
    for (uint32_t s = 0; s < kv.n_stream; ++s) {
        const auto &a = kv.v_cells[s], &b = index.v_cells[s];
        for (uint32_t i = 0; i < a.size(); ++i) {
            if (a.is_empty(i) != b.is_empty(i) || (!a.is_empty(i) && a.pos_get(i) != b.pos_get(i))) {
                return false;
            }
        }
        for (llama_seq_id seq = 0; seq < (llama_seq_id) kv.n_seq_max; ++seq) {
            if (cells_of(a, seq) != cells_of(b, seq)) {
                return false;
            }
        }
    }
    return true;
}

bool llama_subkv::same_slots(const llama_kv_cache_context & rows, const llama_kv_cache_context & index) {
    const auto &slots = rows.sinfos, &of_index = index.sinfos;
    bool        same = slots.size() == of_index.size();
    for (size_t i = 0; same && i < slots.size(); ++i) {
        same = slots[i].strm == of_index[i].strm && slots[i].idxs == of_index[i].idxs;
    }
    if (!same) {
        rows.kv->subkv_hook->report(
            "decode: an indexer's keys in the cells of their tokens expected, others found; clear the "
            "cache and decode again");
    }
    return same;
}

//
// the decorated memory
//

std::unique_ptr<llama_memory_i> llama_subkv::decorate(std::unique_ptr<llama_memory_i> inner, llama_context & ctx) {
    const bool has_hook = !caches_of(inner.get()).hooks().empty();
    return has_hook ? std::make_unique<memory>(std::move(inner), ctx) : std::move(inner);
}

llama_memory_context_ptr llama_subkv::memory::init_batch(llama_batch_allocr & balloc, uint32_t n_ubatch,
                                                         bool embd_all) {
    if (base.subkv_hook) {
        base.subkv_hook->set_causal(ctx.get_cparams().causal_attn);
    }
    if (!is_coded) {
        return inner->init_batch(balloc, n_ubatch, embd_all);
    }
    auto failed = std::make_unique<llama_kv_cache_context>(LLAMA_MEMORY_STATUS_FAILED_PREPARE);
    if (recurrent && !in_step(base, *recurrent, balloc.get_batch())) {
        return failed;
    }
    // While llama.cpp searches for slots of several ubatches in the sliding half, a later one can remove cells of the
    // window of an earlier one for good.
    const uint32_t n_tokens = balloc.get_n_tokens();
    const bool     several  = n_tokens > n_ubatch || (n_tokens > 1 && (base.n_stream > 1 || embd_all));
    const auto     cells    = parts.swa && several ? parts.swa->v_cells : llama_kv_cells_vec();
    auto           batch    = inner->init_batch(balloc, n_ubatch, embd_all);
    if (parts.swa && several) {
        parts.swa->v_cells = cells;
    }
    if (llama_memory_status_is_fail(batch->get_status())) {
        return batch;
    }
    const auto found = caches_of(batch.get());
    const bool can   = ready(base, found.base->ubatches) && (!found.index || same_slots(*found.base, *found.index));
    return can ? std::move(batch) : std::move(failed);
}

// An update of the memory: copies between streams, and rotations of shifted keys.
class llama_subkv::update : public llama_memory_context_i {
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
        // them again.
        auto * const stop = ctx.abort_callback;
        auto * const data = ctx.abort_callback_data;
        if (has_ordinary_layers()) {
            ctx.set_abort_callback(nullptr, nullptr);
        }
        const bool done = inner->apply();
        ctx.set_abort_callback(stop, data);
        if (!parts.base->get_has_shift()) {
            parts.base->subkv_hook->rotated();
        }
        return done;
    }

private:
    bool has_ordinary_layers() const {
        for (const auto * kv : parts.all()) {
            for (size_t i = 0; kv && i < kv->layers.size(); ++i) {
                if (row_bytes(*kv, kv->layers[i].il, false) == 0) {
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

llama_memory_context_ptr llama_subkv::memory::init_update(llama_context * lctx, bool optimize) {
    auto res = inner->init_update(lctx, optimize);
    return is_coded ? std::make_unique<update>(std::move(res), *lctx, parts) : std::move(res);
}

bool llama_subkv::memory::get_can_shift() const {
    return (!is_coded || can_shift(base)) && inner->get_can_shift();
}

void llama_subkv::memory::clear(bool data) {
    for (auto * hook : parts.hooks()) {
        hook->clear();
    }
    inner->clear(data);
}

bool llama_subkv::memory::seq_rm(llama_seq_id seq, llama_pos p0, llama_pos p1) {
    if (is_coded && (seq < 0 || is_known(seq))) {
        if ((recurrent && !may_remove(base, *recurrent, seq, p0, p1)) ||
            (parts.swa && !may_remove(base, *parts.swa, seq, p0, p1)) || !llama_subkv::seq_rm(base, seq, p0, p1)) {
            return false;
        }
    }
    return inner->seq_rm(seq, p0, p1);
}

void llama_subkv::memory::seq_cp(llama_seq_id src, llama_seq_id dst, llama_pos p0, llama_pos p1) {
    if (is_known(src) && is_known(dst)) {
        if ((recurrent && !may_copy(base, *recurrent, src, dst)) ||
            (parts.swa && !may_copy(base, *parts.swa, src, dst, p0, p1)) ||
            !llama_subkv::seq_cp(base, src, dst, p0, p1)) {
            return;
        }
    }
    inner->seq_cp(src, dst, p0, p1);
}

void llama_subkv::memory::seq_keep(llama_seq_id seq) {
    if (is_known(seq)) {
        // llama.cpp keeps the cells of sequences in other streams and the snapshot that a removed tail selected, but not
        // their recurrent state
        for (llama_seq_id other = 0; recurrent && other < (llama_seq_id) base.n_seq_max; ++other) {
            if (other != seq) {
                seq_rm(other, -1, -1);
            }
        }
        base.subkv_hook->keep(seq, reader(base));
    }
    inner->seq_keep(seq);
}

void llama_subkv::memory::seq_add(llama_seq_id seq, llama_pos p0, llama_pos p1, llama_pos shift) {
    if (!is_known(seq) || shift == 0 || llama_subkv::seq_add(base, seq, p0, p1, shift)) {
        inner->seq_add(seq, p0, p1, shift);
    }
}

void llama_subkv::memory::seq_div(llama_seq_id seq, llama_pos p0, llama_pos p1, int d) {
    if (!is_known(seq) || d == 1 || llama_subkv::seq_div(base)) {
        inner->seq_div(seq, p0, p1, d);
    }
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
    apply_deferred(ctx);
    llama_subkv::state_write(*inner, io, seq, flags);
}

void llama_subkv::memory::state_read(llama_io_read_i & io, llama_seq_id seq, llama_state_seq_flags flags) {
    if (!is_coded) {
        inner->state_read(io, seq, flags);
        return;
    }
    apply_deferred(ctx);
#ifdef HAS_HYBRID_IDX
    if (auto * indexed = dynamic_cast<llama_memory_hybrid_idx *>(inner.get())) {
        for (llama_seq_id s = 0; s < (llama_seq_id) base.n_seq_max; ++s) {
            indexed->seq_rm(s, 0, 0); // removes nothing; llama.cpp then computes the pooled keys again
        }
    }
#endif
    llama_subkv::state_read(*inner, io, seq, flags);
}
