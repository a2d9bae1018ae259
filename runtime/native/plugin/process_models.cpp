// process_models.cpp: see process_models.h.
#include "process_models.h"

#include "error.h"

#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <system_error>
#include <tuple>

namespace subkv::plugin {

namespace {

namespace fs = std::filesystem;

constexpr size_t MOST = 64; // models that are remembered

bool is_gguf(const std::string & path) {
    std::error_code error;
    char            head[4] = {};
    return fs::is_regular_file(path, error) && std::ifstream(path, std::ios::binary).read(head, 4) &&
           std::memcmp(head, "GGUF", 4) == 0;
}

// Paths of files that the process has open or mapped, and its arguments.
std::set<std::string> paths() {
    std::set<std::string> out;
    std::error_code       error;
    auto                  entries = fs::directory_iterator("/proc/self/fd", error);
    for (const auto end = fs::directory_iterator(); !error && entries != end; entries.increment(error)) {
        std::error_code gone;
        out.insert(fs::read_symlink(entries->path(), gone).string());
    }
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);) {
        const size_t at = line.find('/');
        out.insert(at == std::string::npos ? "" : line.substr(at));
    }
    std::ifstream arguments("/proc/self/cmdline");
    for (std::string argument; std::getline(arguments, argument, '\0');) {
        out.insert(argument);
    }
    return out;
}

// What tells whether a path has the same file as before.
using Stamp = std::tuple<uintmax_t, fs::file_time_type>;

} // namespace

std::vector<StoredBases> process_models() {
    static std::mutex                                           mutex;
    static std::map<std::string, std::pair<Stamp, StoredBases>> known; // without layers if the file is no model
    const std::lock_guard<std::mutex>                           lock(mutex);
    for (const std::string & path : paths()) {
        std::error_code error;
        if (path.empty() || !fs::is_regular_file(path, error)) {
            continue;
        }
        const Stamp stamp = { fs::file_size(path, error), fs::last_write_time(path, error) };
        const auto  it    = known.find(path);
        if ((it != known.end() && it->second.first == stamp) || !is_gguf(path)) {
            continue;
        }
        StoredBases bases;
        try {
            bases = derivable_bases(path);
        } catch (const Invalid &) { // not a model, or not the first file of a split one
        }
        if (known.size() >= MOST) {
            known.clear();
        }
        known[path] = { stamp, std::move(bases) };
    }
    std::vector<StoredBases> out;
    for (const auto & [path, entry] : known) {
        if (!entry.second.layers.empty() && !entry.second.weights.empty()) {
            out.push_back(entry.second);
        }
    }
    return out;
}

} // namespace subkv::plugin
