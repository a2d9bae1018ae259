// derive_plan.h: the bands of all heads within a budget (subkv/plan/budget.py, which computes the same ones).
#pragma once

#include "layout.h"

#include <cstdint>
#include <utility>
#include <vector>

namespace subkv {

// Runs of neighbouring coefficients with the same bits, as in HeadSpec, but of any number.
using Bands = std::vector<std::pair<int, int>>; // coefficients, bits

constexpr int LEAST_BITS  = 3; // of any coefficient without a calibration
constexpr int WIDEST_BITS = 16;

// One head's K or V. If it is `joined`, its codes continue the row of the previous head, under the same scale.
struct PlannedHead {
    int                 d = 0;
    std::vector<double> importance;         // [d]
    bool                centred    = false; // a mean is subtracted and stored with the bases
    int64_t             basis_bits = 0;     // memory of one coefficient's bases
    bool                joined     = false;
};

// The sizes besides the rows. Bits per element are computed for `context` tokens.
struct PlanOverhead {
    int64_t context = 0;
    int     n_sink = 0, n_recent = 0, n_rollback = 0, recent_bits = 0;
};

// The parts of a budget, in bits per K/V element.
struct PlanAccount {
    double rows = 0.0, window = 0.0, bases = 0.0;

    double total() const { return rows + window + bases; }
};

// The importance [n] of equal coefficients. It decreases slightly, so that a budget ends at the same group in all
// heads.
std::vector<double> equal_importance(int n);

// Bits of a row of E or D in bytes.
int64_t byte_row_bits(int d);

// Cost of a coefficient's errors at `bits`, relative to independent errors of its own size.
double loss_of(int bits);

PlanAccount account_of(const std::vector<PlannedHead> & heads, const std::vector<Bands> & bands,
                       const PlanOverhead & overhead);

// The bands of every head within `kv_bits` bits per element in total. `widest` is the maximum of a band's bits, or 0
// for 16 in large budgets and else 8. Throws Invalid of SUBKV_ERROR_BUDGET with the valid range.
std::vector<Bands> plan_bands(const std::vector<PlannedHead> & heads, double kv_bits, const PlanOverhead & overhead,
                              int widest);

} // namespace subkv
