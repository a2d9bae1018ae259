// adapt.cpp: the adaptive coder of one head. Steps for a block: code it with the current chunk, add it to the sketch,
// and then, if the residual or the chunk's length triggers it, try the sketch's basis on the same block.
#include "adapt.h"

#include "error.h"
#include "numbers.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace subkv {

namespace {

void check_range(const char * name, int64_t value, int64_t low, int64_t high) {
    if (value < low || value > high) {
        refuse_adapt(name, std::to_string(low) + ".." + std::to_string(high), std::to_string(value));
    }
}

} // namespace

AdaptParams Adapter::checked(AdaptParams p, int32_t rank) {
    const bool oja = (SketchKind) p.kind == SketchKind::OJA;
    check_range("rank", p.rank, 0, rank);
    // Oja's U with all n directions would be the whole space, which no update rotates
    p.rank = p.rank != 0 ? p.rank : oja ? std::max(rank / 2, 1) : rank;
    p.rows = p.rows != 0 ? p.rows : oja ? p.rank : 2 * p.rank;
    check_range("rows", p.rows, p.rank, oja ? p.rank : MAX_SKETCH_ROWS);
    std::string err;
    if (!sketch_check({ (SketchKind) p.kind, rank, p.rows, p.decay, p.rate }, err)) {
        throw Invalid(err);
    }
    check_range("block", p.block, 1, MAX_ADAPT_BLOCK);
    check_range("length", p.length, 0, INT32_MAX);
    check_range("warm", p.warm, 0, INT32_MAX);
    check_range("max_chunks", p.max_chunks, 1, MAX_ADAPT_CHUNKS);
    check_range("reuse", p.reuse, 0, 1);
    check_range("merge", p.merge, 0, 1);
    check_range("lookahead", p.lookahead, 0, MAX_ADAPT_BLOCK);
    if (p.window != 0) { // it has the block that is decided on
        check_range("window", p.window, p.block + p.lookahead, MAX_ADAPT_WINDOW);
    }
    if (!(p.tau > 0.0f)) {
        refuse_adapt("tau", "a residual above 0", number(p.tau));
    }
    if (!(p.gain > 0.0f && std::isfinite(p.gain))) {
        refuse_adapt("gain", "a factor above 0", number(p.gain));
    }
    return p;
}

Adapter::Adapter(const Ops & ops, const HeadCodec & codec, const AdaptParams & params) :
    ops_(ops), codec_(codec), params_(params), chunks_((size_t) params.max_chunks),
    sketch_(params.window > 0 ? 0 : sketch_bytes(sketch_params()) / sizeof(uint64_t)) {
    for (int32_t b = 0; b < codec.n_bands; ++b) {
        const double left = 1.0 - quantizer_distortion(codec.bands[b].bits);
        keep_.insert(keep_.end(), (size_t) codec.bands[b].n, (float) left);
        undo_.insert(undo_.end(), (size_t) codec.bands[b].n, (float) (1.0 / left));
    }
    if (!sketch_.empty()) {
        sketch_init(sketch_params(), sketch_.data());
    }
}

SketchParams Adapter::sketch_params() const {
    return { (SketchKind) params_.kind, codec_.rank, params_.rows, params_.decay, params_.rate };
}

const ChunkBasis * Adapter::chunk(int32_t slot) const {
    return slot >= 1 && slot <= params_.max_chunks ? chunks_[(size_t) slot - 1].get() : nullptr;
}

int32_t Adapter::n_chunks() const {
    return (int32_t) std::count_if(chunks_.begin(), chunks_.end(), [](const auto & chunk) { return chunk != nullptr; });
}

bool Adapter::complete() const {
    return params_.merge == 0 && n_chunks() == params_.max_chunks;
}

