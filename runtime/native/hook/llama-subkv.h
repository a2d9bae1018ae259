// llama-subkv.h: the functions that the patched llama.cpp sources call. Compiled into libllama; every function does
// nothing unless the cache has a hook. See hook.h.
#pragma once

#include "llama-kv-cache.h"

#include "file_stamp.h"
#include "hook.h"

#include <array>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

class llama_io_read_i;
class llama_io_write_i;
class llm_graph_input_attn_k;
class llm_graph_input_attn_k_dsa;
class llm_graph_input_attn_kv;
class llm_graph_input_attn_kv_iswa;
class llm_graph_input_i;
class llm_graph_result;
class llama_memory_recurrent;
struct llama_cparams;
struct llama_model_loader;
struct llama_subkv_text;
struct llama_subkv_usage;
struct llm_graph_context;

struct llama_subkv {
    // The parts of a context's memory; nullptr: it has none.
    struct caches {
        llama_kv_cache * base;      // layers of full attention
        llama_kv_cache * swa;       // layers with a sliding window
        llama_kv_cache * index;     // keys of an indexer
        llama_memory_i * recurrent; // recurrent state

        std::array<const llama_kv_cache *, 3> all() const { return { base, swa, index }; }
        std::vector<subkv::CacheHook *>       hooks() const; // those of the caches that have one
    };

    using layer_filter = llama_kv_cache::layer_filter_cb;
    using layer_reuse  = llama_kv_cache::layer_reuse_cb;

    // The request of a context's parameters, while llama_init_from_model creates the context. Replaces subkv's types by
    // ggml's, and ends requests of the C interface with the call.
    class request {
    public:
        explicit request(llama_context_params & params);
        ~request();
        request(const request &)             = delete;
        request & operator=(const request &) = delete;

        // Of libsubkv, which it loads if the context or SUBKV requests its caches. nullptr: the context is ordinary.
        // Throws if the request cannot be met.
        static subkv::cache_new_fn cache_new();
        static subkv::CacheRequest asked(const llama_model & model); // by the types of the parameters

        // Of the context's cache of rows, which llama.cpp creates before its indexer's and before its sliding half
        static thread_local bool rows_coded, rows_created;
        static thread_local bool sliding_f16; // llama_subkv_keep_sliding_f16
    };

    // Called by the constructor of llama_kv_cache before any allocation. Changes the types of sliding layers beside coded
    // ones, and type_k of an indexer's keys.
    static void init(llama_kv_cache & kv, ggml_type & type_k, ggml_type & type_v, bool offload, uint32_t kv_size,
                     const layer_filter & filter, const layer_reuse & reuse, bool shares);
    // Creates the memory of a context. If its cells have a hook, the memory is decorated (class memory); if it has no
    // K/V cache, a request for a coded cache is answered here.
    static std::unique_ptr<llama_memory_i> create_memory(llama_context & ctx, const llama_memory_params & params);
    static size_t row_bytes(const llama_kv_cache & kv, uint32_t il, bool value); // 0: not coded
    // Types of a layer's K and V tensors: bytes if they are coded, else the given ones.
    static std::pair<ggml_type, ggml_type> types(const llama_kv_cache & kv, uint32_t il, ggml_type type_k,
                                                 ggml_type type_v);
    static const char * type_name(const llama_kv_cache & kv, ggml_type type); // of K or V, for the log
    struct model_source {
        std::string path;      // of its file, or the first one; "": from memory
        std::string overrides; // of metadata, by the user

        std::vector<subkv::FileStamp> files; // as they were opened to load the model
    };

    // Records the source of a model that is being loaded; source_of returns it.
    static void record_source(const llama_model & model, const std::string & path, const llama_model_loader & loader);
    static const model_source & source_of(const llama_model & model);

    // Where not every tail can be removed, the context's answers about that, as for a recurrent model: a sequence must keep
    // positions up to pos_min; it can always remove its last n_rs_seq tokens.
    static llama_pos pos_min(const llama_memory_i & memory, llama_seq_id seq);
    static uint32_t  n_rs_seq(const llama_context & ctx);
    // As CacheHook::resume; `pos` where recurrent state or a sliding window cannot return to an earlier position, 0 where
    // a sliding half has lost cells that the token at `pos` needs.
    static llama_pos resume(llama_memory_i * memory, llama_seq_id seq, llama_pos pos);
    // llama_subkv_resume: the same; where a program believes in a refused operation, not behind its first position; 0 if
    // the tail cannot be removed.
    static llama_pos resume(const llama_context & ctx, llama_seq_id seq, llama_pos pos);
    static bool      removable(const llama_context & ctx, llama_seq_id seq, llama_pos pos);

