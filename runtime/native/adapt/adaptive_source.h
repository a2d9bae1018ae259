// adaptive_source.h: adaptive bases as the engine sees them (basis_source.h); chunked.h has their data.
#pragma once

#include "basis_source.h"
#include "chunked.h"

namespace subkv {

class AdaptiveLayer final : public LayerBases {
public:
    explicit AdaptiveLayer(ChunkedLayer & chunks) : chunks_(chunks) {}

    ChunkedLayer & chunks() const { return chunks_; }

    bool          codes_later(bool value) const override { return chunks_.covers(value); }
    size_t        extra_bytes(bool value) const override { return chunks_.covers(value) ? chunks_.n_head_kv() : 0; }
    ggml_tensor * build_encode(LayerNodes & layer, const AttnBuild & b, ggml_tensor * fresh) const override;
    void          attend(const AttendArgs & args, uint32_t stream, int64_t head, const uint8_t * k_tiles,
                         const uint8_t * v_tiles) const override;
    int32_t       coded(uint32_t stream, int64_t head, bool value) const override;
    void          read(const LayerNodes & layer, uint32_t stream, int64_t head, bool value, const uint8_t * tiles,
                       int64_t stride, int64_t n, const int64_t * cells, float * x, int32_t * version) const override;

private:
    ChunkedLayer & chunks_;
};

class AdaptiveSource final : public BasisSource {
public:
    AdaptiveSource(const Layout & layout, const ChunkRequest & request, uint32_t n_stream);

    const ChunkedBases & chunks() const { return chunks_; }

    const LayerBases & layer(int32_t il) const override { return *layers_[(size_t) il]; }
    bool               codes_later() const override { return true; }
    void               clear(uint32_t stream) override { chunks_.clear(stream); }
    int32_t            coded(uint32_t stream) const override { return chunks_.fixed(stream); }
    void               copy(uint32_t src, uint32_t dst) override { chunks_.copy(src, dst); }
    bool               can_remove(int32_t seq, int32_t p0, int32_t p1, const CellReader & cells) const override {
        return chunks_.can_remove(seq, p0, p1, cells);
    }
    bool can_shift() const override;
    bool ready(const std::vector<TokenDesc> & tokens, bool causal, const Window & window,
               const CellReader & cells) const override {
        return chunks_.ready(tokens, causal, window, cells);
    }

    uint64_t    identity() const override;
    std::string describe() const override;
    void        check_partial() const override;
    void        state_write(StateWriter & w, uint32_t stream) const override { chunks_.state_write(w, stream); }
    void state_read(StateReader & r, uint32_t stream, int32_t n_pos) override { chunks_.state_read(r, stream, n_pos); }

    size_t bytes() const override { return chunks_.total().bytes; }
    void   stats(subkv_stats & out) const override;

private:
    ChunkedBases                                chunks_;
    std::vector<std::unique_ptr<AdaptiveLayer>> layers_; // by il
};

// The function of the node of build_encode, in node_blocks.cpp. Its userdata are LayerNodes whose bases are an
// AdaptiveLayer.
void encode_blocks_op(ggml_tensor * dst, int ith, int nth, const LayerNodes & layer);

struct EncodeBlocksSources {
    ggml_tensor * fresh;
    ggml_tensor * window;
    ggml_tensor * slots;
    ggml_tensor * tokens;
    ggml_tensor * k_cache;
    ggml_tensor * v_cache;
    ggml_tensor * k_idxs;
    ggml_tensor * k_view; // for its shape
};

} // namespace subkv
