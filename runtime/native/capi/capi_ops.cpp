// capi_ops.cpp: kernels for tests (subkv_test.h), and the speed of a core (subkv_research.h).
#include "error.h"
#include "subkv/core_speed.h"
#include "subkv/ops.h"
#include "subkv/trellis.h"
#include "subkv_test.h"

#include <cstring>

using namespace subkv;

static const Ops & version_at(const char * function, int32_t i) {
    const int32_t n = subkv_ops_count();
    if (i < 0 || i >= n) {
        fail("%s: i: expected 0..%d, found %d", function, (int) n - 1, (int) i);
    }
    return *ops_available()[i];
}

extern "C" {

bool subkv_core_speed(double seconds, double * clock_ghz, double * additions_per_cycle) {
    clear_error();
    return guarded("core", [&] {
        not_null(clock_ghz, "subkv_core_speed: clock_ghz");
        not_null(additions_per_cycle, "subkv_core_speed: additions_per_cycle");
        if (!(seconds >= 0.0 && seconds <= 10.0)) {
            fail("subkv_core_speed: seconds: expected 0 to 10, found another number");
        }
        const CoreSpeed found = core_speed(seconds);
        *clock_ghz            = found.clock_ghz;
        *additions_per_cycle  = found.additions_per_cycle;
    });
}

int32_t subkv_ops_count(void) {
    int32_t n = 0;
    while (ops_available()[n]) {
        ++n;
    }
    return n;
}

const char * subkv_ops_name(int32_t i) {
    return guarded<const char *>("kernels", nullptr, [&] { return version_at("subkv_ops_name", i).name; });
}

const void * subkv_ops_table(int32_t i) {
    return guarded<const void *>("kernels", nullptr, [&] { return &version_at("subkv_ops_table", i); });
}

const void * subkv_ops_function(const char * name) {
    static const struct {
        const char * name;
        const void * function;
    } functions[] = {
        { "row_to_tile", (const void *) row_to_tile },         { "tile_to_row", (const void *) tile_to_row },
        { "keys_to_values", (const void *) keys_to_values },   { "gather_cells", (const void *) gather_cells },
        { "rows_to_tiles", (const void *) rows_to_tiles },     { "encode_rows", (const void *) encode_rows },
        { "dequantize_rows", (const void *) dequantize_rows }, { "find_path", (const void *) ref::find_path },
        { "trellis_level", (const void *) trellis_level },
    };
    return guarded<const void *>("kernels", nullptr, [&]() -> const void * {
        not_null(name, "subkv_ops_function: name");
        for (const auto & entry : functions) {
            if (std::strcmp(entry.name, name) == 0) {
                return entry.function;
            }
        }
        fail("subkv_ops_function: name: expected a function of the list, found %s", name);
    });
}
}
