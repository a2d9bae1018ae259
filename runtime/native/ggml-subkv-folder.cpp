// ggml-subkv-folder.cpp: see ggml-subkv-folder.h. Part of libggml.
#include "ggml-subkv-folder.h"

#if defined(GGML_BACKEND_DL) && !defined(_WIN32) // Windows finds libraries beside its programs
#    include <dlfcn.h>

#    include <string>

const char * ggml_subkv_backend_folder() {
    static const std::string folder = [] {
        Dl_info here = {};
        if (!dladdr((void *) &ggml_subkv_backend_folder, &here) || !here.dli_fname) {
            return std::string();
        }
        const std::string path = here.dli_fname;
        return path.substr(0, path.find_last_of('/') + 1);
    }();
    return folder.empty() ? nullptr : folder.c_str();
}
#else
const char * ggml_subkv_backend_folder() {
    return nullptr;
}
#endif
