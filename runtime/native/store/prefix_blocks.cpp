// prefix_blocks.cpp: see prefix_blocks.h.
#include "prefix_blocks.h"

#include "sha256.h"

#include <algorithm>
#include <cstring>
#include <tuple>

namespace subkv {

namespace {

// Version 2 adds the order of rows. Heads without one are written as version 1, which older versions of subkv read.
constexpr char     MAGIC[7]    = { 's', 'u', 'b', 'k', 'v', 'P', 'X' };
constexpr uint8_t  UNORDERED   = '1';
constexpr uint8_t  ORDERED     = '2';
constexpr uint32_t MAX_REGIONS = 1 << 13;
constexpr uint32_t MAX_ROW     = 1 << 24; // bytes
constexpr uint64_t MAX_PIECE   = (uint64_t) 1 << 44;
constexpr int32_t  MAX_TYPE    = 256;
constexpr size_t   LOOKED      = 1 << 20; // bytes of a state searched for the start of its cells
constexpr int      MAX_GUESSES = 64;      // starts of cells examined in these bytes

class Writer {
public:
    void bytes(const void * data, size_t size) {
        const auto * begin = (const uint8_t *) data;
        out.insert(out.end(), begin, begin + size);
    }

    template <typename T> void number(T value) {
        uint8_t le[sizeof(T)];
        for (size_t i = 0; i < sizeof(T); ++i) {
            le[i] = (uint8_t) ((uint64_t) value >> (8 * i));
        }
        bytes(le, sizeof(le));
    }

    void digest(const std::string & name) { bytes(name.data(), N_DIGEST); }

    void piece(const PieceRef & ref) {
        number(ref.size);
        if (ref.size > 0) {
            digest(ref.name);
        }
    }

    std::vector<uint8_t> out;
};

// No one reads why a head is damaged: it is removed.
void require(bool sound) {
    if (!sound) {
        throw PrefixInvalid("damaged head of a stored prompt");
    }
}

class Parser {
public:
    Parser(const uint8_t * data, size_t size) : at(data), left(size) {}

    const uint8_t * bytes(size_t size) {
        require(size <= left);
        const uint8_t * here = at;
        at += size;
        left -= size;
        return here;
    }

    template <typename T> T number() {
        const uint8_t * le    = bytes(sizeof(T));
        uint64_t        value = 0;
        for (size_t i = 0; i < sizeof(T); ++i) {
            value |= (uint64_t) le[i] << (8 * i);
        }
        return (T) value;
    }

    template <typename T> T number(T most) {
        const T value = number<T>();
        require(value <= most);
        return value;
    }

    std::string digest() {
        std::string name((const char *) bytes(N_DIGEST), N_DIGEST);
        require(name.find_first_not_of("0123456789abcdef") == std::string::npos);
        return name;
    }

    PieceRef piece() {
        PieceRef ref;
        ref.size = number<uint64_t>(MAX_PIECE);
        if (ref.size > 0) {
            ref.name = digest();
        }
        return ref;
    }

