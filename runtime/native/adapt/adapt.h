// adapt.h: adaptation of bases to the text. `Adapter` codes the rows of one KV head, K or V, block by block, and opens
// a new *chunk* with its own basis when the rows leave the current subspace (papers/online-subspace-projection.md §5).
//
// All computation is in the space of the file's static coefficients, x' = E x - offset, n = codec.rank: in the file's
// metric an error costs the same in every coefficient, so plain norms measure the cost.
//   store  c = R x', quantized with the head's own bands (cells keep their size) and the chunk's own ratios
//   use    x^' = R^T g c^, g = 1/(1 - distortion of the band's width) compensates the quantizer's shrinkage;
//          x^ = D^T keep x^', keep = 1/g of the static bands, because D already includes g
// R [n][n] orthonormal, half: the sketch's directions by energy, mixed inside bands of up to 8 bits. Chunk 0 is the
// static basis, R = I with the file's ratios; it always exists and needs no memory.
//
// A block is coded with the current chunk, or with the best of all chunks (`reuse`). If its residual or the chunk's
// length triggers it, the adapter also tries the sketch's basis on the block and opens a chunk if the gain is large
// enough. When J_max chunks are open, the adapter recodes the oldest chunk in the basis of the next one (`merge`), or
// opens no further chunks. research/notes/quality.md lists the gain of each option.
//
// Decisions about a block may use the complete block and `lookahead` rows after it, but no later ones. With `window`,
// a basis is fitted to that many latest of these rows only: window 256 and lookahead 128 are the anchoring window of
// papers/online-subspace-projection.md §7, centred at the block's end. State and rows depend only on the rows and their
// positions.
#pragma once

#include "layout.h"
#include "quantizer.h"
#include "subkv/ops.h"
#include "subkv/sketch.h"
#include "subkv_adapt.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace subkv {

constexpr int MAX_ADAPT_BLOCK  = 1024;
constexpr int MAX_ADAPT_CHUNKS = 255; // a cell's chunk fits a byte
constexpr int MAX_ADAPT_WINDOW = 4096;

using AdaptParams = subkv_adapt_params;

// Sets an error about the options of adaptation and throws it.
[[noreturn]] inline void refuse_adapt(const std::string & reason) {
    fail({ SUBKV_ERROR_INVALID, "adapt", reason });
}

[[noreturn]] inline void refuse_adapt(const std::string & option, const std::string & expected,
                                      const std::string & found) {
    refuse_adapt(option + ": expected " + expected + ", found " + found);
}

// A basis and its codec, whose matrices are the rotation.
struct ChunkBasis {
    std::vector<uint16_t> rotation; // R [n][n] half, row-major
    HeadCodec             codec;    // for ops, with x' [n] instead of x [d]
    int64_t               opened;   // number of chunks opened before it
};

struct AdaptStats {
    int64_t n_blocks    = 0;
    int64_t n_opened    = 0;
    int64_t n_refused   = 0; // candidates that did not gain enough
    int64_t n_merged    = 0;
    int64_t n_recoded   = 0; // rows recoded by merges
    int64_t n_nonfinite = 0; // rows that could not be coded
};

class Adapter final {
public:
    // Recodes stored rows in place. `cells` [n] are cells of tiles, `stride` bytes apart, as in Ops::encode.
    using Recode = std::function<void(uint8_t * tiles, int64_t stride, int64_t n, const int64_t * cells)>;
    // Chunk `to` replaces `from` (the same slot if it is rotated in place). The host passes every row of `from` to
    // `recode` once and from then on reads it as a row of `to`.
    using Merge = std::function<void(int32_t from, int32_t to, const Recode & recode)>;

    // Parameters for heads of `rank` coefficients, with defaults instead of zeros. Throws Invalid.
    static AdaptParams checked(AdaptParams params, int32_t rank);

    // `params` are as checked() returns them. The codec and its matrices must outlive the adapter.
    Adapter(const Ops & ops, const HeadCodec & codec, const AdaptParams & params);

    // Codes one block, x [n][ldx] f32 of consecutive positions, into cells [n] of tiles, `stride` bytes apart, as in
    // Ops::encode. After these rows, x has the n_ahead rows of the following `lookahead` positions. Returns the slot of
    // the block's chunk. Call it in order of position.
    int32_t block(const float * x, int64_t ldx, int64_t n, int64_t n_ahead, const int64_t * cells, uint8_t * tiles,
                  int64_t stride, const Merge & merge);

