// library-folder.h: the folder of the library that contains a function, for libggml and libllama.
#pragma once

#include <filesystem>

#if defined(_WIN32)
#    if !defined(NOMINMAX)
#        define NOMINMAX
#    endif
#    include <vector>
#    include <windows.h>
#else
#    include <dlfcn.h>
#endif

namespace subkv {

// Returns empty if it is unknown.
inline std::filesystem::path library_folder(const void * function) {
#if defined(_WIN32)
    const DWORD flags = GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS | GET_MODULE_HANDLE_EX_FLAG_UNCHANGED_REFCOUNT;
    HMODULE     here  = nullptr;
    if (!GetModuleHandleExW(flags, (LPCWSTR) function, &here)) {
        return {};
    }
    std::vector<wchar_t> path(32768); // maximum path length of Windows, not MAX_PATH
    const DWORD          size = GetModuleFileNameW(here, path.data(), (DWORD) path.size());
    return size < path.size() ? std::filesystem::path(path.begin(), path.begin() + size).parent_path() :
                                std::filesystem::path();
#else
    Dl_info here = {};
    return dladdr(function, &here) && here.dli_fname ? std::filesystem::path(here.dli_fname).parent_path() :
                                                       std::filesystem::path();
#endif
}

} // namespace subkv
