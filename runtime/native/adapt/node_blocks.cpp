// node_blocks.cpp: codes the rows that leave the exact window, on adapted sides (chunked.h). Runs between encode and
// attend.
#include "adaptive_source.h"
#include "nodes.h"

#include <algorithm>
#include <utility>

namespace subkv {

//
// encode_blocks: dst F32 [1], not read: attend runs after this node | EncodeBlocksSources
//

namespace {

// The exact row of a position, and the cell for its code.
struct Held {
    int32_t          pos;
    int64_t          cell; // of the whole cache tensor
    const uint16_t * row;
};

// Rows of positions [from, end) of one stream's sequence, in order, from the window and from the ubatch.
void gather(const LayerNodes & layer, const EncodeBlocksSources & in, int64_t t0, int64_t n_tps, int64_t first_cell,
            int32_t from, int32_t end, std::vector<Held> & out) {
    out.clear();
    const SlotRow *  slots  = slot_rows(in.slots);
    const TokenRow * tokens = token_rows(in.tokens);
    const auto       add    = [&](int32_t pos, int32_t cell, const ggml_tensor * rows, int64_t i) {
        if (pos >= from && pos < end) {
            out.push_back({ pos, first_cell + cell, (const uint16_t *) ((const char *) rows->data + i * rows->nb[1]) });
        }
    };
    const int64_t first = tokens[t0].first_slot;
    const int64_t count = in.slots->ne[1] / layer.window->n_seq();
    for (int64_t i = first; i < first + count; ++i) {
        if (slots[i].cell >= 0) {
            add(slots[i].pos, slots[i].cell, in.window, i);
        }
    }
    for (int64_t t = t0; t < t0 + n_tps; ++t) {
        add(tokens[t].pos, tokens[t].cell, in.fresh, t);
    }
    std::sort(out.begin(), out.end(), [](const Held & a, const Held & b) { return a.pos < b.pos; });
}

// The codes of one head and side in the cells of one stream.
struct HeadCells {
    uint8_t * tiles;      // codes
    uint8_t * chunks;     // the byte with a cell's chunk
    int64_t   stride;     // bytes from tile to tile
    int64_t   first, end; // cells of the stream, whole tiles

    uint8_t & chunk_of(int64_t cell) const { return chunks[cell / TILE * stride + cell % TILE]; }

    // Adapter::Merge
    void merge(int32_t from, int32_t to, const Adapter::Recode & recode) const {
        std::vector<int64_t> cells;
        for (int64_t tile = first; tile < end; tile += TILE) {
            cells.clear();
            for (int64_t cell = tile; cell < tile + TILE; ++cell) {
                if (uint8_t & chunk = chunk_of(cell); chunk == from) {
                    cells.push_back(cell);
                    chunk = (uint8_t) to;
                }
            }
            if (!cells.empty()) {
                recode(tiles, stride, (int64_t) cells.size(), cells.data());
            }
        }
    }
};

// Codes the positions in `held` below `end`, block by block, looking ahead at later ones. `offset` is that of the
// head's d elements in a row.
void code_blocks(Adapter & adapter, const HeadCells & at, const std::vector<Held> & held, int32_t end, int64_t d,
                 int64_t offset) {
    const int32_t        block = adapter.params().block, ahead = adapter.params().lookahead;
    std::vector<float>   x;
    std::vector<int64_t> cells;
    const auto merge = [&](int32_t from, int32_t to, const Adapter::Recode & recode) { at.merge(from, to, recode); };
    for (size_t i = 0; i < held.size() && held[i].pos < end;) { // skips blocks without a position
        x.clear();
        cells.clear();
        const int32_t after = (held[i].pos / block + 1) * block;
        for (size_t j = i; j < held.size() && held[j].pos < after + ahead; ++j) {
            if (held[j].pos < after) {
                cells.push_back(held[j].cell);
            }
            x.resize(x.size() + (size_t) d);
            ggml_fp16_to_fp32_row((const ggml_fp16_t *) held[j].row + offset, x.data() + x.size() - d, d);
        }
        const auto n = (int64_t) cells.size(), n_ahead = (int64_t) x.size() / d - n;
        i += cells.size();
        const int32_t slot = adapter.block(x.data(), d, n, n_ahead, cells.data(), at.tiles, at.stride, merge);
        for (const int64_t cell : cells) {
            at.chunk_of(cell) = (uint8_t) slot;
        }
    }
}

} // namespace

void encode_blocks_op(ggml_tensor * dst, int ith, int nth, const LayerNodes & layer) {
    const auto &         codec    = *layer.codec;
    const ChunkedLayer & chunked  = static_cast<const AdaptiveLayer &>(*layer.bases).chunks();
    const auto           in       = sources_of<EncodeBlocksSources>(dst);
    const TokenRow *     tokens   = token_rows(in.tokens);
    const int64_t *      idxs     = (const int64_t *) in.k_idxs->data;
    const int64_t        n_stream = in.k_view->ne[2];
    const int64_t        n_tps    = in.tokens->ne[1] / n_stream;
    const int32_t        n_sink   = layer.window->n_sink();
    const int32_t        n_recent = layer.window->n_recent();

    std::vector<Held> held;
    for (int64_t unit = ith; unit < n_stream * codec.n_head_kv * 2; unit += nth) {
        const bool    value = unit % 2;
        const int64_t h     = unit / 2 % codec.n_head_kv;
        const int64_t t0    = unit / 2 / codec.n_head_kv * n_tps;

        ggml_tensor * cache   = value ? in.v_cache : in.k_cache;
        const int64_t n_cells = cache->ne[1];
        const int64_t stream  = idxs[t0] / n_cells;
        ChunkUnit *   state   = chunked.unit((uint32_t) stream, h, value);
        if (!state) {
            continue;
        }
        int32_t last = tokens[t0].pos;
        for (int64_t t = t0; t < t0 + n_tps; ++t) {
            last = std::max(last, tokens[t].pos);
        }
        const int32_t block = state->adapter.params().block;
        if (state->coded > last - n_recent) {
            continue; // the next block has not left the window
        }
        const int32_t end   = ((last - n_recent) / block + 1) * block; // whole blocks, without a key in the window
        const int32_t ahead = state->adapter.params().lookahead;       // these are in the window (ChunkedBases::check)
        const int32_t from  = std::exchange(state->coded, ChunkUnit::LOST); // until all blocks are coded
        gather(layer, in, t0, n_tps, stream * n_cells, std::max(from, n_sink), end + ahead, held);

        const int64_t   d      = value ? codec.d_v : codec.d_k;
        const int64_t   offset = value ? codec.n_head_kv * codec.d_k + h * codec.d_v : h * codec.d_k;
        const HeadCells at     = { (uint8_t *) cache->data + codec.tile_offset(h, value),
                                   (uint8_t *) cache->data + TILE * chunked.chunk_offset(h, value),
                                   TILE * (int64_t) cache->nb[1], stream * n_cells, (stream + 1) * n_cells };
        code_blocks(state->adapter, at, held, end, d, offset);
        state->coded = end;
    }
}

} // namespace subkv
