// fields.cpp: the row format (ops.h) as fields. No ISA flags.
#include "fields.h"

namespace subkv::cpu {

// The field of coefficient j in a plane of `width` bits that begins at byte `first`.
static Field in_plane(const Band & band, int32_t j, int32_t first, int32_t width, int32_t to) {
    const int32_t m = band.n * width / 8;
    return { first + j % m, width * (j / m), width, to };
}

std::vector<std::vector<Field>> fields_of(const HeadCodec & codec) {
    std::vector<std::vector<Field>> fields;
    for (int32_t i = 0; i < codec.n_bands; ++i) {
        const Band &  band = codec.bands[i];
        const int32_t low  = low_plane(band.bits);
        for (int32_t j = 0; j < band.n; ++j) {
            fields.emplace_back();
            if (band.bits == 16) {
                continue;
            }
            fields.back().push_back(in_plane(band, j, band.offset, low, 0));
            if (band.bits > low) {
                fields.back().push_back(in_plane(band, j, band.offset + band.n * low / 8, band.bits - low, low));
            }
        }
    }
    return fields;
}

} // namespace subkv::cpu
