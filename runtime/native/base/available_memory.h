// available_memory.h: how much memory this process can still have.
#pragma once

#include <cstdint>
#include <string>

namespace subkv {

// Bytes that this process can still allocate, including swap: the minimum over the machine, all enclosing control groups
// (v2, v1; file pages count as free), and the process's own limits less a reserve for small blocks. INT64_MAX: unknown, as on other systems than Linux.
int64_t available_memory(const std::string & proc = "/proc", const std::string & cgroup = "/sys/fs/cgroup");

} // namespace subkv
