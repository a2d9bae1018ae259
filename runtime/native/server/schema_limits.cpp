// schema_limits.cpp: see schema_limits.h. Part of libsubkv-server.
#include "schema_limits.h"

#include "common.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <unordered_set>

namespace llama_subkv_server {
namespace {

constexpr size_t MAX_PARTS    = 20000;
constexpr size_t MAX_LEVELS   = 100;
constexpr size_t MAX_NAME     = 4096; // libstdc++'s regular expressions recurse over the name of a rule
constexpr size_t MAX_TYPES    = 7;    // JSON has no more
constexpr size_t MAX_OPTIONAL = 500;
constexpr size_t MAX_RULES    = 1 << 24; // bytes, far above the limit of a grammar

// Follows a schema as common_chat_schema_builder does.
class Schema {
public:
    explicit Schema(const common_json & root) : root(root) {}

    void check() { visit(root, 0, 0); }

private:
    // name: bytes of the name of the part's rule
    void visit(const common_json & part, size_t level, size_t name) {
        if (++n_parts > MAX_PARTS || level > MAX_LEVELS || name > MAX_NAME) {
            too_large();
        }
        if (!part.is_object()) {
            return;
        }
        if (part.contains("$ref")) {
            reference(part.at("$ref"), level);
            return;
        }
        for (const char * key : { "oneOf", "anyOf" }) {
            if (part.contains(key)) {
                list(part.at(key), level, name);
                return;
            }
        }
        if (part.contains("enum")) {
            n_parts += part.at("enum").size();
        }
        const common_json type = part.contains("type") ? part.at("type") : common_json();
        if (!type.is_array()) {
            members(part, level, name, type.is_string() ? type.get<std::string>() : "");
            return;
        }
        if (type.size() > MAX_TYPES) {
            throw std::invalid_argument("a list of types in the schema must name one to seven types");
        }
        for (const auto & one : type) {
            members(part, level, name, one.is_string() ? one.get<std::string>() : "");
        }
    }

    void list(const common_json & parts, size_t level, size_t name) {
        for (const auto & part : parts) {
            visit(part, level + 1, name + 16);
        }
    }

    // type "": any
    void members(const common_json & part, size_t level, size_t name, const std::string & type) {
        if (part.contains("allOf")) {
            list(part.at("allOf"), level, name);
        }
        if (type.empty() || type == "object") {
            properties(part, level, name);
        }
        if (type.empty() || type == "array") {
            for (const char * key : { "items", "prefixItems" }) {
                if (part.contains(key) && part.at(key).is_array()) {
                    list(part.at(key), level, name);
                } else if (part.contains(key)) {
                    visit(part.at(key), level + 1, name + 16);
                }
            }
        }
    }

    void properties(const common_json & part, size_t level, size_t name) {
        std::unordered_set<std::string> required;
        if (part.contains("required") && part.at("required").is_array()) {
            for (const auto & key : part.at("required")) {
                if (key.is_string()) {
                    required.insert(key.get<std::string>());
                }
            }
        }
        size_t n_optional = 0, longest = 0;
        if (part.contains("properties") && part.at("properties").is_object()) {
            for (const auto & [key, value] : part.at("properties").items()) {
                n_optional += required.count(key) == 0;
                longest = std::max(longest, key.size());
                visit(value, level + 1, name + key.size() + 16);
            }
        }
        if (part.contains("additionalProperties") && !(part.at("additionalProperties") == false)) {
            ++n_optional;
            visit(part.at("additionalProperties"), level + 1, name + 32);
        }
        if (n_optional > MAX_OPTIONAL) {
            throw std::invalid_argument("the schema has too many optional properties");
        }
        n_rules += n_optional * n_optional / 2 * (3 * (name + longest) + 40);
        if (n_rules > MAX_RULES) {
            too_large();
        }
    }

    void reference(const common_json & value, size_t level) {
        if (!value.is_string()) {
            return; // llama.cpp refuses it
        }
        const auto path = value.get<std::string>();
        if (path.size() > MAX_NAME) {
            too_large();
        }
        if (path.compare(0, 2, "#/") != 0 || !seen.insert(path).second) {
            return;
        }
        const common_json * target = &root;
        const auto          keys   = string_split(path.substr(2), "/");
        for (const auto & key : keys) {
            if (target->is_object() && target->contains(key)) {
                target = &target->at(key);
            } else if (target->is_array() && !key.empty() && key.size() < 10 &&
                       std::all_of(key.begin(), key.end(), [](char c) { return c >= '0' && c <= '9'; }) &&
                       std::stoul(key) < target->size()) {
                target = &target->at(std::stoul(key));
            } else {
                return; // llama.cpp refuses it
            }
        }
        visit(*target, level + 1, path.size());
    }

    [[noreturn]] static void too_large() { throw std::invalid_argument("the schema is too large"); }

    const common_json &             root;
    std::unordered_set<std::string> seen;
    size_t                          n_parts = 0;
    size_t                          n_rules = 0; // bytes of the rules of optional properties
};

bool names_a_schema(const std::string & key) {
    return key == "json_schema" || key == "schema" || key == "parameters" || key == "input_schema";
}

// Texts are not searched.
bool names_a_text(const std::string & key) {
    return key == "messages" || key == "prompt" || key == "input" || key == "content" || key == "instances";
}

} // namespace

void check_schemas(const common_json & request) {
    if (request.is_array()) {
        for (const auto & value : request) {
            check_schemas(value);
        }
    } else if (request.is_object()) {
        for (const auto & [key, value] : request.items()) {
            if (names_a_schema(key)) {
                Schema(value).check();
            }
            if (!names_a_text(key)) {
                check_schemas(value);
            }
        }
    }
}

} // namespace llama_subkv_server
