// rows.h: the reference's ops, and the row format.
#pragma once

#include "subkv/ops.h"

namespace subkv::ref {

// The kernels of the table ops_ref().
int64_t encode(const HeadCodec & codec, const float * x, int64_t ldx, int64_t n, const int64_t * cells, uint8_t * tiles,
               int64_t tile_stride);
void dequantize(const HeadCodec & codec, const uint8_t * tiles, int64_t tile_stride, int64_t n, const int64_t * cells,
                float * c);
void project(const Matrix & m, int64_t r, int64_t d, const float * x, int64_t ldx, int64_t n, float scale, float * y,
             int64_t ldy);
void reconstruct(const Matrix & m, int64_t r, int64_t d, const float * e, float * o);
void attend(const AttendArgs & args);
void attend_exact(const ExactArgs & args);
bool pack_recent(const float * x, const float * mean, int64_t d, uint8_t * row);
void unpack_recent(const uint8_t * row, const float * mean, int64_t d, uint16_t * out);
void moment(const float * x, int64_t ldx, int64_t n, int64_t d, double * s, double * sum);
void to_half(const float * x, uint16_t * h, int64_t n);

// The code of coefficient j in a band's planes; put_code needs zeros at its place. Then all coefficients c [rank] of a
// row.
uint32_t code(const uint8_t * planes, int32_t n, int32_t bits, int32_t j);
void     put_code(uint8_t * planes, int32_t n, int32_t bits, int32_t j, uint32_t u);
void     dequantize_row(const HeadCodec & codec, const uint8_t * row, float * c);

// Squared error of coefficients c [rank] at scale s without a trellis, in bands of more than `beyond` bits except 16.
float squared_error(const HeadCodec & codec, const float * c, float s, int32_t beyond);

// Both are for codecs with a path (trellis.cpp). choose_path_scale returns the scale code for coefficients c; `middle`
// is the best code without a path. path_levels writes the levels of the codes on the path; other entries stay
// unchanged.
int32_t choose_path_scale(const HeadCodec & codec, const float * c, int32_t middle);
void    path_levels(const HeadCodec & codec, const uint8_t * code, int32_t * level);

} // namespace subkv::ref
