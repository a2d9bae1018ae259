// cpu_place.cpp: caches in the memory of the CPU, and graphs on its backend.
#include "available_memory.h"
#include "log_line.h"
#include "plugin.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string>

namespace subkv::plugin {

namespace {

// Reserves address space, whose pages get memory when they are written, or returns nullptr. With PROT_NONE they get
// none, also in a process that locks its memory, and count as none where the system does not overcommit.
uint8_t * map(size_t size, int protection, void * at = nullptr) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (at ? MAP_FIXED : 0);
    void *    base  = mmap(at, size, protection, flags, -1, 0);
    return base == MAP_FAILED ? nullptr : (uint8_t *) base;
}

// Sets pages to zeros. They then take no memory if the system takes them back, which it does not do with locked ones.
void zero(void * data, size_t size) {
    const auto [begin, n] = pages(data, size, true);
    auto *const first = (uint8_t *) data, *const last = first + size;
    if (n == 0 || madvise(begin, n, MADV_DONTNEED) != 0) {
        std::memset(data, 0, size);
        return;
    }
    std::fill(first, begin, (uint8_t) 0);
    std::fill(begin + n, last, (uint8_t) 0);
}

// A type for codes and windows, which is the CPU's buffers on reserved memory.
ggml_backend_buffer_type_t reserved_type() {
    static BufferType type = make_buffer_type(
        [](ggml_backend_buffer_type_t own, size_t size) -> ggml_backend_buffer_t {
            uint8_t *             base   = map(size, PROT_READ | PROT_WRITE);
            ggml_backend_buffer_t buffer = base ? ggml_backend_cpu_buffer_from_ptr(base, size) : nullptr;
            if (buffer) {
                buffer->buft              = own;
                buffer->iface.free_buffer = [](ggml_backend_buffer_t b) { munmap(b->context, b->size); };
                buffer->iface.clear       = [](ggml_backend_buffer_t b, uint8_t) { // to zeros
                    zero(b->context, b->size);
                };
            }
            return buffer;
        },
        [](ggml_backend_buffer_type_t) { return true; }, nullptr);
    return (ggml_backend_buffer_type_t) type.data();
}

class CpuPlace final : public Place {
public:
    uint8_t * reserve(size_t size) override {
        constexpr size_t MOST_SMALLER = 16; // than f16, because no codes are smaller
        if (size / MOST_SMALLER > (uint64_t) available_memory()) {
            log_line("n_ctx: expected buffers that fit in the " + std::to_string(available_memory() >> 20) +
                     " MiB of memory available, found one of " + std::to_string(size >> 20) + " MiB as f16");
            return nullptr;
        }
        return map(size, PROT_NONE);
    }
    void   release(uint8_t * base, size_t size) override { munmap(base, size); }
    size_t page() const override { return (size_t) sysconf(_SC_PAGESIZE); }
    bool   open(uint8_t * first, size_t n) override { return mprotect(first, n, PROT_READ | PROT_WRITE) == 0; }
    void   close(uint8_t * first, size_t n) override { // also memory that is locked
        munlock(map(n, PROT_NONE, first), n);
    }

    void fill(void * at, uint8_t value, size_t n) override {
        value == 0 ? zero(at, n) : (void) std::memset(at, value, n);
    }
    void read(void * to, const void * from, size_t n) override { std::memcpy(to, from, n); }
    void write(void * to, const void * from, size_t n) override {
        if (to != from) {
            std::memcpy(to, from, n);
        }
    }
    void copy_rows(void * to, const void * from, size_t n) override { std::memcpy(to, from, n); }

    ggml_backend_buffer_type_t codes() const override { return reserved_type(); }
    ggml_backend_buffer_type_t results() const override { return ggml_backend_cpu_buffer_type(); }

    const void * input(const ggml_tensor * t) const override { return t->data; }
    void *       stage(ggml_tensor * t) override { return t->data; }

    ggml_status run(ggml_backend_t cpu, const ggml_cgraph *, ggml_cgraph * nodes, uint64_t) override {
        return ggml_backend_graph_compute(cpu, nodes);
    }
    ggml_status rotate(ggml_backend_t cpu, ggml_cgraph * nodes) override {
        return ggml_backend_graph_compute(cpu, nodes);
    }
};

} // namespace

Place & place() {
    static CpuPlace cpu;
    return cpu;
}

} // namespace subkv::plugin
