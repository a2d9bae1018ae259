// failing_files.cpp: one step of writing or reading files of a store, or one allocation of C++, fails, ends early, or
// ends the process. Preloaded by test_prefix_store_failures.py.
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

constexpr int N_FILES = 1024;

static std::atomic<long>   g_left{ 0 }, g_reads_left{ 0 }, g_allocations_left{ 0 };
static std::atomic<int>    g_error{ 0 }, g_read_error{ 0 }, g_lasts{ 0 };
static std::atomic<int>    g_file{ -1 };       // that is written
static std::atomic<bool>   g_is_read[N_FILES]; // of the store
static std::atomic<size_t> g_most{ SIZE_MAX };
static std::atomic<long>   g_removals_left{ -1 };
static std::atomic<bool>   g_waiting{ false };
static std::atomic<long>   g_listed{ 0 };

// The n-th step from now on (0: none) fails with this error, 0: the process is killed. Returns how many were left.
extern "C" long fail_file(long n, int error) {
    g_error = error;
    return g_left.exchange(n);
}

// The n-th step of reading from now on (0: none, -1: every step) fails with this error, 0: it finds the end of its file.
// Returns how many were left.
extern "C" long fail_read(long n, int error) {
    g_read_error = error;
    return g_reads_left.exchange(n);
}

// The n-th allocation of C++ from now on (0: none) fails; lasts: so do all that follow. Returns how many were left.
extern "C" long fail_memory(long n, int lasts) {
    g_lasts = lasts;
    return g_allocations_left.exchange(n);
}

// No call reads or writes more bytes from now on.
extern "C" void limit_calls(size_t most) {
    g_most = most;
}

// Removals that succeed from now on, before one waits; -1: none waits.
extern "C" void hold_removals(long after) {
    g_removals_left = after;
}

// Files of a store whose status was asked for in a folder, since the last call.
extern "C" long files_listed() {
    return g_listed.exchange(0);
}

extern "C" bool removal_waits() {
    return g_waiting;
}

static bool ours(const char * path) {
    return std::strstr(path, ".piece") || std::strstr(path, ".prefix");
}

static bool comes(std::atomic<long> & left) {
    return left < 0 || (left > 0 && --left == 0);
}

void * operator new(size_t size) {
    if (comes(g_allocations_left)) {
        g_allocations_left = g_lasts ? -1 : 0;
        throw std::bad_alloc();
    }
    if (void * data = std::malloc(size > 0 ? size : 1)) {
        return data;
    }
    throw std::bad_alloc();
}

void operator delete(void * data) noexcept {
    std::free(data);
}

void operator delete(void * data, size_t) noexcept {
    std::free(data);
}

static bool fails() {
    if (!comes(g_left)) {
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
    const bool made = (flags & O_CREAT) && ours(path), read = !(flags & O_CREAT) && ours(path);
    if (made && fails()) {
        return -1;
    }
    if (read && g_read_error != 0 && comes(g_reads_left)) {
        errno = g_read_error;
        return -1;
    }
    const int file = real<int (*)(const char *, int, ...)>(name)(path, flags, mode);
    if (made) {
        g_file = file;
    }
    if (file >= 0 && file < N_FILES) {
        g_is_read[file] = read;
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
    if (file != g_file) {
        return next(file, data, size);
    }
    if (g_left == 1) {
        next(file, data, size / 2);
    }
    return fails() ? -1 : next(file, data, size < g_most ? size : g_most.load());
}

extern "C" ssize_t read(int file, void * data, size_t size) {
    static const auto next = real<ssize_t (*)(int, void *, size_t)>("read");
    if (file < 0 || file >= N_FILES || !g_is_read[file]) {
        return next(file, data, size);
    }
    if (comes(g_reads_left)) {
        errno = g_read_error;
        return g_read_error != 0 ? -1 : 0;
    }
    return next(file, data, size < g_most ? size : g_most.load());
}

extern "C" int fstatat(int folder, const char * name, struct stat * status, int flags) {
    static const auto next = real<int (*)(int, const char *, struct stat *, int)>("fstatat");
    g_listed += ours(name);
    return next(folder, name, status, flags);
}

extern "C" int fstat(int file, struct stat * status) {
    static const auto next = real<int (*)(int, struct stat *)>("fstat");
    if (file >= 0 && file < N_FILES && g_is_read[file] && g_read_error != 0 && comes(g_reads_left)) {
        errno = g_read_error;
        return -1;
    }
    return next(file, status);
}

// The file is closed and its data is lost: network disks report this here.
extern "C" int close(int file) {
    static const auto next = real<int (*)(int)>("close");
    const bool        lost = file == g_file && file >= 0 && fails();
    if (file == g_file) {
        g_file = -1;
    }
    const int error  = g_error;
    const int closed = next(file);
    if (lost) {
        errno = error;
    }
    return lost ? -1 : closed;
}

extern "C" int rename(const char * from, const char * to) {
    return ours(to) && fails() ? -1 : real<int (*)(const char *, const char *)>("rename")(from, to);
}

extern "C" int remove(const char * path) {
    while (ours(path) && g_removals_left == 0) {
        g_waiting = true;
        usleep(1000);
    }
    g_waiting = false;
    if (ours(path) && g_removals_left > 0) {
        --g_removals_left;
    }
    return ours(path) && fails() ? -1 : real<int (*)(const char *)>("remove")(path);
}
