// signals.cpp: see llama-subkv-programs.h. Part of libllama.
#include "llama-subkv-programs.h"

#include <atomic>

static std::atomic<bool> g_ending{ false };

bool llama_subkv_ends() {
    return g_ending;
}

#if defined(_WIN32)
// Windows runs handlers in a separate thread, and llama-server does not ask for one there.
llama_subkv_signal_fn llama_subkv_in_thread(llama_subkv_signal_fn handler) {
    return handler;
}
#else
#    include <unistd.h>

#    include <cerrno>
#    include <system_error>
#    include <thread>

// A signal handler may interrupt its thread inside malloc or with a lock held, so it only writes a byte to a pipe.
static int              g_ends[2] = { -1, -1 };
static std::atomic<int> g_n_come{ 0 };

static void pass_on(int signal) {
    static const char second[] = "Received second interrupt, terminating immediately.\n";
    const int         error    = errno;
    if (g_n_come.fetch_add(1) > 0) {
        (void) !write(STDERR_FILENO, second, sizeof(second) - 1);
        _exit(1);
    }
    const auto byte = (unsigned char) signal;
    (void) !write(g_ends[1], &byte, 1);
    errno = error;
}

llama_subkv_signal_fn llama_subkv_in_thread(llama_subkv_signal_fn handler) {
    if (g_ends[0] >= 0 || pipe(g_ends) != 0) {
        return handler;
    }
    try {
        std::thread([handler] {
            unsigned char byte = 0;
            ssize_t       n    = 0;
            do {
                n = read(g_ends[0], &byte, 1);
            } while (n < 0 && errno == EINTR);
            if (n == 1) {
                g_ending = true;
                handler(byte);
            }
        }).detach();
    } catch (const std::system_error &) { // no threads left
        return handler;
    }
    return pass_on;
}
#endif
