#include "read_rows.h"

#include "cells.h"

#include <algorithm>
#include <vector>

namespace subkv {

namespace {

// Cells of one chunk, before gamma and mean.
void read_run(const Ops & ops, const HeadCodec & codec, const ChunkReader * chunks, int32_t slot, const uint8_t * tiles,
              int64_t stride, int64_t n, const int64_t * cells, float * x) {
    const int64_t      rank  = codec.rank;
    const HeadCodec *  chunk = chunks != nullptr ? chunks->codec(slot) : nullptr;
    std::vector<float> c((size_t) (n * rank)), lifted((size_t) rank);
    ops.dequantize(chunk != nullptr ? *chunk : codec, tiles, stride, n, cells, c.data());
    std::fill(x, x + n * codec.d, 0.0f);
    for (int64_t t = 0; t < n; ++t) {
        const float * e = c.data() + t * rank;
        if (chunk != nullptr) {
            chunks->lift(slot, e, lifted.data());
            e = lifted.data();
        }
        ops.reconstruct(codec.decode, rank, codec.d, e, x + t * codec.d);
    }
}

} // namespace

void read_rows(const Ops & ops, const LayerCodec & layer, int64_t head, bool value, const ChunkReader * chunks,
               const int32_t * slot, const uint8_t * tiles, int64_t stride, int64_t n, const int64_t * cells,
               float * x) {
    const auto        h     = (size_t) head;
    const HeadCodec & codec = layer.head(head, value);
    for (int64_t first = 0; first < n;) {
        const int64_t last = std::find_if(slot + first, slot + n, [&](int32_t s) { return s != slot[first]; }) - slot;
        read_run(ops, codec, chunks, slot[first], tiles, stride, last - first, cells + first, x + first * codec.d);
        first = last;
    }
    if (value) {
        return;
    }
    const std::vector<uint16_t> & mean = layer.centre[h].mean;
    for (int64_t i = 0; i < n * codec.d; ++i) {
        x[i] = layer.gamma[h] * x[i] + (mean.empty() ? 0.0f : ggml_fp16_to_fp32(mean[(size_t) (i % codec.d)]));
    }
}

int64_t Cache::read(const CellReader & cells, const ggml_tensor * t, int32_t il, int64_t head, bool value, int32_t seq,
                    int32_t first, int64_t n, float * x, int32_t * chunk_of) const {
    const LayerNodes &  layer  = *nodes_[(size_t) il];
    const HeadCodec &   codec  = layer.codec->head(head, value);
    const uint32_t      stream = cells.stream_of(seq);
    const ChunkUnit *   unit   = layer.chunked ? layer.chunked->unit(stream, head, value) : nullptr;
    const ChunkReader * chunks = unit ? &unit->reader() : nullptr;

    std::vector<PosCell> held;
    cells.find(seq, first, (int32_t) (first + n), held);
    if (unit) { // cells of sinks and of window positions are not written
        const auto unwritten = [&](const PosCell & c) { return c.pos < window_.n_sink() || c.pos >= unit->coded; };
        held.erase(std::remove_if(held.begin(), held.end(), unwritten), held.end());
    }
    std::vector<int64_t> cell(held.size());
    std::vector<int32_t> slot(held.size(), 0);
    std::vector<float>   decoded(held.size() * (size_t) codec.d);
    for (size_t i = 0; i < held.size(); ++i) {
        cell[i] = held[i].cell;
    }
    const size_t         at     = stream * t->nb[2];
    const auto           offset = (size_t) layer.codec->tile_offset(head, value);
    const int64_t        stride = TILE * (int64_t) t->nb[1];
    const uint8_t *      tiles  = (const uint8_t *) t->data + at + offset;
    std::vector<uint8_t> copied; // from a device
    if (layer.device && !held.empty()) {
        const auto    ends  = std::minmax_element(cell.begin(), cell.end());
        const int64_t begin = *ends.first / TILE, end = *ends.second / TILE + 1;
        copied.resize((size_t) ((end - begin) * stride));
        ggml_backend_tensor_get(t, copied.data(), at + (size_t) (begin * stride), copied.size());
        for (int64_t & c : cell) {
            c -= begin * TILE;
        }
        tiles = copied.data() + offset;
    }
    for (size_t i = 0; chunks && i < held.size(); ++i) { // chunks are never on a device
        const uint8_t * slots = (const uint8_t *) t->data + at + TILE * layer.chunked->chunk_offset(head, value);
        slot[i]               = slots[cell[i] / TILE * stride + cell[i] % TILE];
    }
    read_cells(layer, ops(), head, value, chunks, slot.data(), tiles, stride, (int64_t) held.size(), cell.data(),
               decoded.data());
    std::fill(x, x + n * codec.d, 0.0f);
    std::fill(chunk_of, chunk_of + n, -1);
    for (size_t i = 0; i < held.size(); ++i) {
        const int64_t at = held[i].pos - first;
        chunk_of[at]     = slot[i];
        std::copy_n(decoded.data() + i * (size_t) codec.d, codec.d, x + at * codec.d);
    }
    return (int64_t) held.size();
}

} // namespace subkv
