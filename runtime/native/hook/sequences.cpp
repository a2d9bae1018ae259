// sequences.cpp: operations on sequences change coded cells and the other parts of a memory together, or neither.
// Part of libllama.
#include "llama-subkv-cells.h"
#include "llama-subkv-programs.h"
#include "llama-subkv-sequences.h"

#include "llama-context.h"
#include "llama-impl.h"
#include "llama-memory-recurrent.h"
#include "llama-model.h"

#include <algorithm>
#include <set>
#include <vector>

bool llama_subkv::seq_rm(llama_kv_cache & kv, llama_seq_id seq, llama_pos p0, llama_pos p1) {
    const auto [first, last] = positions(p0, p1);
    return access::hook(kv)->remove(seq, first, last, reader(kv));
}

bool llama_subkv::may_remove(const llama_kv_cache & kv, const llama_memory_recurrent & recurrent, llama_seq_id seq,
                             llama_pos p0, llama_pos & p1) {
    const auto [first, last] = positions(p0, p1);
    if (!access::hook(kv)->can_remove(seq, first, last, reader(kv))) {
        return false;
    }
    if (seq < 0) { // llama.cpp's recurrent half rejects it
        recurrent_stays(kv, seq, p0);
        return false;
    }
    const llama_pos tail = recurrent.seq_pos_max(seq);
    if ((uint32_t) seq < access::n_seq_max(kv) && first == 0 && last > std::max(tail, kv.seq_pos_max(seq))) {
        p1 = -1;
    }
    if (first == 0 || first > tail || last <= tail) { // removes no state, or all of it
        return true;
    }
    const auto & state     = recurrent.cells[(size_t) recurrent.cells[(size_t) seq].tail];
    const auto   snapshots = access::hook(kv)->snapshots(seq);
    const auto   most      = std::min(snapshots.n, (int32_t) recurrent.n_rs_seq);
    if (snapshots.last == tail && tail + 1 - first <= most && state.seq_id.size() == 1 &&
        recurrent.rs_idx[(size_t) seq] == 0) {
        return true;
    }
    recurrent_stays(kv, seq, p0);
    return false;
}

bool llama_subkv::may_remove(const llama_kv_cache & base, const llama_kv_cache & swa, llama_seq_id seq, llama_pos p0,
                             llama_pos p1) {
    if (seq >= (llama_seq_id) access::n_seq_max(base)) {
        return true; // llama.cpp reports an invalid sequence
    }
    const auto [first, last] = positions(p0, p1);
    const llama_seq_id begin = seq < 0 ? 0 : seq, end = seq < 0 ? (llama_seq_id) access::n_seq_max(base) : seq + 1;
    for (llama_seq_id s = begin; s < end; ++s) {
        const llama_pos next = reader(base).max_pos_outside(s, first, last) + 1;
        const llama_pos gone = missing_swa_pos(base, swa, { { s, 0, std::min(first, next) }, { s, last, next } }, next);
        if (gone >= 0) {
            return access::hook(base)->report(format(
                "seq_rm: after removing positions from %d on of sequence %d its next token needs position %d in the "
                "layers of sliding windows, which later tokens have taken there; remove the whole sequence and decode "
                "it again",
                first, s, gone));
        }
    }
    return true;
}

llama_pos llama_subkv::missing_swa_pos(const llama_kv_cache & base, const llama_kv_cache & swa,
                                       const std::vector<piece> & pieces, llama_pos next) {
    std::vector<subkv::PosCell> held, there;
    for (const auto & [seq, first, last] : pieces) {
        reader(base).find_all(seq, std::max(first, next - (llama_pos) access::n_swa(swa)), last, held);
        llama_pos seen = -1; // one cell of an image is enough
        for (const auto & cell : held) {
            if (cell.pos == seen ||
                llama_hparams::is_masked_swa(access::n_swa(swa), access::swa_type(swa), cell.pos, next)) {
                continue;
            }
            seen = cell.pos;
            reader(swa).find_all(seq, cell.pos, cell.pos + 1, there);
            if (there.empty()) {
                return cell.pos;
            }
        }
    }
    return -1;
}

