// adapt_basis.cpp: computes a chunk's basis from the directions of a sketch, as subkv/plan/basis.py does for the static
// one.
//   R [n][n] half: directions by energy, the rows of every band of up to MIX_MAX_BITS bits mixed by an orthonormal
//                  matrix, after which all coefficients of the band have its mean energy
//   ratio          of a band: rms of its coefficients times the best step of its width; the largest is 1
#include "adapt.h"

#include <algorithm>
#include <cmath>

namespace subkv {

namespace {

constexpr int32_t MIX_MAX_BITS = 8;    // 16-bit bands have no shared step, as in subkv/plan/basis.py
constexpr double  STEP_FLOOR   = 1e-6; // the least ratio, as there, for bands without energy

// Entry (i, j) of an orthonormal [n][n], which is Sylvester's Hadamard matrix for powers of two, and else the DCT-II.
double mixing(int32_t n, int32_t i, int32_t j) {
    if ((n & (n - 1)) == 0) {
        int32_t odd = 0;
        for (int32_t both = i & j; both != 0; both &= both - 1) {
            odd ^= 1;
        }
        return (odd != 0 ? -1.0 : 1.0) / std::sqrt((double) n);
    }
    const double pi = 3.14159265358979323846;
    return i == 0 ? 1.0 / std::sqrt((double) n) : std::sqrt(2.0 / n) * std::cos(pi * (j + 0.5) * i / n);
}

} // namespace

void bind_chunk_codec(const HeadCodec & file, const float * ratio, ChunkBasis & chunk) {
    chunk.codec        = file;
    chunk.codec.d      = file.rank;
    chunk.codec.encode = { chunk.rotation.data() };
    chunk.codec.decode = chunk.codec.encode;
    chunk.codec.offset = nullptr;
    for (int32_t b = 0; b < file.n_bands; ++b) {
        chunk.codec.bands[b].ratio = ratio[b];
    }
}

std::unique_ptr<ChunkBasis> make_chunk_basis(const Ops & ops, const HeadCodec & file, const double * rows,
                                             const double * energy) {
    const auto         n = (size_t) file.rank;
    std::vector<float> rotation(n * n);
    double             step[MAX_BANDS];
    double             largest = 0.0;
    for (int32_t b = 0; b < file.n_bands; ++b) {
        const Band & band = file.bands[b];
        double       mean = 0.0;
        for (int32_t i = 0; i < band.n; ++i) {
            mean += std::max(energy[band.first + i], 0.0) / band.n;
        }
        step[b] = std::sqrt(mean) * quantizer_step(band.bits); // 0 for 16 bits
        largest = std::max(largest, step[b]);
        for (int32_t i = 0; i < band.n; ++i) {
            float * out = rotation.data() + (size_t) (band.first + i) * n;
            for (size_t j = 0; j < n; ++j) {
                double value = rows[(size_t) (band.first + i) * n + j];
                if (band.bits <= MIX_MAX_BITS) {
                    value = 0.0;
                    for (int32_t k = 0; k < band.n; ++k) {
                        value += mixing(band.n, i, k) * rows[(size_t) (band.first + k) * n + j];
                    }
                }
                out[j] = (float) value;
            }
        }
    }
    float ratio[MAX_BANDS];
    for (int32_t b = 0; b < file.n_bands; ++b) {
        const bool coded = file.bands[b].bits != 16 && largest > 0.0;
        ratio[b]         = coded ? (float) std::max(step[b] / largest, STEP_FLOOR) : 1.0f;
    }
    auto chunk = std::make_unique<ChunkBasis>();
    chunk->rotation.resize(n * n);
    ops.to_half(rotation.data(), chunk->rotation.data(), (int64_t) (n * n));
    bind_chunk_codec(file, ratio, *chunk);
    return chunk;
}

} // namespace subkv
