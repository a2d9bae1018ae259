// subkv_cuda.h: attention to coded cells in the memory of another program on a CUDA device: subkv.SubspaceCache, whose
// tensors are PyTorch's. Not installed; only builds with CUDA have these functions. NULL and false are failures (subkv.h).
//
// Launches neither allocate nor wait. They use the thread's current device, and a stream of it (a cudaStream_t). Arrays
// are on the device unless a comment says otherwise, halves are IEEE halves, and rows of a kind are adjacent.
#pragma once

#include "subkv.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct subkv_cuda_layer subkv_cuda_layer; // codecs of all KV heads of a layer, immutable once they are placed

// The codec of one head's keys or values, in the host's memory.
typedef struct subkv_cuda_head {
    const int32_t *  bands;  // [n_bands][2] coefficients and bits
    const float *    ratio;  // [n_bands] steps of the bands, relative to the row's scale
    const uint16_t * encode; // [rank][d] halves
    const uint16_t * decode; // [rank][d] halves
    const float *    offset; // [rank] or NULL
    const uint16_t * mean;   // [d] halves or NULL, of keys
    float            gamma;  // factor of logits, of keys
    int32_t          n_bands;
} subkv_cuda_head;

// Refuses heads that the device's shared memory does not suffice for. k, v: [n_head_kv]. device: number of the device.
SUBKV_API subkv_cuda_layer * subkv_cuda_layer_new(int32_t n_head_kv, int32_t d_k, int32_t d_v,
                                                  const subkv_cuda_head * k, const subkv_cuda_head * v, int32_t device);
SUBKV_API void               subkv_cuda_layer_free(subkv_cuda_layer * layer);

// The layer's tables: their bytes, and their content for memory at `device`, a multiple of 32 bytes, which is written to
// `copy` on the host. The caller copies it to the device and keeps both memory and layer while it uses them.
SUBKV_API int64_t subkv_cuda_table_bytes(const subkv_cuda_layer * layer);
SUBKV_API bool    subkv_cuda_place_tables(subkv_cuda_layer * layer, const void * device, void * copy);

// Cells are in tiles of 64, and a tile has 64 rows of all heads. Its first one is at a multiple of 16 bytes.
typedef struct subkv_cuda_cells {
    uint8_t * k;        // [n_stream][n_cells / 64] tiles
    uint8_t * v;        //
    int64_t   n_cells;  // of a stream, a multiple of 64
    int64_t   n_stream; // sequences
} subkv_cuda_cells;

// Encodes rows k [n_tok][n_head_kv][d_k] and v in floats to cells [n_tok], which count through all streams and are
// distinct. fresh: [n_tok][n_head_kv * (d_k + d_v)] halves, receives the rows.
SUBKV_API bool subkv_cuda_encode(const subkv_cuda_layer * layer, const subkv_cuda_cells * to, const float * k,
                                 const float * v, const int64_t * cells, int64_t n_tok, uint16_t * fresh,
                                 void * stream);

// Queries, and which keys they attend to. Stream s has the tokens [s * n_tps, (s + 1) * n_tps) and the slots
// [s * n_slots, (s + 1) * n_slots).
typedef struct subkv_cuda_queries {
    subkv_cuda_cells cells;
    int64_t          n_kv;  // cells of a stream that are read
    int64_t          n_tps; // tokens of a stream
    const float *    q;     // [n_tok][n_head_kv * n_group][d_k]
    const uint16_t * mask;  // [n_tok][n_kv] halves, 0 or -INFINITY
    // [n_stream][n_kv] positions. A token at p reads codes of a cell at c, unless c < n_sink or p - n_recent < c <= p.
    const int32_t *  positions;
    const int32_t *  tokens;         // [n_tok][3] position, cell, first slot of the stream
    const int32_t *  slots;          // [n_stream * n_slots][3] position, cell, -1. A position of -1: the slot is empty
    const uint16_t * window;         // [n_stream * n_slots][n_head_kv * (d_k + d_v)] halves, keys of all heads first
    const uint16_t * fresh;          // [n_tok][n_head_kv * (d_k + d_v)] the tokens' own rows
    const float *    sinks;          // [n_head_kv * n_group] logits without a value, or NULL
    float            scale, softcap; // softcap is 0 if there is none
    int32_t          n_group, n_sink, n_recent, n_slots; // n_slots > 0
} subkv_cuda_queries;

// Bytes of scratch for subkv_cuda_attend, or -1.
SUBKV_API int64_t subkv_cuda_scratch(const subkv_cuda_layer * layer, const subkv_cuda_queries * q);
// out: [n_tok][n_head_kv * n_group * d_v]. A row is 0 without visible keys, and NaN with one that is not finite.
SUBKV_API bool subkv_cuda_attend(const subkv_cuda_layer * layer, const subkv_cuda_queries * q, void * scratch,
                                 float * out, void * stream);

// A prompt's attention by another function on halves (kernels/cuda/ops.h, Prompt). n_rows: n_kv + n_slots + n_tps or
// more. k: [n_stream][n_head_kv][n_rows][d_k] halves, v alike; mask: [n_stream][n_tps][n_rows] halves.
SUBKV_API bool subkv_cuda_suits_prompt(const subkv_cuda_layer * layer, const subkv_cuda_queries * q);
SUBKV_API bool subkv_cuda_prompt(const subkv_cuda_layer * layer, const subkv_cuda_queries * q, int64_t n_rows,
                                 uint16_t * k, uint16_t * v, uint16_t * mask, void * stream);
// Sets rows of `out`, that function's result as of subkv_cuda_attend, to NaN if they see a row that is not finite.
SUBKV_API bool subkv_cuda_prompt_lost(const subkv_cuda_layer * layer, const subkv_cuda_queries * q, float * out,
                                      void * stream);

#ifdef __cplusplus
}
#endif
