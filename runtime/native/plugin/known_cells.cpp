// known_cells.cpp: see known_cells.h.
#include "known_cells.h"

#include "cache.h"
#include "nodes.h"

#include <algorithm>
#include <unordered_set>

namespace subkv::plugin {

// What the tokens of a graph see of a stream's first n_kv cells.
struct KnownCells::Sight {
    const std::vector<GraphToken> & tokens;
    const ggml_tensor *             mask;

    int64_t n_kv() const { return mask->ne[0]; }
    bool    sees(size_t token, int64_t cell) const {
        return cell < n_kv() && mask_value(mask, mask_row(mask, 0, (int64_t) token) + cell) != -INFINITY;
    }
};

KnownCells::KnownCells(uint32_t n_stream, uint32_t n_cells, int32_t n_seq) :
    n_cells_(n_cells), n_stream_((int32_t) n_stream), cells_((size_t) n_stream * n_cells), held_((size_t) n_seq),
    used_((size_t) n_seq) {}

void KnownCells::positions(uint32_t stream, uint32_t n, int32_t * out) const {
    const Cell * cells = cells_.data() + (int64_t) stream * n_cells_;
    std::transform(cells, cells + n, out, [](const Cell & cell) { return cell.pos; });
}

void KnownCells::find(int32_t seq, int32_t p0, int32_t p1, std::vector<PosCell> & out) const {
    const Positions & held = held_[(size_t) seq];
    out.clear();
    for (auto it = held.lower_bound(p0); it != held.end() && it->first < p1; ++it) {
        out.push_back({ it->first, it->second });
    }
}

int32_t KnownCells::max_pos_outside(int32_t seq, int32_t p0, int32_t p1) const {
    const Positions & held = held_[(size_t) seq];
    auto              it   = held.end();
    while (it != held.begin()) {
        --it;
        if (it->first < p0 || it->first >= p1) {
            return it->first;
        }
        it = held.lower_bound(p0);
    }
    return -1;
}

void KnownCells::clear() {
    std::fill(cells_.begin(), cells_.end(), Cell());
    std::fill(held_.begin(), held_.end(), Positions());
}

std::pair<int32_t, int32_t> KnownCells::sequences(int64_t stream) const {
    const auto one = (int32_t) stream;
    return n_stream_ > 1 ? std::pair(one, one + 1) : std::pair(0, (int32_t) held_.size());
}

void KnownCells::forget(int64_t first, int64_t n) {
    for (int64_t at = first; at < first + n; ++at) {
        Cell & cell         = cells_[(size_t) at];
        const auto [s0, s1] = cell.seq < 0 ? std::pair(0, 0) : sequences(at / n_cells_);
        for (int32_t seq = s0; seq < s1; ++seq) {
            const auto it = held_[(size_t) seq].find(cell.pos);
            if (it != held_[(size_t) seq].end() && it->second == at % n_cells_) {
                held_[(size_t) seq].erase(it);
            }
        }
        cell.pos = MAX_POSITION;
        cell.seq = -1;
    }
}

void KnownCells::remove(Cache & cache, int32_t seq, int32_t p0, int32_t p1) {
    Positions & held  = held_[(size_t) seq];
    const auto  begin = held.lower_bound(p0), end = held.lower_bound(p1);
    if (begin == end) {
        return;
    }
    cache.remove(seq, p0, p1, *this);
    const Positions removed(begin, end);
    held.erase(begin, end);
    const auto [s0, s1] = sequences(stream_of(seq));
    for (const auto & [pos, at] : removed) { // another sequence may hold the cell
        Cell & cell = cells_[(size_t) (first_cell(seq) + at)];
        cell.seq    = -1;
        for (int32_t other = s0; other < s1; ++other) {
            const auto it = held_[(size_t) other].find(pos);
            cell.seq      = it != held_[(size_t) other].end() && it->second == at ? other : cell.seq;
        }
        cell.pos = cell.seq < 0 ? MAX_POSITION : cell.pos;
    }
}

int32_t KnownCells::unused(Cache & cache) {
    const auto it = std::min_element(used_.begin(), used_.end());
    if (*it == n_graphs_) {
        return -1;
    }
    const auto seq = (int32_t) (it - used_.begin());
    remove(cache, seq, 0, MAX_POSITION);
    return seq;
}

bool KnownCells::continues(const Sight & sight, size_t token, int32_t seq) const {
    const Positions & held = held_[(size_t) seq];
    return !held.empty() && held.rbegin()->first == sight.tokens[token].pos - 1 &&
           sight.sees(token, held.rbegin()->second);
}

int32_t KnownCells::sequence(Cache & cache, const Sight & sight, size_t token, int32_t previous, bool & exact) {
    const GraphToken & t = sight.tokens[token];
    if (n_stream_ > 1) {
        return (int32_t) (t.cell / n_cells_);
    }
    if (previous >= 0 && continues(sight, token, previous)) { // as nearly all tokens do
        return previous;
    }
    for (int32_t seq = 0; seq < (int32_t) held_.size(); ++seq) {
        if (continues(sight, token, seq)) {
            return seq;
        }
    }
    Cell last; // that the token sees before itself
    for (int64_t cell = 0; cell < sight.n_kv(); ++cell) {
        const Cell & other = cells_[(size_t) cell];
        if (cell != t.cell && other.seq >= 0 && other.pos > last.pos && other.pos < t.pos && sight.sees(token, cell)) {
            last = other;
        }
    }
    const Cell own = cells_[(size_t) t.cell];
    if (last.seq >= 0 &&
        (held_[(size_t) last.seq].rbegin()->first == last.pos || (own.seq == last.seq && own.pos >= t.pos))) {
        return last.seq;
    }
    if (last.seq >= 0) {
        used_[(size_t) last.seq] = n_graphs_;
    }
    const int32_t seq = unused(cache);
    if (seq < 0) { // it reads codes, and the exact sinks of the sequence that it continues
        exact = false;
        return std::max(0, last.seq);
    }
    if (last.seq >= 0 && cache.copy_seq(last.seq, seq, 0, last.pos + 1, *this)) {
        const Positions & from = held_[(size_t) last.seq];
        held_[(size_t) seq]    = Positions(from.begin(), from.upper_bound(last.pos));
    }
    return seq;
}

// The engine takes a cell at an exact position, a sink or one after `past`, from the window of the token's sequence. If
// that does not hold the cell, all tokens read its codes.
void KnownCells::check_held(const Cache & cache, const Sight & sight, size_t token, int32_t past) {
    const int32_t     seq  = seqs_[token];
    const Positions & held = held_[(size_t) seq];
    for (int64_t cell = 0; cell < sight.n_kv(); ++cell) {
        const int64_t at  = first_cell(seq) + cell;
        const int32_t pos = cells_[(size_t) at].pos;
        if (pos < 0 || pos == MAX_POSITION || (pos >= cache.n_sink() && pos <= past) || !sight.sees(token, cell)) {
            continue;
        }
        const auto it = held.find(pos);
        if (it == held.end() || it->second != cell) {
            if (cells_[(size_t) at].graph == n_graphs_) { // a token of this graph
                for (size_t i = 0; i < tokens_.size(); ++i) {
                    tokens_[i].in_picture |= sight.tokens[i].cell == at;
                }
            }
            forget(at, 1);
        }
    }
}

const std::vector<TokenDesc> & KnownCells::enter(Cache & cache, const std::vector<GraphToken> & tokens,
                                                 const ggml_tensor * mask) {
    std::vector<GraphToken> own = tokens;
    const Sight             sight{ own, mask };
    ++n_graphs_;
    tokens_.assign(own.size(), TokenDesc{});
    seqs_.assign(own.size(), 0);
    const int64_t stream0  = own.empty() ? 0 : own[0].cell / n_cells_;
    int32_t       previous = -1;
    for (size_t i = 0; i < own.size(); ++i) {
        GraphToken & t = own[i];
        if (t.pos < 0) { // a token sees itself and all earlier ones of its sequence
            for (int64_t cell = 0; cell < sight.n_kv(); ++cell) {
                t.pos += sight.sees(i, cell);
            }
            t.pos = std::max(t.pos, 0);
        }
        // Else it is read through its codes, as the tokens of a picture are.
        bool          exact = !t.in_picture && t.pos < MAX_POSITION;
        const int32_t seq   = sequence(cache, sight, i, previous, exact);
        if (exact) {
            const Positions & held = held_[(size_t) seq];
            for (auto it = held.lower_bound(t.pos); exact && it != held.end(); ++it) {
                exact = cells_[(size_t) (first_cell(seq) + it->second)].graph != n_graphs_;
            }
        }
        used_[(size_t) seq] = n_graphs_;
        seqs_[i] = previous = seq;
        if (exact) { // a removed tail
            remove(cache, seq, t.pos, MAX_POSITION);
        }
        forget(t.cell, 1);
        const auto cell = (int32_t) (t.cell % n_cells_);
        if (exact) {
            cells_[(size_t) t.cell]    = { t.pos, seq, n_graphs_ };
            held_[(size_t) seq][t.pos] = cell;
        }
        tokens_[i] = { t.pos, 1, &seqs_[i], (int32_t) (t.cell / n_cells_ - stream0), cell, !exact };
    }
    // Of a sequence's tokens, the last one sees the most, and the first one has exact cells furthest back.
    std::vector<int32_t> first(held_.size(), MAX_POSITION);
    for (size_t i = 0; i < own.size(); ++i) {
        int32_t & pos = first[(size_t) seqs_[i]];
        pos           = std::min(pos, own[i].pos);
    }
    for (size_t i = own.size(); i-- > 0;) {
        int32_t & pos = first[(size_t) seqs_[i]];
        if (tokens_[i].in_picture) { // which may continue the sequence apart from its other tokens
            check_held(cache, sight, i, MAX_POSITION);
        } else if (pos != MAX_POSITION) {
            check_held(cache, sight, i, pos - cache.n_recent());
            pos = MAX_POSITION;
        }
    }
    return tokens_;
}

std::vector<KnownCells::Adopted> KnownCells::adopt(Cache & cache, const std::vector<Range> & ranges,
                                                   const std::vector<GraphToken> & tokens, const ggml_tensor * mask) {
    const Sight          sight{ tokens, mask };
    std::vector<Adopted> adopted(ranges.size(), Adopted{ -1, 0, 0 });

    // The sequences that this graph continues are not unused.
    ++n_graphs_;
    for (size_t i = 0; n_stream_ == 1 && i < tokens.size(); ++i) {
        for (int32_t seq = 0; seq < (int32_t) held_.size(); ++seq) {
            used_[(size_t) seq] = continues(sight, i, seq) ? n_graphs_ : used_[(size_t) seq];
        }
    }
    std::unordered_set<int64_t> own; // that the graph writes
    for (const GraphToken & token : tokens) {
        own.insert(token.cell);
    }
    for (size_t i = 0; i < tokens.size(); ++i) {
        std::vector<int64_t> seen(ranges.size(), 0); // before the last cell that the token sees
        int64_t              pos   = tokens[i].pos;
        bool                 whole = true; // else positions cannot be counted
        for (size_t r = 0; r < ranges.size(); ++r) {
            const Range & range = ranges[r];
            if (adopted[r].seq < 0 && tokens[i].cell / n_cells_ == range.first / n_cells_) {
                const auto sees = [&](int64_t cell) {
                    return sight.sees(i, (range.first + cell) % n_cells_) && own.count(range.first + cell) == 0;
                };
                seen[r] = range.n;
                while (seen[r] > 0 && !sees(seen[r] - 1)) {
                    --seen[r];
                }
                for (int64_t cell = 0; whole && cell < seen[r]; ++cell) {
                    whole = sees(cell);
                }
                pos -= seen[r];
            }
        }
        if (!whole || pos < 0 || pos == tokens[i].pos) {
            continue;
        }
        const int32_t seq = n_stream_ > 1 ? (int32_t) (tokens[i].cell / n_cells_) : unused(cache);
        if (seq < 0) {
            break;
        }
        remove(cache, seq, 0, MAX_POSITION);
        used_[(size_t) seq] = n_graphs_;
        for (size_t r = 0; r < ranges.size(); ++r) {
            if (seen[r] == 0) {
                continue;
            }
            adopted[r] = { seq, (int32_t) pos, seen[r] };
            forget(ranges[r].first, ranges[r].n);
            Positions & held = held_[(size_t) seq];
            for (int64_t cell = ranges[r].first; cell < ranges[r].first + seen[r]; ++cell, ++pos) {
                cells_[(size_t) cell] = { (int32_t) pos, seq, 0 };
                held.insert_or_assign(held.end(), (int32_t) pos, (int32_t) (cell % n_cells_));
            }
        }
    }
    return adopted;
}

void KnownCells::shift(Cache & cache, const int32_t * by) {
    for (int32_t seq = 0; seq < (int32_t) held_.size(); ++seq) {
        const int32_t * of    = by + first_cell(seq);
        const Positions held  = held_[(size_t) seq];
        const auto      moves = [&](const auto & entry) { return of[entry.second] != 0; };
        for (auto it = std::find_if(held.begin(), held.end(), moves); it != held.end();) {
            const int32_t distance = of[it->second];
            auto          end      = it;
            while (end != held.end() && of[end->second] == distance) {
                ++end;
            }
            const int32_t p0 = it->first, p1 = std::prev(end)->first + 1;
            if (distance < 0) { // cells there have been removed
                remove(cache, seq, std::max(0, p0 + distance), p0);
            } else {
                remove(cache, seq, p1, p1 + distance);
            }
            const bool  moved = cache.shift(seq, p0, p1, distance, *this);
            Positions & now   = held_[(size_t) seq];
            now.erase(now.lower_bound(p0), now.lower_bound(p1));
            for (; it != end; ++it) {
                Cell & cell = cells_[(size_t) (first_cell(seq) + it->second)];
                if (moved) { // all sequences that hold the cell move it
                    cell.pos                  = it->first + distance;
                    now[it->first + distance] = it->second;
                } else {
                    forget(first_cell(seq) + it->second, 1);
                }
            }
            it = std::find_if(end, held.end(), moves);
        }
    }
}

void KnownCells::copy_stream(Cache & cache, int32_t src, int32_t dst) {
    const auto from = cells_.begin() + src * n_cells_;
    cache.remove(dst, 0, MAX_POSITION, *this);
    cache.copy_seq(src, dst, 0, MAX_POSITION, *this);
    std::copy(from, from + n_cells_, cells_.begin() + dst * n_cells_);
    std::for_each(cells_.begin() + dst * n_cells_, cells_.begin() + (dst + 1) * n_cells_,
                  [&](Cell & cell) { cell.seq = cell.seq < 0 ? -1 : dst; });
    held_[(size_t) dst] = held_[(size_t) src];
}

} // namespace subkv::plugin