void Adapter::add_stats(subkv_adapt_stats & sum) const {
    sum.n_blocks += stats_.n_blocks;
    sum.n_chunks += n_chunks();
    sum.n_opened += stats_.n_opened;
    sum.n_refused += stats_.n_refused;
    sum.n_merged += stats_.n_merged;
    sum.n_recoded += stats_.n_recoded;
    sum.n_nonfinite += stats_.n_nonfinite;
    sum.bytes_bases += (int64_t) bytes_bases();
    sum.bytes_sketch += (int64_t) bytes_sketch();
    sum.residual = std::max(sum.residual, (double) residual_);
}

int64_t Adapter::sketch_rows(float * s) const {
    std::vector<uint64_t> of_window;
    return complete() ? 0 : subkv::sketch_rows(sketch_params(), sketch(of_window), s);
}

size_t Adapter::bytes_bases() const {
    const auto n = (size_t) codec_.rank;
    return (size_t) n_chunks() * (n * n * sizeof(uint16_t) + (size_t) codec_.n_bands * sizeof(float));
}

// x [n][ldx] -> space [n][rank]: x' = E x - offset. All elements of a non-finite row become NaN, so that no basis can
// code it and the sketch skips it. Returns the number of such rows.
int64_t Adapter::project(const float * x, int64_t ldx, int64_t n, std::vector<float> & space) {
    const int64_t rank  = codec_.rank;
    int64_t       n_bad = 0;
    space.resize((size_t) (n * rank));
    project_rows(ops_, codec_, x, ldx, n, space.data());
    for (int64_t t = 0; t < n; ++t) {
        float * row = space.data() + t * rank;
        if (!std::all_of(row, row + rank, [](float c) { return std::isfinite(c); })) {
            ++n_bad;
            std::fill(row, row + rank, NAN);
        }
    }
    return n_bad;
}

void Adapter::absorb(const float * space, int64_t n) {
    if (!sketch_.empty()) {
        sketch_absorb(sketch_params(), sketch_.data(), space, codec_.rank, n);
        return;
    }
    const auto rank = (size_t) codec_.rank, most = (size_t) params_.window * rank;
    for (int64_t t = 0; t < n; ++t, space += rank) {
        if (!std::isnan(*space)) {
            window_.insert(window_.end(), space, space + rank);
            ++n_seen_;
        }
    }
    if (window_.size() > most) {
        window_.erase(window_.begin(), window_.end() - (ptrdiff_t) most);
    }
}

const uint64_t * Adapter::sketch(std::vector<uint64_t> & of_window) const {
    if (params_.window == 0) {
        return sketch_.data();
    }
    of_window.resize(sketch_bytes(sketch_params()) / sizeof(uint64_t));
    sketch_init(sketch_params(), of_window.data());
    sketch_absorb(sketch_params(), of_window.data(), window_.data(), codec_.rank,
                  (int64_t) window_.size() / codec_.rank);
    return of_window.data();
}

// cells [n] -> x^' [n][rank]
void Adapter::decode(const ChunkBasis * chunk, const uint8_t * tiles, int64_t stride, int64_t n, const int64_t * cells,
                     float * space) const {
    const int64_t      rank = codec_.rank;
    std::vector<float> c((size_t) (n * rank));
    ops_.dequantize(chunk != nullptr ? chunk->codec : codec_, tiles, stride, n, cells, c.data());
    for (int64_t t = 0; t < n; ++t) {
        for (int64_t i = 0; i < rank; ++i) {
            c[(size_t) (t * rank + i)] *= undo_[(size_t) i];
        }
    }
    if (chunk == nullptr) {
        std::copy(c.begin(), c.end(), space);
        return;
    }
    std::fill(space, space + n * rank, 0.0f);
    for (int64_t t = 0; t < n; ++t) {
        ops_.reconstruct(chunk->codec.decode, rank, rank, c.data() + t * rank, space + t * rank);
    }
}

