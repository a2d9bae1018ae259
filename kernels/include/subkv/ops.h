// ops.h: the contract of every kernel. Shapes here are authoritative; kernels/ref has the definitions in plain scalar
// code, kernels/cpu the fast versions. The code is C++17, and the caller sees no allocation. The only exception is
// std::bad_alloc. Results are then undefined, but encode in kernels/cpu has changed no cell.
//
// Glossary: a *coefficient* is one number of c = E x; its *code* is the quantized integer; a head's *row* is the data
// of one cell for one KV head (K or V): one scale byte, then the codes of its bands.
//
// Row format of files, states and Python (FORMAT.md is normative):
//   byte 0        scale code u; s = 0 when u = 0 (zero row), NaN when u = 255 (a row that could not be coded), else
//                 s = 2^((u - 160) / 8)
//   then, band by band, the planes of the band's codes.
//   A band of n coefficients (n % 8 == 0) with b bits stores its codes u_j in [0, 2^b - 1] as bit planes:
//     8 -> [8], 6 -> [4,2], 5 -> [4,1], 4 -> [4], 3 -> [2,1], 2 -> [2]    (low bits first)
//   A w-bit plane has m = n*w/8 bytes: the value of coefficient j is in byte (j % m) at bit w * (j / m).
//   Dequantize: c_j = s * ratio * (u_j - (2^b - 1) / 2), or along the row's path if it has one (trellis.h).
//   A 16-bit band stores c_j as little-endian IEEE half, n*2 bytes, without scale and ratio (zero in a zero row, and
//   in a row that could not be coded, whose coefficients are all NaN).
// The cache stores 64 rows of a head as a tile (tiles.h); every op below reads and writes tiles.
#pragma once

#include "subkv/format.h"
#include "subkv/tiles.h"

#include <cstddef>
#include <cstdint>

