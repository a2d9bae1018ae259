// resolve.cpp: see resolve.h.
//
// The order of the decisions: bits and files that are parts of a type (subkv:BITS, subkv:FILE); the variable SUBKV; one
// type for keys and values; the bases; the window.
#include "resolve.h"

#include "error.h"
#include "ggml.h"
#include "model_file.h"
#include "numbers.h"
#include "variables.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <system_error>
#include <tuple>
#include <utility>
#include <vector>

namespace subkv {

namespace {

constexpr const char * CODED = "subkv";
constexpr const char * AUTO  = "auto";
constexpr const char * F16   = "f16";

[[noreturn]] void refuse_field(const char * field, const std::string & reason) {
    throw Invalid({ SUBKV_ERROR_INVALID, field, reason });
}

// Makes the same error about a field of the request.
Invalid about(const char * field, const Error & e) {
    return Invalid(Error{ e.kind, field, (e.key.empty() ? "" : e.key + ": ") + e.reason, e.remedy });
}

std::string variable(const char * name) {
    const char * value = std::getenv(name);
    return value ? value : "";
}

bool is_file(const std::string & path) {
    std::error_code error;
    return std::filesystem::exists(std::filesystem::u8path(path), error);
}

//
// type
//

struct Types {
    std::string both, k, v; // "" if it is not asked

    bool asked() const { return !both.empty() || !k.empty() || !v.empty(); }

