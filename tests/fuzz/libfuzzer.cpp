// libfuzzer.cpp: the entry point of libFuzzer for one target. -DFUZZ_TARGET="name"
#include "targets.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t * data, size_t n) {
    static const Target * target = find_target(FUZZ_TARGET);
    target->run(data, n);
    return 0;
}
