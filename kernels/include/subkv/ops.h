// ops.h: the contract of every kernel. Shapes here are authoritative; kernels/ref holds the definitions in
// plain scalar code, kernels/cpu the fast versions. C++17, no allocation visible to the caller, no exceptions.
//
// Glossary: a *coefficient* is one number of c = E x; its *code* is the quantized integer; a head's *row* is
// what one cell stores for one KV head (K or V): one scale byte followed by the codes of its bands.
//
// Row format (FORMAT.md is normative; of files, states and Python):
//   byte 0        scale code u; s = 0 when u = 0 (zero row), else s = 2^((u - 160) / 8)
//   then, band by band, the planes of the band's codes.
//   A band of n coefficients (n % 8 == 0) with b bits stores its codes u_j in [0, 2^b - 1] as bit planes:
//     8 -> [8], 6 -> [4,2], 5 -> [4,1], 4 -> [4], 3 -> [2,1], 2 -> [2]    (low bits first)
//   A w-bit plane takes m = n*w/8 bytes: the value of coefficient j sits in byte (j % m) at bit w * (j / m).
//   Dequantize: c_j = s * ratio * (u_j - (2^b - 1) / 2), or by the row's path where it has one (trellis.h).
//   A 16-bit band stores c_j itself as little-endian IEEE half, n*2 bytes, no scale, no ratio (it is still zero in
//   a zero row).
// In the cache 64 rows of a head are a tile (tiles.h), and every op below works on tiles.
#pragma once

#include "subkv/format.h"
#include "subkv/tiles.h"

#include <cstddef>
#include <cstdint>

