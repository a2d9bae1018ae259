// llama-subkv-json.h: limits of JSON texts. common/json.cpp calls this function; the build includes this header in front
// of it.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>

// Throws std::runtime_error if the text nests more than 200 levels, or if its members cannot be found in limited time:
// the library that llama.cpp uses copies, prints and destroys values by recursion, and finds a member by linear search.
inline void llama_subkv_json_text(const std::string & text) {
    constexpr size_t max_depth = 200;
    constexpr size_t max_steps = 1 << 29; // one object with 32,768 members, for instance

    size_t depth = 0, n_steps = 0, n_members[max_depth + 2] = {};
    for (size_t i = 0; i < text.size() && depth <= max_depth && n_steps <= max_steps; ++i) {
        if (text[i] == '"') {
            for (++i; i < text.size() && text[i] != '"'; ++i) {
                i += text[i] == '\\';
            }
        } else if (text[i] == '[' || text[i] == '{') {
            n_members[++depth] = 0;
        } else if (text[i] == ':') {
            n_steps += n_members[depth]++;
        } else if (depth > 0 && (text[i] == ']' || text[i] == '}')) {
            --depth;
        }
    }
    if (depth > max_depth || n_steps > max_steps) {
        throw std::runtime_error(depth > max_depth ? "the JSON is nested too deeply" : "the JSON has too many members");
    }
}
