// observer.h: calibration statistics, accumulated by graph nodes (see subkv.h, "calibration").
#pragma once

#include "graph_build.h"
#include "node_work.h"
#include "subkv.h"
#include "subkv/ops.h"

#include <memory>
#include <mutex>
#include <vector>

namespace subkv {

// Sums of the outer products and of the rows of one head, which are empty before the first row.
struct Moments {
    uint64_t            n = 0; // rows
    std::vector<double> second;
    std::vector<double> first;
};

struct ObservedLayer {
    subkv_observed         shape = {};
    const subkv_observer * owner = nullptr;
    std::vector<Moments>   q, k, v;                // by KV head, where q gathers the heads of its group
    std::vector<float>     k_rows, v_rows, o_rows; // samples: [n][n_head or n_head_kv][d]
    std::vector<uint16_t>  q_rows;                 // in half precision, because queries need the most memory
    std::mutex             mutex;                  // guards the counters of `shape`
};

// The data of an observed layer's nodes, in one context.
struct ObserveData {
    NodeReports *   reports;
    ObservedLayer * layer = nullptr; // set when the first node is built
};

// Adds the node that reads q, k, v (as in AttnBuild) of one layer. If k and v are nullptr, q are queries of a layer
// that reads il's rows, and the call for il itself comes first.
void build_observe_node(subkv_observer & obs, ObserveData & data, ggml_context * ctx, ggml_cgraph * gf, int32_t il,
                        ggml_tensor * q, ggml_tensor * k, ggml_tensor * v, const Inputs & in, float scale);

// The same for the attention output of a coded layer, `out` [d_v * n_head, n_tokens]. Call it after build_observe_node.
void build_observe_output_node(ObserveData & data, const AttnBuild & b, ggml_tensor * out);

} // namespace subkv

struct subkv_observer {
    int32_t                                            n_skip = 0;
    int32_t                                            mode   = SUBKV_PAUSE;
    std::vector<int32_t>                               key_pos, query_pos; // sorted
    std::vector<std::unique_ptr<subkv::ObservedLayer>> layers;             // by il, null if it was never observed
};
