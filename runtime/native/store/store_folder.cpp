// store_folder.cpp: see store_folder.h.
#include "store_folder.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <random>
#include <stdexcept>
#include <system_error>

#if defined(_WIN32)
#    include <io.h>
#    include <process.h>
#else
#    include <dirent.h>
#    include <unistd.h>
#endif

namespace subkv {

namespace fs = std::filesystem;

namespace {

constexpr size_t       MAX_CALL = (size_t) 1 << 30; // bytes of one read or write
constexpr size_t       BUFFER   = 1 << 18;          // bytes of small pieces that are read or written together
constexpr const char * ENDING   = ".tmp";
constexpr size_t       N_RANDOM = 16; // hex digits of a temporary name

template <typename Time> int64_t nanoseconds(Time time) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}

[[noreturn]] void broken(const std::string & what, const std::string & path, const std::error_code & error) {
    throw std::system_error(error, "cannot " + what + " " + path);
}

[[noreturn]] void broken(const std::string & what, const std::string & path, int error) {
    broken(what, path, std::error_code(error, std::generic_category()));
}

#if defined(_WIN32)
int open_old(const std::string & path) {
    return _wopen(fs::u8path(path).c_str(), _O_RDONLY | _O_BINARY);
}

int open_new(const std::string & path) {
    return _wopen(fs::u8path(path).c_str(), _O_WRONLY | _O_BINARY | _O_CREAT | _O_EXCL, _S_IREAD | _S_IWRITE);
}

int64_t read_some(int file, void * data, size_t size) {
    return _read(file, data, (unsigned) size);
}

int64_t write_some(int file, const void * data, size_t size) {
    return _write(file, data, (unsigned) size);
}

int close_file(int file) {
    return _close(file);
}

int process() {
    return _getpid();
}
#else
// A pipe would wait for its writer, a link may point anywhere.
int open_old(const std::string & path) {
    return ::open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
}

int open_new(const std::string & path) {
    return ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
}

int64_t read_some(int file, void * data, size_t size) {
    return ::read(file, data, size);
}

int64_t write_some(int file, const void * data, size_t size) {
    return ::write(file, data, size);
}

int close_file(int file) {
    return ::close(file);
}

int process() {
    return (int) getpid();
}

int64_t modified(const struct stat & status) {
#    if defined(__APPLE__)
    const auto & time = status.st_mtimespec;
#    else
    const auto & time = status.st_mtim;
#    endif
    return (int64_t) time.tv_sec * 1000000000 + time.tv_nsec;
}
#endif

class File {
public:
    explicit File(int file) : file(file) {}

    ~File() {
        if (file >= 0) {
            close_file(file);
        }
    }

    File(const File &)             = delete;
    File & operator=(const File &) = delete;

    // 0, or the error of a file system that reports a failed write at close.
    int close() {
        const int closed = close_file(file);
        file             = -1;
        return closed == 0 ? 0 : errno;
    }

    int file;
};

std::string random_digits() {
    static std::atomic<uint64_t> count{ 0 };
    std::random_device           device;
    const uint64_t               number =
        ((uint64_t) device() << 32 | device()) + ++count; // random_device is constant on some systems
    static const char digits[] = "0123456789abcdef";
    std::string       out;
    for (size_t i = 0; i < N_RANDOM; ++i) {
        out += digits[number >> (4 * i) & 15];
    }
    return out;
}

std::string temporary(const std::string & name) {
    return "." + name + "." + std::to_string(process()) + "." + random_digits() + ENDING;
}

void write_all(int file, const uint8_t * data, size_t size, const std::string & path) {
    for (size_t done = 0; done < size;) {
        const int64_t n = write_some(file, data + done, std::min(size - done, MAX_CALL));
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            broken("write", path, n < 0 ? errno : ENOSPC);
        }
        done += (size_t) n;
    }
}

// Small pieces are written together: a block may consist of thousands.
void write_all(int file, const std::vector<Bytes> & pieces, const std::string & path) {
    std::vector<uint8_t> together;
    const auto           write_together = [&] {
        write_all(file, together.data(), together.size(), path);
        together.clear();
    };
    for (const Bytes & piece : pieces) {
        if (together.size() + piece.size > BUFFER) {
            write_together();
        }
        if (piece.size > BUFFER) {
            write_all(file, piece.data, piece.size, path);
        } else {
            together.insert(together.end(), piece.data, piece.data + piece.size);
        }
    }
    write_together();
}

