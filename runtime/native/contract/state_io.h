// state_io.h: the stream of bytes that a state is written to or read from.
#pragma once

#include "ggml.h"

#include <cstddef>

namespace subkv {

class StateWriter {
public:
    virtual ~StateWriter()                                                 = default;
    virtual void write(const void * data, size_t size)                     = 0;
    virtual void write_tensor(ggml_tensor * t, size_t offset, size_t size) = 0;
};

class StateReader {
public:
    virtual ~StateReader()                                                = default;
    virtual void read(void * data, size_t size)                           = 0;
    virtual void read_tensor(ggml_tensor * t, size_t offset, size_t size) = 0;
};

} // namespace subkv