// Codes the block of space_ under one basis into cells 0 .. n - 1 of `tiles` and returns its relative residual
// ||x' - x^'|| / ||x'|| over the whole block; 0 for a block of zeros. The static basis computes coefficients from x as
// everywhere else, so its codes are bit-identical.
double Adapter::encode(const HeadCodec & codec, const float * x, int64_t ldx, int64_t n, const ChunkBasis * chunk,
                       std::vector<uint8_t> & tiles) {
    std::vector<int64_t> cells((size_t) n);
    std::iota(cells.begin(), cells.end(), 0);
    const int64_t stride = TILE * codec_.row_bytes;
    tiles.resize((size_t) ((n + TILE - 1) / TILE * stride));
    ops_.encode(codec, x, ldx, n, cells.data(), tiles.data(), stride);
    seen_.resize(space_.size());
    decode(chunk, tiles.data(), stride, n, cells.data(), seen_.data());
    double error = 0.0, energy = 0.0;
    for (size_t i = 0; i < space_.size(); ++i) {
        if (!std::isnan(space_[i])) {
            const double e = (double) space_[i] - (double) seen_[i];
            error += e * e;
            energy += (double) space_[i] * (double) space_[i];
        }
    }
    return energy > 0.0 ? std::sqrt(error / energy) : 0.0;
}

int32_t Adapter::peek(const float * x, int64_t ldx, int64_t n, const int64_t * cells, uint8_t * tiles, int64_t stride) {
    const ChunkBasis * chunk = this->chunk(current_);
    if (chunk == nullptr) {
        ops_.encode(codec_, x, ldx, n, cells, tiles, stride);
    } else {
        project(x, ldx, n, space_);
        ops_.encode(chunk->codec, space_.data(), codec_.rank, n, cells, tiles, stride);
    }
    return current_;
}

int32_t Adapter::block(const float * x, int64_t ldx, int64_t n, int64_t n_ahead, const int64_t * cells, uint8_t * tiles,
                       int64_t stride, const Merge & merge) {
    const int64_t rank = codec_.rank;
    const auto    code = [&](const ChunkBasis * chunk, std::vector<uint8_t> & out) {
        return chunk == nullptr ? encode(codec_, x, ldx, n, nullptr, out) :
                                  encode(chunk->codec, space_.data(), rank, n, chunk, out);
    };
    stats_.n_nonfinite += project(x, ldx, n, space_);
    double  rho  = code(chunk(current_), stored_);
    int32_t best = current_;
    for (int32_t slot = 0; params_.reuse != 0 && slot <= params_.max_chunks; ++slot) {
        if (slot == current_ || (slot > 0 && chunk(slot) == nullptr)) {
            continue;
        }
        const double other = code(chunk(slot), tried_);
        if (other < rho) {
            rho  = other;
            best = slot;
            std::swap(stored_, tried_);
        }
    }
    if (!complete() && n_ahead + n_ahead_ == 0) {
        absorb(space_.data(), n);
    } else if (const int64_t unseen = n + n_ahead - n_ahead_; !complete() && unseen > 0) {
        project(x + n_ahead_ * ldx, ldx, unseen, later_);
        absorb(later_.data(), unseen);
    }
    n_ahead_ = n_ahead;
    ++stats_.n_blocks;
    const bool triggered =
        (params_.tau < 1.0f && rho > params_.tau) || (params_.length > 0 && since_ >= params_.length);
    current_             = best;
    const int64_t n_seen = sketch_.empty() ? n_seen_ : sketch_count(sketch_.data());
    if (triggered && !complete() && n_seen >= params_.warm) {
        std::unique_ptr<ChunkBasis> next     = candidate();
        const double                rho_next = next ? code(next.get(), tried_) : INFINITY;
        since_                               = 0; // restart the count, adopted or not
        if (rho > 0.0 && rho_next <= params_.gain * rho) {
            current_ = adopt(std::move(next), merge);
            if (complete()) {
                std::vector<uint64_t>().swap(sketch_); // no longer needed
                std::vector<float>().swap(window_);
            }
            rho = rho_next;
            std::swap(stored_, tried_);
        } else {
            ++stats_.n_refused;
        }
    }
    since_ += n;
    residual_ = (float) rho;
    std::vector<uint8_t> row((size_t) codec_.row_bytes);
    for (int64_t t = 0; t < n; ++t) {
        tile_to_row(codec_, stored_.data() + t / TILE * TILE * codec_.row_bytes, t % TILE, row.data());
        row_to_tile(codec_, row.data(), tiles + cells[t] / TILE * stride, cells[t] % TILE);
    }
    return current_;
}

