#include "read_rows.h"

#include "cells.h"

#include <algorithm>
#include <vector>

namespace subkv {

void reconstruct_rows(const Ops & ops, const LayerCodec & layer, int64_t head, bool value, const float * c, int64_t n,
                      float * x) {
    const auto        h     = (size_t) head;
    const HeadCodec & codec = layer.head(head, value);
    std::fill(x, x + n * codec.d, 0.0f);
    for (int64_t t = 0; t < n; ++t) {
        ops.reconstruct(codec.decode, codec.rank, codec.d, c + t * codec.rank, x + t * codec.d);
    }
    if (value) {
        return;
    }
    const std::vector<uint16_t> & mean = layer.centre[h].mean;
    for (int64_t i = 0; i < n * codec.d; ++i) {
        x[i] = layer.gamma[h] * x[i] + (mean.empty() ? 0.0f : ggml_fp16_to_fp32(mean[(size_t) (i % codec.d)]));
    }
}

void read_rows(const Ops & ops, const LayerCodec & layer, int64_t head, bool value, const uint8_t * tiles,
               int64_t stride, int64_t n, const int64_t * cells, float * x) {
    const HeadCodec &  codec = layer.head(head, value);
    std::vector<float> c((size_t) (n * codec.rank));
    ops.dequantize(codec, tiles, stride, n, cells, c.data());
    reconstruct_rows(ops, layer, head, value, c.data(), n, x);
}

void without_gamma(const LayerCodec & codec, int64_t h, int64_t n, float * x) {
    const float                   gamma = codec.gamma[(size_t) h];
    const std::vector<uint16_t> & mean  = codec.centre[(size_t) h].mean;
    for (int64_t i = 0; i < n && gamma != 1.0f; ++i) {
        const float of_mean = mean.empty() ? 0.0f : ggml_fp16_to_fp32(mean[(size_t) (i % codec.d_k)]);
        x[i]                = (x[i] - of_mean) / gamma + of_mean;
    }
}

int64_t Cache::read(const CellReader & cells, const ggml_tensor * t, int32_t il, int64_t head, bool value, int32_t seq,
                    int32_t first, int64_t n, float * x, int32_t * version_of) const {
    encode_uncoded();
    const LayerNodes & layer  = *nodes_[(size_t) il];
    const LayerBases & bases  = *layer.bases;
    const HeadCodec &  codec  = layer.codec->head(head, value);
    const uint32_t     stream = cells.stream_of(seq);

    std::vector<PosCell> held;
    cells.find(seq, first, (int32_t) (first + n), held);
    if (bases.codes_later(value)) { // cells of sinks and of window positions are not written
        const int32_t coded     = bases.coded(stream, head, value);
        const auto    unwritten = [&](const PosCell & c) { return c.pos < window_.n_sink() || c.pos >= coded; };
        held.erase(std::remove_if(held.begin(), held.end(), unwritten), held.end());
    }
    std::vector<int64_t> cell(held.size());
    std::vector<int32_t> version(held.size());
    std::vector<float>   decoded(held.size() * (size_t) codec.d);
    for (size_t i = 0; i < held.size(); ++i) {
        cell[i] = held[i].cell;
    }
    const size_t         at     = stream * t->nb[2];
    const int64_t        stride = TILE * (int64_t) t->nb[1];
    const uint8_t *      tiles  = (const uint8_t *) t->data + at;
    std::vector<uint8_t> copied; // from a device
    if (layer.device && !held.empty()) {
        const auto    ends  = std::minmax_element(cell.begin(), cell.end());
        const int64_t begin = *ends.first / TILE, end = *ends.second / TILE + 1;
        copied.resize((size_t) ((end - begin) * stride));
        ggml_backend_tensor_get(t, copied.data(), at + (size_t) (begin * stride), copied.size());
        for (int64_t & c : cell) {
            c -= begin * TILE;
        }
        tiles = copied.data();
    }
    bases.read(layer, stream, head, value, tiles, stride, (int64_t) held.size(), cell.data(), decoded.data(),
               version.data());
    std::fill(x, x + n * codec.d, 0.0f);
    std::fill(version_of, version_of + n, -1);
    for (size_t i = 0; i < held.size(); ++i) {
        const int64_t at = held[i].pos - first;
        version_of[at]   = version[i];
        std::copy_n(decoded.data() + i * (size_t) codec.d, codec.d, x + at * codec.d);
    }
    return (int64_t) held.size();
}

} // namespace subkv
