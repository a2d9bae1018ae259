// plan.h: layouts for further budgets in a file of bases (converter/FORMAT.md §3.3). A plan has bands and factors of its
// own; its matrices are derived from encode matrices that all plans share.
#pragma once

#include "layout.h"
#include "layout_keys.h"

#include <cstdint>
#include <string>
#include <vector>

namespace subkv {

constexpr size_t MAX_PLANS = 16;

// Reads the budgets of the file's layout and of its plans into `layout`.
void read_budgets(const Keys & keys, Layout & layout);

// Rounds a row to multiples of the step that has the smallest error among those whose significand has 4 bits.
void round_to_bytes(double * row, size_t d);

class Plan {
public:
    // Reads plan i and replaces the sizes in `layout` by its own. `base` are the layers of subkv.layout. Throws
    // Invalid.
    Plan(const Keys & keys, size_t i, const std::vector<LayerSpec> & base, Layout & layout);

    const std::string name; // of its keys, without the last part

    const std::vector<LayerSpec> & specs() const { return specs_; }

    // The bytes that each layer's subkv.blk.N.basis would have after decoding, computed by several threads. Throws
    // Invalid.
    std::vector<std::vector<uint8_t>> derive() const;

private:
    // `factors` are this layer's.
    void derive_layer(const LayerSpec & spec, const uint8_t * factors, uint8_t * out) const;

    const Keys &           keys_;
    std::vector<LayerSpec> specs_;
    std::vector<uint8_t>   factors_;  // gammas and ratios, layer by layer
    bool                   in_bytes_; // rows of D after the first ones
};

} // namespace subkv