std::unique_ptr<ChunkBasis> Adapter::candidate() const {
    const auto          n = (size_t) codec_.rank;
    std::vector<double> rows(n * n), energy(n);

    std::vector<uint64_t> of_window;
    if (!sketch_top(sketch_params(), sketch(of_window), codec_.rank, rows.data(), energy.data())) {
        return nullptr;
    }
    return make_chunk_basis(ops_, codec_, rows.data(), energy.data());
}

// Finds a slot for a new chunk. If all are used, the next younger chunk replaces the oldest one, and if there is no
// other chunk, the new chunk replaces it.
int32_t Adapter::adopt(std::unique_ptr<ChunkBasis> chunk, const Merge & merge) {
    chunk->opened = stats_.n_opened++;
    const auto vacant =
        std::find_if(chunks_.begin(), chunks_.end(), [](const auto & other) { return other == nullptr; });
    if (vacant != chunks_.end()) {
        *vacant = std::move(chunk);
        return (int32_t) (vacant - chunks_.begin()) + 1;
    }
    std::vector<size_t> age(chunks_.size());
    for (size_t i = 0; i < age.size(); ++i) {
        age[i] = i;
    }
    std::sort(age.begin(), age.end(), [&](size_t a, size_t b) { return chunks_[a]->opened < chunks_[b]->opened; });
    const size_t       from = age[0];
    const size_t       to   = age.size() > 1 ? age[1] : from;
    const ChunkBasis & next = to != from ? *chunks_[to] : *chunk;
    merge((int32_t) from + 1, (int32_t) to + 1, [&](uint8_t * tiles, int64_t stride, int64_t n, const int64_t * cells) {
        recode(*chunks_[from], next, tiles, stride, n, cells);
        stats_.n_recoded += n;
    });
    ++stats_.n_merged;
    chunks_[from] = std::move(chunk);
    return (int32_t) from + 1;
}

void Adapter::recode(const ChunkBasis & from, const ChunkBasis & to, uint8_t * tiles, int64_t stride, int64_t n,
                     const int64_t * cells) {
    std::vector<float> space((size_t) (n * codec_.rank));
    decode(&from, tiles, stride, n, cells, space.data());
    ops_.encode(to.codec, space.data(), codec_.rank, n, cells, tiles, stride);
}

void Adapter::query(int32_t slot, const float * qt, float * out) const {
    const ChunkBasis * chunk = this->chunk(slot);
    const int64_t      rank  = codec_.rank;
    if (chunk == nullptr) {
        std::copy_n(qt, rank, out);
        return;
    }
    std::vector<float> kept(keep_);
    for (int64_t i = 0; i < rank; ++i) {
        kept[(size_t) i] *= qt[i];
    }
    ops_.project(chunk->codec.encode, rank, rank, kept.data(), rank, 1, 1.0f, out, rank);
    for (int64_t i = 0; i < rank; ++i) {
        out[i] *= undo_[(size_t) i];
    }
}

void Adapter::lift(int32_t slot, const float * e, float * out) const {
    const ChunkBasis * chunk = this->chunk(slot);
    const int64_t      rank  = codec_.rank;
    if (chunk == nullptr) { // D includes the static gains
        std::copy_n(e, rank, out);
        return;
    }
    std::vector<float> c(undo_);
    for (int64_t i = 0; i < rank; ++i) {
        c[(size_t) i] *= e[i];
    }
    std::fill(out, out + rank, 0.0f);
    ops_.reconstruct(chunk->codec.decode, rank, rank, c.data(), out);
    for (int64_t i = 0; i < rank; ++i) {
        out[i] *= keep_[(size_t) i];
    }
}

} // namespace subkv
