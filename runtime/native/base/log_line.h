// log_line.h: lines for llama.cpp's log.
#pragma once

#include <string>

namespace subkv {

using log_fn = void (*)(const std::string & line);

// Before libllama has connected, lines go to stderr.
void log_line(const std::string & line);
void set_log(log_fn fn);

} // namespace subkv
