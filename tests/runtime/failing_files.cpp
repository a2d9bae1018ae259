// failing_files.cpp: one step of writing files of a store fails, or ends the process. Preloaded by test_prefix_store.py.
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstring>

static std::atomic<long> g_left{ 0 };
static std::atomic<int>  g_error{ 0 };
static std::atomic<int>  g_file{ -1 };

// The n-th step from now on (0: none) fails with this error, 0: the process is killed. Returns how many were left.
extern "C" long fail_file(long n, int error) {
    g_error = error;
    return g_left.exchange(n);
}

static bool ours(const char * path) {
    return std::strstr(path, ".piece") || std::strstr(path, ".prefix");
}

static bool fails() {
    if (g_left <= 0 || --g_left > 0) {
        return false;
    }
    if (g_error == 0) {
        kill(getpid(), SIGKILL);
    }
    errno = g_error;
    return true;
}

template <typename F> static F real(const char * name) {
    return (F) dlsym(RTLD_NEXT, name);
}

static int opened(const char * name, const char * path, int flags, mode_t mode) {
    const bool made = (flags & O_CREAT) && ours(path);
    if (made && fails()) {
        return -1;
    }
    const int file = real<int (*)(const char *, int, ...)>(name)(path, flags, mode);
    if (made) {
        g_file = file;
    }
    return file;
}

extern "C" int open(const char * path, int flags, ...) {
    va_list args;
    va_start(args, flags);
    const mode_t mode = flags & O_CREAT ? va_arg(args, mode_t) : 0;
    va_end(args);
    return opened("open", path, flags, mode);
}

extern "C" int open64(const char * path, int flags, ...) {
    va_list args;
    va_start(args, flags);
    const mode_t mode = flags & O_CREAT ? va_arg(args, mode_t) : 0;
    va_end(args);
    return opened("open64", path, flags, mode);
}

// Half of it is there before the step fails.
extern "C" ssize_t write(int file, const void * data, size_t size) {
    static const auto next = real<ssize_t (*)(int, const void *, size_t)>("write");
    if (file == g_file && g_left == 1) {
        next(file, data, size / 2);
    }
    return file == g_file && fails() ? -1 : next(file, data, size);
}

extern "C" int rename(const char * from, const char * to) {
    return ours(to) && fails() ? -1 : real<int (*)(const char *, const char *)>("rename")(from, to);
}
