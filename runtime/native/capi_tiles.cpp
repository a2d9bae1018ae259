// capi_tiles.cpp: the free functions of ops.h, and paths through a trellis, for tests (subkv_test.h).
#include "subkv/ops.h"
#include "subkv/trellis.h"
#include "subkv_test.h"

using namespace subkv;

extern "C" {

void subkv_row_to_tile(const void * codec, const uint8_t * row, uint8_t * tile, int64_t cell) {
    row_to_tile(*(const HeadCodec *) codec, row, tile, cell);
}

void subkv_tile_to_row(const void * codec, const uint8_t * tile, int64_t cell, uint8_t * row) {
    tile_to_row(*(const HeadCodec *) codec, tile, cell, row);
}

void subkv_keys_to_values(const void * values, const uint8_t * key_tile, uint8_t * value_tile) {
    keys_to_values(*(const HeadCodec *) values, key_tile, value_tile);
}

void subkv_gather_cells(const void * codec, const uint8_t * tiles, int64_t tile_stride, const int32_t * cells,
                        int64_t n, uint8_t * out) {
    gather_cells(*(const HeadCodec *) codec, tiles, tile_stride, cells, n, out);
}

void subkv_rows_to_tiles(const void * codec, const uint8_t * rows, int64_t stride, const int32_t * cells, int64_t n,
                         uint8_t * out) {
    rows_to_tiles(*(const HeadCodec *) codec, rows, stride, cells, n, out);
}

int64_t subkv_ops_encode_rows(const void * ops, const void * codec, const float * x, int64_t ldx, int64_t n,
                              uint8_t * rows) {
    return encode_rows(*(const Ops *) ops, *(const HeadCodec *) codec, x, ldx, n, rows);
}

void subkv_ops_dequantize_rows(const void * ops, const void * codec, const uint8_t * rows, int64_t n, float * c) {
    dequantize_rows(*(const Ops *) ops, *(const HeadCodec *) codec, rows, n, c);
}

float subkv_trellis_path(const void * codec, const float * c, float s, uint8_t * code) {
    return ref::find_path(*(const HeadCodec *) codec, c, s, code);
}

int32_t subkv_trellis_level(int32_t bits, int32_t i) {
    return bits < 2 || bits > TRELLIS_BITS || i < 0 || i >= 2 << bits ? 0 : trellis_level(bits, i);
}
}
