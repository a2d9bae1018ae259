// derive.h: bases for a model without a calibration, from its weights, without running it (subkv/plan/datafree.py, which
// computes the same bytes).
#pragma once

#include "layout.h"

#include <memory>
#include <string>

namespace subkv {

// Bits per element of derived bases unless the user names others: the demo model's divergence equals q8_0's there.
constexpr float DERIVED_BUDGET = 6.5f;

// Bases of the model in this file, in memory. budget: bits per element; 0: DERIVED_BUDGET. Estimates of the last models are
// kept, so that a second call only plans. Throws Invalid if the model cannot have any, and of SUBKV_ERROR_BUDGET with the
// possible range.
std::shared_ptr<const Layout> derive_layout(const std::string & model, float budget);

} // namespace subkv