    void end() const { require(left == 0); }

private:
    const uint8_t * at;
    size_t          left;
};

void write_state(Writer & w, const StateRefs & state, bool with_order) {
    w.number((uint32_t) state.rows.regions.size());
    for (const auto & region : state.rows.regions) {
        w.number(region.offset);
        w.number(region.row);
    }
    if (with_order) {
        w.number((uint32_t) state.rows.order.size());
        for (const auto & run : state.rows.order) {
            w.number(run.row);
            w.number(run.n);
        }
    }
    w.number((uint32_t) state.blocks.size());
    for (const auto & block : state.blocks) {
        w.digest(block);
    }
    w.piece(state.rest);
}

// Every row of n_tokens belongs to one run.
bool covers(const std::vector<Run> & order, uint64_t n_tokens) {
    std::vector<bool> seen((size_t) n_tokens);
    for (const auto & run : order) {
        if (run.row + (uint64_t) run.n > n_tokens) {
            return false;
        }
        for (uint64_t row = run.row; row < run.row + (uint64_t) run.n; ++row) {
            if (seen[(size_t) row]) {
                return false;
            }
            seen[(size_t) row] = true;
        }
    }
    return std::all_of(seen.begin(), seen.end(), [](bool is_seen) { return is_seen; });
}

StateRefs read_state(Parser & p, uint64_t n_tokens, bool with_order) {
    StateRefs      state;
    auto &         regions   = state.rows.regions;
    const uint32_t n_regions = p.number<uint32_t>(MAX_REGIONS);
    for (uint32_t i = 0; i < n_regions; ++i) {
        const auto offset = p.number<uint64_t>(MAX_PIECE);
        const auto row    = p.number<uint32_t>(MAX_ROW);
        regions.push_back({ offset, row });
    }
    if (with_order) {
        const auto n_runs = p.number<uint32_t>((uint32_t) n_tokens);
        require((uint64_t) n_runs * n_regions <= MAX_SPANS);
        uint32_t token = 0;
        for (uint32_t i = 0; i < n_runs; ++i) {
            const auto row = p.number<uint32_t>();
            const auto n   = p.number<uint32_t>((uint32_t) n_tokens - token);
            require(n > 0);
            state.rows.order.push_back({ token, row, n });
            token += n;
        }
        require(n_runs == 0 || covers(state.rows.order, n_tokens));
    }
    const auto n_blocks = p.number<uint32_t>((uint32_t) (n_tokens / BLOCK_TOKENS));
    for (uint32_t i = 0; i < n_blocks; ++i) {
        state.blocks.push_back(p.digest());
    }
    state.rest = p.piece();
    // no sum of these overflows: 2^13 regions of 2^12 blocks of 2^8 rows of 2^24 bytes
    const uint64_t n_rows = state.rows.order.empty() ? n_blocks * BLOCK_TOKENS : n_tokens;
    uint64_t       end    = 0;
    for (const auto & region : regions) {
        require(region.row > 0 && region.offset >= end);
        end = region.offset + n_rows * region.row;
    }
    require(end <= state.size() && (n_blocks > 0) == (n_regions > 0) && (n_regions > 0 || state.rows.order.empty()));
    return state;
}

} // namespace

uint64_t StateRefs::block_bytes() const {
    uint64_t bytes = 0;
    for (const auto & region : rows.regions) {
        bytes += BLOCK_TOKENS * region.row;
    }
    return bytes;
}

std::vector<Run> StateRefs::runs_of(uint64_t first, uint64_t end) const {
    const auto & order = rows.order;
    if (order.empty()) {
        return { { (uint32_t) first, (uint32_t) first, (uint32_t) (end - first) } };
    }
    std::vector<Run> runs;
    auto             it = std::upper_bound(order.begin(), order.end(), first,
                                           [](uint64_t token, auto & run) { return token < run.token; });
    for (--it; it != order.end() && it->token < end; ++it) {
        const auto from = (uint32_t) std::max<uint64_t>(first, it->token);
        const auto to   = (uint32_t) std::min<uint64_t>(end, (uint64_t) it->token + it->n);
        runs.push_back({ from, it->row + (from - it->token), to - from });
    }
    return runs;
}

std::vector<Span> StateRefs::of_block(uint64_t i) const {
    const auto        runs = runs_of(i * BLOCK_TOKENS, (i + 1) * BLOCK_TOKENS);
    std::vector<Span> spans;
    for (const auto & region : rows.regions) {
        for (const auto & run : runs) {
            spans.push_back({ region.offset + (uint64_t) run.row * region.row, (uint64_t) run.n * region.row });
        }
    }
    return spans;
}

std::vector<Span> StateRefs::of_rest() const {
    const uint64_t   first  = blocks.size() * BLOCK_TOKENS;
    const uint64_t   n_rows = rows.order.empty() ? first : rows.order.back().token + (uint64_t) rows.order.back().n;
    std::vector<Run> runs;
    if (first < n_rows) {
        runs = runs_of(first, n_rows);
    }
    std::vector<Span> spans;
    uint64_t          end = 0;
    for (const auto & region : rows.regions) {
        spans.push_back({ end, region.offset - end });
        for (const auto & run : runs) {
            spans.push_back({ region.offset + (uint64_t) run.row * region.row, (uint64_t) run.n * region.row });
        }
        end = region.offset + n_rows * region.row;
    }
    spans.push_back({ end, size() - end });
    return spans;
}

std::string prefix_of(const std::string & identity) {
    return identity.substr(0, 24) + "-";
}

std::string PrefixHead::name() const {
    Writer listed;
    for (const int32_t token : tokens) {
        listed.number(token);
    }
    Sha256 digest;
    digest.update(listed.out.data(), listed.out.size());
    return prefix_of(identity) + digest.hex().substr(0, 32);
}

uint64_t PrefixHead::n_bytes() const {
    uint64_t bytes = 0;
    each_piece([&](const std::string &, uint64_t size) { bytes += size; });
    return bytes;
}

// Magic, hash of all following bytes, content.
std::vector<uint8_t> PrefixHead::file() const {
    const bool ordered =
        std::any_of(states.begin(), states.end(), [](auto & state) { return !state.rows.order.empty(); });
    Writer body;
    body.digest(identity);
    body.number((uint32_t) tokens.size());
    for (const int32_t token : tokens) {
        body.number(token);
    }
    for (const auto & state : states) {
        write_state(body, state, ordered);
    }
    body.number((uint32_t) points.size());
    for (const auto & point : points) {
        body.number(point.n_tokens);
        body.number(point.pos_min);
        body.number(point.pos_max);
        for (const auto & piece : point.data) {
            body.piece(piece);
        }
    }
    Sha256 digest;
    digest.update(body.out.data(), body.out.size());
    Writer file;
    file.bytes(MAGIC, sizeof(MAGIC));
    file.number(ordered ? ORDERED : UNORDERED);
    file.digest(digest.hex());
    file.bytes(body.out.data(), body.out.size());
    return std::move(file.out);
}

PrefixHead PrefixHead::parse(const std::vector<uint8_t> & file) {
    constexpr size_t begin = sizeof(MAGIC) + 1 + N_DIGEST;
    require(file.size() >= begin && std::memcmp(file.data(), MAGIC, sizeof(MAGIC)) == 0);
    const uint8_t version = file[sizeof(MAGIC)];
    if (version != UNORDERED && version != ORDERED) {
        throw PrefixForeign("written by another version");
    }
    Sha256 digest;
    digest.update(file.data() + begin, file.size() - begin);
    require(digest.hex() == std::string((const char *) file.data() + sizeof(MAGIC) + 1, N_DIGEST));
    Parser     p(file.data() + begin, file.size() - begin);
    PrefixHead head;
    head.identity    = p.digest();
    const uint32_t n = p.number<uint32_t>((uint32_t) MAX_TOKENS);
    for (uint32_t i = 0; i < n; ++i) {
        head.tokens.push_back(p.number<int32_t>());
    }
    for (auto & state : head.states) {
        state = read_state(p, n, version == ORDERED);
    }
    const auto n_points = p.number<uint32_t>(MAX_POINTS);
    for (uint32_t i = 0; i < n_points; ++i) {
        PointRefs & point = head.points.emplace_back();
        point.n_tokens    = p.number<int64_t>(n);
        point.pos_min     = p.number<int32_t>();
        point.pos_max     = p.number<int32_t>();
        require(point.n_tokens >= 0);
        for (auto & piece : point.data) {
            piece = p.piece();
        }
    }
    p.end();
    return head;
}

std::string address(const std::string & identity, const std::vector<Bytes> & pieces) {
    Sha256 digest;
    digest.update(identity.data(), identity.size());
    for (const Bytes & piece : pieces) {
        digest.update(piece.data, piece.size);
    }
    return digest.hex();
}

namespace {

template <typename T> T at(const uint8_t * p) {
    T value;
    std::memcpy(&value, p, sizeof(T));
    return value;
}

// Finds the rows of n cells behind each header (type i32, bytes of a row u64).
std::vector<Region> chain(const uint8_t * state, size_t size, uint64_t offset, uint64_t n, size_t most) {
    std::vector<Region> regions;
    while (regions.size() < most && offset + 12 <= size) {
        const auto type = at<int32_t>(state + offset);
        const auto row  = at<uint64_t>(state + offset + 4);
        offset += 12;
        if (type < 0 || type >= MAX_TYPE || row == 0 || row >= MAX_ROW || n * row > size - offset) {
            break;
        }
        regions.push_back({ offset, (uint32_t) row });
        offset += n * row;
    }
    return regions;
}

// Bytes of a cell: position, number of sequences (1), sequence. Where a position has parts or a cell its token, these
// follow the number: column and row of a picture, token.
constexpr uint64_t CELL = 12, LONG_CELL = 24;

// The order of n cells by position, in a picture by row and column. Returns false if there is no cells of one sequence.
bool read_cells(const uint8_t * cells, uint64_t n, uint64_t cell, std::vector<Run> & order) {
    struct Place {
        int32_t  pos, y, x;
        uint32_t i;

        bool operator<(const Place & other) const {
            return std::tie(pos, y, x, i) < std::tie(other.pos, other.y, other.x, other.i);
        }
    };
    const auto         seq = at<int32_t>(cells + cell - 4);
    std::vector<Place> places;
    for (uint64_t i = 0; i < n; ++i, cells += cell) {
        const auto pos = at<int32_t>(cells);
        if (pos < 0 || at<uint32_t>(cells + 4) != 1 || at<int32_t>(cells + cell - 4) != seq) {
            return false;
        }
        const bool parts = cell == LONG_CELL;
        places.push_back(
            { pos, parts ? at<int32_t>(cells + 12) : 0, parts ? at<int32_t>(cells + 8) : 0, (uint32_t) i });
    }
    std::sort(places.begin(), places.end());
    order.clear();
    uint32_t token = 0;
    for (const auto & place : places) {
        if (!order.empty() && place.i == order.back().row + order.back().n) {
            ++order.back().n;
        } else {
            order.push_back({ token, place.i, 1 });
        }
        ++token;
    }
    if (order.size() == 1) {
        order.clear();
    }
    return true;
}

// Rows of the cells whose number is at `offset`.
Rows rows_at(const uint8_t * state, size_t size, uint64_t offset, uint64_t n) {
    for (const uint64_t cell : { CELL, LONG_CELL }) {
        const uint64_t cells = offset + 4, end = cells + n * cell;
        if (end + 8 > size) {
            continue;
        }
        const auto by_element = at<uint32_t>(state + end);
        const auto n_layer    = at<uint32_t>(state + end + 4);
        Rows       rows;
        if (by_element <= 1 && n_layer > 0 && n_layer <= MAX_REGIONS / 2 &&
            read_cells(state + cells, n, cell, rows.order)) {
            rows.regions = chain(state, size, end + 8, n, 2 * (size_t) n_layer);
            if (!rows.regions.empty()) {
                return rows;
            }
        }
    }
    return {};
}

// The first rows of n cells behind `offset`.
Rows next_rows(const uint8_t * state, size_t size, uint64_t offset, uint64_t n) {
    const uint64_t end   = std::min<uint64_t>(size, offset + LOOKED);
    int            tries = 0;
    for (; offset + CELL <= end && tries < MAX_GUESSES; ++offset) {
        if (at<uint32_t>(state + offset) == n && at<uint32_t>(state + offset + 8) == 1) {
            ++tries;
            Rows rows = rows_at(state, size, offset, n);
            if (!rows.regions.empty()) {
                return rows;
            }
        }
    }
    return {};
}

} // namespace

// llama.cpp writes: the number of cells, the cells, a flag for values by element, the number of layers, and then for all
// keys, for all values, per layer: type, bytes of a row, n rows. Some models have a second cache of the same cells. A
// wrong guess only loses sharing.
Rows find_rows(const uint8_t * state, size_t size, uint64_t n) {
    if (n < BLOCK_TOKENS || n > MAX_TOKENS) {
        return {};
    }
    Rows rows = next_rows(state, size, 0, n);
    for (bool more = !rows.regions.empty(); more;) {
        const auto & last = rows.regions.back();
        const Rows   next = next_rows(state, size, last.offset + n * last.row, n);
        more              = !next.regions.empty() && next.order == rows.order &&
                            rows.regions.size() + next.regions.size() <= MAX_REGIONS;
        if (more) {
            rows.regions.insert(rows.regions.end(), next.regions.begin(), next.regions.end());
        }
    }
    return rows.order.size() * rows.regions.size() <= MAX_SPANS ? rows : Rows{};
}

size_t common_prefix(const std::vector<int32_t> & tokens, const int32_t * other, size_t n) {
    const size_t most = std::min(tokens.size(), n);
    return (size_t) (std::mismatch(tokens.begin(), tokens.begin() + (std::ptrdiff_t) most, other).first -
                     tokens.begin());
}

} // namespace subkv
