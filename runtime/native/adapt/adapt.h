// adapt.h: bases that follow the text. `Adapter` codes the rows of one KV head, K or V, block by block, and opens a new
// *chunk* with a basis of its own where the rows have left the one in use (papers/online-subspace-projection.md §5).
//
// Everything happens in the space of the file's static coefficients, x' = E x - offset, n = codec.rank of them: the
// file's metric makes an error cost the same in each, so plain norms mean what they should.
//   store  c = R x', quantized with the head's own bands (cells keep their size) and the chunk's own ratios
//   use    x^' = R^T g c^, g = 1/(1 - distortion of the band's width) undoes what its quantizer shrinks;
//          x^ = D^T keep x^', keep = 1/g of the static bands, which D has in it already
// R [n][n] orthonormal, half: the sketch's directions by energy, mixed inside bands of up to 8 bits. Chunk 0 is the
// static basis, R = I with the file's ratios; it is never given up, and costs nothing.
//
// A block is coded with the chunk in use, or with the best of those alive (`reuse`); where its residual or the chunk's
// length asks for it, the sketch's basis is tried on it, too, and opens a chunk if it gains enough. At J_max the oldest
// chunk is coded anew in the basis of the next (`merge`), or that is it. converter/NOTES.md has what each is worth.
//
// A block is known as a whole when it is coded, so what is decided about it may look at it, but at nothing later.
// State and rows are a function of the rows and their positions alone.
#pragma once

#include "read_rows.h"
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

// 2^b-level uniform quantizer on a unit Gaussian (subkv/plan/quantizer.py, best_step and distortion); b as of Band.
double quantizer_step(int32_t bits);
double quantizer_distortion(int32_t bits);

struct AdaptParams {
    SketchKind kind;
    int32_t    rank;   // r: directions taken from the sketch, the rest completes the basis; 0: n, half of it for OJA
    int32_t    rows;   // l >= r (OJA: = r); 0: 2r (OJA: r)
    float      decay;  // as of SketchParams
    float      rate;   // as of SketchParams
    int32_t    block;  // B: consecutive positions that are coded together
    int32_t    length; // L: tokens after which a chunk is reconsidered; 0: never for its length
    int32_t    warm;   // W: tokens that the sketch has seen before the first chunk is opened
    int32_t    max_chunks; // J_max: adaptive chunks alive; 1: the basis is rotated in place (SubSpace-A)
    float      tau;        // relative residual that triggers; >= 1: none does
    float      gain;  // > 0: a new basis must bring the block's residual to this times what there is; large: always
    int32_t    reuse; // 1: every block takes the best of the bases alive, the static one included; 0: the latest
    int32_t    merge; // 1: at J_max the two oldest chunks become one; 0: no more open, the sketch is freed
};

// A basis and how it is used; the codec's matrices are the rotation.
struct ChunkBasis {
    std::vector<uint16_t> rotation; // R [n][n] half, row-major
    HeadCodec             codec;    // of x' [n] instead of x [d]: ops take it
    int64_t               opened;   // how many chunks had been opened before it
};

struct AdaptStats {
    int64_t n_blocks    = 0;
    int64_t n_opened    = 0;
    int64_t n_refused   = 0; // candidates that did not gain enough
    int64_t n_merged    = 0;
    int64_t n_recoded   = 0; // rows coded anew by merges
    int64_t n_nonfinite = 0; // rows stored as zero rows
};

class Adapter final : public ChunkReader {
public:
    // Codes stored rows anew, in place: `cells` [n] of tiles, `stride` bytes apart, as of Ops::encode.
    using Recode = std::function<void(uint8_t * tiles, int64_t stride, int64_t n, const int64_t * cells)>;
    // The chunk `from` gives way to `to` (the same slot when it is rotated in place). The host hands every row of `from`
    // to `recode` once and from then on reads it as one of `to`.
    using Merge = std::function<void(int32_t from, int32_t to, const Recode & recode)>;

    // What is wrong with parameters for heads of `rank` coefficients; true: nothing. Replaces zeros by defaults.
    static bool check(AdaptParams & params, int32_t rank, std::string & err);

    // `params` passed check(). The codec and its matrices must outlive the adapter.
    Adapter(const Ops & ops, const HeadCodec & codec, const AdaptParams & params);

