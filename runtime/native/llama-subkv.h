// llama-subkv.h: what the patched llama.cpp sources call. Compiled into libllama; every function does nothing unless
// the cache has a hook. See hook.h.
#pragma once

#include "llama-kv-cache.h"

#include "hook.h"

#include <array>
#include <vector>

class llama_io_read_i;
class llama_io_write_i;
class llm_graph_input_attn_k;
class llm_graph_input_attn_k_dsa;
class llm_graph_input_attn_kv;
class llm_graph_input_attn_kv_iswa;
class llm_graph_input_i;
class llm_graph_result;
class llama_kv_cache_iswa;
class llama_memory_hybrid;
class llama_memory_recurrent;
struct llama_cparams;
struct llama_model_loader;
struct llama_subkv_usage;
struct llm_graph_context;

struct llama_subkv {
    using layer_filter = llama_kv_cache::layer_filter_cb;
    using layer_reuse  = llama_kv_cache::layer_reuse_cb;

    // llama_kv_cache: called by the constructor before anything is allocated. type_k: changed for an indexer's keys
    static void init(llama_kv_cache & kv, ggml_type & type_k, ggml_type type_v, bool offload, uint32_t kv_size,
                     const layer_filter & filter, const layer_reuse & reuse, bool shares);
    // llama_context: called when its memory is there, which may be no K/V cache
    static void made(const llama_context & ctx);
    // llama_context: do tokens of the next batches see no later ones?
    static void         set_causal(llama_memory_i * memory, bool causal);
    static size_t       row_bytes(const llama_kv_cache & kv, uint32_t il, bool value);
    static const char * type_name(const llama_kv_cache & kv, ggml_type type); // of K or V, for the log
    // Adds the bytes beside the cells.
    static void add_bytes(const llama_kv_cache & kv, std::map<ggml_backend_buffer_type_t, size_t> & bytes);
    // The file that a model is loaded from, for SUBKV=auto, and metadata that its user has replaced.
    static void loaded(llama_model & model, const std::string & path, const llama_model_loader & loader);

    // What a context answers about the removal of a tail, as of a recurrent one: positions up to pos_min must stay; the last
    // n_rs_seq tokens of a sequence can always be removed.
    static llama_pos pos_min(llama_memory_i & memory, llama_seq_id seq);
    static uint32_t  n_rs_seq(const llama_context & ctx);

    static void clear(llama_kv_cache & kv);
    static bool seq_rm(llama_kv_cache & kv, llama_seq_id seq, llama_pos p0, llama_pos p1); // false: refused
    static bool seq_cp(llama_kv_cache & kv, llama_seq_id src, llama_seq_id dst, llama_pos p0, llama_pos p1); // ditto
    static void seq_keep(llama_kv_cache & kv, llama_seq_id seq);
    static bool refuses(const llama_kv_cache & kv, const char * what); // true: coded cache, reason reported
    static bool can_shift(const llama_kv_cache & kv);
    static bool seq_add(llama_kv_cache & kv, llama_seq_id seq, llama_pos p0, llama_pos p1, llama_pos shift); // ditto
    static bool carried_out(const llama_kv_cache & kv); // the last seq_cp, seq_add or seq_div: the other half follows
    static void shifted(const llama_kv_cache & kv);     // the graph of build_shift has run
    static bool rotation_pending(const llama_kv_cache & kv); // it has not, or not to its end; reports that
    // While it lives no abort callback stops a shift of this cache, half or whole, of a coded context, if layers of it are
    // ordinary: after an aborted shift it is unknown which of these were rotated, and the next one would rotate them again.
    class uninterrupted {
    public:
        uninterrupted(llama_context & ctx, const llama_kv_cache & kv);
        ~uninterrupted();
        uninterrupted(const uninterrupted &)             = delete;
        uninterrupted & operator=(const uninterrupted &) = delete;

