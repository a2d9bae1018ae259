// eviction.cpp: EvictionOrder (prefix_eviction.h) against its definition, for random prompts that share pieces. Prints the
// number of pieces of all prompts, and of visits of pieces while all prompts but some are removed.
#include "prefix_eviction.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <set>
#include <string>

using namespace subkv;

namespace {

using Pieces = std::map<std::string, uint64_t>; // sizes by name

constexpr int64_t NOW = 1000000000000;

// Prompts with pieces of few names, so that prompts share them; some have one twice.
std::vector<EvictionOrder::Candidate> random_candidates(size_t n_prompts, std::mt19937 & random) {
    std::vector<EvictionOrder::Candidate> candidates;
    for (size_t i = 0; i < n_prompts; ++i) {
        auto head = std::make_shared<PrefixHead>();
        head->tokens.resize(1 + random() % 500);
        StateRefs & state = head->states[0];
        state.rows.regions.push_back({ 0, 1 + (uint32_t) i % 3 });
        for (size_t k = 1 + random() % 20; k > 0; --k) {
            state.blocks.push_back("block " + std::to_string(i % 3) + " " + std::to_string(random() % n_prompts));
        }
        state.rest = { "rest " + std::to_string(i), 100 + random() % 1000 };
        candidates.push_back({ "prompt " + std::to_string(i), head, 50 + random() % 100,
                               NOW - (int64_t) (random() % 100) * 1000000000 });
    }
    return candidates;
}

Pieces pieces_of(const EvictionOrder::Candidate & candidate) {
    Pieces pieces;
    candidate.head->each_piece([&](auto & name, uint64_t size) { pieces[name] = size; });
    return pieces;
}

// The definition of the order, whose work is quadratic.
class Definition {
public:
    explicit Definition(const std::vector<EvictionOrder::Candidate> & candidates) : candidates_(candidates) {
        for (size_t i = 0; i < candidates.size(); ++i) {
            left_.insert(i);
        }
    }

    // What is wrong with the choice of a prompt; empty: nothing.
    std::string error(size_t chosen, int64_t oldest_use) const {
        const auto users  = users_of_pieces();
        int64_t    oldest = INT64_MAX;
        for (const size_t i : left_) {
            oldest = std::min(oldest, candidates_[i].used);
            if (cost(i, users) > cost(chosen, users)) {
                return std::to_string(chosen) + " goes before " + std::to_string(i);
            }
        }
        const bool is_left = left_.count(chosen) != 0;
        return is_left && oldest == oldest_use ? "" :
                                                 std::to_string(chosen) + " is not left, or another one is the oldest";
    }

    // The pieces that no other prompt has.
    std::set<std::string> own_pieces(size_t i) const {
        const auto            users = users_of_pieces();
        std::set<std::string> own;
        for (const auto & [name, size] : pieces_of(candidates_[i])) {
            if (users.at(name) == 1) {
                own.insert(name);
            }
        }
        return own;
    }

    void keep(size_t i) {
        kept_.insert(i);
        left_.erase(i);
    }
    void remove(size_t i) { left_.erase(i); }

private:
    using Users = std::map<std::string, size_t>; // prompts that have a piece, of those that are left or kept

    Users users_of_pieces() const {
        Users users;
        for (const auto * there : { &left_, &kept_ }) {
            for (const size_t i : *there) {
                for (const auto & [name, size] : pieces_of(candidates_[i])) {
                    ++users[name];
                }
            }
        }
        return users;
    }

    double cost(size_t i, const Users & users) const {
        const EvictionOrder::Candidate & candidate = candidates_[i];
        uint64_t                         own       = candidate.file_bytes;
        for (const auto & [name, size] : pieces_of(candidate)) {
            const auto it = users.find(name);
            own += it != users.end() && it->second == 1 ? size : 0;
        }
        const double seconds = (double) (NOW - candidate.used) / 1e9;
        return std::max(seconds, 1.0) * (double) own / (double) candidate.head->tokens.size();
    }

    const std::vector<EvictionOrder::Candidate> & candidates_;
    std::set<size_t>                              left_, kept_;
};

int failed(size_t step, const std::string & why) {
    std::printf("step %zu: %s\n", step, why.c_str());
    return 1;
}

} // namespace

int main(int, char ** argv) {
    const auto   n_prompts = (size_t) std::atoi(argv[1]);
    std::mt19937 random((unsigned) std::atoi(argv[2]));
    const bool   compares = std::atoi(argv[3]) != 0;

    const auto candidates = random_candidates(n_prompts, random);
    size_t     n_pieces   = 0;
    for (const auto & candidate : candidates) {
        n_pieces += candidate.head->states.at(0).blocks.size() + 1;
    }
    EvictionOrder order(candidates, NOW);
    Definition    definition(candidates);
    for (size_t step = 0; step < n_prompts; ++step) {
        const auto * next = order.next();
        if (!next) {
            return failed(step, "nothing is left");
        }
        const size_t chosen = (size_t) std::atoi(next->name.c_str() + 7);
        if (compares) {
            if (const std::string error = definition.error(chosen, order.oldest_use()); !error.empty()) {
                return failed(step, error);
            }
        }
        if (random() % 10 == 0) {
            order.keep();
            definition.keep(chosen);
            continue;
        }
        const auto removed = order.remove();
        if (compares) {
            const std::set<std::string> own = definition.own_pieces(chosen);
            if (std::set<std::string>(removed.begin(), removed.end()) != own || removed.size() != own.size()) {
                return failed(step, "other pieces are unused");
            }
        }
        definition.remove(chosen);
    }
    std::printf("%zu %llu\n", n_pieces, (unsigned long long) order.n_visits);
    return order.next() ? 1 : 0;
}
