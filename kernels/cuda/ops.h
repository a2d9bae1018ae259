// ops.h: the ops of a coded layer on a CUDA device. Their callers need no CUDA header.
//
// The pointers in these structures are to device memory; the structures are passed by value. Launches neither allocate
// nor synchronise, so that they can be captured into a CUDA graph. A stream is a cudaStream_t. Functions return nullptr
// or an error message.
//
// Cells are stored in tiles (subkv/tiles.h). The tiles of a layer's heads are contiguous; every tile starts at a
// multiple of 16 bytes.
//
// Codes are bit-identical to kernels/ref for the same coefficients, which are those of the rows in half precision, so
// that the window's rows give the same codes later. The decode kernel of attend rounds projected queries (times band
// ratios) to QUERY_STEP of a query row's largest, and weights exp(l - m) times the scale of the value to WEIGHT_STEP of
// the largest weight times the largest scale; each error is at most half a step. The tile kernel rounds queries,
// coefficients and weights to halves, relative to the largest of a query row, of a tile, and to 1. All other arithmetic
// is f32.
#pragma once

#include "subkv/batch.h"
#include "subkv/ops.h"
#include "subkv/splits.h"

#include <cstdint>

namespace subkv::cuda {

constexpr float QUERY_STEP    = 1.0f / 32639.0f; // two signed bytes: 127 * 256 + 127
constexpr float WEIGHT_STEP   = 1.0f / 65535.0f; // two bytes
constexpr int   DECODE_GROUP  = 8;               // maximum query rows of the decode kernel
constexpr int   DECODE_TOKENS = 8;               // maximum tokens of a stream, each of which has its own blocks
constexpr int   DECODE_HEAD   = 256;             // maximum d of the decode kernel, limited by shared memory
constexpr int   DECODE_BLOCKS = 4;               // blocks per multiprocessor (research/notes/kernels.md)
constexpr int   SIDES         = 2;               // K and V
constexpr int   MATRIX_ROWS   = 16;              // rows of tensor cores' matrices

constexpr int DECODE_HEADS = 128; // maximum KV heads of the decode kernel, limited by the size of its parameters

// The offset of a head's tile among those of all heads, and its size, in bytes.
struct HeadTiles {
    int32_t k_offset, v_offset, k_bytes, v_bytes;
};

// One coded layer.
struct Layer {
    // [n_head_kv], with matrices on the device, in halves, at multiples of 32 bytes; zeros follow the last row of
    // decode up to a multiple of MATRIX_ROWS rows
    const HeadCodec *        k;
    const HeadCodec *        v;        // [n_head_kv]
    const int64_t *          k_offset; // [n_head_kv] offset of the head's tile among those of all heads, in bytes
    const int64_t *          v_offset;
    const float *            gamma; // [n_head_kv]
    const uint16_t * const * mean;  // [n_head_kv] -> [d_k] half, or nullptr if keys are not centred
    const void *             plan;  // [n_head_kv] written by make_plan, at multiples of 16 bytes
    const HeadTiles *        tiles; // [n_head_kv] in the host's memory, for launches
    const float *            slope; // [n_head] slopes of the mask; ones without ALiBi
    unsigned long long *     n_bad; // counter of rows with non-finite coefficients
    int32_t                  n_head_kv, n_group, d_k, d_v;
    int32_t                  width_k, width_v;         // largest ranks
    int32_t                  row_bytes_k, row_bytes_v; // largest rows of a head
    float                    scale, softcap;           // softcap is 0 if there is none
    bool                     latent; // values are the first d_v elements of keys, without tiles; there is one KV head
};

// Stores the rows k, v [n_tok] of all heads in half precision in `fresh` [n_tok][n_head_kv * (d_k + d_v)], K first
// (only K in a latent layer), where a non-finite row becomes HALF_NAN. Encodes these halves into `cells`, which are
// distinct.
struct Encode {
    Layer           layer;
    const float *   k;
    const float *   v;
    int64_t         k_head, k_token, v_head, v_token; // strides, in floats
    uint8_t *       k_tiles;
    uint8_t *       v_tiles;
    int64_t         k_stride, v_stride; // bytes from one tile to the next
    const int64_t * cells;              // [n_tok]
    uint16_t *      fresh;
    int64_t         n_tok;
};

// Query row (t, g) of KV head h and split i has the number ((i * n_head_kv + h) * n_tokens + t) * n_group + g, as in
// runtime/native's AttendShape. Stream s has the tokens [s * n_tps, (s + 1) * n_tps). A cell's bias is the mask's
// value, or -INFINITY if its position is exact for the token (the first n_sink and the last n_recent).
struct Attend {
    Layer            layer;
    const float *    q;
    int64_t          q_head, q_token; // strides, in floats
    const uint8_t *  k_tiles;
    const uint8_t *  v_tiles;
    int64_t          k_stride, v_stride; // bytes from one tile to the next
    int64_t          k_stream, v_stream; // bytes from one stream to the next
    const void *     mask;               // [n_tokens][n_kv]
    bool             mask_half;
    const int32_t *  cell_pos; // [n_stream][n_kv]
    const TokenRow * tokens;   // [n_tokens]
    int32_t          n_sink, n_recent;
    int64_t          n_kv; // cells of a stream; the last tile is complete in memory
    int64_t          n_stream, n_tps;
    int64_t          split, n_split; // cells per split, whole tiles
    float *          m;              // [n_split * n_head_kv * n_tokens * n_group]
    float *          z;
    float *          acc;   // the same rows of width_v floats
    float *          qt;    // scratch [n_head_kv][n_tokens * n_group][width_k]
    float *          shift; // scratch [n_head_kv][n_tokens * n_group]
    uint32_t *       words; // scratch of the decode kernel [n_head_kv][n_tokens][query_words]
    float *          exact; // scratch for the exact keys [exact_floats]
};

// Attends to the exact keys (window rows and fresh rows), merges the splits, multiplies by D_v, adds both and sinks,
// and normalises.
struct Combine {
    Attend           a; // m, z and acc are results of attend
    const uint16_t * fresh;
    const uint16_t * window;       // [n_slots] rows like those of `fresh`, or nullptr without an exact window
    const SlotRow *  slots;        // [n_slots of the window]
    int32_t          slots_of_seq; // slots of one sequence, or 0 without an exact window
    const float *    sinks;        // [n_head] or nullptr
    float *          out;          // [n_tokens][out_stride], query head h at h * d_v
    int64_t          out_stride;
    bool             has_exact; // whether store_and_attend has attended to the exact keys
};

// The rows of a prompt for flash attention on halves, which replaces attend and combine: keys and values of a stream's
// cells, from their codes (D_k c times gamma plus the mean, D_v c), then the exact rows of n_slots window slots, then
// those of the ubatch's own tokens, then zeros. A token's mask selects either a cell's row or its exact row, as in
// combine's softmax. A row that is not finite is zeros, because flash attention would spread NaN to tokens that do not
// see it; prompt_lost then sets the output of those that do to NaN.
struct Prompt {
    Combine    c;       // sources, without the queries and results of c.a
    int64_t    n_slots; // slots per stream: all, or those of its sequence if there are several streams
    int64_t    n_rows;  // n_kv + n_slots + n_tps or more
    int32_t    first;   // first KV head
    int32_t    n_heads; // KV heads from the first one on
    uint16_t * k;       // [n_stream][n_heads][n_rows][d_k] half, at most +-65504
    uint16_t * v;       // [n_stream][n_heads][n_rows][d_v]
    uint16_t * mask;    // [n_stream][n_tps][n_rows] half
};

// Stores the rows k, v of one token per stream in half precision, as encode does, in `fresh` and in the window's slots
// that have a token of this ubatch. The tokens' cells get no codes. Their scales become SCALE_NAN, so that a read
// before encode_window gives NaN.
struct StoreRows {
    const float *   k;
    const float *   v;
    int64_t         k_head, k_token, v_head, v_token; // strides, in floats
    uint8_t *       k_tiles;                          // as in Attend
    uint8_t *       v_tiles;
    uint16_t *      fresh;
    uint16_t *      window;
    const SlotRow * slots; // [n_slots]
    int64_t         n_slots;
};

// A row of the window, and the cell that gets its codes.
struct WindowRow {
    int32_t slot;
    int32_t cell; // cell of the layer's tiles, of all streams
};

constexpr int WINDOW_ROWS = 128; // maximum rows of a launch

// Encodes rows of the window into cells without codes.
struct EncodeWindow {
    Encode           encode; // k, v, cells and fresh are not used
    const uint16_t * window;
    WindowRow        rows[WINDOW_ROWS];
};

// Copies fresh rows to the window's slots that have a token of this ubatch.
struct Store {
    uint16_t *       window;
    const uint16_t * fresh;
    const SlotRow *  slots; // [n_slots]
    int64_t          n_slots;
    int64_t          width; // halves per row
};

const char * encode(const Encode & args, void * stream);
const char * attend(const Attend & args, void * stream);
// Stores the rows of one token per stream, and attends from these tokens to coded cells, but not to their own, and to
// exact keys. Requires suits_decode.
const char * store_and_attend(const StoreRows & store, const Combine & args, void * stream);
const char * encode_window(const EncodeWindow & args, void * stream); // rows [encode.n_tok]
const char * combine(const Combine & args, void * stream);
const char * store_window(const Store & args, void * stream);
const char * prompt_rows(const Prompt & args, void * stream); // writes k and v, requires suits_prompt
const char * prompt_mask(const Prompt & args, void * stream); // writes mask
// Changes c.out, whose rows have only the query heads of these KV heads.
const char * prompt_lost(const Prompt & args, void * stream);

// Makes a device the current one of this thread, which its launches use. To restore the former one would create a context
// on it.
const char * use_device(int device);

// Returns the CUDA device of this memory, or `usual` if it is unknown.
int device_of(const void * memory, int usual);

// Waits until the work on a stream is done. A wait for the whole device would fail, and end the capture, while another
// thread captures a graph there.
const char * wait(void * stream);

// encode_window for any number of rows.
const char * encode_window(EncodeWindow args, const WindowRow * rows, size_t n, int device, void * stream);

// Returns whether the decode kernel applies. It requires at most DECODE_TOKENS tokens per stream, at most DECODE_GROUP
// query heads per KV head and DECODE_HEADS KV heads, and tiles that fit the device's shared memory. The layer must not
// be latent.
bool suits_decode(const Attend & args);
bool suits_decode(const Layer & layer, int device); // for at most DECODE_TOKENS tokens

// The size and the content of a head's part of Layer::plan, which attend_decode reads.
size_t plan_bytes();
void   make_plan(const HeadCodec & k, const HeadCodec & v, void * plan);

// Returns the words of a token and KV head in Attend::words, which begins at a multiple of 16 bytes.
int64_t query_words(const Layer & layer);

// Returns the floats of Attend::exact, which begins at a multiple of 8 bytes, for n_rows query rows of all heads.
int64_t exact_floats(const Layer & layer, int64_t n_rows, int64_t n_tps, int32_t slots_of_seq);

// Returns whether the kernels for prompts apply. They require that head sizes are multiples of MATRIX_ROWS, and that
// tiles fit the device's shared memory. The layer must not be latent.
bool suits_prompt(const Layer & layer, int device);

// Returns how the blocks of attend work on a device: those of the decode kernel if it applies.
BlockSteps block_steps(const Layer & layer, int device);

// Returns the bytes of shared memory that attend needs beyond those of the device, or 0.
size_t lacks_shared(const Layer & layer, int device);

// Returns the arguments of attention to coded cells alone.
inline Combine without_exact_keys(const Attend & a) {
    Combine b = {};
    b.a       = a;
    return b;
}

// attend_decode and attend_tiles do what attend does with a given kernel, for tests and measurements. They read the
// output of project_queries.
const char * project_queries(const Attend & args, void * stream);
const char * attend_decode(const Combine & args, void * stream); // slots_of_seq is 0 without exact keys
const char * attend_tiles(const Attend & args, void * stream);

} // namespace subkv::cuda
