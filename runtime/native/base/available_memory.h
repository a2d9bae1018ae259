// available_memory.h: how much memory this process can still have.
#pragma once

#include <cstdint>
#include <string>

namespace subkv {

// Bytes that this process can still allocate, including swap. They are the minimum over the machine, all enclosing
// control groups (v2, v1; file pages count as free), and the process's own limits less a reserve for small blocks.
// Returns INT64_MAX if it is unknown, as on other systems than Linux.
int64_t available_memory(const std::string & proc = "/proc", const std::string & cgroup = "/sys/fs/cgroup");

} // namespace subkv
