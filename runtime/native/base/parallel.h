// parallel.h: work that several threads share.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <exception>
#include <thread>
#include <vector>

namespace subkv {

// Calls use(i) for every i in [0, n), by at most n_most threads. Which calls share a thread is not determined. Throws
// the exception of the lowest i that failed. Calls after a failure may be omitted.
template <typename F> void for_each_parallel(size_t n, size_t n_most, F use) {
    std::atomic<size_t>             next{ 0 };
    std::atomic<bool>               failed{ false };
    std::vector<std::exception_ptr> errors(n);
    const auto                      work = [&] {
        for (size_t i = next++; i < n && !failed; i = next++) {
            try {
                use(i);
            } catch (...) {
                errors[i] = std::current_exception();
                failed    = true;
            }
        }
    };
    std::vector<std::thread> threads;
    const size_t             n_threads = std::min({ n, n_most, (size_t) std::thread::hardware_concurrency() });
    try {
        while (threads.size() + 1 < n_threads) {
            threads.emplace_back(work);
        }
    } catch (const std::exception &) { // this thread does the rest
    }
    work();
    for (std::thread & thread : threads) {
        thread.join();
    }
    for (const std::exception_ptr & error : errors) {
        if (error) {
            std::rethrow_exception(error);
        }
    }
}

// The same on all processors, 16 at most.
template <typename F> void for_each_parallel(size_t n, F use) {
    for_each_parallel(n, 16, use);
}

} // namespace subkv