namespace subkv {

constexpr int MAX_GROUP = 128; // query heads that share one KV head

// What a query row sees is attended in steps: cells 0 .. STEP - 1 of a call, the next STEP, and so on; exact keys in pages.
// Within a step sums run in the order of cells, and what a row does not see adds nothing, to the bit. A row's result
// therefore depends on its own query and cells and on where they lie in their steps, not on the other rows of a call.
constexpr int STEP = 256; // cells
constexpr int PAGE = 128; // exact keys

struct Band {
    int32_t n;      // coefficients, multiple of 8
    int32_t bits;   // one of WIDTHS
    int32_t first;  // index of the band's first coefficient
    int32_t offset; // byte offset of its codes inside the head's row
    float   ratio;  // step of a uniform quantizer of this band, relative to the row's scale
};

// How the codes of a row's bands of at most TRELLIS_BITS are to be read (trellis.h).
enum Path : int32_t { PATH_NONE, PATH_CIRCLE, PATH_LANES };

// A matrix [r][d] of a basis: IEEE halves; or these for the first rows, and for the others, i from n_halves on, bytes and a
// step of every row, m[i][j] = step[i - n_halves] * bytes[i - n_halves][j]. All finite.
struct Matrix {
    const uint16_t * halves   = nullptr;
    const int8_t *   bytes    = nullptr; // [r - n_halves][d]; nullptr: all rows in halves
    const uint16_t * step     = nullptr; // [r - n_halves] IEEE half
    int64_t          n_halves = 0;       // a multiple of 8, beside bytes
};

inline bool present(const Matrix & m) {
    return m.halves != nullptr || m.bytes != nullptr;
}

// One KV head of one layer, K or V.
struct HeadCodec {
    int32_t       value;     // side, which orders its tiles: 0 K, 1 V
    int32_t       d;         // head size
    int32_t       rank;      // coefficients kept, = sum of bands[i].n, <= d
    int32_t       row_bytes; // 1 + bytes of all planes
    int32_t       n_bands;
    Band          bands[MAX_BANDS];
    Path          path;   // PATH_CIRCLE or PATH_NONE as path_of() says, but in latent layers
    Matrix        encode; // E [rank][d]: c_i = sum_j E[i][j] x_j - offset[i]; neither halves nor bytes: E = 1, d = rank
    Matrix        decode; // D [rank][d]: x^_j = sum_i c_i D[i][j];  K also uses q~_i = sum_j D[i][j] q_j
    const float * offset; // [rank], finite; nullptr: zeros. E mean, where rows are coded less their mean
};

// Online-softmax state of one query row: m = running max of logits, z = sum exp(l - m), acc = sum exp(l - m) value.
// Start: m = -INFINITY, z = 0, acc = 0.
//
// Attention of n_tok * n_group query rows over n_cells coded cells of one KV head. Query row (t, g) is number
// t * n_group + g everywhere below.
//   logit(t,g,c) = cap( qt[t,g] . c_k(c) + shift[t,g] ) + slope[g] * bias[t][c]
//   cap(x) = softcap > 0 ? softcap*tanh(x/softcap) : x
// shift is what a query has in common with all cells: q . mean, where keys are coded less their mean.
// bias = -INFINITY leaves the cell out, whatever its bytes are (a cell nobody may see can hold anything).
// acc collects value *coefficients* of v, dequantized (scale, ratio and zero point applied).
struct AttendArgs {
    const HeadCodec * k;
    const HeadCodec * v;
    const uint8_t *   k_tiles; // this head's tile of the first cell
    const uint8_t *   v_tiles;
    int64_t           k_stride; // bytes from one tile to the next
    int64_t           v_stride;
    int64_t           n_cells; // the last tile is there in full, its cells beyond may hold anything
    int64_t           n_tok;
    int64_t           n_group;
    const float *     qt;    // [n_tok*n_group][k->rank] projected queries, gamma and softmax scale already in
    const float *     shift; // [n_tok*n_group], finite, softmax scale already in; nullptr: zeros
    const float *     bias;  // [n_tok][bias_stride], first n_cells of each row used
    int64_t           bias_stride;
    const float *     slope;   // [n_group]
    float             softcap; // 0: none
    float *           m;       // [n_tok*n_group]                in/out
    float *           z;       // [n_tok*n_group]                in/out
    float *           acc;     // [n_tok*n_group][acc_stride]    in/out, first v->rank of each row used
    int64_t           acc_stride;
};

// The same over n_keys exact keys: half-precision rows of full head size, gathered through pointers.
//   logit(t,g,i) = cap( q[t,g] . k_i ) + slope[g] * bias[t][i]
struct ExactArgs {
    int64_t                  d_k, d_v;
    int64_t                  n_keys;
    const uint16_t * const * k; // [n_keys] -> [d_k] IEEE half; nullptr only where nobody sees the key
    const uint16_t * const * v; // [n_keys] -> [d_v] IEEE half
    int64_t                  n_tok;
    int64_t                  n_group;
    const float *            q;    // [n_tok*n_group][d_k], softmax scale already in
    const float *            bias; // [n_tok][bias_stride]
    int64_t                  bias_stride;
    const float *            slope; // [n_group]
    float                    softcap;
    float *                  m;   // [n_tok*n_group]
    float *                  z;   // [n_tok*n_group]
    float *                  acc; // [n_tok*n_group][acc_stride], first d_v used: values, not coefficients
    int64_t                  acc_stride;
};

struct Ops {
    const char * name; // "ref", "avx2", ...

    // c = E x - offset, quantized, for t in [0, n) into cell cells[t] % TILE of the tile at
    // tiles + cells[t] / TILE * tile_stride. Other cells stay; lines are read and written whole, so that no two threads
    // may be in one tile.
    //   x [n][ldx] f32. The scale code is the one of a few candidates with the least squared coefficient error
    //   (kernels/ref/encode.cpp says which). A row with a non-finite coefficient, or all zero, becomes a zero row:
    //   scale byte 0, all codes 0. Returns the number of non-finite rows.
    int64_t (*encode)(const HeadCodec & codec, const float * x, int64_t ldx, int64_t n, const int64_t * cells,
                      uint8_t * tiles, int64_t tile_stride);

    // c [n][rank] f32 = dequantized coefficients of n cells, found as encode finds them.
    void (*dequantize)(const HeadCodec & codec, const uint8_t * tiles, int64_t tile_stride, int64_t n,
                       const int64_t * cells, float * c);

    // y[t][i] = scale * sum_j m[i][j] x[t][j];  m [r][d]; x [n][ldx], y [n][ldy] f32
    //   Products and sums in f32 or wider: the entries of m are not rounded again.
    void (*project)(const Matrix & m, int64_t r, int64_t d, const float * x, int64_t ldx, int64_t n, float scale,
                    float * y, int64_t ldy);

