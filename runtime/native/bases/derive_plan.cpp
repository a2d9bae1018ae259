// derive_plan.cpp: see derive_plan.h. Arithmetic is in the order of budget.py, without fused operations
// (cmake/native/CMakeLists.txt), so that the plans are equal.
#include "derive_plan.h"

#include "layout_keys.h"
#include "quantizer.h"
#include "subkv/widths.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <queue>
#include <tuple>

namespace subkv {

namespace {

constexpr int    GROUP      = 8; // coefficients planned together
constexpr double SLOPE      = 1e-3;
constexpr double COHERENCE  = 20.0;
constexpr double WIDE_FROM  = 6.0; // bits per element in rows from which bands of 16 bits are planned
constexpr int    STEP_BITS  = 16;  // of a head's exact recent row in integers
constexpr int    MOST_CODED = 8;

double basis_bits(const PlannedHead & head, const PlanOverhead & overhead) {
    return ((double) head.basis_bits + (head.centred ? 32.0 : 0.0)) / (double) overhead.context;
}

double head_bits(const PlannedHead & head, const PlanOverhead & overhead) {
    return (head.centred ? 16.0 * head.d : 0.0) / (double) overhead.context;
}

// The useful widths above LEAST_BITS in ascending order, which are the lower convex hull of (bits per coefficient,
// loss).
std::vector<int> ladder(double of_bases, int widest) {
    const auto       cost = [of_bases](int bits) { return bits + of_bases; };
    std::vector<int> out;
    for (int current = LEAST_BITS; current != widest;) {
        int    next = 0;
        double most = 0.0;
        for (const int bits : WIDTHS) {
            if (bits > current && bits <= widest) {
                const double saved = (loss_of(current) - loss_of(bits)) / (cost(bits) - cost(current));
                if (next == 0 || saved > most) {
                    next = bits;
                    most = saved;
                }
            }
        }
        out.push_back(current = next);
    }
    return out;
}

// Sums over groups, made non-increasing by averaging violators (pool adjacent violators).
std::vector<double> pooled(const std::vector<double> & importance) {
    std::vector<std::pair<double, int>> blocks;
    for (size_t i = 0; i < importance.size(); i += GROUP) {
        const double * x    = importance.data() + i; // in numpy's order
        double         mean = ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
        int            n    = 1;
        for (; !blocks.empty() && blocks.back().first < mean; blocks.pop_back()) {
            const auto [last, count] = blocks.back();
            mean                     = (last * count + mean * n) / (count + n);
            n += count;
        }
        blocks.emplace_back(mean, n);
    }
    std::vector<double> out;
    for (const auto & [mean, n] : blocks) {
        out.insert(out.end(), (size_t) n, mean);
    }
    return out;
}

Bands runs(const std::vector<int> & widths) {
    Bands out;
    for (const int bits : widths) {
        if (out.empty() || out.back().second != bits) {
            out.emplace_back(0, bits);
        }
        out.back().first += GROUP;
    }
    return out;
}

// Repeatedly widens the group that saves the most cost per bit, while the budget allows. `spare` is the bits per token
// beyond LEAST_BITS for all coefficients.
std::vector<Bands> filled(const std::vector<PlannedHead> & heads, const PlanOverhead & overhead, double spare,
                          int widest) {
    using Step = std::tuple<double, size_t, size_t, int>; // -gain, head, group, next width
    std::priority_queue<Step, std::vector<Step>, std::greater<>> steps;
    std::vector<std::vector<double>>                             weight;
    std::vector<std::vector<int>>                                widths, ladders;
    std::map<double, std::vector<int>>                           known; // by bits of bases
    for (const PlannedHead & head : heads) {
        const double of_bases = basis_bits(head, overhead);
        if (known.count(of_bases) == 0) {
            known[of_bases] = ladder(of_bases, widest);
        }
        ladders.push_back(known[of_bases]);
        weight.push_back(pooled(head.importance));
        widths.emplace_back(weight.back().size(), LEAST_BITS);
    }
    const auto push = [&](size_t h, size_t g) {
        if (g >= widths[h].size()) {
            return;
        }
        const int  old  = widths[h][g];
        const auto next = std::upper_bound(ladders[h].begin(), ladders[h].end(), old);
        if (next == ladders[h].end() || (g > 0 && widths[h][g - 1] < *next)) {
            return;
        }
        steps.emplace(-(weight[h][g] * (loss_of(old) - loss_of(*next)) / (GROUP * (*next - old + 0.0))), h, g, *next);
    };
    for (size_t h = 0; h < heads.size(); ++h) {
        push(h, 0);
        push(h, 1);
    }
    spare *= 1.0 + 1e-12;
    while (!steps.empty()) {
        const auto [gain, h, g, next] = steps.top();
        steps.pop();
        const int    old  = widths[h][g];
        const double cost = GROUP * (next - old + 0.0);
        if (next <= old || cost > spare) {
            continue;
        }
        spare -= cost;
        widths[h][g] = next;
        push(h, g);
        push(h, g + 1);
    }
    std::vector<Bands> out;
    for (const auto & of_head : widths) {
        out.push_back(runs(of_head));
    }
    return out;
}

// All coefficients of every head at one width.
std::vector<Bands> even(const std::vector<PlannedHead> & heads, int bits) {
    std::vector<Bands> out;
    for (const PlannedHead & head : heads) {
        out.push_back({ { (int) head.importance.size(), bits } });
    }
    return out;
}

} // namespace

std::vector<double> equal_importance(int n) {
    std::vector<double> out;
    for (int i = 0; i < n; ++i) {
        out.push_back(1.0 - SLOPE * (i / GROUP));
    }
    return out;
}

int64_t byte_row_bits(int d) {
    return 8 * (int64_t) d + 16;
}

double loss_of(int bits) {
    const double relative = quantizer_distortion(bits);
    return relative + (COHERENCE - 1.0) * (relative * relative);
}

PlanAccount account_of(const std::vector<PlannedHead> & heads, const std::vector<Bands> & bands,
                       const PlanOverhead & overhead) {
    int64_t elements = 0, n_bytes = 0, n_rows = 0;
    double  bases = 0.0;
    for (size_t h = 0; h < heads.size(); ++h) {
        int rank = 0;
        for (const auto & [n, bits] : bands[h]) {
            n_bytes += n * bits / 8;
            rank += n;
        }
        elements += heads[h].d;
        n_bytes += heads[h].joined ? 0 : 1;
        n_rows += heads[h].joined ? 0 : 1;
        bases += head_bits(heads[h], overhead) + basis_bits(heads[h], overhead) * rank;
    }
    const int64_t of_recent =
        overhead.recent_bits == 16 ? 16 * elements : overhead.recent_bits * elements + STEP_BITS * n_rows;
    const int64_t window = 16 * elements * overhead.n_sink + of_recent * (overhead.n_recent + overhead.n_rollback);
    const auto    of     = (double) elements;
    return { 8.0 * (double) n_bytes / of, (double) window / of / (double) overhead.context, bases / of };
}

std::vector<Bands> plan_bands(const std::vector<PlannedHead> & heads, double kv_bits, const PlanOverhead & overhead,
                              int widest) {
    const PlanAccount low  = account_of(heads, even(heads, LEAST_BITS), overhead);
    const PlanAccount high = account_of(heads, even(heads, WIDEST_BITS), overhead);
    if (!(kv_bits >= low.total() && kv_bits <= high.total())) {
        const std::string least = number(std::ceil(low.total() * 1000.0) / 1000.0);
        const std::string most  = number(std::floor(high.total() * 1000.0) / 1000.0);
        throw Invalid(Error{ SUBKV_ERROR_BUDGET, "bits per element",
                             "expected " + least + " to " + most + " for bases from the weights of this model at " +
                                 std::to_string(overhead.context) + " tokens, found " + number(kv_bits),
                             "" });
    }
    if (widest == 0) {
        widest = kv_bits - high.window - high.bases >= WIDE_FROM ? WIDEST_BITS : MOST_CODED;
    }
    int64_t elements = 0;
    for (const PlannedHead & head : heads) {
        elements += head.d;
    }
    return filled(heads, overhead, (kv_bits - low.total()) * (double) elements, widest);
}

} // namespace subkv
