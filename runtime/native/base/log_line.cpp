#include "log_line.h"

#include "printable.h"

#include <atomic>
#include <cstdio>

namespace subkv {

static void log_to_stderr(const std::string & line) {
    std::fprintf(stderr, "subkv: %s\n", printable(line).c_str());
}

static std::atomic<log_fn> receiver{ log_to_stderr };

void log_line(const std::string & line) {
    receiver.load()(line);
}

void set_log(log_fn fn) {
    receiver = fn;
}

} // namespace subkv
