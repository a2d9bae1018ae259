// library.cpp: see llama-subkv-library.h. Part of libllama.
#include "llama-subkv-library.h"

#include "hook.h"
#include "library-folder.h"

#include <system_error>

llama_subkv_function llama_subkv_find(const char * name, std::string & why) {
    const auto folder = subkv::library_folder((const void *) &llama_subkv_register);
#if defined(_WIN32)
    const auto file     = folder / "libsubkv.dll";
    HMODULE    library  = LoadLibraryExW(file.c_str(), nullptr, LOAD_WITH_ALTERED_SEARCH_PATH);
    auto *     function = library ? (llama_subkv_function) (void *) GetProcAddress(library, name) : nullptr;
    const int  error    = (int) GetLastError();
    why = function ? "" : "cannot load " + file.u8string() + ": " + std::system_category().message(error);
    return function;
#else
#    if defined(__APPLE__)
    const auto file = folder / "libsubkv.dylib";
#    else
    const auto file = folder / "libsubkv.so";
#    endif
    void * library  = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
    void * function = library ? dlsym(library, name) : nullptr;
    why             = function ? "" : dlerror();
    return (llama_subkv_function) function;
#endif
}
