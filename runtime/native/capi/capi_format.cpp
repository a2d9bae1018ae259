// capi_format.cpp: section "format" of subkv.h.
#include "available_memory.h"
#include "capi.h"
#include "row_codec.h"

#include <string>

using namespace subkv;

namespace {

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
        const HeadCodec codec = row_codec("subkv_encode_rows", bands, ratio, n_bands);
        check_room("subkv_encode_rows", n, c, rows);
        return encode_rows(usable_ops(), codec, c, codec.rank, n, rows);
    });
}

bool subkv_decode_rows(const int32_t * bands, const float * ratio, int32_t n_bands, const uint8_t * rows, int64_t n,
                       float * c) {
    return guarded("subkv_decode_rows", [&] {
        const HeadCodec codec = row_codec("subkv_decode_rows", bands, ratio, n_bands);
        check_room("subkv_decode_rows", n, rows, c);
        // The reference, because other versions may round a coefficient differently, and measurements of convert must
        // not depend on the processor.
        dequantize_rows(ops_ref(), codec, rows, n, c);
    });
}

} // extern "C"