    // The notes of a decorated memory (memory.cpp). text_of: where a sequence's rows were evaluated. note_text: for a
    // sequence that has the state of a known text. note_refused: as llama_subkv_refused. take_refusal: true: an operation on the sequence was refused, whose
    // caller now knows that; its tokens can be decoded again.
    static constexpr llama_pos NO_POSITION = std::numeric_limits<llama_pos>::max();

    static llama_subkv_text text_of(const llama_context & ctx, llama_seq_id seq);
    static void             note_text(const llama_context & ctx, llama_seq_id seq, llama_subkv_text text);
    static bool             note_refused(const llama_context & ctx, llama_seq_id seq, llama_pos p0);
    static bool             take_refusal(const llama_context & ctx, llama_seq_id seq);

    // Operations on sequences: coded cells change with the other parts of the memory, or nothing changes. false: rejected,
    // and the reason is reported.
    static bool seq_rm(llama_kv_cache & kv, llama_seq_id seq, llama_pos p0, llama_pos p1);
    static bool seq_cp(llama_kv_cache & kv, llama_seq_id src, llama_seq_id dst, llama_pos p0, llama_pos p1);
    static bool seq_add(llama_context & ctx, const caches & parts, llama_seq_id seq, llama_pos p0, llama_pos p1,
                        llama_pos shift);
    static bool seq_div(llama_kv_cache & kv);
    // Gives a sequence cells of its own for those at positions [first, last) that it shares. false: too few cells are
    // free, or memory is short; reports it.
    static bool unshare(llama_context & ctx, const caches & parts, llama_seq_id seq, llama_pos first, llama_pos last);
    static bool can_shift(const llama_kv_cache & kv);
    static bool
    rotation_pending(const llama_kv_cache & kv); // true: build_shift's graph has not run completely; reports it
    // llama_kv_cache::build_graph_shift; false: not a coded layer
    static bool build_shift(const llama_kv_cache & kv, const llama_cparams & cparams, llm_graph_result & res,
                            ggml_tensor * k_shift, uint32_t il);

    // Beside recurrent state. may_remove: the result that seq_rm would have; also checks that llama.cpp has the snapshot
    // for the recurrent state. It makes an end p1 behind the last position open, because llama.cpp discards the snapshot
    // for the next token only then. may_copy: neither recurrent state has been reset to a snapshot (a copy would lose
    // this), and the copied state belongs to the position where dst's cells would end. recurrent_stays: reports that the
    // recurrent half rejected a removal. in_step: both halves are at the same position in every sequence of the batch.
    static bool may_remove(const llama_kv_cache & kv, const llama_memory_recurrent & recurrent, llama_seq_id seq,
                           llama_pos p0, llama_pos & p1);
    static bool may_copy(const llama_kv_cache & kv, const llama_memory_recurrent & recurrent, llama_seq_id src,
                         llama_seq_id dst);
    static void recurrent_stays(const llama_kv_cache & kv, llama_seq_id seq, llama_pos p0);
    static bool in_step(const llama_kv_cache & kv, const llama_memory_recurrent & recurrent, const llama_batch & batch);
    // Beside sliding windows: the same; also checks that the sliding half still has the window of the next token.
    static bool may_remove(const llama_kv_cache & base, const llama_kv_cache & swa, llama_seq_id seq, llama_pos p0,
                           llama_pos p1);
    static bool may_copy(const llama_kv_cache & base, const llama_kv_cache & swa, llama_seq_id src, llama_seq_id dst,
                         llama_pos p0, llama_pos p1);

    static bool ready(const llama_kv_cache & kv, const std::vector<llama_ubatch> & ubatches);
    // llama_context::graph_compute: the status of a graph that has run; a failure if coded nodes lacked memory.
    static ggml_status computed(llama_context & ctx, ggml_status status);

