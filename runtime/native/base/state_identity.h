// state_identity.h: what determines the bytes of a context's states, in named parts (docs/format.md). A context may read
// a state of another one if all their parts are equal.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace subkv {

struct StateIdentity {
    struct Part {
        std::string name;
        std::string value;

        bool operator==(const Part & other) const { return name == other.name && value == other.value; }
    };

    std::vector<Part> parts; // in the order in which differences are reported

    void add(std::string name, std::string value) { parts.push_back({ std::move(name), std::move(value) }); }

    void add(const StateIdentity & more) { parts.insert(parts.end(), more.parts.begin(), more.parts.end()); }

    // The text to be hashed, which differs for different identities.
    std::string text() const {
        std::string text;
        for (const auto & [name, value] : parts) {
            text += name + " " + std::to_string(value.size()) + " " + value + "\n";
        }
        return text;
    }

    bool operator!=(const StateIdentity & other) const { return !(parts == other.parts); }
};

} // namespace subkv
