// capi_layout.cpp: section "layout" of subkv.h, and functions of a layout for research and tests.
#include "error.h"
#include "ggml.h"
#include "layout.h"
#include "subkv_test.h"

#include <algorithm>

using namespace subkv;

const HeadCodec * subkv::coded_head(const char * function, const subkv_layout * layout, int32_t il, int32_t head_kv,
                                    bool value) {
    if (!layout) {
        set_error("%s: expected a layout, found NULL", function);
        return nullptr;
    }
    const LayerCodec * layer = layout->p->layer(il);
    if (!layer) {
        set_error("%s: il: expected a coded layer, found %d", function, (int) il);
        return nullptr;
    }
    if (head_kv < 0 || head_kv >= layer->n_head_kv) {
        set_error("%s: head_kv: expected 0..%d, found %d", function, layer->n_head_kv - 1, (int) head_kv);
        return nullptr;
    }
    return &(value ? layer->v : layer->k)[(size_t) head_kv];
}

const HeadCodec * subkv::encoding_head(const char * function, const subkv_layout * layout, int32_t il, int32_t head_kv,
                                       bool value) {
    const HeadCodec * head = coded_head(function, layout, il, head_kv, value);
    if (head && !present(head->encode)) {
        set_error("%s: value: expected false in layer %d, whose values are coded with its keys, found true", function,
                  (int) il);
        return nullptr;
    }
    return head;
}

extern "C" {

int32_t subkv_layout_present(const char * path) {
    return guarded<int32_t>("layout", -1, [&] {
        std::string err;
        const int   present = layout_present(path, err);
        if (present < 0) {
            set_error("%s", err.c_str());
        }
        return (int32_t) present;
    });
}

subkv_layout * subkv_layout_load(const char * path) {
    return guarded<subkv_layout *>("layout", nullptr, [&]() -> subkv_layout * {
        std::string err;
        auto        p = load_layout(path, err);
        if (!p) {
            set_error("%s", err.c_str());
            return nullptr;
        }
        std::string json = layout_to_json(*p);
        return new subkv_layout{ std::move(p), std::move(json) };
    });
}

void subkv_layout_free(subkv_layout * layout) {
    delete layout;
}

const char * subkv_layout_json(const subkv_layout * layout) {
    return layout ? layout->json.c_str() : nullptr;
}

int64_t subkv_layout_basis(const subkv_layout * layout, int32_t il, int32_t head_kv, bool value, bool decode,
                           float * out, int64_t n_out) {
    const auto        find = decode ? coded_head : encoding_head;
    const HeadCodec * head = find("subkv_layout_basis", layout, il, head_kv, value);
    if (!head) {
        return -1;
    }
    const int64_t n = (int64_t) head->rank * head->d;
    if (!out || n_out < n) {
        set_error("subkv_layout_basis: n_out: expected room for %lld values, found %lld", (long long) n,
                  (long long) (out ? n_out : 0));
        return -1;
    }
    std::vector<uint16_t> halves((size_t) n);
    to_halves(decode ? head->decode : head->encode, head->rank, head->d, halves.data());
    ggml_fp16_to_fp32_row(halves.data(), out, n);
    return n;
}

int64_t subkv_layout_project(const subkv_layout * layout, int32_t il, int32_t head_kv, bool value, const float * x,
                             int64_t n, float * c) {
    const HeadCodec * head = encoding_head("subkv_layout_project", layout, il, head_kv, value);
    if (!head) {
        return -1;
    }
    if (ops_error()) {
        set_error("%s", ops_error());
        return -1;
    }
    project_rows(ops(), *head, x, head->d, n, c);
    return head->rank;
}

} // extern "C"
