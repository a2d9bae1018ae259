#include "row_codec.h"

#include "numbers.h"

#include <cmath>

namespace subkv {

HeadCodec row_codec(const char * function, const int32_t * bands, const float * ratio, int32_t n_bands) {
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

} // namespace subkv
