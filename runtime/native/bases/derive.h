// derive.h: bases for a model without a calibration, from its weights, without running it. Tests have the definition
// (tests/format/derived_numpy.py), which computes the same bytes.
#pragma once

#include "layout.h"
#include "weights_file.h"

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace subkv {

// Bits per element of derived bases unless the user names others. At this budget the divergence equals q8_0's
// (derived_numpy.py has the same numbers, and the models that were measured). BESIDE_SLIDING is for models whose
// sliding layers have no bases: their few other layers need more bits and take less of the whole cache.
constexpr float DERIVED_BUDGET                = 6.5f;
constexpr float DERIVED_BUDGET_BESIDE_SLIDING = 7.25f;

// The writer of derived bases. Increase the number when they change.
extern const char * const DERIVED_GENERATOR;

// The layers of a model that would have bases, ascending. Throws Invalid if there is none.
std::vector<int> derivable_layers(const std::string & model);

// Whether a layer has a sliding window, as the model's host knows, or nullptr if none has. It is only asked about
// models whose file has a sliding window.
using Slides = std::function<bool(int32_t il)>;

// Bases of the model in this file, in memory. `content` is the model's, or "" if it is not known yet. `budget` is in
// bits per element, or 0 for derived_budget(). Sliding layers get none, unless all layers slide. Estimates of the last
// models are kept, so that a second call only plans. Throws Invalid if the model cannot have any, and of
// SUBKV_ERROR_BUDGET with the possible range.
std::shared_ptr<const Layout> derive_layout(const std::string & model, const std::string & content, float budget,
                                            const Slides & slides);
// The same of these weights, for a window of these sizes.
std::shared_ptr<const Layout> derive_layout(const WeightsFile & weights, float budget, int n_sink, int n_recent);

// DERIVED_BUDGET_BESIDE_SLIDING if derive_layout() leaves layers out, else DERIVED_BUDGET. Throws as that.
float derived_budget(const std::string & model, const std::string & content, const Slides & slides);

} // namespace subkv
