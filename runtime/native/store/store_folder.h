// store_folder.h: a folder of files that appear atomically and never change afterwards. It never opens links, pipes and
// devices. A failure of the system is a std::system_error, which names the operation, the path and the reason.
#pragma once

#include "owner.h"

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace subkv {

struct Bytes {
    const uint8_t * data;
    size_t          size;
};

struct StoredFile {
    int64_t  used; // modification time in ns of the file system's clock; mark() sets it
    uint64_t size; // bytes
};

class StoreFolder {
public:
    // Creates the folder if it is missing, with access for this user only. Throws std::runtime_error with a sentence if
    // the path is no folder, or if other users may write to it (owner.h).
    explicit StoreFolder(const std::string & path, Writers allowed = Writers::OWNER);

    const std::string & path() const { return path_; }

    static int64_t now(); // on the clock of StoredFile::used

    // Time of the last creation or removal of a file, or 0 without a folder. Throws std::system_error.
    int64_t changed() const;

    using Files = std::map<std::string, StoredFile>; // by name

    // Regular files, at most `most`; none if there is no folder. Where `earlier`, an earlier result, has a file that
    // `is_same` accepts because it never changes, the system is not asked for more than its name, and `used` is outdated.
    // Throws std::system_error.
    Files list(size_t most, Files earlier = {}, bool (*is_same)(const std::string & name) = nullptr) const;

    struct MutableBytes {
        uint8_t * data;
        size_t    size;
    };

    // Reads a regular file of `size` bytes into `parts`, whose sizes add up to `size`. Returns false without
    // such a file of a trusted owner. Throws std::system_error if it cannot be read.
    bool read(const std::string & name, uint64_t size, const std::vector<MutableBytes> & parts) const;

    // Throws std::system_error and then leaves no part of the file.
    void write(const std::string & name, const std::vector<Bytes> & pieces) const;

    bool has(const std::string & name) const;
    void mark(const std::string & name) const;   // sets `used` to now; ignores failures
    void remove(const std::string & name) const; // throws std::system_error if the file still exists

    // The final name of a temporary file of write(), or "" for another file.
    static std::string of_temporary(const std::string & name);

private:
    std::string full(const std::string & name) const { return path_ + "/" + name; }

    void make() const;

    std::string path_;
};

} // namespace subkv
