#include "adapt.h"
#include "read_rows.h"

#include <algorithm>
#include <vector>

namespace subkv {

void read_chunks(const Ops & ops, const LayerCodec & layer, int64_t head, bool value, const Adapter & adapter,
                 const int32_t * slot, const uint8_t * tiles, int64_t stride, int64_t n, const int64_t * cells,
                 float * x) {
    const HeadCodec &  codec = layer.head(head, value);
    const int64_t      rank  = codec.rank;
    std::vector<float> c((size_t) (n * rank)), own((size_t) rank);
    for (int64_t first = 0; first < n;) {
        const int64_t last = std::find_if(slot + first, slot + n, [&](int32_t s) { return s != slot[first]; }) - slot;
        const ChunkBasis * chunk = adapter.chunk(slot[first]);
        float *            at    = c.data() + first * rank;
        ops.dequantize(chunk ? chunk->codec : codec, tiles, stride, last - first, cells + first, at);
        for (float * row = at; chunk && row < at + (last - first) * rank; row += rank) {
            adapter.lift(slot[first], row, own.data());
            std::copy(own.begin(), own.end(), row);
        }
        first = last;
    }
    reconstruct_rows(ops, layer, head, value, c.data(), n, x);
}

} // namespace subkv