bool llama_subkv::may_copy(const llama_kv_cache & kv, const llama_memory_recurrent & recurrent, llama_seq_id src,
                           llama_seq_id dst) {
    if (src == dst) {
        return true;
    }
    for (const llama_seq_id seq : { src, dst }) {
        if (seq >= 0 && (size_t) seq < recurrent.rs_idx.size() && recurrent.rs_idx[(size_t) seq] != 0) {
            return access::hook(kv)->report(format(
                "seq_cp: recurrent state of its last token expected in sequence %d, a snapshot found that the next "
                "token begins with; decode one, or remove the whole sequence",
                seq));
        }
    }
    const auto & streams = access::seq_to_stream(kv);
    if (std::min(src, dst) < 0 || (size_t) std::max(src, dst) >= streams.size() || streams[src] != streams[dst] ||
        kv.seq_pos_max(dst) < 0) {
        return true; // llama.cpp reports invalid sequences; between streams, or if dst is empty, it becomes equal to src
    }
    const llama_pos last = std::max(kv.seq_pos_max(src), kv.seq_pos_max(dst)), state = recurrent.seq_pos_max(src);
    if (state != last) {
        return access::hook(kv)->report(format(
            "seq_cp: recurrent state of position %d expected in sequence %d, where the cells of sequence %d would end, "
            "that of %d found; remove all of sequence %d first",
            last, src, dst, state, dst));
    }
    return true;
}

bool llama_subkv::may_copy(const llama_kv_cache & base, const llama_kv_cache & swa, llama_seq_id src, llama_seq_id dst,
                           llama_pos p0, llama_pos p1) {
    const auto & streams = access::seq_to_stream(base);
    if ((size_t) std::max(src, dst) >= streams.size() || std::min(src, dst) < 0 || src == dst ||
        streams[src] != streams[dst]) {
        return true; // llama.cpp copies everything between streams, and reports an invalid sequence
    }
    const auto [first, last] = positions(p0, p1);
    // After a checkpoint one sequence may have own cells there, while both share coded cells.
    const llama_pos doubled = reader(swa).doubled(src, dst, first, last);
    if (doubled >= 0) {
        return access::hook(base)->report(format(
            "seq_cp: one token per position expected in the layers of sliding windows, sequence %d has its own at "
            "position %d where one of sequence %d would join it; remove it first",
            dst, doubled, src));
    }
    std::vector<subkv::PosCell> copied;
    reader(base).find_all(src, first, last, copied);
    if (copied.empty() || reader(base).max_pos_outside(src, first, last) < 0) {
        return true; // nothing is copied, or everything, and dst gets the same window as src
    }
    const llama_pos next = std::max(base.seq_pos_max(dst), copied.back().pos) + 1;
    const llama_pos gone = missing_swa_pos(base, swa, { { src, first, std::min(last, next) } }, next);
    if (gone < 0) {
        return true;
    }
    return access::hook(base)->report(format(
        "seq_cp: with positions from %d on of sequence %d the next token of sequence %d needs position %d in the "
        "layers of sliding windows, which later tokens have taken there; copy the whole sequence",
        first, src, dst, gone));
}

int32_t llama_subkv_checkpoint_min(const llama_context * ctx, int32_t pos_min, int32_t pos_max, int32_t n_swa) {
    auto *     memory = ctx->get_memory();
    const bool slides = llama_subkv::caches_of(memory).swa && llama_subkv::coded(memory);
    if (!slides) {
        return pos_min;
    }
    // llama-server removes the last token of a checkpoint, or continues behind pos_min if that is later.
    const bool one_back = pos_min <= std::max(0, pos_max - n_swa + 1);
    return one_back ? std::max(pos_min, pos_max - n_swa - 1) : pos_max;
}

void llama_subkv::recurrent_stays(const llama_kv_cache & kv, llama_seq_id seq, llama_pos p0) {
    access::hook(kv)->report(
        format("seq_rm: removing positions from %d on of sequence %d needs the recurrent state before them, which is "
               "not kept; remove the whole sequence and decode it again, or restore a state",
               p0, seq));
}

bool llama_subkv::in_step(const llama_kv_cache & kv, const llama_memory_recurrent & recurrent,
                          const llama_batch & batch) {
    std::set<llama_seq_id> seqs;
    for (int32_t i = 0; i < batch.n_tokens; ++i) {
        seqs.insert(batch.seq_id[i], batch.seq_id[i] + batch.n_seq_id[i]);
    }
    for (const llama_seq_id seq : seqs) {
        const llama_pos last = kv.seq_pos_max(seq);
        if (last != recurrent.seq_pos_max(seq)) {
            return access::hook(kv)->report(
                format("decode: recurrent state of position %d expected in sequence %d, where its cells end, that of "
                       "%d found; remove the whole sequence and decode it again",
                       last, seq, recurrent.seq_pos_max(seq)));
        }
    }
    return true;
}

