// llama-subkv-sequences.h: operations on sequences of coded cells. Coded cells change together with the other parts of
// the memory, or nothing changes. Part of libllama.
#pragma once

#include "llama-subkv-memory.h"

#include <limits>
#include <vector>

class llama_memory_recurrent;
struct llama_subkv_text;

namespace llama_subkv {

// If not every tail can be removed, the context answers like one of a recurrent model: a sequence must keep positions
// up to pos_min, and can always remove its last n_rs_seq tokens.
llama_pos pos_min(const llama_memory_i & memory, llama_seq_id seq);
uint32_t  n_rs_seq(const llama_context & ctx);
// As CacheHook::resume, but it returns `pos` if recurrent state or a sliding window cannot return to an earlier
// position, and 0 if a sliding half lacks cells that the token at `pos` needs.
llama_pos resume(llama_memory_i * memory, llama_seq_id seq, llama_pos pos);
// The same for llama_subkv_resume. It returns at most the first position of a refused operation, and 0 if the tail
// cannot be removed.
llama_pos resume(const llama_context & ctx, llama_seq_id seq, llama_pos pos);
bool      removable(const llama_context & ctx, llama_seq_id seq, llama_pos pos);

// The notes of a decorated memory (memory.cpp).
constexpr llama_pos NO_POSITION = std::numeric_limits<llama_pos>::max();

// Where the rows of a sequence were evaluated. note_text sets this for a sequence that gets the state of a known text.
llama_subkv_text text_of(const llama_context & ctx, llama_seq_id seq);
void             note_text(const llama_context & ctx, llama_seq_id seq, llama_subkv_text text);
// llama_subkv_refused
bool note_refused(const llama_context & ctx, llama_seq_id seq, llama_pos p0);
// Returns true if an operation on the sequence was refused. The caller now knows that, and the tokens can be decoded
// again.
bool take_refusal(const llama_context & ctx, llama_seq_id seq);

// Returns false if the operation is rejected, and reports the reason.
bool seq_rm(llama_kv_cache & kv, llama_seq_id seq, llama_pos p0, llama_pos p1);
bool seq_cp(llama_kv_cache & kv, llama_seq_id src, llama_seq_id dst, llama_pos p0, llama_pos p1);
bool seq_add(llama_context & ctx, const caches & parts, llama_seq_id seq, llama_pos p0, llama_pos p1, llama_pos shift);
bool seq_div(llama_kv_cache & kv);
// Gives a sequence cells of its own for those at positions [first, last) that it shares. Returns false if too few cells
// are free, or memory is short, and reports it.
bool unshare(llama_context & ctx, const caches & parts, llama_seq_id seq, llama_pos first, llama_pos last);
bool can_shift(const llama_kv_cache & kv);
// Returns true if the graph that rotates shifted keys has not run completely, and reports it.
bool rotation_pending(const llama_kv_cache & kv);

// A model with recurrent state. may_remove has the result of seq_rm, and checks that llama.cpp has the snapshot of the
// recurrent state. It makes an end p1 behind the last position open (-1), because llama.cpp discards the snapshot for
// the next token only then.
bool may_remove(const llama_kv_cache & kv, const llama_memory_recurrent & recurrent, llama_seq_id seq, llama_pos p0,
                llama_pos & p1);
// Neither recurrent state has been reset to a snapshot, which a copy would lose, and the copied state belongs to the
// position where the cells of dst would end.
bool may_copy(const llama_kv_cache & kv, const llama_memory_recurrent & recurrent, llama_seq_id src, llama_seq_id dst);
// Reports that the recurrent half rejected a removal.
void recurrent_stays(const llama_kv_cache & kv, llama_seq_id seq, llama_pos p0);
// Both halves are at the same position in every sequence of the batch.
bool in_step(const llama_kv_cache & kv, const llama_memory_recurrent & recurrent, const llama_batch & batch);

// The same for a model with sliding windows. These functions also check that the sliding half still has the window of
// the next token.
bool may_remove(const llama_kv_cache & base, const llama_kv_cache & swa, llama_seq_id seq, llama_pos p0, llama_pos p1);
bool may_copy(const llama_kv_cache & base, const llama_kv_cache & swa, llama_seq_id src, llama_seq_id dst, llama_pos p0,
              llama_pos p1);

bool ready(const llama_kv_cache & kv, const std::vector<llama_ubatch> & ubatches); // as CacheHook::ready

struct piece { // positions [first, last) of a sequence
    llama_seq_id seq;
    llama_pos    first, last;
};

// A position of the pieces that is inside the sliding window of the next token (at `next`), but no longer in the
// sliding half, or -1 if there is none.
llama_pos missing_swa_pos(const llama_kv_cache & base, const llama_kv_cache & swa, const std::vector<piece> & pieces,
                          llama_pos next);

} // namespace llama_subkv
