// eviction.cpp: EvictionOrder (prefix_eviction.h) against its definition, for random prompts that share pieces. Prints the
// number of pieces of all prompts, and of visits of pieces while all prompts but some are removed.
#include "prefix_eviction.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <set>

using namespace subkv;

int main(int, char ** argv) {
    const auto        n_prompts = (size_t) std::atoi(argv[1]);
    std::mt19937      random((unsigned) std::atoi(argv[2]));
    const bool        compares = std::atoi(argv[3]) != 0; // with the definition, whose work is quadratic
    constexpr int64_t NOW      = 1000000000000;

    std::vector<EvictionOrder::Candidate> candidates;
    size_t                                n_pieces = 0;
    for (size_t i = 0; i < n_prompts; ++i) {
        auto head = std::make_shared<PrefixHead>();
        head->tokens.resize(1 + random() % 500);
        StateRefs & state = head->states[0];
        state.rows.regions.push_back({ 0, 1 + (uint32_t) i % 3 });
        for (size_t k = 1 + random() % 20; k > 0;
             --k) { // of few names, so that prompts share them; some have one twice
            state.blocks.push_back("block " + std::to_string(i % 3) + " " + std::to_string(random() % n_prompts));
        }
        state.rest = { "rest " + std::to_string(i), 100 + random() % 1000 };
        n_pieces += state.blocks.size() + 1;
        candidates.push_back({ "prompt " + std::to_string(i), head, 50 + random() % 100,
                               NOW - (int64_t) (random() % 100) * 1000000000 });
    }
    EvictionOrder    order(candidates, NOW);
    std::set<size_t> left;
    for (size_t i = 0; i < n_prompts; ++i) {
        left.insert(i);
    }
    for (size_t step = 0; step < n_prompts; ++step) {
        const auto * next = order.next();
        if (!next) {
            std::printf("nothing at step %zu\n", step);
            return 1;
        }
        const size_t chosen = (size_t) std::atoi(next->name.c_str() + 7);
        const bool   keeps  = random() % 10 == 0;
        if (compares) {
            std::map<std::string, std::pair<size_t, uint64_t>> users; // of pieces that are still there
            const auto                                         pieces_of = [&](size_t i) {
                std::map<std::string, uint64_t> pieces;
                candidates[i].head->each_piece([&](auto & name, uint64_t size) { pieces[name] = size; });
                return pieces;
            };
            static std::set<size_t> kept;
            std::set<size_t>        there = left;
            there.insert(kept.begin(), kept.end());
            for (const size_t i : there) {
                for (const auto & [name, size] : pieces_of(i)) {
                    users[name] = { users[name].first + 1, size };
                }
            }
            const auto cost = [&](size_t i) {
                uint64_t own = candidates[i].file_bytes;
                for (const auto & [name, size] : pieces_of(i)) {
                    own += users[name].first == 1 ? size : 0;
                }
                const double seconds = (double) (NOW - candidates[i].used) / 1e9;
                return std::max(seconds, 1.0) * (double) own / (double) candidates[i].head->tokens.size();
            };
            int64_t oldest = INT64_MAX;
            for (const size_t i : left) {
                oldest = std::min(oldest, candidates[i].used);
                if (cost(i) > cost(chosen)) {
                    std::printf("step %zu: %zu goes before %zu\n", step, chosen, i);
                    return 1;
                }
            }
            std::set<std::string> unused;
            for (const auto & [name, size] : pieces_of(chosen)) {
                if (users[name].first == 1) {
                    unused.insert(name);
                }
            }
            if (left.count(chosen) == 0 || oldest != order.oldest_use()) {
                std::printf("step %zu: %zu is not left, or another one is the oldest\n", step, chosen);
                return 1;
            }
            if (keeps) {
                kept.insert(chosen);
                order.keep();
            } else {
                const auto got = order.remove();
                if (std::set<std::string>(got.begin(), got.end()) != unused || got.size() != unused.size()) {
                    std::printf("step %zu: other pieces are unused\n", step);
                    return 1;
                }
            }
        } else if (keeps) {
            order.keep();
        } else {
            order.remove();
        }
        left.erase(chosen);
    }
    std::printf("%zu %llu\n", n_pieces, (unsigned long long) order.n_visits);
    return order.next() ? 1 : 0;
}
