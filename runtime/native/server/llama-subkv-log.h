// llama-subkv-log.h: writes the log of a program to its end. The build includes this header in front of programs that
// print their results with LOG: a thread writes the log, and nothing else waits for it.
#pragma once

#include "log.h"

namespace llama_subkv_log {

struct End {
    ~End() { common_log_flush(common_log_main()); }
};

static const End end;

} // namespace llama_subkv_log
