// capi_format.cpp: section "format" of subkv.h.
#include "error.h"
#include "layout.h"
#include "subkv.h"

#include <cmath>
#include <string>
#include <vector>

using namespace subkv;

namespace {

// A codec for given coefficients, without E and D; false: error set.
bool codec_of(const char * function, const int32_t * bands, const float * ratio, int32_t n_bands, HeadCodec & codec) {
    if (!bands || !ratio || n_bands < 1 || n_bands > MAX_BANDS) {
        set_error("%s: bands: expected 1..%d bands and a ratio of each, found %d", function, MAX_BANDS,
                  bands && ratio ? (int) n_bands : 0);
        return false;
    }
    codec           = {};
    codec.row_bytes = 1;
    for (int32_t b = 0; b < n_bands; ++b) {
        const int32_t n    = bands[2 * b];
        const int32_t bits = bands[2 * b + 1];
        if (n < BAND_STEP || n % BAND_STEP != 0 || n > MAX_HEAD_SIZE - codec.rank) {
            set_error(
                "%s: bands[%d]: expected a positive multiple of %d coefficients, at most %d in all bands, found %d",
                function, (int) b, BAND_STEP, MAX_HEAD_SIZE, (int) n);
            return false;
        }
        if (!is_width(bits)) {
            set_error("%s: bands[%d]: expected one of 16, 8, 6, 5, 4, 3, 2 bits, found %d", function, (int) b,
                      (int) bits);
            return false;
        }
        if (!std::isfinite(ratio[b]) || ratio[b] <= 0.0f) {
            set_error("%s: ratio[%d]: expected a positive finite number, found %g", function, (int) b,
                      (double) ratio[b]);
            return false;
        }
        add_band(codec, n, bits, ratio[b]);
    }
    codec.d    = codec.rank;
    codec.path = path_of(codec);
    return true;
}

bool room_for(const char * function, int64_t n, const void * in, const void * out) {
    if (n < 0 || (n > 0 && (!in || !out))) {
        set_error("%s: n: expected rows and room for them, found %lld%s", function, (long long) n,
                  n > 0 ? " and NULL" : "");
        return false;
    }
    return true;
}

} // namespace

extern "C" {

const char * subkv_constants(void) {
    static const std::string json = constants_to_json();
    return json.c_str();
}

int64_t subkv_encode_rows(const int32_t * bands, const float * ratio, int32_t n_bands, const float * c, int64_t n,
                          uint8_t * rows) {
    HeadCodec codec;
    if (!codec_of("subkv_encode_rows", bands, ratio, n_bands, codec) || !room_for("subkv_encode_rows", n, c, rows)) {
        return -1;
    }
    if (ops_error()) {
        set_error("%s", ops_error());
        return -1;
    }
    return encode_rows(ops(), codec, c, codec.rank, n, rows);
}

bool subkv_decode_rows(const int32_t * bands, const float * ratio, int32_t n_bands, const uint8_t * rows, int64_t n,
                       float * c) {
    HeadCodec codec;
    if (!codec_of("subkv_decode_rows", bands, ratio, n_bands, codec) || !room_for("subkv_decode_rows", n, rows, c)) {
        return false;
    }
    // the reference: other versions may round a coefficient differently, and measurements of convert must not depend on
    // the processor
    dequantize_rows(ops_ref(), codec, rows, n, c);
    return true;
}

} // extern "C"
