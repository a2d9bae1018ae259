// adapt_text.cpp: parses the options of adaptation: `none`, `v`, `kv,length=512,gain=0.9`.
#include "chunked.h"
#include "layout_keys.h"
#include "numbers.h"

#include <cerrno>
#include <cstdlib>
#include <iterator>
#include <sstream>
#include <utility>

namespace subkv {

namespace {

// The cheapest choice with most of the gain (research/notes/quality.md).
constexpr subkv_adapt_params DEFAULTS = {
    /*kind =*/0,     /*rank =*/0,       /*rows =*/0,   /*decay =*/1.0f, /*rate =*/0.05f, /*block =*/32,
    /*length =*/512,
    /*warm =*/1024,  /*max_chunks =*/1, /*tau =*/1.0f, /*gain =*/0.9f,  /*reuse =*/1,    /*merge =*/0,
    /*window =*/0,   /*lookahead =*/0,
};

constexpr const char * KINDS[] = { "covariance", "fd", "oja" };

struct Field {
    const char * name;
    int32_t subkv_adapt_params::* whole;  // nullptr for a fraction
    float subkv_adapt_params::* fraction; // nullptr for a whole number
};

constexpr Field FIELDS[] = {
    { "rank", &subkv_adapt_params::rank, nullptr },     { "rows", &subkv_adapt_params::rows, nullptr },
    { "decay", nullptr, &subkv_adapt_params::decay },   { "rate", nullptr, &subkv_adapt_params::rate },
    { "block", &subkv_adapt_params::block, nullptr },   { "length", &subkv_adapt_params::length, nullptr },
    { "warm", &subkv_adapt_params::warm, nullptr },     { "max_chunks", &subkv_adapt_params::max_chunks, nullptr },
    { "tau", nullptr, &subkv_adapt_params::tau },       { "gain", nullptr, &subkv_adapt_params::gain },
    { "reuse", &subkv_adapt_params::reuse, nullptr },   { "merge", &subkv_adapt_params::merge, nullptr },
    { "window", &subkv_adapt_params::window, nullptr }, { "lookahead", &subkv_adapt_params::lookahead, nullptr },
};

std::string quoted(const std::string & text) {
    return "'" + shortened(text) + "'";
}

int32_t kind_of(const std::string & value) {
    for (size_t i = 0; i < std::size(KINDS); ++i) {
        if (value == KINDS[i]) {
            return (int32_t) i;
        }
    }
    refuse_adapt("kind", "one of covariance, fd, oja", quoted(value));
}

bool read_whole(const std::string & text, int32_t & x) {
    char * end        = nullptr;
    errno             = 0;
    const long number = std::strtol(text.c_str(), &end, 10);
    x                 = (int32_t) number;
    return !text.empty() && *end == 0 && errno == 0 && number == x;
}

void set(subkv_adapt_params & params, const std::string & name, const std::string & value) {
    if (name == "kind") {
        params.kind = kind_of(value);
        return;
    }
    for (const auto & field : FIELDS) {
        if (name != field.name) {
            continue;
        }
        if (!(field.whole ? read_whole(value, params.*field.whole) : read_number(value, params.*field.fraction))) {
            refuse_adapt(name, "a number", quoted(value));
        }
        return;
    }
    std::string names = "kind";
    for (const auto & field : FIELDS) {
        names += std::string(", ") + field.name;
    }
    refuse_adapt("expected one of " + names + ", found " + quoted(name));
}

} // namespace

// The sides of the text, as in subkv_adapt_parse.
static int32_t parse(const std::string & text, subkv_adapt_params & given) {
    std::istringstream fields(text);
    std::string        field;
    std::getline(fields, field, ',');
    given = DEFAULTS;
    if (text == "none") {
        return 0;
    }
    const int32_t sides = field == "k" ? 1 : field == "v" ? 2 : field == "kv" ? 3 : 0;
    if (sides == 0) {
        refuse_adapt("expected k, v or kv, found " + quoted(field));
    }
    while (std::getline(fields, field, ',')) {
        const size_t      equals = field.find('=');
        const std::string name   = field.substr(0, equals);
        set(given, name, equals == std::string::npos ? "" : field.substr(equals + 1));
        // Only the defaults may disable a trigger, because a user who sets one needs it.
        if (name == "tau" && !(given.tau > 0.0f && given.tau < 1.0f)) {
            refuse_adapt("tau", "a relative residual between 0 and 1", number(given.tau));
        }
        if (name == "length" && given.length < 1) {
            refuse_adapt("length", "at least 1 token", std::to_string(given.length));
        }
        for (const auto & [option, n] : { std::pair("window", given.window), { "lookahead", given.lookahead } }) {
            if (name == option && n < 1) {
                refuse_adapt(option, "at least 1 token", std::to_string(n));
            }
        }
    }
    return sides;
}

// Options missing in `text` get their defaults. Throws Invalid.
static ChunkRequest parse_adapt(const std::string & text) {
    subkv_adapt_params params;
    const int32_t      sides = parse(text, params);
    return { (sides & 1) != 0, (sides & 2) != 0, params };
}

// The shortest of two texts of a number that reads as the same number.
static std::string exact(float x) {
    const std::string text = number(x);
    float             read = 0.0f;
    return read_number(text, read) && read == x ? text : number(x, 9);
}

std::string ChunkRequest::text() const {
    std::string text = std::string(k ? "k" : "") + (v ? "v" : "") + ",kind=" + KINDS[params.kind];
    for (const auto & field : FIELDS) {
        text += std::string(",") + field.name + "=";
        text += field.whole ? std::to_string(params.*field.whole) : exact(params.*field.fraction);
    }
    return text;
}

ChunkRequest requested_chunks(const std::string & text, const char * key) {
    try {
        return parse_adapt(text);
    } catch (const Invalid & e) {
        if (e.error.key == key) {
            throw;
        }
        throw Invalid(std::string(key) + ": " + e.what());
    }
}

} // namespace subkv

extern "C" bool subkv_adapt_parse(const char * text, int32_t * sides, subkv_adapt_params * params) {
    return subkv::guarded("adapt", [&] {
        subkv::not_null(sides, "subkv_adapt_parse: sides");
        subkv::not_null(params, "subkv_adapt_parse: params");
        *sides = subkv::parse(text ? text : "", *params);
    });
}
