// layout.h: the bases and bands of one model, as read from the subkv.* keys of a GGUF (converter/FORMAT.md §1-3).
//
// Only load_layout() and make_layout() create a Layout, so every Layout meets all limits of FORMAT.md.
#pragma once

#include "error.h"
#include "subkv.h"
#include "subkv/ops.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace subkv {

constexpr size_t MAX_LAYOUT_BYTES = 16u << 20; // of the subkv.layout string

// The bands of one head in subkv.layout.
struct HeadSpec {
    struct BandSpec {
        uint16_t n;
        uint16_t bits;
    };

    int32_t  n_bands          = 0;
    BandSpec bands[MAX_BANDS] = {};

    int rank() const;
};

struct LayerSpec {
    int                   il = 0, n_head_kv = 0, d_k = 0, d_v = 0;
    std::vector<HeadSpec> k, v; // [n_head_kv], but v of a latent layer is empty

    bool   latent() const { return v.empty(); }
    size_t basis_bytes() const; // of the decoded subkv.blk.N.basis
};

// Appends a band to a head. The first call needs row_bytes = 1, for the scale byte.
inline void add_band(HeadCodec & head, int32_t n, int32_t bits, float ratio) {
    head.bands[head.n_bands++] = { n, bits, head.rank, head.row_bytes, ratio };
    head.rank += n;
    head.row_bytes += n * bits / 8;
}

// Computes c [n][rank] = E x - offset of rows x [n][ldx], in f32.
void project_rows(const Ops & ops, const HeadCodec & codec, const float * x, int64_t ldx, int64_t n, float * c);

// E mean, summed in double, which encode subtracts from E x. It is empty without a mean.
std::vector<float> project_mean(const HeadCodec & head, const std::vector<uint16_t> & mean);

// The codec of a latent layer's values, which are the first bands of its keys, with matrices in halves, restricted to
// the first d_v elements. `decode` receives their D [rank][d_v]. Throws Invalid, which begins with `key`, unless every
// band covers only these elements or only the other ones.
HeadCodec latent_values(const std::string & key, const HeadCodec & keys, int d_v, std::vector<uint16_t> & decode);

// Copies the matrices of a head, in halves, to `storage` and advances it. The last rows become bytes, as long as all
// entries of a row are multiples (-127 .. 127) of one half, the step. The vectors receive the steps of E and of D.
void store_matrices(HeadCodec & head, uint16_t *& storage, std::vector<uint16_t> & encode_step,
                    std::vector<uint16_t> & decode_step);

// Parses and validates a layout (FORMAT.md §2), the value of `key`. Throws Invalid with the place of a defect.
std::vector<LayerSpec> parse_layout(std::string_view text, int block_count, const std::string & key = "subkv.layout");

// The mean of one head's keys, which is subtracted before coding, or empty for zeros. HeadCodec::offset points to
// `offset`.
struct KeyCentre {
    std::vector<uint16_t> mean;   // [d_k] IEEE half
    std::vector<float>    offset; // [rank] E mean

    size_t bytes() const { return mean.size() * sizeof(uint16_t) + offset.size() * sizeof(float); }
};

struct LayerCodec {
    int                                il = 0, n_head_kv = 0, d_k = 0, d_v = 0;
    std::vector<HeadCodec>             k, v;   // [n_head_kv]
    std::vector<float>                 gamma;  // [n_head_kv]
    std::vector<KeyCentre>             centre; // [n_head_kv]
    std::vector<std::vector<uint16_t>> steps;  // [4 n_head_kv] steps of rows in bytes, E and D of K, of V, head by head
    size_t                             k_row_bytes = 0; // of one cell, all heads
    size_t                             v_row_bytes = 0;
    std::vector<size_t> k_offset, v_offset; // [n_head_kv] byte offset of the head's row in the cell's row
    // the layer has one KV head, and values are the first d_v elements of keys and have no rows
    bool latent = false;