// Reads the next bytes of a file into several parts, small ones together. Returns false if the file ends before.
class PartReader {
public:
    PartReader(int file, uint64_t size, const std::string & path) : file(file), left(size), path(path) {}

    bool read(uint8_t * to, size_t size) {
        while (size > 0) {
            if (at < held.size()) {
                const size_t n = std::min(size, held.size() - at);
                std::memcpy(to, held.data() + at, n);
                at += n;
                to += n;
                size -= n;
            } else if (size >= BUFFER) {
                const size_t n = next(to, size);
                to += n;
                size -= n;
                if (n == 0) {
                    return false;
                }
            } else {
                held.resize((size_t) std::min<uint64_t>(left, BUFFER));
                held.resize(next(held.data(), held.size()));
                at = 0;
                if (held.empty()) {
                    return false;
                }
            }
        }
        return true;
    }

private:
    size_t next(uint8_t * to, size_t size) { // 0 if the file was truncated meanwhile
        int64_t n = -1;
        do {
            n = read_some(file, to, std::min(size, MAX_CALL));
        } while (n < 0 && errno == EINTR);
        if (n < 0) {
            broken("read", path, errno);
        }
        left -= (uint64_t) n;
        return (size_t) n;
    }

    const int            file;
    uint64_t             left;
    const std::string &  path;
    std::vector<uint8_t> held;
    size_t               at = 0;
};

} // namespace

StoreFolder::StoreFolder(const std::string & path, Writers allowed) : path_(path) {
    make();
    std::error_code error;
    const auto      status = fs::status(fs::u8path(path_), error);
    if (error) {
        broken("read", path_, error);
    }
    if (!fs::is_directory(status)) {
        throw std::runtime_error("expected a folder, found something else: " + path_);
    }
    const std::string others = other_writers(path_, allowed);
    if (!others.empty()) {
        throw std::runtime_error("expected a folder that only this user can write to, found " + others + ": " + path_);
    }
}

void StoreFolder::make() const {
    const fs::path  path = fs::u8path(path_);
    std::error_code error;
    if (fs::exists(path, error)) {
        return;
    }
    if (path.has_parent_path()) {
        fs::create_directories(path.parent_path(), error);
        if (error) {
            broken("make the folder", path.parent_path().u8string(), error);
        }
    }
#if defined(_WIN32)
    fs::create_directory(path, error);
    if (error && !fs::exists(path)) {
        broken("make the folder", path_, error);
    }
#else
    if (::mkdir(path_.c_str(), 0700) != 0 && errno != EEXIST) { // files contain users' prompts
        broken("make the folder", path_, errno);
    }
#endif
}

#if defined(_WIN32)
int64_t StoreFolder::now() {
    return nanoseconds(fs::file_time_type::clock::now());
}

int64_t StoreFolder::changed() const {
    std::error_code error;
    const auto      time = fs::last_write_time(fs::u8path(path_), error);
    if (error == std::errc::no_such_file_or_directory) {
        return 0;
    }
    if (error) {
        broken("read", path_, error);
    }
    return nanoseconds(time);
}

StoreFolder::Files StoreFolder::list(size_t most, Files, bool (*)(const std::string &)) const {
    Files                  res; // a listing has times and sizes here
    std::error_code        error;
    fs::directory_iterator files(fs::u8path(path_), error);
    for (; !error && files != fs::directory_iterator() && res.size() < most; files.increment(error)) {
        std::error_code of_file; // other processes may remove files meanwhile
        const bool      regular = fs::is_regular_file(files->symlink_status(of_file));
        const auto      time    = regular ? files->last_write_time(of_file) : fs::file_time_type();
        const auto      size    = regular && !of_file ? files->file_size(of_file) : 0;
        if (regular && !of_file) {
            res[files->path().filename().u8string()] = { nanoseconds(time), size };
        }
    }
    if (error && error != std::errc::no_such_file_or_directory) {
        broken("read", path_, error);
    }
    return res;
}
#else
int64_t StoreFolder::now() {
    return nanoseconds(std::chrono::system_clock::now());
}

int64_t StoreFolder::changed() const {
    struct stat status;
    if (::stat(path_.c_str(), &status) == 0) {
        return modified(status);
    }
    if (errno != ENOENT) {
        broken("read", path_, errno);
    }
    return 0;
}

