#include "adaptive_source.h"

#include "attend_chunks.h"
#include "checksum.h"
#include "error.h"
#include "nodes.h"
#include "window.h"

namespace subkv {

//
// one layer
//

ggml_tensor * AdaptiveLayer::build_encode(LayerNodes & layer, const AttnBuild & b, ggml_tensor * fresh) const {
    const Inputs &            in      = *b.inputs;
    const EncodeBlocksSources sources = {
        fresh, layer.window_rows().tensor, in.slots, in.tokens, b.k_cache, b.v_cache, b.k_idxs, b.k_view
    };
    ggml_tensor * node =
        new_node(b.ctx, GGML_TYPE_F32, { 1, 1, 1, 1 }, sources, NodeWork::on_cpu<encode_blocks_op>(layer));
    ggml_format_name(node, "subkv_encode_blocks-%d", b.il);
    return node;
}

void AdaptiveLayer::attend(const AttendArgs & args, uint32_t stream, int64_t head, const uint8_t * k_tiles,
                           const uint8_t * v_tiles) const {
    static thread_local ChunkedAttention attention; // keeps its memory
    attention.begin(chunks_, stream, head);
    attention.attend(ops(), args, k_tiles + TILE * chunks_.chunk_offset(head, false),
                     v_tiles + TILE * chunks_.chunk_offset(head, true));
    attention.finish(args);
}

int32_t AdaptiveLayer::coded(uint32_t stream, int64_t head, bool value) const {
    return chunks_.covers(value) ? chunks_.unit(stream, head, value)->coded : 0;
}

void AdaptiveLayer::read(const LayerNodes & layer, uint32_t stream, int64_t head, bool value, const uint8_t * tiles,
                         int64_t stride, int64_t n, const int64_t * cells, float * x, int32_t * version) const {
    if (!chunks_.covers(value)) {
        LayerBases::read(layer, stream, head, value, tiles, stride, n, cells, x, version);
        return;
    }
    const uint8_t * slots = tiles + TILE * chunks_.chunk_offset(head, value);
    for (int64_t i = 0; i < n; ++i) {
        version[i] = slots[cells[i] / TILE * stride + cells[i] % TILE];
    }
    read_chunks(ops(), *layer.codec, head, value, chunks_.unit(stream, head, value)->adapter, version,
                tiles + layer.codec->tile_offset(head, value), stride, n, cells, x);
}

//
// one context
//

AdaptiveSource::AdaptiveSource(const Layout & layout, const ChunkRequest & request, uint32_t n_stream) :
    chunks_(layout, request, n_stream) {
    for (const LayerCodec & codec : layout.layers) { // ascending
        layers_.resize((size_t) codec.il + 1);
        layers_.back() = std::make_unique<AdaptiveLayer>(*chunks_.layer(codec.il));
    }
}

bool AdaptiveSource::can_shift() const {
    return reject("seq_add: positions in a subkv cache with adaptive bases cannot be shifted; remove the sequence and "
                  "decode it again with new positions, or use an ordinary cache type (-ctk f16)");
}

void AdaptiveSource::check_partial() const {
    fail("state: cells with adapted bases cannot return to a partial state; save a whole state");
}

std::string AdaptiveSource::describe() const {
    return "adaptive bases (" + chunks_.request().text() + ")";
}

// A hash of all options, which is never 0, the value of static bases.
uint64_t AdaptiveSource::identity() const {
    const std::string text = chunks_.request().text();
    return checksum(CHECKSUM_OF_NOTHING, (const uint8_t *) text.data(), text.size()) | 1;
}

void AdaptiveSource::stats(subkv_stats & out) const {
    const auto total = chunks_.total();
    out.bytes_chunks = total.bytes;
    out.n_chunks     = total.n_chunks;
}

//
// requests
//

static MakeBases made_by(const ChunkRequest & request) {
    return [request](const Layout & layout, const Window & window, const CacheDesc & desc) {
        if (!request.any()) {
            return std::make_unique<BasisSource>();
        }
        ChunkedBases::check(request, layout, window.n_recent(), window.n_rollback(), desc);
        return std::unique_ptr<BasisSource>(new AdaptiveSource(layout, request, desc.n_stream));
    };
}

MakeBases bases_of(const std::string & adapt, const char * key) {
    return made_by(requested_chunks(adapt, key));
}

} // namespace subkv