    // Codes one block: x [n][ldx] f32 of consecutive positions into cells [n] of tiles, `stride` bytes apart, as of
    // Ops::encode. Returns the slot of the chunk that all of them belong to. Blocks come in order of position.
    int32_t block(const float * x, int64_t ldx, int64_t n, const int64_t * cells, uint8_t * tiles, int64_t stride,
                  const Merge & merge);

    // Codes rows with the chunk in use and learns nothing: what would be stored now.
    int32_t peek(const float * x, int64_t ldx, int64_t n, const int64_t * cells, uint8_t * tiles, int64_t stride);

    // Attention on a chunk's own coefficients c^, given those of the static basis: qt [n] = D q, as for any row.
    //   q . x^ = query(qt) . c^         out [n] = g * R (keep * qt)
    void query(int32_t slot, const float * qt, float * out) const;
    //   x^ = D^T lift(c^), linear       out [n] = keep * R^T (g * e), e a row or any weighted sum of rows of the chunk
    void lift(int32_t slot, const float * e, float * out) const override;

    const HeadCodec * codec(int32_t slot) const override {
        const ChunkBasis * found = chunk(slot);
        return found ? &found->codec : nullptr;
    }

    const ChunkBasis *  chunk(int32_t slot) const;             // nullptr: 0, or not in use
    int32_t             n_chunks() const;                      // adaptive, alive
    float               residual() const { return residual_; } // of the latest block as stored
    const AdaptStats &  stats() const { return stats_; }
    const AdaptParams & params() const { return params_; }
    size_t              bytes_bases() const; // of the chunks alive
    size_t              bytes_sketch() const { return sketch_.size() * sizeof(uint64_t); }
    int64_t             sketch_rows(float * s) const; // subkv::sketch_rows; 0, too, when the sketch is freed

    std::vector<uint8_t> save() const;
    // Takes over a saved state of an adapter with the same codec and parameters. false: `err`, and nothing has changed.
    bool restore(const uint8_t * bytes, size_t n, std::string & err);

private:
    int64_t project(const float * x, int64_t ldx, int64_t n); // -> space_; rows that are not finite
    double  encode(const HeadCodec & codec, const float * x, int64_t ldx, int64_t n, const ChunkBasis * chunk,
                   std::vector<uint8_t> & tiles);
    void    decode(const ChunkBasis * chunk, const uint8_t * tiles, int64_t stride, int64_t n, const int64_t * cells,
                   float * space) const;
    std::unique_ptr<ChunkBasis> candidate() const;
    int32_t                     adopt(std::unique_ptr<ChunkBasis> chunk, const Merge & merge);
    void         recode(const ChunkBasis & from, const ChunkBasis & to, uint8_t * tiles, int64_t stride, int64_t n,
                        const int64_t * cells);
    SketchParams sketch_params() const;
    bool         complete() const; // no chunk will ever be opened again

    const Ops &       ops_;
    const HeadCodec & codec_;
    AdaptParams       params_;

    std::vector<float>                       keep_, undo_; // [n] 1 - distortion of the static bands; g
    std::vector<std::unique_ptr<ChunkBasis>> chunks_;      // [max_chunks], slot s at s - 1
    std::vector<uint64_t>                    sketch_;      // empty once complete()
    int32_t                                  current_  = 0;
    int64_t                                  since_    = 0; // tokens since the current chunk was last decided on
    float                                    residual_ = 0.0f;
    AdaptStats                               stats_;

    std::vector<float>   space_; // x' [block][n]; scratch, as the rest
    std::vector<float>   seen_;
    std::vector<uint8_t> stored_, tried_; // tiles, cells as in the block
};

// The basis that a sketch asks for. rows [n][n] f64 orthonormal by energy [n] f64; `file`: the head's static codec.
std::unique_ptr<ChunkBasis> make_chunk_basis(const Ops & ops, const HeadCodec & file, const double * rows,
                                             const double * energy);

// Adds what one adapter can tell; of residuals the largest counts.
void add_stats(const Adapter & adapter, subkv_adapt_stats & sum);

// The C interface's parameters.
AdaptParams adapt_params(const subkv_adapt_params & params);

// Lets the codec point to the rotation and carry the file's bands, ratios as given [n_bands].
void bind_chunk_codec(const HeadCodec & file, const float * ratio, ChunkBasis & chunk);

} // namespace subkv
