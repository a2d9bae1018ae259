#include "read_rows.h"

#include "cache.h"

#include <algorithm>
#include <vector>

namespace subkv {

namespace {

// Rows of one chunk, before gamma and mean.
void read_run(const Ops & ops, const HeadCodec & codec, const Adapter * adapter, int32_t slot, const uint8_t * rows,
              int64_t stride, int64_t n, float * x) {
    const int64_t      rank  = codec.rank;
    const ChunkBasis * chunk = adapter != nullptr ? adapter->chunk(slot) : nullptr;
    std::vector<float> c((size_t) (n * rank)), lifted((size_t) rank);
    ops.dequantize_rows(chunk != nullptr ? chunk->codec : codec, rows, stride, n, c.data());
    std::fill(x, x + n * codec.d, 0.0f);
    for (int64_t t = 0; t < n; ++t) {
        const float * e = c.data() + t * rank;
        if (chunk != nullptr) {
            adapter->lift(slot, e, lifted.data());
            e = lifted.data();
        }
        ops.reconstruct(codec.decode, rank, codec.d, e, x + t * codec.d);
    }
}

} // namespace

void read_rows(const Ops & ops, const LayerCodec & layer, int64_t head, bool value, const Adapter * adapter,
               const int32_t * slot, const uint8_t * rows, int64_t stride, int64_t n, float * x) {
    const auto        h     = (size_t) head;
    const HeadCodec & codec = (value ? layer.v : layer.k)[h];
    for (int64_t first = 0; first < n;) {
        const int64_t last = std::find_if(slot + first, slot + n, [&](int32_t s) { return s != slot[first]; }) - slot;
        read_run(ops, codec, adapter, slot[first], rows + first * stride, stride, last - first, x + first * codec.d);
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

int64_t Cache::read(const CellReader & cells, const ggml_tensor * rows, int32_t il, int64_t head, bool value,
                    int32_t seq, int32_t first, int64_t n, float * x, int32_t * chunk_of) const {
    const LayerNodes & layer  = *nodes_[(size_t) il];
    const HeadCodec &  codec  = (value ? layer.codec->v : layer.codec->k)[(size_t) head];
    const uint32_t     stream = cells.stream_of(seq);
    const AdaptUnit *  unit   = layer.adaptive ? layer.adaptive->unit(stream, head, value) : nullptr;
    const size_t       offset = (value ? layer.codec->v_offset : layer.codec->k_offset)[(size_t) head];
    const auto         row    = (size_t) codec.row_bytes;

    std::vector<PosCell> held;
    cells.find(seq, first, (int32_t) (first + n), held);
    if (unit) { // the cells of sinks and of what the window still holds are not written
        const auto unwritten = [&](const PosCell & c) { return c.pos < window_.n_sink() || c.pos >= unit->coded; };
        held.erase(std::remove_if(held.begin(), held.end(), unwritten), held.end());
    }
    std::vector<uint8_t> bytes(held.size() * row);
    std::vector<int32_t> slot(held.size(), 0);
    std::vector<float>   seen(held.size() * (size_t) codec.d);
    for (size_t i = 0; i < held.size(); ++i) {
        const size_t at = stream * rows->nb[2] + (size_t) held[i].cell * rows->nb[1];
        ggml_backend_tensor_get(rows, bytes.data() + i * row, at + offset, row);
        if (unit) {
            uint8_t chunk = 0;
            ggml_backend_tensor_get(rows, &chunk, at + layer.adaptive->chunk_offset(value) + (size_t) head, 1);
            slot[i] = chunk;
        }
    }
    read_rows(ops(), *layer.codec, head, value, unit ? &unit->adapter : nullptr, slot.data(), bytes.data(),
              (int64_t) row, (int64_t) held.size(), seen.data());
    std::fill(x, x + n * codec.d, 0.0f);
    std::fill(chunk_of, chunk_of + n, -1);
    for (size_t i = 0; i < held.size(); ++i) {
        const int64_t t = held[i].pos - first;
        chunk_of[t]     = slot[i];
        std::copy_n(seen.data() + i * (size_t) codec.d, codec.d, x + t * codec.d);
    }
    return (int64_t) held.size();
}

} // namespace subkv