    private:
        llama_context * ctx       = nullptr;
        bool (*stop)(void * data) = nullptr;
        void * data               = nullptr;
    };
    // llama_kv_cache::build_graph_shift; false: not a coded layer
    static bool build_shift(const llama_kv_cache & kv, const llama_cparams & cparams, llm_graph_result & res,
                            ggml_tensor * k_shift, uint32_t il);

    // llama_memory_hybrid: both halves change or none. may_remove asks what seq_rm would answer, and whether llama.cpp has
    // the snapshot that its recurrent state would go back to; an end p1 behind everything becomes open, for which alone
    // llama.cpp forgets the snapshot that the next token would begin with; may_copy: whether neither state has gone back,
    // of which a copy would not know, and the copied one is of where dst's cells would end; recurrent_stays reports that
    // the other half refused; in_step: no half is behind the other in a sequence of this batch; keep_alone: llama.cpp
    // keeps the cells of sequences that have streams of their own, not their recurrent state but the snapshot of it that
    // a removed tail chose.
    static bool may_remove(const llama_kv_cache & kv, const llama_memory_recurrent & recurrent, llama_seq_id seq,
                           llama_pos p0, llama_pos & p1);
    // llama_kv_cache_iswa: ditto, and whether the sliding half still has what the window of the next token needs.
    static bool may_remove(const llama_kv_cache & base, const llama_kv_cache & swa, llama_seq_id seq, llama_pos p0,
                           llama_pos p1);
    // Slots of a batch in the sliding half. Trying them out, llama.cpp removes for good what a later ubatch lets slide away,
    // also of the window of an earlier one.
    static llama_kv_cache::slot_info_vec_t prepare(const llama_kv_cache & base, llama_kv_cache & swa,
                                                   const std::vector<llama_ubatch> & ubatches);
    static bool may_copy(const llama_kv_cache & base, const llama_kv_cache & swa, llama_seq_id src, llama_seq_id dst,
                         llama_pos p0, llama_pos p1);
    static bool may_copy(const llama_kv_cache & kv, const llama_memory_recurrent & recurrent, llama_seq_id src,
                         llama_seq_id dst);
    static void keep_alone(llama_memory_i & attn, llama_memory_i & recurrent, llama_seq_id seq);
    static void recurrent_stays(const llama_kv_cache & kv, llama_seq_id seq, llama_pos p0);
    static bool in_step(const llama_kv_cache & kv, const llama_memory_recurrent & recurrent,
                        const std::vector<llama_ubatch> & ubatches);

    static bool ready(const llama_kv_cache & kv, const std::vector<llama_ubatch> & ubatches);

    // A state of a coded cache (seq -1: of all sequences) in place of llama.cpp's, whole or with its flag partial; false:
    // not coded, or already inside. Reading throws when it cannot be this cache's; what it would replace is then
    // unchanged, or empty.
    static bool state_write(const llama_kv_cache & kv, llama_io_write_i & io, llama_seq_id seq,
                            llama_state_seq_flags flags);
    static bool state_read(llama_kv_cache & kv, llama_io_read_i & io, llama_seq_id seq, llama_state_seq_flags flags,
                           llama_kv_cache::slot_info_vec_t *       sinfos_out,
                           const llama_kv_cache::slot_info_vec_t * sinfos_in);
    // The same of coded cells and what lies beside them. A partial state leaves the coded cells out: who reads it still has those of then, and removes
    // later ones. What is wrong with any part is known before any cell is touched, but for what only cells can tell, and
    // want of room, which leave all parts empty. lose() leaves them so when what comes behind them fails.
    static bool state_write(const llama_memory_i & memory, llama_io_write_i & io, llama_seq_id seq,
                            llama_state_seq_flags flags);
    static bool state_read(llama_memory_i & memory, llama_io_read_i & io, llama_seq_id seq,
                           llama_state_seq_flags flags);
    static void lose(llama_memory_i & memory, llama_seq_id seq);
    // Carries out copies between streams and shifts that llama.cpp has put off until the next decode: before cells are read
    // or set. Throws when it cannot.
    static void settle(llama_context & ctx);

