// host.cpp: checks the Host and Origin of requests to llama-server (SUBKV_ALLOW_HOST, docs/server.md).
// Part of libllama.
//
// A foreign web page can reach a server on this machine through the user's browser: by DNS rebinding (a name of its own
// that resolves to this machine), or by a cross-site request. The browser sends the name as Host and the page as
// Origin.
#include "llama-subkv-programs.h"

#include <algorithm>
#include <cstdlib>
#include <set>
#include <sstream>
#include <string>

static constexpr size_t SHOWN = 80; // characters of a header

// The name in a Host, an Origin or an entry of the list, in lower case and without scheme, port and brackets.
static std::string name_of(std::string text) {
    const size_t scheme = text.find("://");
    text.erase(0, scheme == std::string::npos ? 0 : scheme + 3);
    if (!text.empty() && text[0] == '[') {
        const size_t end = text.find(']');
        text             = end == std::string::npos ? "" : text.substr(1, end - 1);
    } else {
        text.resize(std::min(text.size(), text.find_first_of(":/")));
    }
    std::transform(text.begin(), text.end(), text.begin(),
                   [](char c) { return c >= 'A' && c <= 'Z' ? (char) (c - 'A' + 'a') : c; });
    if (!text.empty() && text.back() == '.') { // fully qualified name
        text.pop_back();
    }
    return text;
}

// 127.0.0.0/8 and ::1, as browsers write them.
static bool loopback(const std::string & name) {
    int n_parts = 0;
    for (std::istringstream parts(name); parts; ++n_parts) {
        std::string part;
        std::getline(parts, part, '.');
        const bool number =
            !part.empty() && part.size() <= 3 && part.find_first_not_of("0123456789") == std::string::npos;
        if (!number || std::stoi(part) > 255 || (n_parts == 0 && part != "127")) {
            return name == "::1";
        }
        if (parts.eof()) {
            return n_parts == 3;
        }
    }
    return false;
}

static std::set<std::string> names_of(const char * list) {
    std::set<std::string> names;
    std::istringstream    entries(list ? list : "");
    for (std::string entry; std::getline(entries, entry, ',');) {
        const size_t first = entry.find_first_not_of(" \t");
        const size_t last  = entry.find_last_not_of(" \t");
        if (first != std::string::npos) {
            names.insert(name_of(entry.substr(first, last - first + 1)));
        }
    }
    return names;
}

std::string llama_subkv_refusal(const std::string & host, const std::string & origin) {
    static const char *                list  = std::getenv("SUBKV_ALLOW_HOST");
    static const std::set<std::string> names = names_of(list);
    if (!list || !*list || names.count("*") > 0) {
        return "";
    }
    const auto allowed = [](const std::string & name) {
        return name == "localhost" || loopback(name) || names.count(name) > 0;
    };
    const auto refusal = [](const std::string & header, const std::string & value) {
        return header + ": localhost, a loopback address or a name in SUBKV_ALLOW_HOST expected, '" +
               value.substr(0, SHOWN) + "' found";
    };
    if (!allowed(name_of(host))) {
        return refusal("Host", host);
    }
    return origin.empty() || allowed(name_of(origin)) ? "" : refusal("Origin", origin);
}