    bool has(const char * type) const { return both == type || k == type || v == type; }
};

// Reduces subkv:BITS and subkv:FILE to subkv. The bits are appended to `bits`.
std::string plain_type(const char * field, const std::string & type, std::vector<float> & bits, std::string & file) {
    const std::string coded = std::string(CODED) + ":";
    if (type.compare(0, coded.size(), coded) != 0) {
        return type;
    }
    const std::string rest = type.substr(coded.size());
    if (const float budget = parse_budget(rest); budget > 0.0f) {
        bits.push_back(budget);
    } else if (!rest.empty() && (is_file(rest) || ends_with(rest, ".gguf"))) { // the search says that it is missing
        file = rest;
    } else {
        refuse_field(field, "expected subkv:BITS with bits per element, such as subkv:3, or subkv:FILE, found " + type);
    }
    return CODED;
}

// Bits and memory are those of a coded cache, so that `auto` is one.
void require_coded(Types & types, const std::vector<float> & bits, bool memory) {
    const char * field = memory ? "memory" : "bits";
    for (const float other : bits) {
        if (other != bits.front()) {
            refuse_field("bits", "expected one number of bits per element, found " + number(bits.front()) + " and " +
                                     number(other));
        }
    }
    if (memory && !bits.empty()) {
        refuse_field(field, "expected either it or bits per element, found both");
    }
    const bool               separate = !types.k.empty() || !types.v.empty();
    std::vector<std::string> others;
    for (std::string * type : { &types.both, &types.k, &types.v }) {
        *type = *type == AUTO ? CODED : *type;
        if (separate == (type != &types.both) && !type->empty() && *type != CODED) {
            others.push_back(*type);
        }
    }
    if (!others.empty()) {
        refuse_field(field, "expected a coefficient cache ('subkv'), found " +
                                *std::min_element(others.begin(), others.end()));
    }
}

// SUBKV is for contexts that ask for no type. The bases of a file that it names are for coded ones as well.
void take_variable(Types & types, std::string & file, const CacheRequest & asked) {
    std::string value = cache_setting();
    if (value.empty()) {
        return;
    }
    if (value == "off") {
        if (types.has(CODED)) {
            refuse_field("type", "SUBKV=auto, a file, or no SUBKV expected, SUBKV=off found");
        }
        types = types.has(AUTO) ? Types() : types;
        return;
    }
    value = asked.variables == Variables::OF_ANOTHER ? AUTO : value;
    file  = value == AUTO || value == CODED || !file.empty() ? file : value;
    if (!types.asked()) {
        types.both = value == AUTO || asked.drafts ? AUTO : CODED;
    }
}

void check_type(const char * field, const std::string & type) {
    std::string names = std::string(AUTO) + ", " + CODED;
    for (const ggml_type known : ORDINARY_TYPES) {
        if (type == ggml_type_name(known)) {
            return;
        }
        names += std::string(", ") + ggml_type_name(known);
    }
    refuse_field(field, "expected one of " + names + ", found '" + type + "'");
}

// One type for keys and values if one of them is coded or `auto`.
void join(Types & types) {
    const auto own = [](const std::string & type) { return type == CODED || type == AUTO; };
    if (own(types.k) || own(types.v)) {
        if (!types.k.empty() && !types.v.empty() && types.k != types.v) {
            refuse_field("type_v",
                         "expected the same cache for K and V with '" + types.k + "', found '" + types.v + "'");
        }
        types = { types.k.empty() ? types.v : types.k, "", "" };
    }
    if (types.k.empty() && types.v.empty()) {
        return;
    }
    if (types.both == CODED) {
        refuse_field("type_k", "expected no type_k or type_v with kv_cache='subkv', found both");
    }
    const std::string other = types.both.empty() || types.both == AUTO ? F16 : types.both;
    types.k                 = types.k.empty() ? other : types.k;
    types.v                 = types.v.empty() ? other : types.v;
    types.both.clear();
}

// Refuses what only a coded cache has.
void check_ordinary(const CacheChoice & choice, const CacheRequest & asked) {
    const std::string name = choice.type_k + (choice.type_v == choice.type_k ? "" : "/" + choice.type_v);
    for (const auto & [field, is_asked] : { std::pair("n_sink", asked.n_sink >= 0),
                                            { "n_recent", asked.n_recent >= 0 },
                                            { "n_rollback", asked.n_rollback >= 0 },
                                            { "adapt", !asked.adapt.empty() },
                                            { "bases", !asked.bases.empty() } }) {
        if (is_asked) {
            refuse_field(field, "expected a coefficient cache ('subkv'), found " + name);
        }
    }
}

//
// window
//

void check_window(const CacheRequest & asked) {
    for (const auto & [field, n, most] : { std::tuple("n_sink", asked.n_sink, MAX_SINK),
                                           { "n_recent", asked.n_recent, MAX_RECENT },
                                           { "n_rollback", asked.n_rollback, MAX_RECENT } }) {
        if (n > most) {
            refuse_field(field, "expected 0 to " + std::to_string(most) + " tokens, found " + std::to_string(n));
        }
    }
}

// If nothing is asked, the number of `variable` stands for it, unless it is nullptr.
int32_t tokens(int32_t asked, const char * variable, int32_t most, int32_t otherwise) {
    if (asked >= 0) {
        return asked;
    }
    return variable ? (int32_t) number_of(variable, 0, most, otherwise) : otherwise;
}

void give_window(CacheChoice & choice, const CacheRequest & asked) {
    const Layout & l         = *choice.layout;
    const bool     variables = asked.variables != Variables::BITS;
    const auto     named     = [&](const char * name) { return variables ? name : nullptr; };
    choice.n_sink            = tokens(asked.n_sink, named("SUBKV_SINK"), MAX_SINK, l.n_sink);
    choice.n_recent          = tokens(asked.n_recent, named("SUBKV_RECENT"), MAX_RECENT, l.n_recent);
    choice.n_rollback        = tokens(asked.n_rollback, named("SUBKV_ROLLBACK"), MAX_RECENT, DEFAULT_ROLLBACK);
    // Sensitivities include errors beyond the window only, so these bases may have any error inside it.
    if ((l.basis_k == "kld-aware" || l.basis_v == "kld-aware") && choice.n_recent < l.n_recent) {
        throw Invalid({ SUBKV_ERROR_INVALID, "n_recent",
                        "at least " + std::to_string(l.n_recent) +
                            " expected, for which the kld-aware bases were made, " + std::to_string(choice.n_recent) +
                            " found",
                        "convert the model with --n-recent " + std::to_string(choice.n_recent) });
    }
    const std::string of_variable = variables ? variable("SUBKV_ADAPT") : "";
    const bool        by_variable = asked.adapt.empty() && !of_variable.empty();
    const bool        by_file     = asked.adapt.empty() && of_variable.empty() && !l.adapt.empty();
    choice.adapt_key              = by_variable ? "SUBKV_ADAPT" : by_file ? "subkv.adapt" : "adapt";
    choice.adapt                  = by_variable ? of_variable : by_file ? l.adapt : asked.adapt;
    if (choice.adapt.empty()) {
        choice.adapt = "none";
    }
}

float asked_bits(const CacheChoice & choice) {
    try {
        return choice.bits > 0.0f ? choice.bits : budget_of_environment();
    } catch (const Invalid & e) {
        throw Invalid({ SUBKV_ERROR_BUDGET, e.error.key, e.error.reason });
    }
}

// Throws for bases that were found and cannot be used.
void check_usable(const FoundBases & found) {
    if (found.layout || found.source == SUBKV_BASES_NONE) {
        return;
    }
    const bool by_user = found.source == SUBKV_BASES_NAMED || found.source == SUBKV_BASES_EMBEDDED;
    if (found.error.kind == SUBKV_ERROR_BUDGET) {
        throw Invalid({ SUBKV_ERROR_BUDGET, "bits", found.error.reason, found.error.remedy });
    }
    throw about(by_user ? "bases" : "sidecar", found.error);
}

} // namespace

CacheChoice choose_type(const CacheRequest & asked) {
    check_window(asked);
    std::vector<float> bits;
    std::string        file = asked.bases;
    if (asked.bits != 0.0f) {
        if (!(asked.bits > 0.0f && asked.bits <= MAX_BUDGET)) { // also NaN
            refuse_field("bits", "expected bits per element, more than 0 and at most " + number(MAX_BUDGET) +
                                     ", found " + number(asked.bits));
        }
        bits.push_back(asked.bits);
    }
    Types types;
    types.both = plain_type("type", asked.type, bits, file);
    types.k    = plain_type("type_k", asked.type_k, bits, file);
    types.v    = plain_type("type_v", asked.type_v, bits, file);
    if (!bits.empty() || asked.memory) {
        require_coded(types, bits, asked.memory);
    }
    const bool names_file = !file.empty(); // not by the variable, whose file is not for every model
    if (asked.variables != Variables::BITS) {
        take_variable(types, file, asked);
    }
    join(types);

    CacheChoice choice;
    if (types.both == CODED || types.both == AUTO) {
        choice.type_k = choice.type_v = CODED;
        choice.automatic              = types.both == AUTO && !names_file;
        choice.bits                   = bits.empty() ? 0.0f : bits.front();
        choice.path                   = file;
        return choice;
    }
    const bool same = types.k.empty();
    choice.type_k   = !same ? types.k : types.both.empty() ? F16 : types.both;
    choice.type_v   = !same ? types.v : choice.type_k;
    if (asked.variables == Variables::BITS) { // libllama has checked its own types
        check_type(same ? "type" : "type_k", choice.type_k);
        check_type(same ? "type" : "type_v", choice.type_v);
    }
    check_ordinary(choice, asked);
    return choice;
}

CacheChoice with_bases(const std::shared_ptr<const Layout> & layout, const CacheRequest & asked) {
    check_window(asked);
    CacheChoice choice;
    choice.type_k = choice.type_v = CODED;
    choice.layout                 = layout;
    choice.bits                   = layout->budget;
    give_window(choice, asked);
    return choice;
}

CacheChoice resolve(const CacheRequest & asked) {
    CacheChoice choice = choose_type(asked);
    if (!choice.coded()) {
        return choice;
    }
    const bool derive = asked.derive || !choice.automatic;
    FoundBases found;
    try {
        found = find_bases({ asked.model, choice.path, asked_bits(choice), asked.sidecar, derive, asked.slides });
    } catch (const ModelError & e) {
        throw Invalid({ e.error.kind, "model", e.error.sentence() });
    }
    check_usable(found);
    if (found.layout) {
        const bool automatic = choice.automatic;
        choice               = with_bases(found.layout, asked);
        choice.automatic     = automatic;
        choice.source        = found.source;
        choice.path          = found.path;
        choice.bits_default  = found.budget_default;
        choice.words         = found.words;
        if (found.source == SUBKV_BASES_WEIGHTS) {
            choice.gain = "`subkv convert " + shell_word(asked.model) + "`: smaller at the same quality";
        }
        return choice;
    }
    const int32_t kind  = found.error.kind;
    const bool    never = kind == SUBKV_ERROR_INVALID || kind == SUBKV_ERROR_UNSUPPORTED; // else it can have some later
    const bool    windowed = asked.n_sink >= 0 || asked.n_recent >= 0 || asked.n_rollback >= 0 || !asked.adapt.empty();
    if (!choice.automatic || !never || (windowed && derive)) {
        throw about("derive", found.error);
    }
    CacheChoice instead;
    instead.type_k = instead.type_v = F16;
    instead.automatic               = derive;
    instead.words =
        derive ? about("derive", found.error).error.reason : "a cache that is read once is not coded by default";
    check_ordinary(instead, asked);
    return instead;
}

} // namespace subkv
