// store_folder.h: a folder of files that appear complete or not at all and never change afterwards. Links, pipes and
// devices in it are never opened.
#pragma once

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
    int64_t  used; // ns of the file system's clock: the time of its modification, which mark() sets
    uint64_t size; // bytes
};

class StoreFolder {
public:
    // Makes the folder, for this user alone, when it is missing. Throws std::runtime_error with a sentence: no folder, or
    // one in which everybody may write.
    explicit StoreFolder(const std::string & path);

    const std::string & path() const { return path_; }

    static int64_t now(); // on the clock of StoredFile::used

    // Time of the last name that appeared or vanished; 0: the folder is gone. Throws std::runtime_error.
    int64_t changed() const;

    // Regular files, by name, at most `most` of them; none when the folder is gone. Throws std::runtime_error.
    std::map<std::string, StoredFile> list(size_t most) const;

    struct Room {
        uint8_t * data;
        size_t    size;
    };

    // Reads a regular file of `size` bytes into `rooms`, which have as many. false: there is none of that size. Throws
    // std::runtime_error when it cannot be read.
    bool read(const std::string & name, uint64_t size, const std::vector<Room> & rooms) const;

    // Throws std::runtime_error; nothing of the file is left then.
    void write(const std::string & name, const std::vector<Bytes> & pieces) const;

    void mark(const std::string & name) const;   // used now; nothing happens where that is not possible
    bool remove(const std::string & name) const; // false: it is still there

    // The name of the file that write() makes of a temporary one; "": no temporary one.
    static std::string of_temporary(const std::string & name);

private:
    std::string full(const std::string & name) const { return path_ + "/" + name; }

    void make() const;

    std::string path_;
};

} // namespace subkv
