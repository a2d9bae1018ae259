// failing_new.cpp: the n-th `operator new` of the thread that requested the fault fails, or of all other threads.
// Preloaded by test_allocations.py.
#include <atomic>
#include <cstdlib>
#include <new>

static thread_local long g_left = 0;
static std::atomic<long> g_live{ 0 };
static std::atomic<long> g_left_elsewhere{ 0 };
static thread_local bool g_is_caller = false;

// Counts from now on; 0: none fails. Returns how many were left.
extern "C" long fail_new(long n) {
    const long left = g_left;
    g_left          = n;
    return left;
}

// The same for the other threads together.
extern "C" long fail_new_elsewhere(long n) {
    g_is_caller = true;
    return g_left_elsewhere.exchange(n);
}

// Pieces that are allocated and not freed.
extern "C" long live_news() {
    return g_live;
}

void * operator new(std::size_t size) {
    if (g_left > 0 && --g_left == 0) {
        throw std::bad_alloc();
    }
    if (!g_is_caller && g_left_elsewhere > 0 && --g_left_elsewhere == 0) {
        throw std::bad_alloc();
    }
    void * p = std::malloc(size ? size : 1);
    if (!p) {
        throw std::bad_alloc();
    }
    ++g_live;
    return p;
}

void * operator new[](std::size_t size) {
    return operator new(size);
}

void operator delete(void * p) noexcept {
    g_live -= p != nullptr;
    std::free(p);
}

void operator delete[](void * p) noexcept {
    operator delete(p);
}

void operator delete(void * p, std::size_t) noexcept {
    operator delete(p);
}

void operator delete[](void * p, std::size_t) noexcept {
    operator delete(p);
}