    // Zeroes cells of one stream's tensor; false: not a coded layer.
    static bool clear_cells(llama_kv_cache & kv, int32_t il, bool value, ggml_tensor * t,
                            const std::vector<uint32_t> & cells);

    // Base of writers that only count bytes: no rows are made for them.
    struct counts_only {
        virtual ~counts_only() = default;
    };

    // A stored state: everything that decides which bytes a token leaves in it, `content` being the model's; whether that
    // is all (no LoRA); how long a tail of a restored sequence can be removed without a checkpoint,
    // -1: any.
    static std::string state_identity(const llama_context & ctx, const std::string & content);
    static bool        storable(const llama_context & ctx);
    static int64_t     n_removable(const llama_context & ctx);

    static llama_subkv_usage usage_of(llama_context & ctx); // what its cache takes

    struct caches { // of full attention, of sliding windows, of an indexer's keys; recurrent state; nullptr: none
        llama_kv_cache * base;
        llama_kv_cache * swa;
        llama_kv_cache * index;
        llama_memory_i * recurrent;

        std::array<const llama_kv_cache *, 3> all() const { return { base, swa, index }; }
    };

    static caches                         caches_of(const llama_memory_i * memory);
    static const llama_kv_cache_context * base_of(const llama_memory_context_i * mctx); // of full attention

    // the cache, or the full-attention half of an iswa cache, holds coefficients
    static bool coded(llama_memory_i * memory);
    static bool coded(const llama_kv_cache & kv);

    // llm_graph_context::build_attn. An observer first sees q, k and v after RoPE, before the Hadamard rotation
    // of quantized caches. Then all of a coded layer's, up to the output projection; null: not coded, upstream goes on.
    // chosen: the cells that a token attends to, as in AttnBuild, or a mask that hides the others; nullptr: all.
    static ggml_tensor * attend(const llm_graph_context & g, const llm_graph_input_attn_kv & inp, ggml_tensor * wo,
                                ggml_tensor * wo_b, ggml_tensor * wo_s, ggml_tensor * q, ggml_tensor * k,
                                ggml_tensor * v, ggml_tensor * kq_b, ggml_tensor * sinks, ggml_tensor * v_mla,
                                float scale, int il, ggml_tensor * chosen = nullptr);
    static ggml_tensor * attend(const llm_graph_context & g, const llm_graph_input_attn_kv_iswa & inp, ggml_tensor * wo,
                                ggml_tensor * wo_b, ggml_tensor * wo_s, ggml_tensor * q, ggml_tensor * k,
                                ggml_tensor * v, ggml_tensor * kq_b, ggml_tensor * sinks, ggml_tensor * v_mla,
                                float scale, int il);
    static ggml_tensor * attend(const llm_graph_context & g, const llm_graph_input_attn_k & inp, ggml_tensor * wo,
                                ggml_tensor * wo_b, ggml_tensor * wo_s, ggml_tensor * q, ggml_tensor * k,
                                ggml_tensor * v, ggml_tensor * kq_b, ggml_tensor * sinks, ggml_tensor * v_mla,
                                float scale, int il, ggml_tensor * chosen = nullptr);
    // Of the latent layer's cells that an indexer has chosen for each token.
    static ggml_tensor * attend(const llm_graph_context & g, const llm_graph_input_attn_k_dsa & inp, ggml_tensor * wo,
                                ggml_tensor * wo_b, ggml_tensor * wo_s, ggml_tensor * q, ggml_tensor * k,
                                ggml_tensor * v, ggml_tensor * kq_b, ggml_tensor * sinks, ggml_tensor * v_mla,
                                ggml_tensor * top_k, float scale, int il);
    // For a model whose graph makes the masks of its KV heads by itself: an observer first, and whether the
    // layer is coded; a tensor of the shape that its cache would have, for views that nobody computes.
    static bool sees(const llm_graph_context & g, const llama_kv_cache_context * mctx, ggml_tensor * q, ggml_tensor * k,
                     ggml_tensor * v, int il);
    static ggml_tensor * unread(const llm_graph_context & g, const ggml_tensor * rows, int64_t n_kv, int64_t n_stream);
    template <typename Input>
    static ggml_tensor * attend_kv(const llm_graph_context & g, const Input & inp, const llama_kv_cache_context * mctx,
                                   ggml_tensor * wo, ggml_tensor * wo_b, ggml_tensor * wo_s, ggml_tensor * q,
                                   ggml_tensor * k, ggml_tensor * v, ggml_tensor * mask, ggml_tensor * chosen,
                                   ggml_tensor * sinks, float scale, int il);
    static bool          coded(const llama_kv_cache_context * mctx, int il);
    static bool          coded(const llama_kv_cache_context * mctx); // any layer
    static void          observe(const llm_graph_context & g, const llama_kv_cache_context * mctx, ggml_tensor * q,
                                 ggml_tensor * k, ggml_tensor * v, float scale, int il);
    static ggml_tensor * build_attn(const llm_graph_context & g, const llama_kv_cache_context * mctx, ggml_tensor * q,
                                    ggml_tensor * k, ggml_tensor * v, ggml_tensor * k_idxs, ggml_tensor * v_idxs,
                                    ggml_tensor * mask, ggml_tensor * chosen, ggml_tensor * sinks, float scale, int il);
    // The same where values are the first elements of keys; v_mla [d_v, size of a head's output, n_head] follows.
    static ggml_tensor * build_attn_latent(const llm_graph_context & g, const llama_kv_cache_context * mctx,
                                           ggml_tensor * q, ggml_tensor * k, ggml_tensor * k_idxs, ggml_tensor * mask,
                                           ggml_tensor * chosen, ggml_tensor * sinks, ggml_tensor * v_mla, float scale,
                                           int il);

