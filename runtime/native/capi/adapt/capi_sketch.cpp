// capi_sketch.cpp: the sketches of subkv_adapt.h and subkv_adapt_test.h.
#include "error.h"
#include "subkv/sketch.h"
#include "subkv_adapt_test.h"

#include <string>
#include <vector>

using namespace subkv;

struct subkv_sketch {
    SketchParams          params;
    std::vector<uint64_t> state; // 8-byte boundary
};

extern "C" {

subkv_sketch * subkv_sketch_new(const subkv_sketch_params * params) {
    return guarded<subkv_sketch *>("sketch", nullptr, [&] {
        not_null(params, "subkv_sketch_new: params");
        const SketchParams p = { (SketchKind) params->kind, params->d, params->rows, params->decay, params->rate };
        std::string        err;
        if (!sketch_check(p, err)) {
            throw Invalid(err);
        }
        auto * sketch = new subkv_sketch{ p, std::vector<uint64_t>(sketch_bytes(p) / sizeof(uint64_t)) };
        sketch_init(p, sketch->state.data());
        return sketch;
    });
}

void subkv_sketch_free(subkv_sketch * sketch) {
    delete sketch;
}

int64_t subkv_sketch_bytes(const subkv_sketch * sketch) {
    return guarded<int64_t>(
        "sketch", -1, [&] { return (int64_t) sketch_bytes(not_null(sketch, "subkv_sketch_bytes: sketch").params); });
}

int64_t subkv_sketch_count(const subkv_sketch * sketch) {
    return guarded<int64_t>("sketch", -1,
                            [&] { return sketch_count(not_null(sketch, "subkv_sketch_count: sketch").state.data()); });
}

double subkv_sketch_energy(const subkv_sketch * sketch) {
    return guarded<double>("sketch", -1.0, [&] {
        not_null(sketch, "subkv_sketch_energy: sketch");
        return sketch_energy(sketch->params, sketch->state.data());
    });
}

int64_t subkv_sketch_absorb(subkv_sketch * sketch, const float * x, int64_t n) {
    return guarded<int64_t>("sketch", -1, [&] {
        not_null(sketch, "subkv_sketch_absorb: sketch");
        check_array(x, n, "subkv_sketch_absorb: x");
        return sketch_absorb(sketch->params, sketch->state.data(), x, sketch->params.d, n);
    });
}

bool subkv_sketch_top(const subkv_sketch * sketch, int32_t r, double * rows, double * energy) {
    return guarded("sketch", [&] {
        const SketchParams & p    = not_null(sketch, "subkv_sketch_top: sketch").params;
        const int32_t        most = p.kind == SketchKind::COVARIANCE || p.rows > p.d ? p.d : p.rows;
        if (r < 1 || r > most) {
            fail("subkv_sketch_top: r: expected 1..%d (a sketch of %d rows of %d), found %d", (int) most, (int) p.rows,
                 (int) p.d, (int) r);
        }
        not_null(rows, "subkv_sketch_top: rows");
        not_null(energy, "subkv_sketch_top: energy");
        if (!sketch_top(p, sketch->state.data(), r, rows, energy)) {
            fail("subkv_sketch_top: expected a sketch of finite values, found others");
        }
    });
}

int64_t subkv_sketch_rows(const subkv_sketch * sketch, float * s) {
    return guarded<int64_t>("sketch", -1, [&] {
        not_null(sketch, "subkv_sketch_rows: sketch");
        not_null(s, "subkv_sketch_rows: s");
        return sketch_rows(sketch->params, sketch->state.data(), s);
    });
}

bool subkv_eigen(double * a, double * w, int32_t n) {
    return guarded("eigen", [&] {
        if (n < 1 || n > MAX_SKETCH_SIZE) {
            fail("subkv_eigen: n: expected 1..%d, found %d", MAX_SKETCH_SIZE, (int) n);
        }
        not_null(a, "subkv_eigen: a");
        not_null(w, "subkv_eigen: w");
        if (!eigen_symmetric(a, w, n)) {
            fail("subkv_eigen: expected finite values, found others");
        }
    });
}

} // extern "C"
