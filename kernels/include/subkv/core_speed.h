// core_speed.h: how much of a core a thread gets. Speeds of two runs can be compared only if both are equal: a virtual
// processor shares its core with another one, which takes execution units but not the clock.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace subkv {

// clock_ghz: the rate of additions that wait for each other, one a cycle. additions_per_cycle: of independent ones.
struct CoreSpeed {
    double clock_ghz;
    double additions_per_cycle;
};

namespace core_speed_detail {

constexpr int64_t ADDITIONS = 1 << 16; // of a call

// Adds with N independent sums. The empty assembler statement hides a sum, so that the compiler keeps each addition. The
// summand is in a register, because some processors add constants without a cycle.
template <int N> inline uint64_t add(uint64_t step) {
    constexpr int TIMES  = 64 / N; // without a branch
    uint64_t      sum[N] = {};
    for (int64_t i = 0; i < ADDITIONS; i += N * TIMES) {
#pragma GCC unroll 64
        for (int k = 0; k < N * TIMES; ++k) {
            sum[k % N] += step;
            __asm__ volatile("" : "+r"(sum[k % N]));
        }
    }
    uint64_t all = 0;
    for (const uint64_t one : sum) {
        all ^= one;
    }
    return all;
}

// Additions per nanosecond of one call.
inline double rate(uint64_t (*additions)(uint64_t)) {
    using Clock = std::chrono::steady_clock;

    const Clock::time_point start = Clock::now();
    volatile uint64_t       sink  = additions(1);
    (void) sink;
    return (double) ADDITIONS / std::chrono::duration<double, std::nano>(Clock::now() - start).count();
}

inline double median(std::vector<double> & values) {
    const auto middle = values.begin() + (std::ptrdiff_t) (values.size() / 2);
    std::nth_element(values.begin(), middle, values.end());
    return *middle;
}

} // namespace core_speed_detail

// Calls of both kinds alternate for `seconds` on the calling thread. The median is not that of a thread that waits for
// a core, because a call takes some 10 microseconds.
inline CoreSpeed core_speed(double seconds = 0.2) {
    using namespace core_speed_detail;
    using Clock = std::chrono::steady_clock;

    std::vector<double>     dependent, independent;
    const Clock::time_point start = Clock::now();
    do {
        dependent.push_back(rate(add<1>));
        independent.push_back(rate(add<8>));
    } while (std::chrono::duration<double>(Clock::now() - start).count() < seconds);
    const double clock = median(dependent);
    return { clock, median(independent) / clock };
}

} // namespace subkv
