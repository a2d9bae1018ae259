// backend_folder.cpp: see ggml-subkv-folder.h. Part of libggml.
#include "ggml-subkv-folder.h"

#if defined(GGML_BACKEND_DL)
#    include "library-folder.h"

#    include <string>

const char * ggml_subkv_backend_folder() {
    static const std::string folder = [] {
        const auto path = subkv::library_folder((const void *) &ggml_subkv_backend_folder);
        return path.empty() ? std::string() : (path / "").u8string(); // UTF-8, as in ggml
    }();
    return folder.empty() ? nullptr : folder.c_str();
}
#else
const char * ggml_subkv_backend_folder() {
    return nullptr;
}
#endif
