// emulated.cpp: the fibers behind cuda_runtime.h, and shared memory.
#include "cuda_runtime.h"

#include <setjmp.h>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

namespace subkv::cuda {

constexpr size_t SHARED = 99u << 10; // per block, as on sm_86 to sm_120
alignas(32) unsigned char block_memory[SHARED];

} // namespace subkv::cuda

namespace emulated {

dim3   thread_index, block_index;
bool   only_count  = false;
size_t last_shared = 0;

std::vector<unsigned char> last_args;

void (*around_launch)(void (*launch)(void *), void * data)                            = nullptr;
void (*on_stream)(void * stream, std::function<void()> work)                          = nullptr;
void (*wait_for)(void * stream)                                                       = nullptr;
void (*before_launch)(const void * kernel, const unsigned * grid, unsigned n_threads) = nullptr;

namespace {

size_t most_shared = subkv::cuda::SHARED;

constexpr size_t STACK = 256u << 10; // a fragment holds a whole matrix

// Threads that wait for each other: a block or a warp.
struct Barrier {
    unsigned n = 0, arrived = 0;
    uint64_t round = 0;
    bool     any = false, all = true; // votes so far
    bool     last_any = false, last_all = true;
};

// A context starts a thread; later switches are jumps without a system call.
struct Fiber {
    ucontext_t              context;
    jmp_buf                 at;
    bool                    begun = false;
    std::unique_ptr<char[]> stack{ new char[STACK] };
    bool                    done = false;
};

// A thread's factors of a product.
struct Factors {
    uint32_t left, right;
};

std::vector<Fiber>    fibers;
std::vector<Barrier>  warps;
std::vector<uint32_t> exchange; // by thread
std::vector<Factors>  factors;  // by thread
Barrier               block;
jmp_buf               scheduler;
void (*body)(void *);
void * body_data;

void release(Barrier & b) {
    b.last_any = b.any;
    b.last_all = b.all;
    b.any      = false;
    b.all      = true;
    b.arrived  = 0;
    ++b.round;
}

void wait(Barrier & b, bool vote) {
    b.any                = b.any || vote;
    b.all                = b.all && vote;
    const uint64_t round = b.round;
    if (++b.arrived == b.n) {
        release(b);
        return;
    }
    while (b.round == round) {
        if (_setjmp(fibers[thread_index.x].at) == 0) {
            _longjmp(scheduler, 1);
        }
    }
}

// A thread that has ended no longer counts for the barrier.
void leave(Barrier & b) {
    if (--b.n > 0 && b.arrived == b.n) {
        release(b);
    }
}

void start() {
    body(body_data);
    const unsigned me = thread_index.x;
    fibers[me].done   = true;
    leave(block);
    leave(warps[me / 32]);
    _longjmp(scheduler, 1);
}

void resume(Fiber & fiber) {
    if (_setjmp(scheduler) != 0) {
        return;
    }
    if (fiber.begun) {
        _longjmp(fiber.at, 1);
    }
    fiber.begun = true;
    setcontext(&fiber.context);
}

} // namespace

static void run_block(unsigned n_threads, void (*f)(void *), void * data) {
    body      = f;
    body_data = data;
    if (fibers.size() < n_threads) {
        fibers = std::vector<Fiber>(n_threads);
    }
    block   = Barrier{};
    block.n = n_threads;
    warps.assign((n_threads + 31) / 32, Barrier{});
    exchange.assign(n_threads, 0);
    factors.assign(n_threads, Factors{});
    // NaN in all floats, so that a read before a write changes the result
    std::memset(subkv::cuda::block_memory, 0xFF, sizeof(subkv::cuda::block_memory));
    for (unsigned i = 0; i < n_threads; ++i) {
        ++warps[i / 32].n;
        fibers[i].done = fibers[i].begun = false;
        getcontext(&fibers[i].context);
        fibers[i].context.uc_stack.ss_sp   = fibers[i].stack.get();
        fibers[i].context.uc_stack.ss_size = STACK;
        fibers[i].context.uc_link          = nullptr;
        makecontext(&fibers[i].context, start, 0);
    }
    // A pass runs every thread up to a barrier that others have not reached. Every second pass starts with the last
    // thread, so that a missing barrier changes results.
    unsigned left      = n_threads;
    bool     backwards = false;
    int      without   = 0; // passes in which no barrier opened and no thread ended
    while (left > 0) {
        const uint64_t before = block.round;
        uint64_t       opened = 0;
        for (const auto & w : warps) {
            opened += w.round;
        }
        const unsigned left_before = left;
        backwards                  = !backwards;
        for (unsigned step = 0; step < n_threads; ++step) {
            const unsigned i = backwards ? n_threads - 1 - step : step;
            if (fibers[i].done) {
                continue;
            }
            thread_index.x = i;
            resume(fibers[i]);
            left -= fibers[i].done ? 1 : 0;
        }
        uint64_t after = 0;
        for (const auto & w : warps) {
            after += w.round;
        }
        without = block.round == before && after == opened && left == left_before ? without + 1 : 0;
        if (without > 1) {
            std::fprintf(stderr, "emulated block (%u, %u, %u): its threads wait at different barriers\n", block_index.x,
                         block_index.y, block_index.z);
            std::abort();
        }
    }
}

void run_grid(dim3 grid, unsigned n_threads, void (*f)(void *), void * data) {
    struct Launch {
        dim3     grid;
        unsigned n_threads;
        void (*body)(void *);
        void * data;
    } launch{ grid, n_threads, f, data };

    const auto run = [](void * of) {
        const Launch & l = *(const Launch *) of;
        for (unsigned z = 0; z < l.grid.z; ++z) {
            for (unsigned y = 0; y < l.grid.y; ++y) {
                for (unsigned x = 0; x < l.grid.x; ++x) {
                    block_index = dim3(x, y, z);
                    run_block(l.n_threads, l.body, l.data);
                }
            }
        }
    };
    if (around_launch) {
        around_launch(run, &launch);
    } else {
        run(&launch);
    }
}

void block_barrier() {
    wait(block, false);
}

bool block_any(bool mine) {
    wait(block, mine);
    return block.last_any;
}

bool block_all(bool mine) {
    wait(block, mine);
    return block.last_all;
}

void warp_barrier() {
    wait(warps[thread_index.x / 32], false);
}

uint32_t from_lane(uint32_t mine, unsigned lane) {
    exchange[thread_index.x] = mine;
    warp_barrier();
    const uint32_t theirs = exchange[thread_index.x / 32 * 32 + lane];
    warp_barrier();
    return theirs;
}

void product(int * sum, uint32_t left, uint32_t right, bool right_signed) {
    const unsigned me = thread_index.x, lane = me % 32, warp = me - lane;
    factors[me] = { left, right };
    warp_barrier();
    for (unsigned i = 0; i < 2; ++i) {
        const unsigned row = lane / 4, column = lane % 4 * 2 + i;
        for (unsigned depth = 0; depth < 16; ++depth) {
            const unsigned shift = depth % 4 * 8;
            const auto     a     = (int8_t) (factors[warp + row * 4 + depth / 4].left >> shift);
            const auto     b     = (uint8_t) (factors[warp + column * 4 + depth / 4].right >> shift);
            sum[i] += a * (right_signed ? (int8_t) b : b);
        }
    }
    warp_barrier();
}

} // namespace emulated

cudaError_t cudaGetDevice(int * device) {
    *device = 0;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int * value, cudaDeviceAttr attr, int) {
    constexpr int RESERVED = 1 << 10; // of a block on sm_80 and later
    switch (attr) {
        case cudaDevAttrMultiProcessorCount:
            *value = 30; // as on an RTX 2060
            break;
        case cudaDevAttrReservedSharedMemoryPerBlock: *value = RESERVED; break;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = (int) emulated::most_shared + RESERVED; break;
        default: *value = (int) emulated::most_shared;
    }
    return cudaSuccess;
}

extern "C" {

// Later launches do not run; `most`: the device's shared memory per block in bytes.
void emulated_only_count(size_t most) {
    emulated::only_count  = true;
    emulated::most_shared = most;
}

void emulated_before_launch(void (*f)(const void * kernel, const unsigned * grid, unsigned n_threads)) {
    emulated::before_launch = f;
}

size_t emulated_last_shared() {
    return emulated::last_shared;
}

const void * emulated_last_args() {
    return emulated::last_args.data();
}

size_t emulated_last_args_size() {
    return emulated::last_args.size();
}
}
