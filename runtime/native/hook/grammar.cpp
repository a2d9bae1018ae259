// grammar.cpp: see llama-subkv-grammar.h. Part of libllama.
#include "llama-subkv-grammar.h"

#include "llama-grammar.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace {

constexpr size_t   MAX_BYTES    = 1 << 20;
constexpr size_t   MAX_DEPTH    = 2000; // some schema converters emit one group per optional item
constexpr size_t   MAX_CLASS    = 4096;
constexpr uint64_t MAX_TIMES    = 2000; // the parser refuses higher minima, and takes higher maxima for none
constexpr uint64_t MAX_WORK     = 1 << 29;
constexpr uint64_t N_CANDIDATES = 1 << 14; // tokens that are compared with the character on top of a stack

thread_local uint64_t g_n_work = 0; // since the last accepted token, roughly in bytes that are read

void work(uint64_t n) {
    g_n_work += n;
    if (g_n_work > MAX_WORK) {
        g_n_work = 0;
        throw std::runtime_error("the grammar is too ambiguous or too large");
    }
}

// Reads a grammar from left to right as the parser does, as far as literals, classes, comments, groups and repetitions
// are concerned.
class Scanner {
public:
    explicit Scanner(const char * text) : at(text) {}

    void scan() {
        while (*at) {
            switch (*at) {
                case '"': item = delimited('"'); break;
                case '[':
                    item = delimited(']');
                    if (item > MAX_CLASS) {
                        throw std::runtime_error("a class of the grammar has too many characters");
                    }
                    break;
                case '<': item = delimited('>'); break;
                case '#': at += std::strcspn(at, "\r\n"); break;
                case '(':
                    ++at;
                    if (++depth > MAX_DEPTH) {
                        throw std::runtime_error("groups are nested too deeply");
                    }
                    break;
                case ')':
                    ++at;
                    depth -= depth > 0;
                    item = 1;
                    break;
                case '*':
                case '+':
                case '?':
                    ++at;
                    repeat(0, 1);
                    break;
                case '{':
                    ++at;
                    braces();
                    break;
                default:
                    item = std::strchr(" \t\r\n", *at) ? item : 1; // space may be in front of a repetition
                    ++at;
            }
        }
    }

private:
    // Skips to behind the end of a literal, class or token, and returns an upper bound of its elements.
    size_t delimited(char end) {
        size_t n = 0;
        for (++at; *at && *at != end; ++n) {
            at += *at == '\\' && end != '>' && at[1] ? 2 : 1;
        }
        at += *at != 0;
        return n;
    }

    void space() { at += std::strspn(at, " \t\r\n"); }

    // A number, at most MAX_TIMES + 1.
    uint64_t number() {
        uint64_t n = 0;
        for (; *at >= '0' && *at <= '9'; ++at) {
            n = std::min<uint64_t>(10 * n + (uint64_t) (*at - '0'), MAX_TIMES + 1);
        }
        return n;
    }

    void braces() {
        space();
        const uint64_t least = number();
        uint64_t       most  = least;
        space();
        if (*at == ',') {
            ++at;
            space();
            most = *at >= '0' && *at <= '9' ? number() : MAX_TIMES + 1;
        }
        if (most < least) {
            throw std::runtime_error("the largest number of repetitions is below the smallest");
        }
        repeat(least, most > MAX_TIMES ? least : most);
    }

    // The parser copies the item `least` times, and into one more rule for each optional repetition.
    void repeat(uint64_t least, uint64_t most) {
        work(std::max<uint64_t>(most, 1) * (256 + 64 * item));
        item = std::max<uint64_t>(least, 1) * item + 1;
    }

    const char * at;
    size_t       depth = 0;
    uint64_t     item  = 1; // elements of what a repetition would repeat
};

bool ends(const llama_grammar_element & element) {
    return element.type == LLAMA_GRETYPE_END || element.type == LLAMA_GRETYPE_ALT;
}

// Calls use(first, last) for each alternative of a rule.
template <typename F> void each_alternative(const llama_grammar_rule & rule, F use) {
    for (size_t first = 0, i = 0; i < rule.size(); ++i) {
        if (ends(rule[i])) {
            use(rule.data() + first, rule.data() + i);
            first = i + 1;
        }
    }
}

