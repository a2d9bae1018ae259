// llama-subkv-library.h: libsubkv, as libllama sees it. Part of libllama.
#pragma once

#include "calls.h"

#include <string>

// The functions of libsubkv, if it is loaded; with `load`, the library in libllama's folder is loaded first. Returns
// nullptr if there is none, with the reason in `why`.
const subkv::SubkvCalls * llama_subkv_library(bool load, std::string & why);

// Writes a line to llama.cpp's log, as a warning because llama.cpp's programs hide lower levels.
void llama_subkv_log(const std::string & line);
