// core_speed.h: measures how much of a core a thread gets. A virtual processor shares its core with another one, which
// takes execution units but does not change the clock. Speeds of two runs can be compared only if both numbers of
// CoreSpeed are equal.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace subkv {

struct CoreSpeed {
    double clock_ghz;           // rate of additions that depend on each other, one per cycle
    double additions_per_cycle; // rate of independent additions
};

namespace core_speed_detail {

constexpr int64_t ADDITIONS = 1 << 16; // additions of a call

// Adds with N independent sums. The empty assembler statement hides a sum, so that the compiler keeps each addition.
// The summand is in a register, because some processors add constants without a cycle.
template <int N> inline uint64_t add(uint64_t step) {
    constexpr int TIMES  = 64 / N; // additions to each sum without a branch
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

// Returns the additions per nanosecond of one call.
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

// Calls of both kinds alternate for `seconds` on the calling thread. The median excludes calls in which the thread
// waits for a core, because a call takes only some 10 microseconds.
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
