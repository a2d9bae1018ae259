// layout_codec.cpp: parts of a layout's heads: bands, means, and values that are the first elements of keys.
#include "layout.h"

#include "error.h"
#include "ggml.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace subkv {

void project_rows(const Ops & ops, const HeadCodec & codec, const float * x, int64_t ldx, int64_t n, float * c) {
    const int64_t rank = codec.rank;
    ops.project(codec.encode, rank, codec.d, x, ldx, n, 1.0f, c, rank);
    for (int64_t i = 0; codec.offset != nullptr && i < n * rank; ++i) {
        c[i] -= codec.offset[i % rank];
    }
}

const LayerCodec * Layout::layer(int il) const {
    const auto it = std::lower_bound(layers.begin(), layers.end(), il,
                                     [](const LayerCodec & l, int value) { return l.il < value; });
    return it != layers.end() && it->il == il ? &*it : nullptr;
}

std::vector<float> project_mean(const HeadCodec & head, const std::vector<uint16_t> & mean) {
    std::vector<float> offset(mean.empty() ? 0 : (size_t) head.rank);
    for (size_t i = 0; i < offset.size(); ++i) {
        const uint16_t * row   = head.encode.halves + i * mean.size();
        double           total = 0.0;
        for (size_t j = 0; j < mean.size(); ++j) {
            total += (double) ggml_fp16_to_fp32(row[j]) * (double) ggml_fp16_to_fp32(mean[j]);
        }
        offset[i] = (float) total;
    }
    return offset;
}

// Returns true if a band's rows of E and D are zero in elements [j0, j1).
static bool silent(const HeadCodec & keys, const Band & band, int j0, int j1) {
    for (const uint16_t * m : { keys.encode.halves, keys.decode.halves }) {
        for (int i = band.first; i < band.first + band.n; ++i) {
            const uint16_t * row = m + (size_t) i * (size_t) keys.d;
            if (std::any_of(row + j0, row + j1, [](uint16_t half) { return (half & 0x7fff) != 0; })) {
                return false;
            }
        }
    }
    return true;
}

HeadCodec latent_values(const std::string & key, const HeadCodec & keys, int d_v, std::vector<uint16_t> & decode) {
    HeadCodec values = {};
    values.value     = 1;
    values.d         = d_v;
    values.row_bytes = 1;
    while (values.n_bands < keys.n_bands && silent(keys, keys.bands[values.n_bands], d_v, keys.d)) {
        const Band & band = keys.bands[values.n_bands];
        add_band(values, band.n, band.bits, band.ratio);
    }
    for (int b = values.n_bands; b < keys.n_bands; ++b) {
        if (!silent(keys, keys.bands[b], 0, d_v)) {
            refuse(key,
                   "bands of a latent layer of its first " + std::to_string(d_v) +
                       " elements, then bands of the others",
                   "band " + std::to_string(b) + " of both or in another order");
        }
    }
    values.path = keys.path;
    if (values.n_bands == 0 || values.rank > d_v) {
        refuse(key,
               "8.." + std::to_string(d_v) + " coefficients of a latent layer's first " + std::to_string(d_v) +
                   " elements",
               std::to_string(values.rank));
    }
    decode.resize((size_t) values.rank * (size_t) d_v);
    for (int i = 0; i < values.rank; ++i) {
        std::copy_n(keys.decode.halves + (size_t) i * (size_t) keys.d, d_v, decode.data() + (size_t) i * (size_t) d_v);
    }
    values.decode = { decode.data() };
    return values;
}

// Converts a row [d] to bytes times a half. Returns false if the row has no such form.
static bool as_bytes(const uint16_t * row, int64_t d, int8_t * bytes, uint16_t & step) {
    float largest = 0.0f;
    for (int64_t j = 0; j < d; ++j) {
        largest = std::max(largest, std::fabs(ggml_fp16_to_fp32(row[j])));
    }
    // The largest is at least 64 times a step, or 0.
    for (int times = 127; times >= 64; --times) {
        step          = ggml_fp32_to_fp16(largest / (float) times);
        const float s = ggml_fp16_to_fp32(step);
        int64_t     j = 0;
        for (; j < d; ++j) {
            const float x = ggml_fp16_to_fp32(row[j]);
            const float n = s > 0.0f ? std::rint(x / s) : 0.0f;
            if (std::fabs(n) > 127.0f || n * s != x) {
                break;
            }
            bytes[j] = (int8_t) n;
        }
        if (j == d) {
            return true;
        }
    }
    return false;
}

// Copies a matrix [r][d], in halves, to `storage` and advances it. Groups of 8 rows at its end whose entries are
// multiples (-127 .. 127) of one half per row become bytes, and `step` receives these halves.
static Matrix stored_matrix(const uint16_t * halves, int64_t r, int64_t d, uint16_t *& storage,
                            std::vector<uint16_t> & step) {
    constexpr int64_t   GROUP = 8;
    std::vector<int8_t> bytes((size_t) (r * d));
    step.resize((size_t) r);
    int64_t first = r; // row in bytes
    while (first > 0 &&
           as_bytes(halves + (first - 1) * d, d, bytes.data() + (first - 1) * d, step[(size_t) first - 1])) {
        --first;
    }
    first = (first + GROUP - 1) / GROUP * GROUP; // 8 * d is a multiple of 64, so that all parts are aligned
    step.erase(step.begin(), step.begin() + first);
    std::copy_n(halves, first * d, storage);
    const uint16_t * of_first = storage;
    storage += first * d;
    if (first == r) {
        return { of_first };
    }
    auto * at = (int8_t *) storage;
    std::memcpy(at, bytes.data() + first * d, (size_t) ((r - first) * d));
    storage += (r - first) * d / 2;
    return { of_first, at, step.data(), first };
}

void store_matrices(HeadCodec & head, uint16_t *& storage, std::vector<uint16_t> & encode_step,
                    std::vector<uint16_t> & decode_step) {
    if (present(head.encode)) { // values of a latent layer have none
        head.encode = stored_matrix(head.encode.halves, head.rank, head.d, storage, encode_step);
    }
    head.decode = stored_matrix(head.decode.halves, head.rank, head.d, storage, decode_step);
}

} // namespace subkv
