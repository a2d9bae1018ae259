// file_stamp.h: recognizes a file that a process has opened, for libllama and libsubkv.
#pragma once

#include <sys/stat.h>

#include <cstdint>
#include <string>
#include <vector>

namespace subkv {

// A file that is replaced has another inode, and one that is written has another time. Both numbers are 0 on Windows,
// which has no inodes.
struct FileStamp {
    uint64_t device = 0, inode = 0, size = 0;
    int64_t  modified = 0; // ns, but on Windows only seconds
    int64_t  changed  = 0; // ns, of the inode, which unlike `modified` no program can set back; a new name sets it too

    // Tells that the bytes are the same, although their file may have another name by now.
    bool operator==(const FileStamp & other) const {
        return device == other.device && inode == other.inode && size == other.size && modified == other.modified;
    }

    std::string text() const {
        return std::to_string(device) + " " + std::to_string(inode) + " " + std::to_string(size) + " " +
               std::to_string(modified) + " " + std::to_string(changed);
    }
};

// Returns false if the system cannot tell.
inline bool stamp_of(int file, FileStamp & stamp) {
#if defined(_WIN32)
    struct _stat64 status;
    if (_fstat64(file, &status) != 0) {
        return false;
    }
    stamp = { 0, 0, (uint64_t) status.st_size, (int64_t) status.st_mtime * 1000000000, 0 };
#else
    struct stat status;
    if (::fstat(file, &status) != 0) {
        return false;
    }
#    if defined(__APPLE__)
    const auto &modified = status.st_mtimespec, &changed = status.st_ctimespec;
#    else
    const auto &modified = status.st_mtim, &changed = status.st_ctim;
#    endif
    const auto ns = [](const auto & time) { return (int64_t) time.tv_sec * 1000000000 + time.tv_nsec; };
    stamp         = { (uint64_t) status.st_dev, (uint64_t) status.st_ino, (uint64_t) status.st_size, ns(modified),
                      ns(changed) };
#endif
    return true;
}

// A model as it was loaded.
struct LoadedModel {
    std::string            path;  // of its first file, or "" if it comes from memory or a stream
    std::vector<FileStamp> files; // of all its files, in order
};

} // namespace subkv
