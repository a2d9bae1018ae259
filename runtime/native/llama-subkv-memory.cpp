// llama-subkv-memory.cpp: finds the K/V caches of a llama.cpp memory. Part of libllama.
#include "llama-subkv.h"

#include "llama-kv-cache-dsa-iswa.h"
#include "llama-kv-cache-dsa.h"
#include "llama-kv-cache-iswa.h"
#include "llama-kv-cache-msa.h"
#include "llama-memory-hybrid-idx.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-hybrid.h"
#include "llama-memory-recurrent.h"
#include "llama-impl.h"
#include "llama-model.h"

#include <cstdlib>
#include <cstring>
#include <stdexcept>

//
// memories: a K/V cache, one of full attention and one of sliding windows, either beside recurrent state; one of latent
// attention beside an indexer's keys
//

llama_subkv::caches llama_subkv::caches_of(const llama_memory_i * memory) {
    if (const auto * indexed = dynamic_cast<const llama_memory_hybrid_idx *>(memory)) {
        return { indexed->get_mem_attn(), nullptr, indexed->get_mem_idx(), indexed->get_mem_recr() };
    }
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
    if (const auto * dsa_iswa = dynamic_cast<const llama_kv_cache_dsa_iswa *>(memory)) {
        return { dsa_iswa->get_dsa()->get_mla(), dsa_iswa->get_swa(), dsa_iswa->get_dsa()->get_lid(), recurrent };
    }
    if (const auto * msa = dynamic_cast<const llama_kv_cache_msa *>(memory)) {
        return { msa->get_base(), nullptr, msa->get_idx(), recurrent };
    }
    // a memory is const where its state is written; its owner has it as llama_memory_i *
    return { const_cast<llama_kv_cache *>(dynamic_cast<const llama_kv_cache *>(memory)), nullptr, nullptr, recurrent };
}

const llama_kv_cache_context * llama_subkv::base_of(const llama_memory_context_i * mctx) {
    if (auto * hybrid = dynamic_cast<const llama_memory_hybrid_context *>(mctx)) {
        return hybrid->get_attn();
    }
    if (auto * hybrid_iswa = dynamic_cast<const llama_memory_hybrid_iswa_context *>(mctx)) {
        return hybrid_iswa->get_attn()->get_base();
    }
    if (auto * iswa = dynamic_cast<const llama_kv_cache_iswa_context *>(mctx)) {
        return iswa->get_base();
    }
    if (auto * dsa = dynamic_cast<const llama_kv_cache_dsa_context *>(mctx)) {
        return dsa->get_mla();
    }
    if (auto * dsa_iswa = dynamic_cast<const llama_kv_cache_dsa_iswa_context *>(mctx)) {
        return dsa_iswa->get_dsa()->get_mla();
    }
    if (auto * msa = dynamic_cast<const llama_kv_cache_msa_context *>(mctx)) {
        return msa->get_base();
    }
    return static_cast<const llama_kv_cache_context *>(mctx);
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
            if (a.seq_pos_get(seq) != b.seq_pos_get(seq)) {
                return false;
            }
        }
    }
    return true;
}

bool llama_subkv::same_slots(const llama_kv_cache & kv, const llama_kv_cache::slot_info_vec_t & slots,
                             const llama_kv_cache::slot_info_vec_t & of_index) {
    if (!coded(kv)) {
        return true;
    }
    bool same = slots.size() == of_index.size();
    for (size_t i = 0; same && i < slots.size(); ++i) {
        same = slots[i].strm == of_index[i].strm && slots[i].idxs == of_index[i].idxs;
    }
    if (!same) {
        kv.subkv_hook->report(
            "decode: an indexer's keys in the cells of their tokens expected, others found; clear the "
            "cache and decode again");
    }
    return same;
}