    // The state of coded cells (seq -1: all sequences) and of the other parts of a memory (sliding, recurrent, indexer),
    // complete or with the partial flag. A partial state does not include the coded cells: the reader still has them and
    // removes later ones. Reading throws if the state does not belong to this memory; it checks all parts before any
    // cell changes. Errors that only the cells can show, and lack of free cells, leave all parts empty.
    static void state_write(const llama_memory_i & memory, llama_io_write_i & io, llama_seq_id seq,
                            llama_state_seq_flags flags);
    static void state_read(llama_memory_i & memory, llama_io_read_i & io, llama_seq_id seq,
                           llama_state_seq_flags flags);
    // Runs copies between streams and shifts that llama.cpp has deferred to the next decode; called before cells are
    // read or set. Throws on failure.
    static void apply_deferred(llama_context & ctx);

    // Base of writers that only count bytes; they need no rows.
    struct counts_only {
        virtual ~counts_only() = default;
    };

    // For stored prompts. state_identity: everything that affects the bytes of a state; `content`: the model's content
    // hash. storable: nothing else affects them (no LoRA). n_removable: the longest tail of a restored sequence that
    // can be removed without a checkpoint; -1: any.
    static std::string state_identity(const llama_context & ctx, const std::string & content);
    static bool        storable(const llama_context & ctx);
    static int64_t     n_removable(const llama_context & ctx);

    static llama_subkv_usage usage_of(llama_context & ctx); // memory use of its cache

    static caches caches_of(const llama_memory_i * memory);

    struct batch_caches { // the parts of a batch's context: full attention, an indexer's keys (nullptr: none)
        const llama_kv_cache_context * base;
        const llama_kv_cache_context * index;
    };

    static batch_caches caches_of(const llama_memory_context_i * mctx);

    // true: the cache, or the full-attention half of an iswa cache, stores coefficients
    static bool coded(const llama_memory_i * memory);
    static bool coded(const llama_kv_cache & kv);

    // The tensors of the four kinds of llama.cpp's inputs that read a K/V cache: of the full-attention half.
    struct attn_input {
        attn_input(const llm_graph_input_attn_kv & inp);
        attn_input(const llm_graph_input_attn_kv_iswa & inp);
        attn_input(const llm_graph_input_attn_k & inp);
        attn_input(const llm_graph_input_attn_k_dsa & inp); // an indexer chooses cells

        const llama_kv_cache_context * mctx;
        ggml_tensor *                  k_idxs;
        ggml_tensor *                  v_idxs = nullptr;
        ggml_tensor *                  mask;
        ggml_tensor *                  k_rot  = nullptr;
        ggml_tensor *                  v_rot  = nullptr;
        bool                           iswa   = false;
        bool                           latent = false; // values are the first elements of keys; v_mla applies last
    };

    // llm_graph_context::build_attn. Passes q, k and v to the observer, after RoPE and before the Hadamard rotation of
    // quantized caches. Then builds the attention of a coded layer, including the output projection; null: not coded,
    // upstream's code continues. chosen: the cells that a token attends to, as in AttnBuild, or a mask that hides the
    // others; nullptr: all.
    static ggml_tensor * attend(const llm_graph_context & g, const attn_input & in, ggml_tensor * wo,
                                ggml_tensor * wo_b, ggml_tensor * wo_s, ggml_tensor * q, ggml_tensor * k,
                                ggml_tensor * v, ggml_tensor * kq_b, ggml_tensor * sinks, ggml_tensor * v_mla,
                                float scale, int il, ggml_tensor * chosen = nullptr);
    // For a model whose graph computes the masks of its KV heads. observe_layer: passes q, k and v to the observer; true: the
    // layer is coded. unused_rows: a tensor with the shape of the ordinary cache, for views that are never computed.
    static bool observe_layer(const llm_graph_context & g, const llama_kv_cache_context * mctx, ggml_tensor * q,
                              ggml_tensor * k, ggml_tensor * v, int il);
    static ggml_tensor * unused_rows(const llm_graph_context & g, const ggml_tensor * rows, int64_t n_kv,
                                     int64_t n_stream);
    static bool          coded(const llama_kv_cache_context * mctx, int il);
    static bool          coded(const llama_kv_cache_context * mctx); // any layer
    static void          observe(const llm_graph_context & g, const llama_kv_cache_context * mctx, ggml_tensor * q,
                                 ggml_tensor * k, ggml_tensor * v, float scale, int il);
    static ggml_tensor * build_attn(const llm_graph_context & g, const llama_kv_cache_context * mctx, ggml_tensor * q,
                                    ggml_tensor * k, ggml_tensor * v, ggml_tensor * k_idxs, ggml_tensor * v_idxs,
                                    ggml_tensor * mask, ggml_tensor * chosen, ggml_tensor * sinks, float scale, int il);
    class reader;
    class tiles;
    class cursor;
    class row_writer;
    class row_reader;
    struct mover;
    class graph_input;
    class shift_input;
    static void build_shift(const llama_kv_cache & kv, const llama_cparams & cparams, llm_graph_result & res,
                            ggml_tensor * k_shift, uint32_t il, shift_input & input);
    class memory; // decorates llama.cpp's
    class update;
    static std::unique_ptr<llama_memory_i> decorate(std::unique_ptr<llama_memory_i> inner, llama_context & ctx);