bool llama_subkv::seq_cp(llama_kv_cache & kv, llama_seq_id src, llama_seq_id dst, llama_pos p0, llama_pos p1) {
    if (access::seq_to_stream(kv)[src] != access::seq_to_stream(kv)[dst]) { // llama.cpp then copies everything
        p0 = 0;
        p1 = -1;
    }
    const auto [first, last] = positions(p0, p1);
    if (llm_arch_is_hybrid(access::model(kv).arch) && src != dst && reader(kv).max_pos_outside(src, first, last) >= 0) {
        return access::hook(kv)->report(format(
            "seq_cp: all of sequence %d expected, since its recurrent state is of its last token, positions from %d on "
            "found; copy all of it",
            src, first));
    }
    if (!access::hook(kv)->copy_seq(src, dst, first, last, reader(kv))) {
        return false;
    }
    if (src != dst) {
        access::hook(kv)->forget_snapshots(dst);
    }
    return true;
}

bool llama_subkv::seq_div(llama_kv_cache & kv) {
    return access::hook(kv)->report(
        "seq_div: a subkv cache can shift positions, not divide them; remove the sequence and decode it again "
        "with new positions, or use an ordinary cache type (-ctk f16)");
}

// Returns true if not every tail can be removed (BasisSource::codes_later)
static bool keeps_tails(const subkv::CacheHook * hook) {
    return hook && hook->facts().n_rollback >= 0;
}

llama_pos llama_subkv::pos_min(const llama_memory_i & memory, llama_seq_id seq) {
    const llama_pos first = memory.seq_pos_min(seq);
    const auto *    hook  = hook_of(&memory);
    if (first < 0 || !keeps_tails(hook)) {
        return first;
    }
    const struct caches caches = caches_of(&memory);
    llama_pos           last   = hook->rollback_target(seq, reader(*caches.base)) - 1;
    // Callers that know of a truncated sliding window subtract its size from the position that they return to.
    if (caches.swa && caches.swa->get_size() < caches.base->get_size()) {
        last -= (llama_pos) access::hparams(*caches.base).n_swa;
    }
    return std::max(first, last);
}

uint32_t llama_subkv::n_rs_seq(const llama_context & ctx) {
    const uint32_t snapshots = ctx.get_cparams().n_rs_seq;
    const auto *   hook      = hook_of(ctx.get_memory());
    if (!keeps_tails(hook)) {
        return snapshots;
    }
    const auto n_rollback = (uint32_t) std::max(1, hook->facts().n_rollback);
    return caches_of(ctx.get_memory()).recurrent ? std::min(snapshots, n_rollback) : n_rollback;
}

llama_pos llama_subkv::resume(llama_memory_i * memory, llama_seq_id seq, llama_pos pos) {
    const struct caches caches = caches_of(memory);
    if (!coded(memory) || caches.recurrent || seq < 0 || seq >= (llama_seq_id) access::n_seq_max(*caches.base)) {
        return pos;
    }
    const auto & base = *caches.base;
    const auto   to   = access::hook(base)->resume(seq, pos, reader(base));
    // In the sliding half, the window of an earlier token may be gone, even that of the next one.
    const auto ready = [&](llama_pos at) { return missing_swa_pos(base, *caches.swa, { { seq, 0, at } }, at) < 0; };
    return !caches.swa || ready(to) ? to : ready(pos) ? pos : 0;
}

int32_t llama_subkv_resume(const llama_context * ctx, llama_seq_id seq, int32_t pos) {
    return llama_subkv::resume(*ctx, seq, pos);
}

bool llama_subkv_removable(const llama_context * ctx, llama_seq_id seq, int32_t pos) {
    return llama_subkv::removable(*ctx, seq, pos);
}

bool llama_subkv_refused(const llama_context * ctx, llama_seq_id seq, int32_t p0) {
    return llama_subkv::note_refused(*ctx, seq, p0);
}

bool llama_subkv::ready(const llama_kv_cache & kv, const std::vector<llama_ubatch> & ubatches) {
    if (rotation_pending(kv)) {
        return false;
    }
    std::vector<subkv::TokenDesc> tokens;
    for (const auto & ubatch : ubatches) {
        add_tokens(ubatch, tokens);
    }
    return access::hook(kv)->ready(tokens, reader(kv));
}
