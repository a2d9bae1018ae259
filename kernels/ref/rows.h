// rows.h: the reference's ops.
#pragma once

#include "subkv/ops.h"

namespace subkv::ref {

int64_t encode_rows(const HeadCodec & codec, const float * x, int64_t ldx, int64_t n, const int64_t * cells,
                    uint8_t * rows, int64_t row_stride);
void    dequantize_rows(const HeadCodec & codec, const uint8_t * rows, int64_t row_stride, int64_t n, float * c);
void project(const uint16_t * m, int64_t r, int64_t d, const float * x, int64_t ldx, int64_t n, float scale, float * y,
             int64_t ldy);
void reconstruct(const uint16_t * m, int64_t r, int64_t d, const float * e, float * o);
void attend(const AttendArgs & args);
void attend_exact(const ExactArgs & args);
void moment(const float * x, int64_t ldx, int64_t n, int64_t d, double * s, double * sum);
void to_half(const float * x, uint16_t * h, int64_t n);

} // namespace subkv::ref
