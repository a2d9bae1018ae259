// dispatch.cpp: chooses a version once, at first use. Nothing here runs a kernel.
#include "subkv/ops.h"
#include "versions.h"

#include <cstdlib>
#include <cstring>
#include <string>

#if defined(SUBKV_X86)
#    include <cpuid.h>
#endif
#if defined(SUBKV_ARM64) && defined(__linux__)
#    include <asm/hwcap.h>
#    include <sys/auxv.h>
#endif

namespace subkv {

namespace {

#if defined(SUBKV_X86)
// Not by __builtin_cpu_supports: Clang 14 does not know its name.
bool has_f16c() {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}

bool has_avx512_bw() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

#if defined(SUBKV_ARM64)
bool has_dot_products() {
#    if defined(__linux__)
    return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#    else
    return true; // Apple's and Windows' processors have them all
#    endif
}
#endif

struct Choice {
    const Ops * available[5] = {}; // slowest first, ends with nullptr
    const Ops * chosen       = nullptr;
    std::string error;

    Choice() {
        int n          = 0;
        available[n++] = &ops_ref();
#if defined(SUBKV_X86)
        __builtin_cpu_init(); // the checks below include the operating system's support of the registers
        if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c()) {
            available[n++] = &ops_avx2;
            if (has_avx512_bw()) {
                available[n++] = &ops_avx512_bw;
                if (__builtin_cpu_supports("avx512vnni")) {
                    available[n++] = &ops_avx512;
                }
            }
        }
#endif
#if defined(SUBKV_ARM64)
        if (has_dot_products()) {
            available[n++] = &ops_neon;
        }
#endif
        chosen = available[n - 1];
        if (const char * wanted = std::getenv("SUBKV_KERNEL")) {
            choose(wanted);
        }
    }

    void choose(const char * wanted) {
        std::string names;
        for (const Ops * const * version = available; *version != nullptr; ++version) {
            if (std::strcmp((*version)->name, wanted) == 0) {
                chosen = *version;
                return;
            }
            names += (names.empty() ? "" : ", ") + std::string((*version)->name);
        }
        error = "SUBKV_KERNEL: expected one of " + names + " on this processor, found '" + wanted + "'";
    }
};

const Choice & choice() {
    static const Choice made;
    return made;
}

} // namespace

const Ops & ops() {
    return *choice().chosen;
}

const char * ops_error() {
    return choice().error.empty() ? nullptr : choice().error.c_str();
}

const Ops * const * ops_available() {
    return choice().available;
}

} // namespace subkv