namespace subkv {

constexpr int MAX_GROUP = 128; // query heads that share one KV head

// Attention processes cells in steps, which are cells 0 .. STEP - 1 of a call, the next STEP, and so on, and exact keys
// in pages. Within a step, sums run in the order of cells, and a masked cell adds exactly nothing. The result of a
// query row therefore depends on its query, its cells and their places in the steps, not on the other rows of the call.
constexpr int STEP = 256; // cells
constexpr int PAGE = 128; // exact keys

struct Band {
    int32_t n;      // coefficients, multiple of 8
    int32_t bits;   // one of WIDTHS
    int32_t first;  // index of the band's first coefficient
    int32_t offset; // byte offset of its codes inside the head's row
    float   ratio;  // step of a uniform quantizer of this band, relative to the row's scale
};

// How a row's bands of at most TRELLIS_BITS bits are coded (trellis.h).
enum Path : int32_t { PATH_NONE, PATH_CIRCLE, PATH_LANES };

// A matrix [r][d] of a basis, whose values are all finite. They are IEEE halves, or only rows i < n_halves are, and the
// other rows are bytes with one step per row: m[i][j] = step[i - n_halves] * bytes[i - n_halves][j].
struct Matrix {
    const uint16_t * halves   = nullptr;
    const int8_t *   bytes    = nullptr; // [r - n_halves][d], or nullptr if all rows are halves
    const uint16_t * step     = nullptr; // [r - n_halves] IEEE half
    int64_t          n_halves = 0;       // rows in halves if there are bytes, a multiple of 8
};

inline bool present(const Matrix & m) {
    return m.halves != nullptr || m.bytes != nullptr;
}

// One KV head of one layer, K or V.
struct HeadCodec {
    int32_t       value;     // 0 for K and 1 for V, which selects the order of its tiles
    int32_t       d;         // head size
    int32_t       rank;      // coefficients kept, = sum of bands[i].n, <= d
    int32_t       row_bytes; // 1 + bytes of all planes
    int32_t       n_bands;
    Band          bands[MAX_BANDS];
    Path          path;   // path_of(), in latent layers latent_path()
    Matrix        encode; // E [rank][d]: c_i = sum_j E[i][j] x_j - offset[i]; if absent, E = 1 and d = rank
    Matrix        decode; // D [rank][d]: x^_j = sum_i c_i D[i][j];  K also uses q~_i = sum_j D[i][j] q_j
    const float * offset; // [rank] E mean, finite, or nullptr for zeros
};

// The online-softmax state of a query row is m = running max of logits, z = sum exp(l - m), acc = sum exp(l - m) value.
// It starts with m = -INFINITY, z = 0, acc = 0.
//
// attend computes attention of n_tok * n_group query rows over n_cells coded cells of one KV head. Query row (t, g) is
// number t * n_group + g everywhere below.
//   logit(t,g,c) = cap( qt[t,g] . c_k(c) + shift[t,g] ) + slope[g] * bias[t][c]
//   cap(x) = softcap > 0 ? softcap*tanh(x/softcap) : x
// shift is q . mean, the same for all cells: codes of keys do not include the mean.
// bias = -INFINITY excludes the cell, whatever its bytes are (a masked cell may have any content).
// acc accumulates dequantized value *coefficients* of v (with scale, ratio and zero point).
//
// A query row is *lost* if qt . c_k, shift, bias or the logit of a cell that it sees is NaN or infinite, before the cap
// too. That is so for every cell it sees if its query is not finite, and for a key that could not be coded (SCALE_NAN)
// or whose halves are not finite. A lost row has z = NaN, m > -INFINITY, any acc, and stays lost in later calls. A
// value that could not be coded or whose halves are not finite also loses the row, or makes elements of its acc NaN or
// infinite, if its weight is not 0; with weight 0 it adds nothing. Weights of less than e^-87 of the row's largest may
// count as 0. Other rows of the call do not change.
struct AttendArgs {
    const HeadCodec * k;
    const HeadCodec * v;
    const uint8_t *   k_tiles; // this head's tile of the first cell
    const uint8_t *   v_tiles;
    int64_t           k_stride; // bytes from one tile to the next
    int64_t           v_stride;
    int64_t           n_cells; // the last tile is complete in memory, and its cells beyond n_cells may have any content
    int64_t           n_tok;
    int64_t           n_group;
    const float *     qt;    // [n_tok*n_group][k->rank] projected queries, times gamma and softmax scale
    const float *     shift; // [n_tok*n_group], times softmax scale, or nullptr for zeros
    const float *     bias;  // [n_tok][bias_stride], first n_cells of each row used
    int64_t           bias_stride;
    const float *     slope;   // [n_group]
    float             softcap; // 0 if there is none
    float *           m;       // [n_tok*n_group]                in/out
    float *           z;       // [n_tok*n_group]                in/out
    float *           acc;     // [n_tok*n_group][acc_stride]    in/out, first v->rank of each row used
    int64_t           acc_stride;
};

// attend_exact does the same over n_keys exact keys, which are half-precision rows of the full head size, gathered
// through pointers. Numbers that are not finite have the same effect.
//   logit(t,g,i) = cap( q[t,g] . k_i ) + slope[g] * bias[t][i]
struct ExactArgs {
    int64_t                  d_k, d_v;
    int64_t                  n_keys;
    const uint16_t * const * k; // [n_keys] -> [d_k] IEEE half, nullptr only for a key that every query masks
    const uint16_t * const * v; // [n_keys] -> [d_v] IEEE half
    int64_t                  n_tok;
    int64_t                  n_group;
    const float *            q;    // [n_tok*n_group][d_k], times softmax scale
    const float *            bias; // [n_tok][bias_stride]
    int64_t                  bias_stride;
    const float *            slope; // [n_group]
    float                    softcap;
    float *                  m; // [n_tok*n_group]
    float *                  z; // [n_tok*n_group]
    // [n_tok*n_group][acc_stride] sums of values, not of coefficients; the first d_v of each row are used
    float * acc;
    int64_t acc_stride;
};

struct Ops {
    const char * name; // "ref", "avx2", ...

    // Quantizes c = E x - offset for t in [0, n) into cell cells[t] % TILE of the tile at
    // tiles + cells[t] / TILE * tile_stride. Other cells stay unchanged; encode reads and writes whole lines, so two
    // threads must not share a tile.
    //   x [n][ldx] f32. The scale code is the candidate with the least squared coefficient error
    //   (kernels/ref/encode.cpp defines the candidates). A row that is all zero becomes a zero row: scale byte 0, all
    //   codes 0. A row with a non-finite coefficient gets scale byte SCALE_NAN, all codes 0. Returns the number of the
    //   latter.
    int64_t (*encode)(const HeadCodec & codec, const float * x, int64_t ldx, int64_t n, const int64_t * cells,
                      uint8_t * tiles, int64_t tile_stride);

    // c [n][rank] f32 = dequantized coefficients of n cells, addressed as in encode.
    void (*dequantize)(const HeadCodec & codec, const uint8_t * tiles, int64_t tile_stride, int64_t n,
                       const int64_t * cells, float * c);

    // y[t][i] = scale * sum_j m[i][j] x[t][j];  m [r][d]; x [n][ldx], y [n][ldy] f32
    //   Products and sums are f32 or wider, and m's entries are not rounded again.
    void (*project)(const Matrix & m, int64_t r, int64_t d, const float * x, int64_t ldx, int64_t n, float scale,
                    float * y, int64_t ldy);

