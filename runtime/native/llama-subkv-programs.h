// llama-subkv-programs.h: what the patched programs of llama.cpp (common/, tools/) call. Compiled into libllama.
#pragma once

#include <cstdint>

struct llama_context;

#if defined(_WIN32) && !defined(__MINGW32__)
#    if defined(LLAMA_BUILD)
#        define SUBKV_PROGRAMS_API __declspec(dllexport)
#    else
#        define SUBKV_PROGRAMS_API __declspec(dllimport)
#    endif
#else
#    define SUBKV_PROGRAMS_API __attribute__((visibility("default")))
#endif

// -ctk subkv: from now on the first context of this process gets a coded cache, as with SUBKV=auto, or is not made. SUBKV
// says more when it is set: it is left as it is.
SUBKV_PROGRAMS_API void llama_subkv_require(void);

// Should a server keep a checkpoint of a prompt of which n_left tokens are still to come? A coded cache cannot go back
// without one. Checkpoints at 4 + n_ubatch * 2^k tokens before the end: an edit of the prompt then evaluates at most twice
// the tokens that follow it, and a prompt of n tokens costs log2(n / n_ubatch) checkpoints. Always false for ordinary
// caches.
SUBKV_PROGRAMS_API bool llama_subkv_checkpoint(const llama_context * ctx, int32_t n_left, int32_t n_ubatch);