    // While it lives, a context (or nullptr) has llama.cpp's memory, which another context casts to its class.
    class undecorated {
    public:
        explicit undecorated(llama_context * ctx);
        ~undecorated();
        undecorated(const undecorated &)             = delete;
        undecorated & operator=(const undecorated &) = delete;

    private:
        llama_context *  ctx;
        llama_memory_i * whole = nullptr;
    };

    static void write_cells(const llama_kv_cache & kv, llama_io_write_i & io, llama_seq_id seq,
                            llama_state_seq_flags flags);
    static void remove_cells(llama_kv_cache & kv, llama_seq_id seq); // -1: all
    static void clear_parts(const caches & all, llama_seq_id seq);   // empties all parts
    // Reads and checks the head of a state; returns a reader of its cells, with the checksum compared.
    static row_reader read_body(llama_kv_cache & kv, llama_io_read_i & io, llama_seq_id seq);
    using parts = std::vector<llama_memory_i *>;
    static parts other_parts(const caches & all);
    static parts in_state(const caches & all, llama_state_seq_flags flags);
    // An indexer identifies cells by the places of its keys. is_index: a cache of such keys. same_cells: every key is
    // in the cell of its token. same_slots: a batch assigns each token the same cell in both caches.
    static bool      is_index(const llama_kv_cache & kv);
    static ggml_type index_type(const llama_kv_cache & kv, ggml_type type); // from SUBKV_INDEXER, else `type`
    static bool      same_cells(const llama_kv_cache & kv, const llama_kv_cache & index);
    // Of the keys and values of sliding layers beside coded ones (SUBKV_SLIDING): q8_0 where flash attention is not off
    // and llama.cpp can shift such keys; else `type`. Throws if the variable demands q8_0 elsewhere. Beside any others:
    // f16 if the request says so.
    static ggml_type sliding_type(const llama_kv_cache & kv, ggml_type type, bool offload, const layer_filter & filter);
    // With quantized values in sliding layers, "auto" is on, as for a quantized cache of llama.cpp's.
    static void require_flash_attention(llama_context & ctx, const llama_memory_i & memory);

    // Where releases of llama.cpp differ (releases.h). has_cell_ext: states hold a llama_kv_cell_ext for each cell.
    // read_cells: llama_kv_cache::state_read_sinfo.
    static bool has_cell_ext(const llama_kv_cache & kv);
    static void read_cells(llama_kv_cache & kv, llama_io_read_i & io, llama_seq_id seq, llama_state_seq_flags flags,
                           llama_kv_cache::slot_info_vec_t * out, const llama_kv_cache::slot_info_vec_t * in);
    static bool same_slots(const llama_kv_cache_context & rows, const llama_kv_cache_context & index);

    struct piece { // positions [first, last) of a sequence
        llama_seq_id seq;
        llama_pos    first, last;
    };

    // A position of the pieces that is inside the sliding window of the next token (at `next`), but no longer in the
    // sliding half; -1: none.
    static llama_pos          missing_swa_pos(const llama_kv_cache & base, const llama_kv_cache & swa,
                                              const std::vector<piece> & pieces, llama_pos next);
    static graph_input *      inputs(const llm_graph_context & g, const llama_kv_cache_context * mctx);
    static subkv::CacheHook * hook_of(const llama_memory_i * memory);
    static subkv::RowSizes    row_sizes(const llama_memory_i * memory);
    // as in subkv::LlamaCalls
    static subkv::CacheHook * cache_of(llama_context * ctx, subkv::RowSizes * sizes);
    static bool               rows(llama_context * ctx, int32_t il, const subkv::rows_fn & use);
};