    // o[j] += sum_i e[i] m[i][j]; m [r][d]; e [r], o [d] f32. Products and sums are as in project.
    void (*reconstruct)(const Matrix & m, int64_t r, int64_t d, const float * e, float * o);

    void (*attend)(const AttendArgs & args);
    void (*attend_exact)(const ExactArgs & args);

    // s[i][j] += sum_t x[t][i] x[t][j] for all i, j (both triangles);  sum[i] += sum_t x[t][i]
    //   x [n][ldx] f32, s [d][d] f64, sum [d] f64
    void (*moment)(const float * x, int64_t ldx, int64_t n, int64_t d, double * s, double * sum);

    // h = x rounded to IEEE half, n values.
    void (*to_half)(const float * x, uint16_t * h, int64_t n);

    // Packs one head's row x [d] of the recent part of the exact window (recent.h), and unpacks it to IEEE halves [d].
    // mean [d] is finite f32, or nullptr for zeros. pack returns false if x is not finite; unpack then gives HALF_NAN
    // [d].
    bool (*pack_recent)(const float * x, const float * mean, int64_t d, uint8_t * row);
    void (*unpack_recent)(const uint8_t * row, const float * mean, int64_t d, uint16_t * out);

    // Relative step to which attend rounds two kinds of numbers: queries times the ratio of their coefficient's band
    // (relative to the largest of a query row), and weights exp(l - m) times the scale of the value row (relative to
    // the largest weight of a query row times the largest scale of its token's visible cells). The error of each number
    // is at most half a step. For queries of more than 512 coefficients the step is an eighth larger. 0 means that only
    // f32 rounding occurs, as always in attend_exact.
    float rounding;
};

const Ops & ops_ref();

// path_of returns PATH_CIRCLE if bands of at most TRELLIS_BITS bits have TRELLIS_LEAST coefficients or more, else
// PATH_NONE. latent_path is for the keys of a latent layer. It returns PATH_LANES if these bands have
// TRELLIS_LEAST_LATENT coefficients or more, and the layer's values use the same path.
Path path_of(const HeadCodec & codec);
Path latent_path(const HeadCodec & codec);

// Copies a row of row_bytes bytes to cell `cell` of a tile, and back, and leaves other cells unchanged. The conversion
// is one-to-one.
void row_to_tile(const HeadCodec & codec, const uint8_t * row, uint8_t * tile, int64_t cell);
void tile_to_row(const HeadCodec & codec, const uint8_t * tile, int64_t cell, uint8_t * row);

// Copies a tile of values out of a tile of keys in latent attention, where values are the first elements of keys and
// have no own rows. Their bands are the keys' first bands, so a row of values is a prefix of a row of keys.
void keys_to_values(const HeadCodec & values, const uint8_t * key_tile, uint8_t * value_tile);

// Copies cells [n] in this order to new contiguous tiles, TILE * row_bytes bytes each, and writes every tile in full. A
// negative cell becomes a zero row. The codes stay unchanged, so attention computes the same.
void gather_cells(const HeadCodec & codec, const uint8_t * tiles, int64_t tile_stride, const int32_t * cells, int64_t n,
                  uint8_t * out);

// Like gather_cells, for cells stored as rows, where cell c is at rows + c * stride. Without `cells` it copies the
// first n.
void rows_to_tiles(const HeadCodec & codec, const uint8_t * rows, int64_t stride, const int32_t * cells, int64_t n,
                   uint8_t * out);

// Converts a matrix to halves [r][d], for devices without byte matrices. Every product of a step and a byte must be
// representable as a half.
void to_halves(const Matrix & m, int64_t r, int64_t d, uint16_t * out);

// Ops::encode and Ops::dequantize with rows [n][row_bytes] instead of tiles.
int64_t encode_rows(const Ops & ops, const HeadCodec & codec, const float * x, int64_t ldx, int64_t n, uint8_t * rows);
void    dequantize_rows(const Ops & ops, const HeadCodec & codec, const uint8_t * rows, int64_t n, float * c);

// The best version for this processor, or, for debugging, the one that SUBKV_KERNEL names (ref, avx2, avx2vnni,
// avx512bw, avx512 or neon). For an unknown or unsupported name ops_error() has the error and callers reject the
// request. There is NO fallback to the best version.
const Ops &  ops();
const char * ops_error(); // nullptr if there is none

// All versions for this processor, in a list that ends with nullptr. It serves tests and benchmarks.
const Ops * const * ops_available();

} // namespace subkv
