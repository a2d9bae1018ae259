// ggml-subkv-folder.h: where ggml looks for backends that are libraries of their own (GGML_BACKEND_DL). Part of libggml.
#pragma once

// The folder of libggml itself; nullptr where it is not known, or where backends are linked: ggml's own search, in the
// program's folder and in the current one. A Python process has neither near our libraries, and nobody expects that a
// library in the current folder is run.
const char * ggml_subkv_backend_folder();
