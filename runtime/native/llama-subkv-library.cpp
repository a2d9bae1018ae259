// llama-subkv-library.cpp: see llama-subkv-library.h. Part of libllama.
#include "llama-subkv-library.h"

#include "hook.h"

#if defined(_WIN32)
#    include <windows.h>
#else
#    include <dlfcn.h>
#endif

#if defined(_WIN32)
llama_subkv_function llama_subkv_find(const char * name, std::string & why) {
    HMODULE here = nullptr;
    wchar_t path[MAX_PATH];
    GetModuleHandleExW(GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS | GET_MODULE_HANDLE_EX_FLAG_UNCHANGED_REFCOUNT,
                       (LPCWSTR) &llama_subkv_register, &here);
    const DWORD  size   = GetModuleFileNameW(here, path, MAX_PATH);
    std::wstring folder = std::wstring(path, size);
    folder.resize(folder.find_last_of(L"\\/") + 1);
    HMODULE library  = LoadLibraryExW((folder + L"libsubkv.dll").c_str(), nullptr, LOAD_WITH_ALTERED_SEARCH_PATH);
    auto *  function = library ? (llama_subkv_function) (void *) GetProcAddress(library, name) : nullptr;
    why              = function ? "" : "libsubkv.dll: error " + std::to_string(GetLastError());
    return function;
}
#else
llama_subkv_function llama_subkv_find(const char * name, std::string & why) {
#    if defined(__APPLE__)
    const std::string file = "libsubkv.dylib";
#    else
    const std::string file = "libsubkv.so";
#    endif
    Dl_info here = {};
    dladdr((void *) &llama_subkv_register, &here);
    std::string path = here.dli_fname ? here.dli_fname : "";
    path.resize(path.find_last_of('/') + 1);
    void * library  = dlopen((path + file).c_str(), RTLD_NOW | RTLD_LOCAL);
    void * function = library ? dlsym(library, name) : nullptr;
    why             = function ? "" : dlerror();
    return (llama_subkv_function) function;
}
#endif
