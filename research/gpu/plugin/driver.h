// driver.h: what the prototype needs of CUDA's driver, besides launches. cuda_driver.cpp has the functions of libcuda.so.1,
// and libggml-emulated those of the emulated GPUs. Events are those of ggml (ggml_backend_event::context).
#pragma once

#include <cstddef>
#include <cstdint>

namespace subkv::plugin {

struct Driver {
    size_t page; // of mapped memory

    void * (*new_stream)();
    bool (*wait)(void * stream, void * event);   // later work of the stream waits for what the event has recorded
    bool (*record)(void * event, void * stream); // the event records the stream's work
    bool (*wait_for_all)();                      // the host waits for all streams of the device

    uint8_t * (*reserve)(size_t size); // addresses without memory; nullptr: none
    void (*release)(uint8_t * base, size_t size);
    bool (*map)(uint8_t * page); // gives it memory
    void (*unmap)(uint8_t * page);

    // Between any of the host's and the device's memory; they return when they are done.
    bool (*copy)(void * to, const void * from, size_t n);
    bool (*fill)(void * at, uint8_t value, size_t n);

    // How the emulation runs the kernels of another library (emulated::around_launch); nullptr: they are launched.
    void (*around_launch)(void (*launch)(void *), void * data);
};

// CUDA's; nullptr: this process has none. Not part of a build without CUDA's headers.
const Driver * cuda_driver() __attribute__((weak));

} // namespace subkv::plugin