// Not by std::filesystem, whose iterators end the process if memory runs out.
StoreFolder::Files StoreFolder::list(size_t most, Files earlier, bool (*is_same)(const std::string &)) const {
    Files                                      res;
    const std::unique_ptr<DIR, int (*)(DIR *)> folder(::opendir(path_.c_str()), ::closedir);
    if (!folder && errno != ENOENT) {
        broken("read", path_, errno);
    }
    while (folder && res.size() < most) {
        errno               = 0;
        const dirent * file = ::readdir(folder.get());
        if (!file && errno != 0) {
            broken("read", path_, errno);
        }
        if (!file) {
            break;
        }
        const std::string name = file->d_name;
        if (auto known = is_same && is_same(name) ? earlier.extract(name) : Files::node_type()) {
            res.insert(std::move(known));
            continue;
        }
        struct stat status;
        if (::fstatat(::dirfd(folder.get()), file->d_name, &status, AT_SYMLINK_NOFOLLOW) == 0) {
            if (S_ISREG(status.st_mode)) {
                res[name] = { modified(status), (uint64_t) status.st_size };
            }
        } else if (errno != ENOENT) { // other processes may remove files meanwhile
            broken("read", full(file->d_name), errno);
        }
    }
    return res;
}
#endif

bool StoreFolder::read(const std::string & name, uint64_t size, const std::vector<MutableBytes> & parts) const {
    const std::string path = full(name);
#if defined(_WIN32)
    std::error_code error;
    const auto      kind = fs::symlink_status(fs::u8path(path), error);
    if (!fs::status_known(kind)) {
        broken("read", path, error);
    }
    if (!fs::is_regular_file(kind)) {
        return false;
    }
#endif
    const File opened(open_old(path));
    if (opened.file < 0) {
        if (errno == ENOENT || errno == ELOOP || errno == ENXIO) {
            return false;
        }
        broken("read", path, errno);
    }
#if defined(_WIN32)
    struct _stat64 status;
    const int      failed = _fstat64(opened.file, &status);
#else
    struct stat status;
    const int   failed = ::fstat(opened.file, &status);
#endif
    if (failed != 0) {
        broken("read", path, errno);
    }
    if ((status.st_mode & S_IFMT) != S_IFREG || (uint64_t) status.st_size != size || !is_trusted_owner(status)) {
        return false;
    }
    PartReader from(opened.file, size, path);
    return std::all_of(parts.begin(), parts.end(), [&](auto & to) { return from.read(to.data, to.size); });
}

void StoreFolder::write(const std::string & name, const std::vector<Bytes> & pieces) const {
    make();
    const std::string path = full(temporary(name));
    File              file(open_new(path));
    if (file.file < 0) {
        broken("write", path, errno);
    }
    std::error_code error;
    try {
        write_all(file.file, pieces, path);
        if (const int failed = file.close(); failed != 0) {
            broken("write", path, failed);
        }
        // No flush to the disk: after a power failure a damaged file has a wrong checksum and its prompt is evaluated
        // again.
        fs::rename(fs::u8path(path), fs::u8path(full(name)), error);
        if (error) {
            broken("write", full(name), error);
        }
    } catch (...) {
        fs::remove(fs::u8path(path), error);
        throw;
    }
}

void StoreFolder::mark(const std::string & name) const {
#if defined(_WIN32)
    std::error_code error;
    fs::last_write_time(fs::u8path(full(name)), fs::file_time_type::clock::now(), error);
#else
    (void) ::utimensat(AT_FDCWD, full(name).c_str(), nullptr, AT_SYMLINK_NOFOLLOW);
#endif
}

bool StoreFolder::has(const std::string & name) const {
    std::error_code error;
    return fs::exists(fs::symlink_status(fs::u8path(full(name)), error));
}

void StoreFolder::remove(const std::string & name) const {
    std::error_code error;
    fs::remove(fs::u8path(full(name)), error);
    if (error) {
        broken("remove", full(name), error);
    }
}

std::string StoreFolder::of_temporary(const std::string & name) {
    const size_t tail = std::strlen(ENDING);
    if (name.size() < tail + 2 || name[0] != '.' || name.compare(name.size() - tail, tail, ENDING) != 0) {
        return "";
    }
    const size_t random = name.rfind('.', name.size() - tail - 1); // .NAME.PROCESS.RANDOM.tmp
    const size_t number = random == 0 || random == std::string::npos ? 0 : name.rfind('.', random - 1);
    return number == 0 || number == std::string::npos ? "" : name.substr(1, number - 1);
}

} // namespace subkv
