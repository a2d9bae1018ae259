// planter.h: K and V rows computed elsewhere, put in place of those of a batch's tokens (subkv_research.h).
#pragma once

#include "hook.h"

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

namespace subkv {

// Rows of one layer. Never changed once a layer has them.
struct PlantedRows {
    std::vector<int32_t>          pos;  // strictly increasing
    std::vector<float>            k, v; // [pos][n_head_kv][d]
    mutable std::atomic<uint64_t> n_planted{ 0 };
};

// Graphs that are kept and reused hold its address.
struct PlantedLayer {
    int32_t                            n_head_kv;
    int32_t                            d_k;
    int32_t                            d_v;
    std::shared_ptr<const PlantedRows> rows; // through std::atomic_load and std::atomic_store; null: none
};

// Shared by its handle and the contexts that it is attached to.
class Planter {
public:
    // Puts in k and v (as in AttnBuild) the tensors that everything after reads instead. tokens: as in Inputs.
    // Throws std::runtime_error when the layer had another shape before.
    void build(ggml_context * ctx, int32_t il, ggml_tensor *& k, ggml_tensor *& v, ggml_tensor * tokens);

    int32_t              n_layer() const { return (int32_t) layers_.size(); }
    const PlantedLayer * layer(int32_t il) const; // nullptr: it has no K/V rows
    void                 set(int32_t il, std::shared_ptr<const PlantedRows> rows);
    void                 clear();

private:
    std::vector<std::unique_ptr<PlantedLayer>> layers_; // by il, null: no K/V rows
};

} // namespace subkv

struct subkv_planter {
    std::shared_ptr<subkv::Planter> p;
};
