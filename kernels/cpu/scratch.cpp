// scratch.cpp: per-thread memory, by purpose.
#include "scratch.h"

#include <cstdint>
#include <cstring>
#include <new>

namespace subkv::cpu {

namespace {

constexpr size_t ALIGNMENT = 64;

struct Memory {
    void * memory[N_SLOTS] = {}; // unaligned, because some C libraries lack aligned_alloc
    size_t bytes[N_SLOTS]  = {}; // usable after alignment

    ~Memory() {
        for (void * p : memory) {
            ::operator delete(p);
        }
    }
};

} // namespace

void * scratch(Slot slot, size_t bytes) {
    static thread_local Memory m;
    if (m.bytes[slot] < bytes) {
        ::operator delete(m.memory[slot]);
        m.memory[slot]    = nullptr;
        m.bytes[slot]     = 0;
        const size_t size = (bytes + bytes / 4 + 4095) / 4096 * 4096;
        m.memory[slot]    = ::operator new(size + ALIGNMENT);
        std::memset(m.memory[slot], 0, size + ALIGNMENT);
        m.bytes[slot] = size;
    }
    return (void *) (((uintptr_t) m.memory[slot] + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
}

} // namespace subkv::cpu
