// prefix_blocks.cpp: see prefix_blocks.h.
#include "prefix_blocks.h"

#include "sha256.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace subkv {

namespace {

constexpr char     MAGIC[8]    = { 's', 'u', 'b', 'k', 'v', 'P', 'X', '1' };
constexpr uint32_t MAX_REGIONS = 1 << 13;
constexpr uint32_t MAX_ROW     = 1 << 24; // bytes
constexpr uint64_t MAX_PIECE   = (uint64_t) 1 << 44;
constexpr int32_t  MAX_TYPE    = 256;
constexpr size_t   LOOKED      = 1 << 20; // bytes of a state searched for the start of its cells

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

void write_state(Writer & w, const StateRefs & state) {
    w.number((uint32_t) state.regions.size());
    for (const auto & region : state.regions) {
        w.number(region.offset);
        w.number(region.row);
    }
    w.number((uint32_t) state.blocks.size());
    for (const auto & block : state.blocks) {
        w.digest(block);
    }
    w.piece(state.rest);
}

StateRefs read_state(Parser & p, uint64_t n_tokens) {
    StateRefs      state;
    const uint32_t n_regions = p.number<uint32_t>(MAX_REGIONS);
    for (uint32_t i = 0; i < n_regions; ++i) {
        const auto offset = p.number<uint64_t>(MAX_PIECE);
        const auto row    = p.number<uint32_t>(MAX_ROW);
        state.regions.push_back({ offset, row });
    }
    const auto n_blocks = p.number<uint32_t>((uint32_t) (n_tokens / BLOCK_TOKENS));
    for (uint32_t i = 0; i < n_blocks; ++i) {
        state.blocks.push_back(p.digest());
    }
    state.rest = p.piece();
    // no sum of these overflows: 2^13 regions of 2^12 blocks of 2^8 rows of 2^24 bytes
    uint64_t end = 0;
    for (const auto & region : state.regions) {
        require(region.row > 0 && region.offset >= end);
        end = region.offset + (uint64_t) n_blocks * BLOCK_TOKENS * region.row;
    }
    require(end <= state.size() && (n_blocks > 0) == (n_regions > 0));
    return state;
}

} // namespace

uint64_t StateRefs::block_bytes() const {
    uint64_t bytes = 0;
    for (const auto & region : regions) {
        bytes += BLOCK_TOKENS * region.row;
    }
    return bytes;
}

std::vector<Span> StateRefs::of_block(uint64_t i) const {
    std::vector<Span> spans;
    for (const auto & region : regions) {
        const uint64_t size = BLOCK_TOKENS * region.row;
        spans.push_back({ region.offset + i * size, size });
    }
    return spans;
}

std::vector<Span> StateRefs::of_rest() const {
    std::vector<Span> spans;
    uint64_t          end = 0;
    for (const auto & region : regions) {
        spans.push_back({ end, region.offset - end });
        end = region.offset + blocks.size() * BLOCK_TOKENS * region.row;
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
    Writer body;
    body.digest(identity);
    body.number((uint32_t) tokens.size());
    for (const int32_t token : tokens) {
        body.number(token);
    }
    for (const auto & state : states) {
        write_state(body, state);
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
    file.digest(digest.hex());
    file.bytes(body.out.data(), body.out.size());
    return std::move(file.out);
}

PrefixHead PrefixHead::parse(const std::vector<uint8_t> & file) {
    constexpr size_t begin = sizeof(MAGIC) + N_DIGEST;
    require(file.size() >= begin && std::memcmp(file.data(), MAGIC, sizeof(MAGIC) - 1) == 0);
    if (file[sizeof(MAGIC) - 1] != (uint8_t) MAGIC[sizeof(MAGIC) - 1]) {
        throw PrefixForeign("written by another version");
    }
    Sha256 digest;
    digest.update(file.data() + begin, file.size() - begin);
    require(digest.hex() == std::string((const char *) file.data() + sizeof(MAGIC), N_DIGEST));
    Parser     p(file.data() + begin, file.size() - begin);
    PrefixHead head;
    head.identity    = p.digest();
    const uint32_t n = p.number<uint32_t>((uint32_t) MAX_TOKENS);
    for (uint32_t i = 0; i < n; ++i) {
        head.tokens.push_back(p.number<int32_t>());
    }
    for (auto & state : head.states) {
        state = read_state(p, n);
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

} // namespace

// llama.cpp writes: the number of cells, the cells from position 0 on, a flag for values by element, the number of
// layers, and then for all keys, for all values, per layer: type, bytes of a row, n rows. A wrong guess only loses
// sharing.
std::vector<Region> find_regions(const uint8_t * state, size_t size, uint64_t n) {
    if (n < BLOCK_TOKENS || n > MAX_TOKENS) {
        return {};
    }
    const int32_t pattern[3] = { (int32_t) n, 0, 1 };
    const auto *  first      = (const uint8_t *) pattern;
    const auto *  end        = state + std::min(size, LOOKED);
    const auto *  start      = std::search(state, end, first, first + sizeof(pattern));
    if (start == end) {
        return {};
    }
    for (const uint64_t cell : { 12, 20 }) { // bytes: position, sequences; 20: three-part positions
        const uint64_t offset = (uint64_t) (start - state) + 4 + n * cell;
        if (offset + 8 > size) {
            continue;
        }
        const auto by_element = at<uint32_t>(state + offset);
        const auto n_layer    = at<uint32_t>(state + offset + 4);
        if (by_element <= 1 && n_layer > 0 && n_layer <= MAX_REGIONS / 2) {
            auto regions = chain(state, size, offset + 8, n, 2 * (size_t) n_layer);
            if (!regions.empty()) {
                return regions;
            }
        }
    }
    return {};
}

size_t common_prefix(const std::vector<int32_t> & tokens, const int32_t * other, size_t n) {
    const size_t most = std::min(tokens.size(), n);
    return (size_t) (std::mismatch(tokens.begin(), tokens.begin() + (std::ptrdiff_t) most, other).first -
                     tokens.begin());
}

} // namespace subkv
