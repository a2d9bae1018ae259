// place.h: where the device keeps caches and computes: its memory, what the engine's nodes read there, and how graphs run.
// The plug-in's place is the CPU (plugin.cpp).
#pragma once

#include "ggml-backend.h"
#include "ggml.h"

#include <cstddef>
#include <cstdint>
#include <utility>

namespace subkv::plugin {

class Place {
public:
    virtual ~Place() = default;

    // Address space, whose pages have no memory until they are opened, or nullptr if there is none.
    virtual uint8_t * reserve(size_t size)                 = 0;
    virtual void      release(uint8_t * base, size_t size) = 0;
    virtual size_t    page() const                         = 0;
    // opens whole pages, which may be open; false if there is no memory
    virtual bool open(uint8_t * first, size_t size)  = 0;
    virtual void close(uint8_t * first, size_t size) = 0; // gives their memory back

    // Bytes of open pages.
    virtual void fill(void * at, uint8_t value, size_t n)          = 0;
    virtual void read(void * to, const void * from, size_t n)      = 0; // to the host's memory
    virtual void write(void * to, const void * from, size_t n)     = 0; // from there
    virtual void copy_rows(void * to, const void * from, size_t n) = 0;

    virtual ggml_backend_buffer_type_t codes() const   = 0; // for codes and windows
    virtual ggml_backend_buffer_type_t results() const = 0; // for results of nodes

    // The host's copy of a graph's input, or nullptr if there is none.
    virtual const void * input(const ggml_tensor * t) const = 0;
    // The host's memory for an input of the engine's nodes, which write() then takes to the input's data.
    virtual void * stage(ggml_tensor * t) = 0;

    // Computes nodes of the engine, and those of `graph` around them. `uid` is a number of these nodes.
    virtual ggml_status run(ggml_backend_t backend, const ggml_cgraph * graph, ggml_cgraph * nodes, uint64_t uid) = 0;
    // The same for nodes that rotate keys, which the CPU computes.
    virtual ggml_status rotate(ggml_backend_t backend, ggml_cgraph * nodes) = 0;
};

Place & place(); // of the device

// The whole pages in a range, or all pages that it touches.
inline std::pair<uint8_t *, size_t> pages(const void * data, size_t size, bool whole) {
    const auto page  = (uintptr_t) place().page();
    const auto first = (uintptr_t) data, last = first + size;
    const auto begin = whole ? (first + page - 1) / page * page : first / page * page;
    const auto end   = whole ? last / page * page : (last + page - 1) / page * page;
    return { (uint8_t *) begin, begin < end ? end - begin : 0 };
}

} // namespace subkv::plugin
