// derive_weights.h: estimates from a model's weights: the energies of the coordinates of keys and queries, and means from
// biases. Definition, with its method: tests/format/weights_numpy.py.
#pragma once

#include "weights_file.h"

#include <optional>
#include <string>
#include <vector>

namespace subkv {

// The attention of a layer.
struct LayerShape {
    int il = 0, n_head = 0, n_head_kv = 0, d_k = 0, d_v = 0;

    int n_group() const { return n_head / n_head_kv; }
};

// The energies of one layer's keys and queries after RoPE, over all positions, [n_head_kv][d_k].
struct Energies {
    std::vector<std::vector<double>> k, q; // mean squares of the coordinates
    std::vector<std::vector<double>> mean; // of the keys, from biases
    std::vector<std::vector<double>> rest; // mean squares of biases around the mean, to be added to k
};

// The estimates of all layers, or nothing for a layer whose weights or rotation are unknown. Several threads compute
// them, to the same bytes for any number of threads. Means are averaged over `span` positions. Throws Invalid.
std::vector<std::optional<Energies>> energies_of(const WeightsFile & weights, const std::vector<LayerShape> & layers,
                                                 int span);

} // namespace subkv
