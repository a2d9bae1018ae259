// ggml-subkv-folder.h: the folder in which ggml searches for backend libraries (GGML_BACKEND_DL). Part of libggml.
#pragma once

// The folder of libggml, or nullptr if it is unknown, or backends are linked, and ggml searches the program's folder
// and the current folder. In a Python process neither folder has our libraries, and loading code from the current
// folder is unsafe.
const char * ggml_subkv_backend_folder();
