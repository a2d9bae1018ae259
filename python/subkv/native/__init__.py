"""ctypes over libsubkv, llama.cpp and ggml."""