    const HeadCodec & head(int64_t h, bool value) const { return (value ? v : k)[(size_t) h]; }
    // Byte offset of the head's tile in the tile of all heads (subkv/tiles.h).
    int64_t tile_offset(int64_t h, bool value) const {
        return TILE * (int64_t) (value ? v_offset : k_offset)[(size_t) h];
    }
};

// A plan of a file (FORMAT.md §3.3). `budget` and `bpe` are bits per element, requested and counted. `predicted` is the
// KLD in nats per token, or 0 if it is unknown.
struct PlanFacts {
    float budget = 0.0f, bpe = 0.0f, predicted = 0.0f;
};

struct Layout {
    int         version = 0;
    std::string codec;
    std::string arch;
    int         n_layer     = 0; // subkv.block_count
    int         n_sink      = 0;
    int         n_recent    = 0;
    int         recent_bits = 16;   // bits per element of recent rows, 16 for halves or RECENT_BITS for integers
    float       bpe         = 0.0f; // bits per element, everything counted, at a context of bpe_context
    float       bpe_rows    = 0.0f; // coefficient rows alone
    uint32_t    bpe_context = 0;
    float       budget      = 0.0f; // bits per element that the user names to get this layout
    // KLD in nats per token of this layout, of q8_0, or 0 if it is unknown
    float       predicted = 0.0f, predicted_q8_0 = 0.0f;
    std::string gamma;
    std::string basis_k;
    std::string basis_v;
    std::string base_sha256;
    std::string calibration_sha256;
    uint64_t    calibration_tokens = 0;
    std::string calibration_text;
    std::string generator;
    std::string adapt; // default of the user's option, or "" if there is none

    std::string            path;  // of the file, or "" if they are derived from the weights
    std::vector<PlanFacts> plans; // for other budgets than that of subkv.layout

    std::vector<LayerCodec> layers; // coded layers, ascending il
    std::string             fingerprint;
    size_t                  bytes_bases     = 0; // E, D, means and offsets of all heads in memory
    size_t                  bytes_per_token = 0; // coefficient rows of one cell, all coded layers

    // Returns nullptr if the layer keeps an ordinary cache.
    const LayerCodec * layer(int il) const;

    // Owns the memory of HeadCodec::encode and ::decode, where every matrix starts on a 64-byte boundary.
    struct AlignedDelete {
        void operator()(uint16_t * p) const;
    };

    std::unique_ptr<uint16_t[], AlignedDelete> matrices;
};

// `budget` is in bits per element, or 0 for that of subkv.layout. Throws Invalid with the key of a defect, the expected
// and the actual value, or of SUBKV_ERROR_BUDGET with the budgets that the file has plans for.
std::shared_ptr<const Layout> load_layout(const char * path, float budget = 0.0f);

// Writes the bytes that a layer's subkv.blk.N.basis has after decoding (FORMAT.md §3). It is called for every layer in
// order.
using BasisBytes = std::function<void(const LayerSpec &, uint8_t *)>;

// Completes a layout that does not come from a file. `header` has all but the layers. Throws as load_layout.
std::shared_ptr<const Layout> make_layout(const std::shared_ptr<Layout> & header, const std::vector<LayerSpec> & specs,
                                          const BasisBytes & bases);

// The budget of the file's layout with this fingerprint, or 0 if there is none.
float budget_of_fingerprint(const Layout & layout, const std::string & fingerprint);

// Returns true if the GGUF has subkv.* keys. Throws Invalid if it is not a readable GGUF.
bool layout_present(const char * path);

// The subkv.layout string in canonical form (no spaces, members in FORMAT.md's order), which is part of the
// fingerprint.
std::string canonical_layout(const std::vector<LayerSpec> & layers);

// The JSON of subkv_layout_json (subkv.h).
std::string layout_to_json(const Layout & layout);

// The JSON of subkv_constants.
std::string constants_to_json();

} // namespace subkv

// The C interface's handle. subkv_attach shares `p` with the context.
struct subkv_layout {
    std::shared_ptr<const subkv::Layout> p;
    std::string                          json;
};
