// prefix_eviction.cpp: see prefix_eviction.h.
#include "prefix_eviction.h"

#include <algorithm>
#include <limits>

namespace subkv {

template <typename F> void EvictionOrder::each_piece(uint32_t i, F use) {
    candidates[i].head->each_piece([&](const std::string & name, uint64_t size) {
        ++n_visits;
        Piece & piece = pieces[name];
        if (piece.last != i + 1) {
            piece.last = i + 1;
            piece.size = size;
            use(name, piece);
        }
    });
}

EvictionOrder::EvictionOrder(std::vector<Candidate> given, int64_t now) :
    candidates(std::move(given)), states(candidates.size()), now(now) {
    const auto n = (uint32_t) candidates.size();
    for (uint32_t i = 0; i < n; ++i) {
        each_piece(i, [&](auto &, Piece & piece) {
            ++piece.n_users;
            piece.users ^= i;
        });
        by_use.emplace_back(candidates[i].used, i);
    }
    for (auto & [name, piece] : pieces) {
        states[piece.n_users == 1 ? piece.users : 0].own += piece.n_users == 1 ? piece.size : 0;
        piece.last = 0;
    }
    for (uint32_t i = 0; i < n; ++i) {
        states[i].own += candidates[i].file_bytes;
        rank(i);
    }
    std::sort(by_use.rbegin(), by_use.rend());
}

void EvictionOrder::rank(uint32_t i) {
    const double seconds  = (double) (now - candidates[i].used) / 1e9; // a clock may have been set back
    const auto   n_tokens = std::max<size_t>(1, candidates[i].head->tokens.size());
    states[i].cost        = std::max(seconds, 1.0) * (double) states[i].own / (double) n_tokens;
    ranked.emplace(states[i].cost, i);
}

const EvictionOrder::Candidate * EvictionOrder::next() {
    while (!ranked.empty()) {
        const auto [cost, i] = ranked.top();
        if (!states[i].taken && cost == states[i].cost) {
            top = i;
            return &candidates[i];
        }
        ranked.pop();
    }
    return nullptr;
}

void EvictionOrder::take() {
    states[top].taken = true;
    while (!by_use.empty() && states[by_use.back().second].taken) {
        by_use.pop_back();
    }
}

std::vector<std::string> EvictionOrder::remove() {
    std::vector<std::string> unused;
    take();
    each_piece(top, [&](const std::string & name, Piece & piece) {
        piece.users ^= top;
        if (--piece.n_users == 0) {
            unused.push_back(name);
        } else if (piece.n_users == 1) {
            states[piece.users].own += piece.size;
            if (!states[piece.users].taken) {
                rank(piece.users);
            }
        }
    });
    for (const auto & name : unused) {
        pieces.erase(name);
    }
    return unused;
}

void EvictionOrder::keep() {
    take();
}

int64_t EvictionOrder::oldest_use() const {
    return by_use.empty() ? std::numeric_limits<int64_t>::max() : by_use.back().first;
}

} // namespace subkv
