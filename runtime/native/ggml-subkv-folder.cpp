// ggml-subkv-folder.cpp: see ggml-subkv-folder.h. Part of libggml.
#include "ggml-subkv-folder.h"

#if defined(GGML_BACKEND_DL)
#    include <string>

#    ifdef _WIN32
#        define WIN32_LEAN_AND_MEAN
#        include <vector>
#        include <windows.h>

// the path of this library in UTF-8, as in ggml; empty if Windows reports none
static std::string this_library() {
    const DWORD flags = GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS | GET_MODULE_HANDLE_EX_FLAG_UNCHANGED_REFCOUNT;
    HMODULE     here  = nullptr;
    if (!GetModuleHandleExW(flags, (LPCWSTR) (void *) &ggml_subkv_backend_folder, &here)) {
        return "";
    }
    std::vector<wchar_t> wide(32768); // maximum path length of Windows
    const int            n = (int) GetModuleFileNameW(here, wide.data(), (DWORD) wide.size());
    if (n == 0 || n == (int) wide.size()) {
        return "";
    }
    std::string path((size_t) n * 3, 0); // at most three bytes per UTF-16 unit
    path.resize((size_t) WideCharToMultiByte(CP_UTF8, 0, wide.data(), n, &path[0], n * 3, nullptr, nullptr));
    return path;
}

static const char * const SEPARATORS = "/\\";
#    else
#        include <dlfcn.h>

static std::string this_library() {
    Dl_info here = {};
    return dladdr((void *) &ggml_subkv_backend_folder, &here) && here.dli_fname ? here.dli_fname : "";
}

static const char * const SEPARATORS = "/";
#    endif

const char * ggml_subkv_backend_folder() {
    static const std::string folder = [] {
        const std::string path = this_library();
        return path.substr(0, path.find_last_of(SEPARATORS) + 1);
    }();
    return folder.empty() ? nullptr : folder.c_str();
}
#else
const char * ggml_subkv_backend_folder() {
    return nullptr;
}
#endif