// Returns whether each rule can be empty, or begin with a character or token. This is the least solution of the two
// recursions.
bool all_lead_somewhere(const llama_grammar_rules & rules) {
    std::vector<std::vector<size_t>> users(rules.size()); // rules that refer to a rule
    std::vector<bool>                empty(rules.size()), begins(rules.size()), waits(rules.size(), true);
    std::vector<size_t>              todo(rules.size());
    for (size_t i = 0; i < rules.size(); ++i) {
        todo[i] = i;
        for (const auto & element : rules[i]) {
            if (element.type == LLAMA_GRETYPE_RULE_REF) {
                users[element.value].push_back(i);
            }
        }
    }
    while (!todo.empty()) {
        const size_t of = todo.back();
        todo.pop_back();
        waits[of]         = false;
        bool may_be_empty = false, may_begin = false;
        work(rules[of].size());
        each_alternative(rules[of], [&](const llama_grammar_element * first, const llama_grammar_element * last) {
            const llama_grammar_element * it = first;
            for (; it != last && it->type == LLAMA_GRETYPE_RULE_REF && empty[it->value]; ++it) {
                may_begin = may_begin || begins[it->value];
            }
            may_be_empty = may_be_empty || it == last;
            may_begin    = may_begin || (it != last && (it->type != LLAMA_GRETYPE_RULE_REF || begins[it->value]));
        });
        if (may_be_empty == empty[of] && may_begin == begins[of]) {
            continue;
        }
        empty[of]  = may_be_empty;
        begins[of] = may_begin;
        for (const size_t user : users[of]) {
            if (!waits[user]) {
                waits[user] = true;
                todo.push_back(user);
            }
        }
    }
    for (size_t i = 0; i < rules.size(); ++i) {
        if (!empty[i] && !begins[i]) {
            return false;
        }
    }
    return true;
}

// The rules that a rule can begin with. As in llama.cpp, a rule in front may be empty if it has an alternative without
// symbols.
std::vector<std::vector<size_t>> first_rules(const llama_grammar_rules & rules) {
    std::vector<bool> empty(rules.size());
    for (size_t i = 0; i < rules.size(); ++i) {
        each_alternative(rules[i],
                         [&](const auto * first, const auto * last) { empty[i] = empty[i] || first == last; });
    }
    std::vector<std::vector<size_t>> firsts(rules.size());
    for (size_t i = 0; i < rules.size(); ++i) {
        each_alternative(rules[i], [&](const auto * first, const auto * last) {
            for (bool more = true; more && first != last && first->type == LLAMA_GRETYPE_RULE_REF; ++first) {
                firsts[i].push_back(first->value);
                more = empty[first->value];
            }
        });
    }
    return firsts;
}

// Returns whether a rule can begin with itself, by a depth-first search that visits each rule once.
bool left_recursive(const llama_grammar_rules & rules) {
    struct Visit {
        size_t rule;
        size_t next;
    };
    enum { NEW, OPEN, DONE };

    const auto         firsts = first_rules(rules);
    std::vector<char>  state(rules.size(), NEW);
    std::vector<Visit> path;
    for (size_t start = 0; start < rules.size(); ++start) {
        if (state[start] == NEW) {
            path.push_back({ start, 0 });
            state[start] = OPEN;
        }
        while (!path.empty()) {
            auto & visit = path.back();
            if (visit.next == firsts[visit.rule].size()) {
                state[visit.rule] = DONE;
                path.pop_back();
                continue;
            }
            const size_t rule = firsts[visit.rule][visit.next++];
            if (state[rule] == OPEN) {
                return true;
            }
            if (state[rule] == NEW) {
                state[rule] = OPEN;
                path.push_back({ rule, 0 });
            }
        }
    }
    return false;
}

} // namespace

void llama_subkv_grammar_text(const char *& text) {
    g_n_work = 0;
    if (std::strlen(text) > MAX_BYTES) {
        text = "";
        throw std::runtime_error("the grammar is too long");
    }
    Scanner(text).scan();
}

bool llama_subkv_grammar_rules(const llama_grammar_rules & rules) {
    try {
        return !left_recursive(rules) && all_lead_somewhere(rules);
    } catch (const std::runtime_error &) { // too much work
        return false;
    }
}

void llama_subkv_grammar_step(const llama_grammar_stack & stack, size_t n_stacks) {
    uint64_t n = 64 + 8 * stack.size() + n_stacks * (1 + stack.size() / 8);
    if (!stack.empty() && stack.back()->type != LLAMA_GRETYPE_RULE_REF) {
        uint64_t n_class = 1;
        while (stack.back()[n_class].type == LLAMA_GRETYPE_CHAR_ALT ||
               stack.back()[n_class].type == LLAMA_GRETYPE_CHAR_RNG_UPPER) {
            ++n_class;
        }
        n += N_CANDIDATES * (1 + n_class / 4);
    }
    work(n);
}

void llama_subkv_grammar_token() {
    g_n_work = 0;
}
