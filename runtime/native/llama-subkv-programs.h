// llama-subkv-programs.h: what the patched programs of llama.cpp (common/, tools/) call. Compiled into libllama.
#pragma once

#include <cstdint>
#include <string>

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
// without one. Checkpoints are 4 + n * n_ubatch tokens before the end, n = 1, 2, 3, 4, 8, 16, …: an edit in the last
// 4 n_ubatch tokens evaluates at most n_ubatch tokens again, an earlier one at most as many as follow it, and a prompt of
// n tokens costs log2(n / n_ubatch) + 3 checkpoints. Always false for ordinary caches.
SUBKV_PROGRAMS_API bool llama_subkv_checkpoint(const llama_context * ctx, int32_t n_left, int32_t n_ubatch);

// Does the context hold coefficients, and thus need a checkpoint to go back?
SUBKV_PROGRAMS_API bool llama_subkv_is_coded(const llama_context * ctx);

// The position up to which tokens stay where a sequence goes on from a checkpoint whose last one is pos_max. pos_min: that
// of the sequence now, whose layers of sliding windows may still have what a checkpoint leaves out. n_swa: 0 where these
// keep everything. Ordinary caches: pos_min.
SUBKV_PROGRAMS_API int32_t llama_subkv_checkpoint_min(const llama_context * ctx, int32_t pos_min, int32_t pos_max,
                                                      int32_t n_swa);

// Tokens at the beginning of a sequence that a context shift keeps where `n_keep` were asked for: a coded cache also keeps
// its sinks, which cannot be replaced by later tokens.
SUBKV_PROGRAMS_API int32_t llama_subkv_n_keep(const llama_context * ctx, int32_t n_keep);

// Why a server does not answer a request with these headers, in a sentence; "": it does. SUBKV_ALLOW_HOST lists the names
// beside localhost and loopback addresses for which requests may be, and whose pages may send them; unset, or with *: any.
SUBKV_PROGRAMS_API std::string llama_subkv_refusal(const std::string & host, const std::string & origin);

// A signal handler that has `handler`, which may wait for locks, run in a thread of its own; a second signal ends the
// process. Called once.
using llama_subkv_signal_fn = void (*)(int);
SUBKV_PROGRAMS_API llama_subkv_signal_fn llama_subkv_in_thread(llama_subkv_signal_fn handler);
