// capi_layout.cpp: section "layout" of subkv.h, and functions of a layout for research and tests.
#include "capi.h"
#include "derive.h"
#include "ggml.h"
#include "subkv_research.h"
#include "weights_file.h"

#include <algorithm>

using namespace subkv;

const HeadCodec & subkv::coded_head(const char * function, const subkv_layout * layout, int32_t il, int32_t head_kv,
                                    bool value) {
    if (!layout) {
        fail("%s: expected a layout, found NULL", function);
    }
    const LayerCodec * layer = layout->p->layer(il);
    if (!layer) {
        fail("%s: il: expected a coded layer, found %d", function, (int) il);
    }
    if (head_kv < 0 || head_kv >= layer->n_head_kv) {
        fail("%s: head_kv: expected 0..%d, found %d", function, layer->n_head_kv - 1, (int) head_kv);
    }
    return layer->head(head_kv, value);
}

const HeadCodec & subkv::encoding_head(const char * function, const subkv_layout * layout, int32_t il, int32_t head_kv,
                                       bool value) {
    const HeadCodec & head = coded_head(function, layout, il, head_kv, value);
    if (!present(head.encode)) {
        fail("%s: value: expected false in layer %d, whose values are coded with its keys, found true", function,
             (int) il);
    }
    return head;
}

subkv_layout * subkv::new_layout(std::shared_ptr<const Layout> p) {
    std::string json = layout_to_json(*p);
    return new subkv_layout{ std::move(p), std::move(json) };
}

extern "C" {

int32_t subkv_layout_present(const char * path) {
    return guarded<int32_t>("subkv.layout", -1, [&] { return (int32_t) layout_present(path); });
}

subkv_layout * subkv_layout_load(const char * path) {
    return subkv_layout_load_budget(path, 0.0f);
}

subkv_layout * subkv_layout_load_budget(const char * path, float budget) {
    return guarded<subkv_layout *>("subkv.layout", nullptr, [&] { return new_layout(load_layout(path, budget)); });
}

subkv_layout * subkv_layout_derive(const char * path, float budget, const int32_t * sliding, int32_t n_sliding) {
    return guarded<subkv_layout *>("model", nullptr, [&] {
        const std::string model  = &not_null(path, "subkv_layout_derive: path");
        const auto        slides = [&](int32_t il) {
            return std::find(sliding, sliding + n_sliding, il) != sliding + n_sliding;
        };
        return new_layout(derive_layout(model, "", budget, sliding && n_sliding > 0 ? Slides(slides) : nullptr));
    });
}

subkv_layout * subkv_layout_derive_matrices(const struct gguf_context * metadata, const subkv_matrix * matrices,
                                            int32_t n_matrices, float budget, int32_t n_sink, int32_t n_recent) {
    return guarded<subkv_layout *>("model", nullptr, [&] {
        const char * const   function = "subkv_layout_derive_matrices: matrices";
        const subkv_matrix * first    = n_matrices > 0 ? &not_null(matrices, function) : nullptr;
        const gguf_context & keys     = not_null(metadata, "subkv_layout_derive_matrices: metadata");
        const WeightsFile    weights(&keys, first, n_matrices);
        return new_layout(derive_layout(weights, budget, n_sink, n_recent));
    });
}

void subkv_layout_free(subkv_layout * layout) {
    delete layout;
}

const char * subkv_layout_json(const subkv_layout * layout) {
    return guarded<const char *>("subkv.layout", nullptr,
                                 [&] { return not_null(layout, "subkv_layout_json: layout").json.c_str(); });
}

int64_t subkv_layout_basis(const subkv_layout * layout, int32_t il, int32_t head_kv, bool value, bool decode,
                           float * out, int64_t n_out) {
    return guarded<int64_t>("subkv_layout_basis", -1, [&] {
        const auto        find = decode ? coded_head : encoding_head;
        const HeadCodec & head = find("subkv_layout_basis", layout, il, head_kv, value);
        const int64_t     n    = (int64_t) head.rank * head.d;
        if (!out || n_out < n) {
            fail("subkv_layout_basis: n_out: expected room for %lld values, found %lld", (long long) n,
                 (long long) (out ? n_out : 0));
        }
        std::vector<uint16_t> halves((size_t) n);
        to_halves(decode ? head.decode : head.encode, head.rank, head.d, halves.data());
        ggml_fp16_to_fp32_row(halves.data(), out, n);
        return n;
    });
}

int64_t subkv_layout_mean(const subkv_layout * layout, int32_t il, int32_t head_kv, float * out, int64_t n_out) {
    return guarded<int64_t>("subkv_layout_mean", -1, [&] {
        const int64_t d = coded_head("subkv_layout_mean", layout, il, head_kv, false).d;
        if (!out || n_out < d) {
            fail("subkv_layout_mean: n_out: expected room for %lld values, found %lld", (long long) d,
                 (long long) (out ? n_out : 0));
        }
        const std::vector<uint16_t> & mean = layout->p->layer(il)->centre[(size_t) head_kv].mean;
        std::fill(out, out + d, 0.0f);
        ggml_fp16_to_fp32_row(mean.data(), out, (int64_t) mean.size());
        return d;
    });
}

int64_t subkv_layout_project(const subkv_layout * layout, int32_t il, int32_t head_kv, bool value, const float * x,
                             int64_t n, float * c) {
    return guarded<int64_t>("subkv_layout_project", -1, [&] {
        const HeadCodec & head = encoding_head("subkv_layout_project", layout, il, head_kv, value);
        check_array(x, n, "subkv_layout_project: x");
        check_array(c, n, "subkv_layout_project: c");
        project_rows(usable_ops(), head, x, head.d, n, c);
        return (int64_t) head.rank;
    });
}

} // extern "C"
