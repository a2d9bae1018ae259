// library.cpp: see llama-subkv-library.h. Part of libllama.
#include "llama-subkv-library.h"

#include "library-folder.h"
#include "llama-subkv-programs.h"
#include "llama-subkv.h"
#include "printable.h"

#include "llama-context.h"
#include "llama-impl.h"
#include "llama-model.h"

#include <mutex>
#include <system_error>

void llama_subkv_log(const std::string & line) {
    LLAMA_LOG_WARN("subkv: %s\n", subkv::printable(line).c_str());
}

namespace {

const subkv::LlamaCalls LLAMA_CALLS = {
    llama_subkv_log,
    llama_subkv::cache_of,
    llama_subkv::rows,
    llama_subkv_resume,
    [](const llama_context * ctx) {
        const auto & source = llama_subkv::source_of(ctx->get_model());
        return subkv::LoadedModel{ source.path, source.files };
    },
    llama_subkv::take_refusal,
    llama_subkv::state_identity,
    llama_subkv::n_removable,
};

// SUBKV_CONNECT of a library. A program that links libsubkv, or has opened it by another path, has loaded it already.
subkv::connect_fn find_connect(bool load, std::string & why) {
    const auto folder = subkv::library_folder((const void *) &llama_subkv_library);
#if defined(_WIN32)
    const auto file    = folder / "libsubkv.dll";
    HMODULE    library = nullptr;
    if (!GetModuleHandleExW(0, L"libsubkv.dll", &library) && load) {
        library = LoadLibraryExW(file.c_str(), nullptr, LOAD_WITH_ALTERED_SEARCH_PATH);
    }
    const auto connect = library ? (subkv::connect_fn) (void *) GetProcAddress(library, SUBKV_CONNECT) : nullptr;
    const int  error   = (int) GetLastError();
    why                = connect ? "" : "cannot load " + file.u8string() + ": " + std::system_category().message(error);
#else
#    if defined(__APPLE__)
    const char * name = "libsubkv.dylib";
#    else
    const char * name = "libsubkv.so";
#    endif
    void * library = dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    if (!library && load) {
        library = dlopen((folder / name).c_str(), RTLD_NOW | RTLD_LOCAL);
    }
    const auto   connect = library ? (subkv::connect_fn) dlsym(library, SUBKV_CONNECT) : nullptr;
    const char * error   = connect ? nullptr : dlerror();
    why                  = error ? error : "";
#endif
    return connect;
}

} // namespace

const subkv::SubkvCalls * llama_subkv_library(bool load, std::string & why) {
    static std::mutex                 mutex;
    static const subkv::SubkvCalls *  calls = nullptr;
    const std::lock_guard<std::mutex> lock(mutex);
    if (!calls) {
        const auto connect = find_connect(load, why);
        calls              = connect ? connect(&LLAMA_CALLS) : nullptr;
    }
    return calls;
}
