// ggml_calls.cpp: the plug-in calls ggml through addresses that it looks up in the ggml by which it is loaded. The dynamic
// linker would search the libraries that are visible to all others; those that node, Python or a program's own plug-in
// loads are not, and a process may have several ggml.
#include "ggml_calls.h"

#include <dlfcn.h>

#include <mutex>
#include <string>

// CALL(name) for every function of ggml that our objects call, as the build lists them (cmake/native/plugin.cmake).
#define GGML_NAMES "ggml_names.inc"

#if defined(__x86_64__)
#    define JUMP(slot) "jmp *" slot "(%rip)\n"
#elif defined(__aarch64__)
#    define JUMP(slot) "adrp x16, " slot "\n ldr x16, [x16, #:lo12:" slot "]\n br x16\n"
#endif

#ifdef JUMP

#    define CALL(name)                                                                                                 \
        extern "C" __attribute__((visibility("hidden"))) void * subkv_slot_##name;                                     \
        void *                                                  subkv_slot_##name;                                     \
        asm(".pushsection .text\n.globl " #name "\n.hidden " #name "\n.type " #name ", %function\n" #name              \
            ":\n" JUMP("subkv_slot_" #name) ".size " #name ", .-" #name "\n.popsection\n");
#    include GGML_NAMES
#    undef CALL

namespace subkv::plugin {

namespace {

struct Slot {
    const char * name;
    void **      address;
};

#    define CALL(name) { #name, &subkv_slot_##name },
const Slot slots[] = {
#    include GGML_NAMES
};
#    undef CALL

constexpr const char * LOADER = "ggml_backend_dev_by_type"; // in the library of ggml that loads backends

// The handle, for dlsym, of the ggml that contains the address `caller`. Returns whether it shows its own functions.
bool find_ggml(const void * caller, void *& handle) {
    Dl_info of_caller, of_loader;
    handle = RTLD_DEFAULT;
    if (!caller || !dladdr(caller, &of_caller)) {
        return true;
    }
    if (void * const library = dlopen(of_caller.dli_fname, RTLD_LAZY | RTLD_NOLOAD)) {
        handle = library;
    }
    void * const loader = dlsym(handle, LOADER);
    return loader && dladdr(loader, &of_loader) && of_loader.dli_fbase == of_caller.dli_fbase;
}

} // namespace

std::string bind_ggml(const void * caller) {
    static std::mutex                 mutex;
    const std::lock_guard<std::mutex> lock(mutex);
    void *                            ggml = nullptr;
    if (!find_ggml(caller, ggml)) {
        return "does not show its functions to other libraries";
    }
    void * const first = dlsym(ggml, slots[0].name);
    if (first && first == *slots[0].address) {
        return "";
    }
    if (*slots[0].address) {
        return "is the second one of this process that loads the plug-in";
    }
    for (const Slot & slot : slots) {
        if (!dlsym(ggml, slot.name)) {
            return std::string("has no function ") + slot.name;
        }
    }
    for (const Slot & slot : slots) {
        *slot.address = dlsym(ggml, slot.name);
    }
    return "";
}

} // namespace subkv::plugin

#else // the dynamic linker binds them

std::string subkv::plugin::bind_ggml(const void *) {
    return "";
}

#endif
