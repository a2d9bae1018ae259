// ggml_calls.cpp: the plug-in calls ggml through addresses that it looks up in the ggml by which it is loaded. The dynamic
// linker would search the libraries that are visible to all others; those that node, Python or a program's own plug-in
// loads are not, and a process may have several ggml.
#include "ggml_calls.h"

#include <dlfcn.h>

#include <string>

// CALL(name) for every function of ggml that our objects call; the build lists them (cmake/native/plugin.cmake).
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

void * ggml_of(const void * caller) {
    Dl_info info;
    void *  library = caller && dladdr(caller, &info) ? dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD) : nullptr;
    return library && dlsym(library, slots[0].name) ? library : RTLD_DEFAULT;
}

} // namespace

const char * bind_ggml(const void * caller) {
    static std::string missing;
    void *             ggml = ggml_of(caller);
    void *             one  = dlsym(ggml, slots[0].name);
    if (one && one == *slots[0].address) {
        return "";
    }
    if (*slots[0].address) {
        return "is the second one of this process that loads the plug-in";
    }
    for (const Slot & slot : slots) {
        if (!dlsym(ggml, slot.name)) {
            missing = std::string("has no function ") + slot.name;
            return missing.c_str();
        }
    }
    for (const Slot & slot : slots) {
        *slot.address = dlsym(ggml, slot.name);
    }
    return "";
}

} // namespace subkv::plugin

#else // the dynamic linker binds them

const char * subkv::plugin::bind_ggml(const void *) {
    return "";
}

#endif
