// cache.h: the coefficient cache of one context: its coded layers, the exact window, and the graph nodes
// encode -> attend -> combine -> store_window that replace llama.cpp's K/V store and attention.
#pragma once

#include "basis_source.h"
#include "device.h"
#include "cache_hook.h"
#include "layout.h"
#include "node_work.h"
#include "observer.h"
#include "resolve.h"
#include "subkv.h"
#include "subkv/ops.h"
#include "uncoded.h"
#include "window.h"

#include <map>
#include <memory>
#include <optional>
#include <vector>

namespace subkv {

// The data of one coded layer's nodes. Addresses are stable, because llama.cpp reuses graphs.
struct LayerNodes {
    const LayerCodec * codec;
    const Window *     window;
    const LayerBases * bases;
    NodeReports *      reports;
    int32_t            n_head;
    int32_t            owner; // the layer that stores the rows, which is this one, or another one whose rows it reads
    std::vector<float> means; // [n_head_kv][d_k] means of keys, subtracted before coding
    int32_t            n_readers      = 0;    // other layers that read its rows
    float              scale          = 0.0f; // set when the graph is built, constant per model
    float              softcap        = 0.0f;
    float              max_alibi_bias = 0.0f;
    int64_t            shift_first    = 0; // as in ShiftBuild
    bool               shift_apart    = false;
    ggml_tensor *      shift_keys     = nullptr; // the K cache
    bool               by_rows        = false;   // the cache stores rows, not tiles (cells.h)
    bool               gathers        = false;   // attend can read a list of selected cells

    // While a shift is pending, the parts of this layer whose keys are rotated, and whether there are any
    // (node_shift.cpp).
    std::vector<uint8_t> rotated = {};
    bool                 shifted = false;

    bool          defers  = false;   // decoded tokens get their codes later (uncoded.h)
    ggml_tensor * k_cache = nullptr; // then the cells of all streams, set when the graph is built
    ggml_tensor * v_cache = nullptr;

    std::unique_ptr<DeviceLayer> device = nullptr; // for a cache on a GPU, or nullptr for CPU nodes
    ggml_backend_buffer_type_t   buft   = nullptr; // of the cache on a GPU

    const WindowRows & window_rows() const { return window->rows(owner); }
    const float *      mean(int64_t h, bool value) const { return value ? nullptr : means.data() + h * codec->d_k; }
};

// Memory for the node that rotates the keys of one layer's cells and window slots, and the node.
void reserve_shift(LayerNodes & layer, int64_t n_cells);
void build_shift_node(LayerNodes & layer, const ShiftBuild & b);

// Builds the nodes of one layer, and returns F32 [d_v * n_head, n_tokens].
ggml_tensor * build_attn_nodes(LayerNodes & layer, const AttnBuild & b);

class Cache final : public CacheHook {
public:
    // The request's layout or the observer may be null.
    Cache(const CacheDesc & desc, const CacheChoice & choice, subkv_observer * observer);

    bool    report(const std::string & reason) const override;
    void    clear() override;
    bool    can_remove(int32_t seq, int32_t p0, int32_t p1, const CellReader & cells) const override;
    bool    remove(int32_t seq, int32_t p0, int32_t p1, const CellReader & cells) override;
    bool    copy_seq(int32_t src, int32_t dst, int32_t p0, int32_t p1, const CellReader & cells) override;
    void    keep(int32_t seq, const CellReader & cells) override;
    bool    ready(const std::vector<TokenDesc> & tokens, const CellReader & cells) const override;
    int32_t rollback_target(int32_t seq, const CellReader & cells) const override;
    int32_t resume(int32_t seq, int32_t pos, const CellReader & cells) const override;

    bool     computed() override;
    bool     lacks_memory() const override { return reports_.lacks_memory(); }
    uint64_t n_bad_rows() const override { return reports_.n_bad(); }

    Inputs        build_inputs(ggml_context * ctx, int64_t n_kv, int64_t n_stream, int64_t n_tokens) override;
    void          set_inputs(const Inputs & in, const std::vector<TokenDesc> & tokens, uint32_t stream0,
                             const CellReader & cells) override;
    ggml_tensor * build_attn(const AttnBuild & b) override;
    void          build_observe(ggml_context * ctx, ggml_cgraph * gf, int32_t il, ggml_tensor * q, ggml_tensor * k,
                                ggml_tensor * v, const Inputs & in, float scale) override;

    bool can_shift(int32_t seq, int32_t p0, int32_t p1, int32_t by, const CellReader & cells) const override;
    bool shift(int32_t seq, int32_t p0, int32_t p1, int32_t by, const CellReader & cells) override;
    void rotations(int32_t * by) const override { window_.rotations(by); }
    void rotated() override;
    void build_shift(const ShiftBuild & b) override;