    // o[j] += sum_i e[i] m[i][j];  m [r][d]; e [r], o [d] f32. The same of products and sums.
    void (*reconstruct)(const Matrix & m, int64_t r, int64_t d, const float * e, float * o);

    void (*attend)(const AttendArgs & args);
    void (*attend_exact)(const ExactArgs & args);

    // s[i][j] += sum_t x[t][i] x[t][j] for all i, j (both triangles);  sum[i] += sum_t x[t][i]
    //   x [n][ldx] f32, s [d][d] f64, sum [d] f64
    void (*moment)(const float * x, int64_t ldx, int64_t n, int64_t d, double * s, double * sum);

    // h = x rounded to IEEE half, n values.
    void (*to_half)(const float * x, uint16_t * h, int64_t n);

    // One head's row of the recent part of the exact window, x [d], and back, as IEEE halves [d] (recent.h).
    // mean [d] f32, finite; nullptr: zeros. pack returns false where x is not finite: the row is then the mean.
    bool (*pack_recent)(const float * x, const float * mean, int64_t d, uint8_t * row);
    void (*unpack_recent)(const uint8_t * row, const float * mean, int64_t d, uint16_t * out);

    // Step, relative to the largest, that attend rounds to: queries times the ratio of their coefficient's band (largest
    // of a query row), and weights exp(l - m) times the scale of the value row (largest weight of a query row times the
    // largest scale of the cells that its token sees). Half of it is the error of each; queries of more than 512
    // coefficients are rounded to an eighth more. 0: neither is rounded beyond f32. attend_exact rounds nothing.
    float rounding;
};

const Ops & ops_ref();

// PATH_CIRCLE where bands of at most TRELLIS_BITS have TRELLIS_LEAST coefficients or more, else PATH_NONE. Of a latent
// layer's keys PATH_LANES where they have TRELLIS_LEAST_LATENT; its values are on the keys' path.
Path path_of(const HeadCodec & codec);
Path latent_path(const HeadCodec & codec);

// Cell `cell` of one tile from and to a row of row_bytes bytes; other cells stay. Every row has one form in a tile.
void row_to_tile(const HeadCodec & codec, const uint8_t * row, uint8_t * tile, int64_t cell);
void tile_to_row(const HeadCodec & codec, const uint8_t * tile, int64_t cell, uint8_t * row);

// Where values are the first elements of keys (latent attention), no rows hold them: their bands are the keys' first, so
// that a row of values is the beginning of one of keys. A tile of values from one of keys.
void keys_to_values(const HeadCodec & values, const uint8_t * key_tile, uint8_t * value_tile);

// Cells [n] of tiles, in this order, into tiles of their own that follow each other, TILE * row_bytes apart, all of them
// written whole. A cell below 0 becomes a zero row. Rows keep their codes: what is attended to is the same.
void gather_cells(const HeadCodec & codec, const uint8_t * tiles, int64_t tile_stride, const int32_t * cells, int64_t n,
                  uint8_t * out);

// The same of cells that lie as rows, cell c at rows + c * stride. cells: nullptr: the first n.
void rows_to_tiles(const HeadCodec & codec, const uint8_t * rows, int64_t stride, const int32_t * cells, int64_t n,
                   uint8_t * out);

// A matrix as halves [r][d], for devices that hold no others. Of one in bytes every product must be a half.
void to_halves(const Matrix & m, int64_t r, int64_t d, uint16_t * out);

// Rows [n][row_bytes] as x and c of Ops::encode and Ops::dequantize, by way of tiles.
int64_t encode_rows(const Ops & ops, const HeadCodec & codec, const float * x, int64_t ldx, int64_t n, uint8_t * rows);
void    dequantize_rows(const Ops & ops, const HeadCodec & codec, const uint8_t * rows, int64_t n, float * c);

// Best version for this processor. SUBKV_KERNEL=ref|avx2|avx512bw|avx512|neon overrides (debugging); an unknown
// or unsupported name is reported by ops_error() and the best version is NOT substituted: callers refuse to start.
const Ops &  ops();
const char * ops_error(); // nullptr when fine

// Every version that runs on this processor; list ends with nullptr. For tests and benchmarks.
const Ops * const * ops_available();

} // namespace subkv
