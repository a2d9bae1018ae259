// dispatch.cpp: chooses a version once, at first use. It runs no kernel.
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
// __builtin_cpu_supports is not used, because it lacks f16c in Clang 14, and zig's library reports no features.
struct Processor {
    bool avx2 = false, avx2_vnni = false, avx512_bw = false, avx512_bytes = false;

    Processor() {
        unsigned a, b, c, d;
        if (__get_cpuid(1, &a, &b, &c, &d) == 0 || (c & bit_OSXSAVE) == 0) {
            return;
        }
        const bool fma_f16c = (c & bit_FMA) != 0 && (c & bit_F16C) != 0;
        unsigned   saved, high; // the registers that the operating system saves
        __asm__("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
        if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) {
            return;
        }
        const unsigned needed = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
        avx2                  = fma_f16c && (saved & 0x06) == 0x06 && (b & bit_AVX2) != 0;
        avx512_bw             = avx2 && (saved & 0xe6) == 0xe6 && (b & needed) == needed;
        avx512_bytes          = avx512_bw && (c & bit_AVX512VNNI) != 0 && (c & bit_AVX512VBMI) != 0;
#    if defined(SUBKV_EVEX_VNNI) // avx2_vnni.cpp
        avx2_vnni = avx512_bw && (c & bit_AVX512VNNI) != 0;
#    else
        const unsigned avx_vnni = 1u << 4;
        avx2_vnni               = avx2 && __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a & avx_vnni) != 0;
#    endif
    }
};
#endif

#if defined(SUBKV_ARM64)
bool has_dot_products() {
#    if defined(__linux__)
    return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#    else
    return true; // all processors of Apple and Windows have them
#    endif
}
#endif

struct Choice {
    const Ops * available[6] = {}; // from the slowest to the fastest, then nullptr
    const Ops * chosen       = nullptr;
    std::string error;

    Choice() {
        int n          = 0;
        available[n++] = &ops_ref();
#if defined(SUBKV_X86)
        const Processor processor;
        if (processor.avx2) {
            available[n++] = &ops_avx2;
        }
        if (processor.avx2_vnni) {
            available[n++] = &ops_avx2_vnni;
        }
        if (processor.avx512_bw) {
            available[n++] = &ops_avx512_bw;
        }
        if (processor.avx512_bytes) {
            available[n++] = &ops_avx512;
        }
#endif
#if defined(SUBKV_ARM64)
        if (has_dot_products()) {
            available[n++] = &ops_neon;
        }
#endif
        chosen            = available[n - 1];
        const char * name = std::getenv("SUBKV_KERNEL");
        if (name && *name) {
            choose(name);
        }
    }

    void choose(const char * name) {
        std::string names;
        for (const Ops * const * version = available; *version != nullptr; ++version) {
            if (std::strcmp((*version)->name, name) == 0) {
                chosen = *version;
                return;
            }
            names += (names.empty() ? "" : ", ") + std::string((*version)->name);
        }
        error = "SUBKV_KERNEL: expected one of " + names + " on this processor, found '" + name + "'";
    }
};

const Choice & choice() {
    static const Choice chosen;
    return chosen;
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
