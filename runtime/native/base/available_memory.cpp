#include "available_memory.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <locale>
#include <map>
#include <sstream>
#include <string>

namespace subkv {

namespace {

constexpr int64_t UNKNOWN = INT64_MAX;
constexpr int64_t SMALL   = 192 << 20; // for small blocks, without which llama.cpp aborts

std::ifstream opened(const std::string & path) {
    std::ifstream in(path);
    in.imbue(std::locale::classic());
    return in;
}

// Numbers by name, of lines `Name: 12 kB` or `name 12`.
std::map<std::string, int64_t> fields(const std::string & path) {
    std::map<std::string, int64_t> found;
    std::ifstream                  in = opened(path);
    for (std::string line; std::getline(in, line);) {
        std::istringstream words(line);
        words.imbue(std::locale::classic());
        std::string name;
        int64_t     number = 0;
        if (words >> name >> number) {
            found[name.back() == ':' ? name.substr(0, name.size() - 1) : name] = number;
        }
    }
    return found;
}

// A file with one number, or UNKNOWN if there is none, or "max".
int64_t number_in(const std::string & path) {
    std::ifstream in     = opened(path);
    int64_t       number = UNKNOWN;
    return in >> number ? number : UNKNOWN;
}

// What one control group leaves, without swap.
int64_t left_by(const std::string & folder, bool v1) {
    const int64_t limit = number_in(folder + (v1 ? "/memory.limit_in_bytes" : "/memory.max"));
    const int64_t usage = number_in(folder + (v1 ? "/memory.usage_in_bytes" : "/memory.current"));
    if (limit == UNKNOWN || usage == UNKNOWN) { // no limit, not mounted here, or the root group of v2
        return UNKNOWN;
    }
    auto              status = fields(folder + "/memory.stat");
    const std::string total  = v1 ? "total_" : "";
    return limit - usage + status[total + "inactive_file"] + status[total + "active_file"];
}

// The same for the groups of a line of /proc/self/cgroup: `1:memory:/path`, `0::/path`.
int64_t left_by_groups(const std::string & line, const std::string & mounted) {
    const size_t first  = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) {
        return UNKNOWN;
    }
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool        v1          = !controllers.empty();
    if (v1 && ("," + controllers + ",").find(",memory,") == std::string::npos) {
        return UNKNOWN;
    }
    const std::string root = mounted + (v1 ? "/memory" : "");
    std::string       path = line.substr(second + 1);
    int64_t           left = left_by(root, v1);
    while (!path.empty()) {
        left = std::min(left, left_by(root + path, v1));
        path.resize(path.find_last_of('/') == std::string::npos ? 0 : path.find_last_of('/'));
    }
    return left;
}

// What RLIMIT_AS and RLIMIT_DATA leave, less SMALL.
int64_t left_by_limits(const std::string & proc) {
    auto          used = fields(proc + "/self/status"); // in KiB
    int64_t       left = UNKNOWN;
    std::ifstream in   = opened(proc + "/self/limits");
    for (std::string line; std::getline(in, line);) {
        for (const auto & [name, of] : { std::pair("Max address space", "VmSize"), { "Max data size", "VmData" } }) {
            if (line.rfind(name, 0) == 0) {
                std::istringstream numbers(line.substr(std::string(name).size()));
                numbers.imbue(std::locale::classic());
                if (int64_t limit = 0; numbers >> limit) {
                    left = std::min(left, limit - 1024 * used[of] - SMALL);
                }
            }
        }
    }
    return left;
}

} // namespace

int64_t available_memory(const std::string & proc, const std::string & cgroup) {
    auto system = fields(proc + "/meminfo"); // in KiB
    if (system.count("MemAvailable") == 0) {
        return UNKNOWN;
    }
    const int64_t swap   = 1024 * system["SwapFree"];
    int64_t       left   = std::min(1024 * system["MemAvailable"] + swap, left_by_limits(proc));
    std::ifstream groups = opened(proc + "/self/cgroup");
    for (std::string line; std::getline(groups, line);) {
        const int64_t by_groups = left_by_groups(line, cgroup);
        left                    = std::min(left, by_groups == UNKNOWN ? UNKNOWN : by_groups + swap);
    }
    return std::max<int64_t>(left, 0);
}

} // namespace subkv
