// refusals.cpp: preloaded, it hides our patch of a backend (SUBKV_REFUSE=patch), or makes its memory too small for a
// layer's bases (SUBKV_REFUSE=bases). SUBKV_LIBRARY: libsubkv; its dependencies supply the functions.
#include <dlfcn.h>

#include <cstdlib>
#include <cstring>

namespace {

template <typename Function> Function next(const char * name) {
    static void * library = dlopen(std::getenv("SUBKV_LIBRARY"), RTLD_NOW);
    return (Function) dlsym(library, name);
}

bool refuse(const char * what) {
    return std::strcmp(std::getenv("SUBKV_REFUSE"), what) == 0;
}

} // namespace

extern "C" void * ggml_backend_reg_get_proc_address(void * reg, const char * name) {
    if (refuse("patch") && std::strcmp(name, "ggml_backend_vk_subkv_set") == 0) {
        return nullptr;
    }
    return next<void * (*)(void *, const char *)>("ggml_backend_reg_get_proc_address")(reg, name);
}

extern "C" void * ggml_backend_alloc_ctx_tensors_from_buft(void * ctx, void * buft) {
    const auto first = next<void * (*)(void *)>("ggml_get_first_tensor")(ctx);
    const auto name  = next<const char * (*)(const void *)>("ggml_get_name");
    if (refuse("bases") && first && std::strncmp(name(first), "subkv_bases_l1", 14) == 0) {
        return nullptr;
    }
    return next<void * (*)(void *, void *)>("ggml_backend_alloc_ctx_tensors_from_buft")(ctx, buft);
}