    void                  write_head(StateWriter & w, int32_t seq, bool partial) const override;
    std::vector<uint64_t> read_head(StateReader & r, int32_t seq, bool partial) const override;
    void                  write_window(StateWriter & w, int32_t seq) const override;
    void                  read_window(StateReader & r, int32_t seq, const std::vector<uint64_t> & moves,
                                      const CellReader & cells) override;
    void                  get_rows(int32_t il, bool value, const ggml_tensor * t, int64_t first, int64_t n,
                                   uint8_t * rows) const override;
    void set_rows(int32_t il, bool value, ggml_tensor * t, int64_t first, int64_t n, const uint8_t * rows) override;
    void check_rows(int32_t il, bool value, int64_t n, const uint8_t * rows) const override;

    // Reason why the bases do not belong to this cache's model, or "" if they do.
    static std::string misfit(const Layout & layout, const CacheDesc & desc);

    // The line about this cache, with these words about its bases, is logged once the context's memory is complete.
    void announce(const std::string & words) { announced_ = words; }
    void created(const RowSizes & rows) override;

    void                stats(const RowSizes & rows, subkv_stats & out) const;
    int32_t             n_seq() const { return window_.n_seq(); }
    const auto &        devices() const { return devices_; } // see subkv_context_devices
    const Layout *      layout() const { return layout_.get(); }
    const BasisSource & bases() const { return *bases_; }

    // As subkv_read_rows, where t is the K or V tensor of the coded layer il, and head one of its KV heads.
    int64_t read(const CellReader & cells, const ggml_tensor * t, int32_t il, int64_t head, bool value, int32_t seq,
                 int32_t first, int64_t n, float * x, int32_t * version_of) const;

    // These convert cells [first, first + n) of t, the K or V of a coded layer with all streams, to rows of halves
    // [n][width], and store such rows at cells. Keys have no gamma, so that a row that is read and stored again keeps
    // its codes.
    int32_t width(int32_t il, bool value) const;
    void decode_cells(int32_t il, bool value, const ggml_tensor * t, int64_t first, int64_t n, uint16_t * rows) const;
    void encode_rows(int32_t il, bool value, ggml_tensor * t, int64_t first, int64_t n, const uint16_t * rows);
    // Copies the window's row [width]. Returns false if the window does not hold the position.
    bool exact_row(int32_t il, bool value, int32_t seq, int32_t pos, uint16_t * row) const;
    // Stores a row in the window. Call it for all coded layers and both sides.
    void set_exact_row(int32_t il, bool value, int32_t seq, int32_t pos, const uint16_t * row);

    int32_t n_sink() const { return window_.n_sink(); }
    int32_t n_recent() const { return window_.n_recent(); }

private:
    void code(const CacheDesc & desc, const CacheChoice & choice); // selects the layers with bases in the layout
    void check(const CacheDesc & desc) const;        // throws std::runtime_error if the layout does not fit the model
    void check_memory(const CacheDesc & desc) const; // the same if there is not enough for the host's layers
    void wait_for_devices() const;                   // before the host changes rows that a graph may use
    void encode_uncoded() const;                     // before anything but an exact read uses the cells of uncoded_
    StateIdentity identity() const;                  // of states
    size_t        row_bytes(const LayerNodes & nodes, bool value) const;
    void          set_facts();
    // The layer that stores il's rows in this cache, or -1 if they are in another cache.
    int32_t owner(int32_t il) const;
    // Creates the nodes of a layer that stores, or reads, rows of `codec`.
    void add_nodes(const LayerDesc & layer, int32_t il, int32_t n_head, const LayerCodec & codec);

    std::shared_ptr<const Layout>  layout_;
    subkv_observer *               observer_;
    std::map<int32_t, int32_t>     owners_; // of this cache's layers, without those of a sliding half (see owner())
    Window                         window_;
    uint32_t                       n_cells_;
    uint32_t                       n_stream_;
    int32_t                        n_resume_;
    size_t                         elements_per_token_ = 0; // K and V elements of the coded layers
    std::unique_ptr<BasisSource>   bases_              = std::make_unique<BasisSource>();
    std::string                    devices_;
    NodeReports                    reports_;
    std::map<int32_t, ObserveData> observed_; // by layer, at stable addresses
    std::optional<std::string>     announced_;
    mutable UncodedRows            uncoded_; // cells have the same content on the list and after it

    std::vector<std::unique_ptr<LayerNodes>> nodes_; // by il, null if the layer is ordinary
};

} // namespace subkv
