// llama-subkv-library.h: looks up functions of libsubkv, and loads it from libllama's folder if necessary.
#pragma once

#include <string>

using llama_subkv_function = void (*)();

// nullptr: libsubkv cannot be loaded, or has no function of this name; `why` has the reason.
llama_subkv_function llama_subkv_find(const char * name, std::string & why);
