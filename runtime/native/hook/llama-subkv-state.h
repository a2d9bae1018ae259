// llama-subkv-state.h: states of a memory with coded cells. Part of libllama.
#pragma once

#include "llama-subkv-memory.h"

#include <vector>

class llama_io_read_i;
class llama_io_write_i;

namespace llama_subkv {

// The state of coded cells (seq -1 for all sequences) and of the other parts of a memory (sliding, recurrent, indexer),
// complete or with the partial flag. A partial state does not include the coded cells, because the reader still has
// them and removes later ones. Reading checks all parts before any cell changes, and throws if the state does not
// belong to this memory. Errors that only the cells can show, and lack of free cells, leave all parts empty.
void state_write(const llama_memory_i & memory, llama_io_write_i & io, llama_seq_id seq, llama_state_seq_flags flags);
void state_read(llama_memory_i & memory, llama_io_read_i & io, llama_seq_id seq, llama_state_seq_flags flags);

// The base of writers that only count bytes and need no rows.
struct counts_only {
    virtual ~counts_only() = default;
};

class row_reader; // llama-subkv-body.h

void write_cells(const llama_kv_cache & kv, llama_io_write_i & io, llama_seq_id seq, llama_state_seq_flags flags);
void remove_cells(llama_kv_cache & kv, llama_seq_id seq); // -1 for all
void clear_parts(const caches & all, llama_seq_id seq);   // empties all parts
// Reads and checks the head of a state. Returns a reader of its cells, whose checksum has been compared.
row_reader read_body(llama_kv_cache & kv, llama_io_read_i & io, llama_seq_id seq);

using parts = std::vector<llama_memory_i *>;
parts other_parts(const caches & all);
parts in_state(const caches & all, llama_state_seq_flags flags);

// Where releases of llama.cpp differ (releases.h).
bool has_cell_ext(const llama_kv_cache & kv); // states hold a llama_kv_cell_ext for each cell
// Called by llama_kv_cache::state_read_sinfo.
void read_cells(llama_kv_cache & kv, llama_io_read_i & io, llama_seq_id seq, llama_state_seq_flags flags,
                llama_kv_cache::slot_info_vec_t * out, const llama_kv_cache::slot_info_vec_t * in);

} // namespace llama_subkv