    class reader;
    class tiles;
    class cursor;
    class row_writer;
    class row_reader;
    class graph_input;
    class shift_input;
    static void state_read_cells(llama_kv_cache & kv, row_reader & body, llama_seq_id seq, llama_state_seq_flags flags,
                                 llama_kv_cache::slot_info_vec_t *       sinfos_out,
                                 const llama_kv_cache::slot_info_vec_t * sinfos_in);
    static void state_read_rest(llama_kv_cache & kv, row_reader & body, llama_seq_id seq,
                                const std::vector<uint64_t> & moves); // the window, at its end
    using parts = std::vector<llama_memory_i *>;
    static parts beside(const caches & all);
    static parts in_state(const caches & all, llama_state_seq_flags flags);
    // An indexer names cells by where its keys are: is this a cache of such keys, and are these in the cells of their tokens,
    // and will they be?
    static bool      is_index(const llama_kv_cache & kv);
    static ggml_type index_type(const llama_kv_cache & kv, ggml_type type); // as SUBKV_INDEXER says, else `type`
    static bool      same_cells(const llama_kv_cache & kv, const llama_kv_cache & index);
    static bool      same_slots(const llama_kv_cache & kv, const llama_kv_cache::slot_info_vec_t & slots,
                                const llama_kv_cache::slot_info_vec_t & of_index);

    struct piece { // positions [first, last) of a sequence
        llama_seq_id seq;
        llama_pos    first, last;
    };

    // A position of the pieces that the sliding window of the token behind them, at `next`, has and the sliding half no
    // longer; -1: none.
    static llama_pos          slid_away(const llama_kv_cache & base, const llama_kv_cache & swa,
                                        const std::vector<piece> & pieces, llama_pos next);
    static graph_input *      inputs(const llm_graph_context & g, const llama_kv_cache_context * mctx);
    static subkv::CacheHook * hook_of(llama_memory_i * memory, size_t * bytes_stock, size_t * bytes_coded);
    static bool               rows(llama_memory_i * memory, int32_t il, const subkv::rows_fn & use);
};
