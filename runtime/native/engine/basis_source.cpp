// basis_source.cpp: static bases.
#include "basis_source.h"

#include "cells.h"

#include <algorithm>

namespace subkv {

bool LayerBases::codes_later(bool) const {
    return false;
}

size_t LayerBases::extra_bytes(bool) const {
    return 0;
}

ggml_tensor * LayerBases::build_encode(LayerNodes &, const AttnBuild &, ggml_tensor * fresh) const {
    return fresh;
}

void LayerBases::attend(const AttendArgs & args, uint32_t, int64_t, const uint8_t *, const uint8_t *) const {
    ops().attend(args);
}

int32_t LayerBases::coded(uint32_t, int64_t, bool) const {
    return 0;
}

void LayerBases::read(const LayerNodes & layer, uint32_t, int64_t head, bool value, const uint8_t * tiles,
                      int64_t stride, int64_t n, const int64_t * cells, float * x, int32_t * version) const {
    read_cells(layer, ops(), head, value, tiles + layer.codec->tile_offset(head, value), stride, n, cells, x);
    std::fill(version, version + n, 0);
}

const LayerBases & BasisSource::layer(int32_t) const {
    static const LayerBases bases;
    return bases;
}

bool BasisSource::codes_later() const {
    return false;
}

void BasisSource::clear(uint32_t) {}

int32_t BasisSource::coded(uint32_t) const {
    return 0;
}

void BasisSource::copy(uint32_t, uint32_t) {}

bool BasisSource::can_remove(int32_t, int32_t, int32_t, const CellReader &) const {
    return true;
}

bool BasisSource::can_shift() const {
    return true;
}

bool BasisSource::ready(const std::vector<TokenDesc> &, bool, const Window &, const CellReader &) const {
    return true;
}

uint64_t BasisSource::identity() const {
    return 0;
}

std::string BasisSource::describe() const {
    return "static bases";
}

void BasisSource::check_partial() const {}

void BasisSource::state_write(StateWriter &, uint32_t) const {}

void BasisSource::state_read(StateReader &, uint32_t, int32_t) {}

size_t BasisSource::bytes() const {
    return 0;
}

void BasisSource::stats(subkv_stats &) const {}

} // namespace subkv