    // Codes rows with the current chunk and leaves the state unchanged.
    int32_t peek(const float * x, int64_t ldx, int64_t n, const int64_t * cells, uint8_t * tiles, int64_t stride);

    // Attention on a chunk's own coefficients c^, given those of the static basis: qt [n] = D q, as for any row.
    //   q . x^ = query(qt) . c^         out [n] = g * R (keep * qt)
    void query(int32_t slot, const float * qt, float * out) const;
    //   x^ = D^T lift(c^), linear       out [n] = keep * R^T (g * e), e a row or any weighted sum of rows of the chunk
    void lift(int32_t slot, const float * e, float * out) const;

    const ChunkBasis *  chunk(int32_t slot) const;                // nullptr if the slot is 0 or not in use
    int32_t             n_chunks() const;                         // adaptive, alive
    float               residual() const { return residual_; }    // of the latest block as stored
    void                add_stats(subkv_adapt_stats & sum) const; // of the residuals the maximum
    const AdaptParams & params() const { return params_; }
    size_t              bytes_bases() const; // of the chunks in use
    size_t  bytes_sketch() const { return sketch_.size() * sizeof(uint64_t) + window_.size() * sizeof(float); }
    int64_t sketch_rows(float * s) const; // subkv::sketch_rows of the next trial, or 0 if the sketch is freed

    std::vector<uint8_t> save() const;
    // Restores a saved state of an adapter with the same codec and parameters. Throws Invalid and then changes nothing.
    void restore(const uint8_t * bytes, size_t n);

private:
    int64_t project(const float * x, int64_t ldx, int64_t n, std::vector<float> & space); // rows that are not finite
    double  encode(const HeadCodec & codec, const float * x, int64_t ldx, int64_t n, const ChunkBasis * chunk,
                   std::vector<uint8_t> & tiles);
    void    decode(const ChunkBasis * chunk, const uint8_t * tiles, int64_t stride, int64_t n, const int64_t * cells,
                   float * space) const;
    std::unique_ptr<ChunkBasis> candidate() const;
    int32_t                     adopt(std::unique_ptr<ChunkBasis> chunk, const Merge & merge);
    void recode(const ChunkBasis & from, const ChunkBasis & to, uint8_t * tiles, int64_t stride, int64_t n,
                const int64_t * cells);
    void absorb(const float * space, int64_t n); // rows [n][rank], the sketch's next ones
    // of a trial at this moment, with `of_window` as its memory
    const uint64_t * sketch(std::vector<uint64_t> & of_window) const;
    SketchParams     sketch_params() const;
    bool             complete() const; // true if no more chunks will open, the sketch is freed

    const Ops &       ops_;
    const HeadCodec & codec_;
    AdaptParams       params_;

    std::vector<float>                       keep_, undo_;  // [n] 1 - distortion of the static bands, and g
    std::vector<std::unique_ptr<ChunkBasis>> chunks_;       // [max_chunks], slot s at s - 1
    std::vector<uint64_t>                    sketch_;       // empty once complete(), or with a window
    std::vector<float>                       window_;       // [at most params_.window][rank] latest finite rows
    int64_t                                  n_seen_   = 0; // finite rows seen, with a window
    int64_t                                  n_ahead_  = 0; // rows after the latest block that have been seen
    int32_t                                  current_  = 0;
    int64_t                                  since_    = 0; // tokens since the current chunk was last decided on
    float                                    residual_ = 0.0f;
    AdaptStats                               stats_;

    std::vector<float>   space_; // x' [block][n], which like the rest is scratch
    std::vector<float>   seen_, later_;
    std::vector<uint8_t> stored_, tried_; // tiles, cells as in the block
};

// As read_rows (read_rows.h), of cells with chunks. slot [n] is the chunk of each cell.
void read_chunks(const Ops & ops, const LayerCodec & layer, int64_t head, bool value, const Adapter & adapter,
                 const int32_t * slot, const uint8_t * tiles, int64_t stride, int64_t n, const int64_t * cells,
                 float * x);

// The basis of a sketch, from orthonormal rows [n][n] f64 ordered by energy [n] f64. `file` is the head's static codec.
std::unique_ptr<ChunkBasis> make_chunk_basis(const Ops & ops, const HeadCodec & file, const double * rows,
                                             const double * energy);

// Sets the codec's matrices to the rotation, its bands to the file's, and its ratios to `ratio` [n_bands].
void bind_chunk_codec(const HeadCodec & file, const float * ratio, ChunkBasis & chunk);

} // namespace subkv
