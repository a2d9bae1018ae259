// capi_format.cpp: section "format" of subkv.h.
#include "available_memory.h"
#include "capi.h"
#include "numbers.h"

#include <cmath>
#include <string>

using namespace subkv;

namespace {

// A codec for given coefficients, without E and D. Throws Invalid.
HeadCodec codec_of(const char * function, const int32_t * bands, const float * ratio, int32_t n_bands) {
    if (!bands || !ratio || n_bands < 1 || n_bands > MAX_BANDS) {
        fail("%s: bands: expected 1..%d bands and a ratio of each, found %d", function, MAX_BANDS,
             bands && ratio ? (int) n_bands : 0);
    }
    HeadCodec codec = {};
    codec.row_bytes = 1;
    for (int32_t b = 0; b < n_bands; ++b) {
        const int32_t n    = bands[2 * b];
        const int32_t bits = bands[2 * b + 1];
        if (n < BAND_STEP || n % BAND_STEP != 0 || n > MAX_HEAD_SIZE - codec.rank) {
            fail("%s: bands[%d]: expected a positive multiple of %d coefficients, at most %d in all bands, found %d",
                 function, (int) b, BAND_STEP, MAX_HEAD_SIZE, (int) n);
        }
        if (!is_width(bits)) {
            fail("%s: bands[%d]: expected one of 16, 8, 6, 5, 4, 3, 2 bits, found %d", function, (int) b, (int) bits);
        }
        if (!std::isfinite(ratio[b]) || ratio[b] <= 0.0f) {
            fail("%s: ratio[%d]: expected a positive finite number, found %s", function, (int) b,
                 number(ratio[b]).c_str());
        }
        add_band(codec, n, bits, ratio[b]);
    }
    codec.d    = codec.rank;
    codec.path = path_of(codec);
    return codec;
}

void check_room(const char * function, int64_t n, const void * in, const void * out) {
    if (n < 0 || (n > 0 && (!in || !out))) {
        fail("%s: n: expected rows and room for them, found %lld%s", function, (long long) n, n > 0 ? " and NULL" : "");
    }
}

} // namespace

extern "C" {

int64_t subkv_available_memory(const char * proc, const char * cgroup) {
    return guarded<int64_t>("subkv_available_memory", INT64_MAX, [&] {
        return available_memory(proc ? proc : "/proc", cgroup ? cgroup : "/sys/fs/cgroup");
    });
}

const char * subkv_constants(void) {
    return guarded<const char *>("subkv_constants", nullptr, [] {
        static const std::string json = constants_to_json();
        return json.c_str();
    });
}

int64_t subkv_encode_rows(const int32_t * bands, const float * ratio, int32_t n_bands, const float * c, int64_t n,
                          uint8_t * rows) {
    return guarded<int64_t>("subkv_encode_rows", -1, [&] {
        const HeadCodec codec = codec_of("subkv_encode_rows", bands, ratio, n_bands);
        check_room("subkv_encode_rows", n, c, rows);
        return encode_rows(usable_ops(), codec, c, codec.rank, n, rows);
    });
}

bool subkv_decode_rows(const int32_t * bands, const float * ratio, int32_t n_bands, const uint8_t * rows, int64_t n,
                       float * c) {
    return guarded("subkv_decode_rows", [&] {
        const HeadCodec codec = codec_of("subkv_decode_rows", bands, ratio, n_bands);
        check_room("subkv_decode_rows", n, rows, c);
        // The reference, because other versions may round a coefficient differently, and measurements of convert must
        // not depend on the processor.
        dequantize_rows(ops_ref(), codec, rows, n, c);
    });
}

} // extern "C"
