// scratch.cpp: memory of a thread, by purpose.
#include "scratch.h"

#include <cstdlib>
#include <cstring>

namespace subkv::cpu {

namespace {

struct Memory {
    void * memory[N_SLOTS] = {};
    size_t bytes[N_SLOTS]  = {};

    ~Memory() {
        for (void * p : memory) {
            std::free(p);
        }
    }
};

} // namespace

void * scratch(Slot slot, size_t bytes) {
    static thread_local Memory m;
    if (m.bytes[slot] < bytes) {
        std::free(m.memory[slot]);
        const size_t size = (bytes + bytes / 4 + 4095) / 4096 * 4096;
        m.memory[slot]    = std::aligned_alloc(64, size);
        if (m.memory[slot] == nullptr) {
            m.bytes[slot] = 0;
            std::abort(); // a few hundred KiB: nothing sensible is left to do, and kernels cannot fail
        }
        std::memset(m.memory[slot], 0, size);
        m.bytes[slot] = size;
    }
    return m.memory[slot];
}

} // namespace subkv::cpu
