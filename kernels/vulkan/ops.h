// ops.h: the ops of a coded layer on a Vulkan device. Their callers need no Vulkan header.
//
// An op becomes one dispatch or two (subkv/vulkan_dispatch.h). Shaders read words, so every place and stride below is a
// multiple of 4 bytes, except for a mask in halves.
//
// Cells are stored in tiles (subkv/tiles.h); the tiles of a layer's heads are contiguous.
//
// Codes are bit-identical to kernels/ref for the same coefficients if the device's division and fused operations follow
// IEEE. All other arithmetic is f32, except where attend multiplies bytes. It then rounds queries, times the steps of
// bands, to 1/32639 of the largest, and weights to 1/65535 of a tile's largest one times the tile's largest scale, as
// in kernels/cuda.
#pragma once

#include "subkv/ops.h"
#include "subkv/vulkan_dispatch.h"

#include <cstdint>
#include <vector>

namespace subkv::vulkan {

// A place in a buffer.
struct Place {
    const void * buffer = nullptr; // as in Dispatch
    uint64_t     at     = 0;       // bytes
};

// A layer's tables for its shaders, in words. The first word counts rows with non-finite coefficients.
struct LayerTables {
    std::vector<HeadCodec>        k, v;               // [n_head_kv]
    std::vector<int64_t>          k_offset, v_offset; // offset of the head's tile among those of all heads, in bytes
    std::vector<float>            gamma;              // [n_head_kv]
    std::vector<const uint16_t *> mean;               // [n_head_kv] -> [d_k] half, or nullptr if keys are not centred
    std::vector<float>            slope;              // [n_head] slopes of the mask; ones without ALiBi
    int32_t                       n_sink, n_recent;
    bool                          latent; // as in Layer
};

struct Tables {
    std::vector<uint32_t> words;
    size_t                slopes_at; // words
};

Tables make_tables(const LayerTables & layer);

struct Layer {
    Place   tables; // Tables::words, at the beginning of a buffer
    int32_t n_head_kv, n_group, d_k, d_v;
    int32_t width_k, width_v; // largest ranks
    float   scale, softcap;   // softcap is 0 if there is none
    bool    integer_dot;      // whether the device has fast dot products of four bytes, and the feature is enabled
    bool    latent;           // values are the first d_v elements of keys, without tiles; there is one KV head
};

// Returns the words of packed queries per query row in attend's scratch memory, or 0 if it multiplies floats.
int64_t packed_words(const Layer & layer);

// Encodes the rows k, v [n_tok] of all heads into `cells`, which are distinct, and stores both in half precision in
// `fresh` [n_tok][n_head_kv * (d_k + d_v)], K first (only K in a latent layer). There, a non-finite row becomes
// HALF_NAN.
struct Encode {
    Layer   layer;
    Place   k, v;
    int64_t k_head, k_token, v_head, v_token; // strides, in floats
    Place   k_tiles, v_tiles;
    int64_t k_stride, v_stride; // bytes from one tile to the next
    Place   cells;              // [n_tok] int64
    Place   fresh;
    int64_t n_tok;
};

// Query row (t, g) of KV head h and split i has the number ((i * n_head_kv + h) * n_tokens + t) * n_group + g, as in
// runtime/native's AttendShape. Stream s has the tokens [s * n_tps, (s + 1) * n_tps). A cell's bias is the mask's
// value, or -INFINITY if its position is exact for the token (the first n_sink and the last n_recent).
struct Attend {
    Layer   layer;
    Place   q;
    int64_t q_head, q_token;    // strides, in floats
    Place   k_tiles, v_tiles;   // in a latent layer both are the tiles of keys
    int64_t k_stride, v_stride; // bytes from one tile to the next
    int64_t k_stream, v_stream; // bytes from one stream to the next
    Place   mask;               // [n_tokens][n_kv]
    bool    mask_half;
    Place   cell_pos; // [n_stream][n_kv]
    Place   tokens;   // [n_tokens] TokenRow (subkv/batch.h)
    int64_t n_kv;     // cells of a stream; the last tile is complete in memory
    int64_t n_stream, n_tps;
    int64_t split, n_split; // cells per split, whole tiles; number of splits
    // The places from here on are in one buffer.
    Place m; // [n_split * n_head_kv * n_tokens * n_group]
    Place z;
    Place acc;    // the same rows of width_v floats
    Place qt;     // scratch [n_head_kv][n_tokens * n_group][width_k]
    Place shift;  // scratch [n_head_kv][n_tokens * n_group]
    Place packed; // scratch, the same rows of packed_words()
};

// Merges the splits, multiplies by D_v, adds the exact keys (window rows and fresh rows) and sinks, and normalises.
struct Combine {
    Attend  a; // m, z and acc are results of attend
    Place   fresh;
    Place   window;       // [n_slots] rows like those of `fresh`, or any place without an exact window
    Place   slots;        // [n_slots of the window] SlotRow (subkv/batch.h)
    int32_t slots_of_seq; // slots of one sequence, or 0 without an exact window
    Place   sinks;        // [n_head], or no buffer without sinks
    Place   out;          // [n_tokens][out_stride], query head h at h * d_v
    int64_t out_stride;
};

// The rows of a prompt for flash attention on halves, which replaces attend and combine, as in kernels/cuda/ops.h. They
// are rows of a stream's cells from their codes, exact rows of n_slots window slots and of the ubatch's own tokens,
// then zeros. There is also a mask, and the output of tokens that see a row that is not finite becomes NaN.
struct Prompt {
    Combine c;       // sources, without the queries and results of c.a
    int64_t n_slots; // slots per stream
    int64_t n_rows;  // n_kv + n_slots + n_tps or more, even
    int32_t first;   // first KV head
    int32_t n_heads; // KV heads from the first one on
    Place   k;       // [n_stream][n_heads][n_rows][d_k] half, at most +-65504
    Place   v;       // [n_stream][n_heads][n_rows][d_v]
    Place   mask;    // [n_stream][n_tps][n_rows] half
};

// Copies fresh rows to the window's slots that have a token of this ubatch.
struct Store {
    Place   window;
    Place   fresh;
    Place   slots; // [n_slots] SlotRow
    int64_t n_slots;
    int64_t width; // halves per row
};

// These functions return nullptr, or the condition that is not met, or the error of `run`.
const char * encode(const Encode & args, Run run, void * recorder);
const char * attend(const Attend & args, Run run, void * recorder);
const char * combine(const Combine & args, Run run, void * recorder);
const char * store_window(const Store & args, Run run, void * recorder);
const char * prompt_rows(const Prompt & args, Run run, void * recorder); // writes k and v
const char * prompt_mask(const Prompt & args, Run run, void * recorder); // writes mask
const char * prompt_lost(const Prompt & args, Run run, void * recorder); // c.out has the query heads of these KV heads

// Does the first part of attend, which projects queries, for tests and measurements.
const char * project_queries(const Attend & args, Run run, void * recorder);

} // namespace subkv::vulkan
