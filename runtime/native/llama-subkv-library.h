// llama-subkv-library.h: functions of libsubkv, which is beside libllama, in a process that may not have loaded it.
#pragma once

#include <string>

using llama_subkv_function = void (*)();

// nullptr: no libsubkv there loads, or it has none of this name; `why` says more.
llama_subkv_function llama_subkv_find(const char * name, std::string & why);
