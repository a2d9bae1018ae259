// llama-subkv-library.h: libsubkv, as libllama sees it. Part of libllama.
#pragma once

#include "calls.h"

#include <string>

// The functions of libsubkv: of the loaded library, or, with `load`, of the one in libllama's folder. nullptr: there is
// none; `why` has the reason.
const subkv::SubkvCalls * llama_subkv_library(bool load, std::string & why);

// Writes a line to llama.cpp's log as a warning: llama.cpp's programs hide lower levels.
void llama_subkv_log(const std::string & line);
