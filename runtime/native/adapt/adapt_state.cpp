// adapt_state.cpp: saves and restores an adapter's state as little-endian bytes.
//   Head | sketch, or with a window its rows | per chunk in use, by slot: Entry, ratio [n_bands] f32, R [n][n] half
#include "adapt.h"
#include "error.h"
#include "numbers.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <initializer_list>

namespace subkv {

namespace {

constexpr uint32_t STATE_VERSION = 2;

struct Head {
    uint32_t    version;
    int32_t     rank;
    AdaptParams params;
    int32_t     n_chunks;
    int32_t     current;
    float       residual;
    int64_t     since, n_seen, n_ahead;
    AdaptStats  stats;
    uint64_t    bytes_sketch;
};

struct Entry {
    int64_t slot, opened;
};

void append(std::vector<uint8_t> & out, const void * bytes, size_t n) {
    const auto * p = static_cast<const uint8_t *>(bytes);
    out.insert(out.end(), p, p + n);
}

bool take(const uint8_t *& bytes, size_t & left, void * out, size_t n) {
    if (n > left) {
        return false;
    }
    std::copy_n(bytes, n, static_cast<uint8_t *>(out)); // `out` may be null if n is 0
    bytes += n;
    left -= n;
    return true;
}

// Upper limit of counts, far below overflow.
bool plausible(std::initializer_list<int64_t> counts) {
    return std::all_of(counts.begin(), counts.end(),
                       [](int64_t count) { return count >= 0 && count < INT64_C(1) << 62; });
}

bool same(const AdaptParams & a, const AdaptParams & b) {
    return a.kind == b.kind && a.rank == b.rank && a.rows == b.rows && a.decay == b.decay && a.rate == b.rate &&
           a.block == b.block && a.length == b.length && a.warm == b.warm && a.max_chunks == b.max_chunks &&
           a.tau == b.tau && a.gain == b.gain && a.reuse == b.reuse && a.merge == b.merge && a.window == b.window &&
           a.lookahead == b.lookahead;
}

} // namespace

std::vector<uint8_t> Adapter::save() const {
    Head head;
    std::memset(static_cast<void *>(&head), 0, sizeof(head)); // also the padding, so that equal states are equal bytes
    head.version      = STATE_VERSION;
    head.rank         = codec_.rank;
    head.params       = params_;
    head.n_chunks     = n_chunks();
    head.current      = current_;
    head.residual     = residual_;
    head.since        = since_;
    head.n_seen       = n_seen_;
    head.n_ahead      = n_ahead_;
    head.stats        = stats_;
    head.bytes_sketch = bytes_sketch();
    std::vector<uint8_t> out;
    append(out, &head, sizeof(head));
    append(out, sketch_.data(), sketch_.size() * sizeof(uint64_t));
    append(out, window_.data(), window_.size() * sizeof(float));
    for (int32_t slot = 1; slot <= params_.max_chunks; ++slot) {
        const ChunkBasis * chunk = this->chunk(slot);
        if (chunk == nullptr) {
            continue;
        }
        const Entry entry = { slot, chunk->opened };
        append(out, &entry, sizeof(entry));
        for (int32_t b = 0; b < codec_.n_bands; ++b) {
            append(out, &chunk->codec.bands[b].ratio, sizeof(float));
        }
        append(out, chunk->rotation.data(), chunk->rotation.size() * sizeof(uint16_t));
    }
    return out;
}

void Adapter::restore(const uint8_t * bytes, size_t n) {
    Head   head;
    size_t left = n;
    if (!take(bytes, left, &head, sizeof(head))) {
        refuse("adapt state", "at least " + std::to_string(sizeof(head)) + " bytes", std::to_string(n));
    }
    if (head.version != STATE_VERSION || head.rank != codec_.rank || !same(head.params, params_)) {
        refuse("adapt state", "one of this head and of the same parameters", "another");
    }
    const AdaptStats & s = head.stats;
    if (!plausible({ head.since, head.n_seen, head.n_ahead, s.n_blocks, s.n_opened, s.n_refused, s.n_merged,
                     s.n_recoded, s.n_nonfinite })) {
        refuse("adapt state", "counts from 0 on", "others");
    }
    const auto   rank  = (size_t) codec_.rank;
    const bool   freed = params_.merge == 0 && head.n_chunks == params_.max_chunks; // complete()
    const size_t row   = rank * sizeof(float);
    const size_t held  = row * (size_t) std::min<int64_t>(head.n_seen, params_.window); // rows of the window
    const size_t kept  = freed ? 0 : params_.window > 0 ? held : sketch_bytes(sketch_params());
    const size_t entry = sizeof(Entry) + (size_t) codec_.n_bands * sizeof(float) + rank * rank * sizeof(uint16_t);
    if (head.n_chunks < 0 || head.n_chunks > params_.max_chunks || head.current < 0 ||
        head.n_ahead > params_.lookahead || head.bytes_sketch != kept ||
        left != head.bytes_sketch + (size_t) head.n_chunks * entry) {
        refuse("adapt state", "chunks that fill it",
               std::to_string(head.n_chunks) + " in " + std::to_string(n) + " bytes");
    }
    const bool            rows = params_.window > 0;
    std::vector<uint64_t> sketch(rows ? 0 : kept / sizeof(uint64_t));
    std::vector<float>    window(rows ? kept / sizeof(float) : 0);
    take(bytes, left, rows ? (void *) window.data() : (void *) sketch.data(), kept);
    std::vector<std::unique_ptr<ChunkBasis>> chunks(chunks_.size());
    for (int32_t i = 0; i < head.n_chunks; ++i) {
        Entry e;
        float ratio[MAX_BANDS];
        auto  chunk = std::make_unique<ChunkBasis>();
        chunk->rotation.resize(rank * rank);
        take(bytes, left, &e, sizeof(e));
        take(bytes, left, ratio, (size_t) codec_.n_bands * sizeof(float));
        take(bytes, left, chunk->rotation.data(), rank * rank * sizeof(uint16_t));
        if (e.slot < 1 || e.slot > params_.max_chunks || chunks[(size_t) e.slot - 1] != nullptr) {
            refuse("adapt state", "every slot once in 1.." + std::to_string(params_.max_chunks),
                   std::to_string(e.slot));
        }
        for (int32_t b = 0; b < codec_.n_bands; ++b) {
            if (!(ratio[b] > 0.0f && std::isfinite(ratio[b]))) {
                refuse("adapt state", "positive ratios", number(ratio[b]));
            }
        }
        for (const uint16_t value : chunk->rotation) {
            if ((value & 0x7c00) == 0x7c00) {
                refuse("adapt state", "finite rotations", "others");
            }
        }
        bind_chunk_codec(codec_, ratio, *chunk);
        chunk->opened               = e.opened;
        chunks[(size_t) e.slot - 1] = std::move(chunk);
    }
    if (head.current > params_.max_chunks || (head.current > 0 && chunks[(size_t) head.current - 1] == nullptr)) {
        refuse("adapt state", "a chunk in use that is there", std::to_string(head.current));
    }
    if (!std::all_of(window.begin(), window.end(), [](float x) { return std::isfinite(x); }) ||
        (!freed && !rows && !sketch_valid(sketch_params(), sketch.data()))) {
        refuse("adapt state", "a sketch of finite values", "another");
    }
    chunks_.swap(chunks);
    sketch_.swap(sketch);
    window_.swap(window);
    n_seen_   = head.n_seen;
    n_ahead_  = head.n_ahead;
    current_  = head.current;
    residual_ = head.residual;
    since_    = head.since;
    stats_    = head.stats;
}

} // namespace subkv
