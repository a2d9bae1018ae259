// derive.h: bases for a model without a calibration, from its weights, without running it. Tests have the definition
// (tests/format/derived_numpy.py), which computes the same bytes.
#pragma once

#include "layout.h"
#include "weights_file.h"

#include <memory>
#include <string>
#include <vector>

namespace subkv {

// Bits per element of derived bases unless the user names others: the divergence equals q8_0's there (derived_numpy.py has
// the same numbers, and the models that were measured). BESIDE_SLIDING: without bases of sliding layers, whose few other
// layers need more bits and take less of the whole cache.
constexpr float DERIVED_BUDGET                = 6.5f;
constexpr float DERIVED_BUDGET_BESIDE_SLIDING = 7.25f;

// The writer of derived bases; increase the number when they change.
extern const char * const DERIVED_GENERATOR;

// The layers of a model that would have bases, ascending. Throws Invalid if there is none.
std::vector<int> derivable_layers(const std::string & model);

// The layers of an argument of the C interface; NULL: none.
std::vector<int32_t> layers_of(const int32_t * layers, int32_t n);

// Bases of the model in this file, in memory. budget: bits per element; 0: derived_budget(). sliding: layers that need
// none, unless all are or the model's file has no sliding window. Estimates of the last models are kept, so that a second
// call only plans. Throws Invalid if the model cannot have any, and of SUBKV_ERROR_BUDGET with the possible range.
std::shared_ptr<const Layout> derive_layout(const std::string & model, float budget,
                                            const std::vector<int32_t> & sliding);
// The same of these weights, for a window of these sizes.
std::shared_ptr<const Layout> derive_layout(const WeightsFile & weights, float budget, int n_sink, int n_recent);

// DERIVED_BUDGET_BESIDE_SLIDING if derive_layout() leaves layers out, else DERIVED_BUDGET. Throws as that.
float derived_budget(const std::string & model, const std::vector<int32_t> & sliding);

} // namespace subkv
