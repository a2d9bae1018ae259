// releases.h: members of llama.cpp that releases before 0.3.36 lack (cmake/canary.py). Part of libllama.
#pragma once

#include "llama-cparams.h"
#include "llama-hparams.h"
#include "llama-kv-cache.h"
#include "llama-subkv-state.h"

#include <set>
#include <utility>

// The layer that llama.cpp appends for a router, which is not in the file, or -1 if there is none, as in all models
// before 0.3.35.
template <typename Hparams> auto router_layer(const Hparams & hparams, int) -> decltype(hparams.router_layer) {
    return hparams.router_layer;
}

template <typename Hparams> int32_t router_layer(const Hparams &, long) {
    return -1;
}

// Whether a shift rotates the keys of a layer; before 0.3.35 those of all.
template <typename Hparams> auto has_rope(const Hparams & hparams, uint32_t il, int) -> decltype(hparams.has_rope(il)) {
    return hparams.has_rope(il);
}

template <typename Hparams> bool has_rope(const Hparams &, uint32_t, long) {
    return true;
}

// Elements of a layer's heads that RoPE rotates; before 0.3.35 the same in all layers.
template <typename Hparams> auto n_rot_of(const Hparams & hparams, uint32_t il, int) -> decltype(hparams.n_rot(il)) {
    return hparams.n_rot(il);
}

template <typename Hparams> uint32_t n_rot_of(const Hparams & hparams, uint32_t, long) {
    return hparams.n_rot;
}

#if LLAMA_STATE_SEQ_VERSION >= 3

inline const std::set<std::pair<llama_pos, uint32_t>> & cells_of(const llama_kv_cells & cells, llama_seq_id seq) {
    return cells.seq_pos_get(seq);
}

inline bool llama_subkv::has_cell_ext(const llama_kv_cache & kv) {
    return kv.has_cell_ext();
}

inline void llama_subkv::read_cells(llama_kv_cache & kv, llama_io_read_i & io, llama_seq_id seq,
                                    llama_state_seq_flags flags, llama_kv_cache::slot_info_vec_t * out,
                                    const llama_kv_cache::slot_info_vec_t * in) {
    access::state_read_sinfo(kv, io, seq, flags, out, in);
}

inline llama_token token_of(const llama_kv_cell_ext & ext) {
    return ext.tok;
}

inline int rope_scaling_of(const llama_cparams & cparams) {
    return (int) cparams.rope_scaling_type;
}

#else

// The (position, cell) pairs of a sequence, by position.
inline std::set<std::pair<llama_pos, uint32_t>> cells_of(const llama_kv_cells & cells, llama_seq_id seq) {
    std::set<std::pair<llama_pos, uint32_t>> found;
    for (uint32_t i = 0; i < cells.size(); ++i) {
        if (!cells.is_empty(i) && cells.seq_has(i, seq)) {
            found.emplace(cells.pos_get(i), i);
        }
    }
    return found;
}

inline bool llama_subkv::has_cell_ext(const llama_kv_cache & kv) {
    return access::hparams(kv).n_pos_per_embd() > 1;
}

// An indexer's keys search for cells of their own; same_cells compares them.
inline void llama_subkv::read_cells(llama_kv_cache & kv, llama_io_read_i & io, llama_seq_id seq,
                                    llama_state_seq_flags flags, llama_kv_cache::slot_info_vec_t *,
                                    const llama_kv_cache::slot_info_vec_t *) {
    kv.state_read(io, seq, flags);
}

inline llama_token token_of(const llama_kv_cell_ext &) {
    return LLAMA_TOKEN_NULL; // cells keep no tokens
}

inline int rope_scaling_of(const llama_cparams &) {
    return 0; // the factors of the other members follow from it
}

#endif
