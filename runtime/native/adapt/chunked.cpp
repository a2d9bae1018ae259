#include "chunked.h"

#include "device.h"
#include "error.h"
#include "window.h"

#include <algorithm>
#include <map>

namespace subkv {

ChunkedLayer::ChunkedLayer(const LayerCodec & codec, const ChunkRequest & request, uint32_t n_stream) :
    codec_(codec), request_(request), units_((size_t) n_stream * (size_t) codec.n_head_kv * 2) {
    for (uint32_t stream = 0; stream < n_stream; ++stream) {
        reset(stream);
    }
}

ChunkUnit * ChunkedLayer::unit(uint32_t stream, int64_t head, bool value) const {
    return units_[index(stream, head, value)].get();
}

void ChunkedLayer::reset(uint32_t stream) {
    for (int64_t head = 0; head < codec_.n_head_kv; ++head) {
        for (const bool value : { false, true }) {
            if (!covers(value)) {
                continue;
            }
            const HeadCodec & codec = codec_.head(head, value);
            try { // defaults depend on the head's rank
                const AdaptParams params = Adapter::checked(request_.params, codec.rank);
                units_[index(stream, head, value)].reset(new ChunkUnit{ Adapter(ops(), codec, params) });
            } catch (const Invalid & e) {
                Error error = e.error;
                error.reason += sentence(" (layer %d, head %d)", codec_.il, (int) head);
                fail(error);
            }
        }
    }
}

void ChunkedBases::check(const ChunkRequest & request, const Layout & layout, int32_t n_recent, int32_t n_rollback,
                         const CacheDesc & desc) {
    const AdaptParams & p = request.params;
    Adapter::checked(p, MAX_SKETCH_SIZE);
    if (n_recent < p.block + n_rollback) {
        refuse_adapt(
            sentence("block: expected at most n_recent less n_rollback, %d, since a block is coded when it leaves the "
                     "exact window, found %d",
                     std::max(0, n_recent - n_rollback), p.block));
    }
    if (n_recent < p.block + p.lookahead + n_rollback) {
        refuse_adapt(sentence(
            "lookahead: expected at most n_recent less n_rollback and block, %d, since the tokens that a block "
            "looks ahead at are in the exact window and can no longer be removed, found %d",
            n_recent - n_rollback - p.block, p.lookahead));
    }
    for (const LayerDesc & layer : desc.layers) {
        if (layer.latent) {
            refuse_adapt("expected layers with values of their own, found latent attention (MLA)");
        }
        if (std::max(layer.d_k, layer.d_v) > MAX_SKETCH_SIZE) {
            refuse_adapt(sentence("expected heads of at most %d elements, found %d in layer %d", MAX_SKETCH_SIZE,
                                  std::max(layer.d_k, layer.d_v), layer.il));
        }
    }
    for (const LayerDesc & layer : desc.layers) {
        if (layout.layer(layer.il) && has_device_kernels(layer.buft)) {
            refuse_adapt(
                sentence("layer %d has its cache on %s, which does not support adaptive bases; keep it on the CPU "
                         "(-ngl 0, or offload_kqv off), or use static bases",
                         layer.il, ggml_backend_buft_name(layer.buft)));
        }
    }
    if (desc.n_seq_max > 1 && desc.n_stream == 1) {
        refuse_adapt(
            sentence("expected one sequence, or a cache for each (kv_unified off), found %u that share their cells",
                     desc.n_seq_max));
    }
}

ChunkedBases::ChunkedBases(const Layout & layout, const ChunkRequest & request, uint32_t n_stream) :
    request_(request), n_stream_(n_stream) {
    for (const LayerCodec & codec : layout.layers) {
        if ((size_t) codec.il >= layers_.size()) {
            layers_.resize((size_t) codec.il + 1);
        }
        layers_[(size_t) codec.il] = std::make_unique<ChunkedLayer>(codec, request_, n_stream);
    }
}

ChunkedLayer * ChunkedBases::layer(int32_t il) const {
    return (size_t) il < layers_.size() ? layers_[(size_t) il].get() : nullptr;
}

void ChunkedBases::clear(uint32_t stream) {
    if (coded(stream) == 0) { // it is as new
        return;
    }
    try {
        reset(stream);
    } catch (const std::bad_alloc &) {
        for_each(stream, [](ChunkUnit & unit) { unit.coded = ChunkUnit::LOST; });
    }
}

void ChunkedBases::reset(uint32_t stream) {
    for (const auto & layer : layers_) {
        if (layer) {
            layer->reset(stream);
        }
    }
}

template <typename F> void ChunkedBases::for_each(uint32_t stream, F use) const {
    for (const auto & layer : layers_) {
        for (int64_t i = 0; layer && i < 2 * layer->n_head_kv(); ++i) {
            if (ChunkUnit * unit = layer->unit(stream, i / 2, i % 2 != 0)) {
                use(*unit);
            }
        }
    }
}

int32_t ChunkedBases::coded(uint32_t stream) const {
    int32_t last = 0;
    for_each(stream, [&last](const ChunkUnit & unit) { last = std::max(last, unit.coded); });
    return last;
}

int32_t ChunkedBases::coded_by_each(uint32_t stream) const {
    int32_t first = ChunkUnit::LOST;
    for_each(stream, [&first](const ChunkUnit & unit) { first = std::min(first, unit.coded); });
    return first;
}

int32_t ChunkedBases::fixed(uint32_t stream) const {
    const int32_t last = coded(stream);
    return last > 0 ? last + request_.params.lookahead : 0;
}

void ChunkedBases::copy(uint32_t src, uint32_t dst) {
    if (src == dst) {
        return;
    }
    reset(dst);
    std::vector<ChunkUnit *> to;
    for_each(dst, [&to](ChunkUnit & unit) { to.push_back(&unit); });
    size_t i = 0;
    for_each(src, [&](ChunkUnit & unit) {
        const std::vector<uint8_t> state = unit.adapter.save();
        to[i]->adapter.restore(state.data(), state.size());
        to[i++]->coded = unit.coded;
    });
}

bool ChunkedBases::can_remove(int32_t seq, int32_t p0, int32_t p1, const CellReader & cells) const {
    const int32_t left    = cells.max_pos_outside(seq, p0, p1);
    const int32_t n_fixed = fixed(cells.stream_of(seq));
    if (left < 0 || left + 1 >= n_fixed) {
        return true;
    }
    return reject(
        "seq_rm: removing positions [%d, %d) of sequence %d would leave adaptive bases fitted to them: positions "
        "below %d are coded; remove the whole sequence and decode it again",
        p0, p1, seq, n_fixed);
}

bool ChunkedBases::ready(const std::vector<TokenDesc> & tokens, bool causal, const Window & window,
                         const CellReader & cells) const {
    if (!causal) {
        return reject(
            "decode: adaptive bases need a causal mask, because they code a token when it leaves the exact window; "
            "this mask lets tokens attend to later ones (some models use such masks for images); use static bases");
    }
    std::map<int32_t, int32_t> begin; // smallest position by sequence
    for (const auto & token : tokens) {
        if (token.in_picture) {
            return reject(
                "decode: adaptive bases need one token per position, because they code a token when it leaves "
                "the exact window; tokens of an image share position %d; use static bases",
                token.pos);
        }
        for (int32_t i = 0; i < token.n_seq; ++i) {
            auto [it, fresh] = begin.try_emplace(token.seq[i], token.pos);
            it->second       = std::min(it->second, token.pos);
        }
    }
    std::vector<PosCell> uncoded;
    for (const auto & [seq, first] : begin) {
        const uint32_t stream = cells.stream_of(seq);
        if (coded(stream) == ChunkUnit::LOST) {
            return reject(
                "decode: adaptive bases of sequence %d are incomplete, because memory was short; remove the whole "
                "sequence and decode it again",
                seq);
        }
        // After a decode that failed between two heads, one of them needs earlier rows.
        cells.find(seq, std::max(window.n_sink(), coded_by_each(stream)), first, uncoded);
        for (const auto & cell : uncoded) {
            if (!window.holds(seq, cell.pos)) {
                return reject(
                    "decode: sequence %d at position %d needs the exact row of position %d to code it, which is not "
                    "held; remove the whole sequence and decode it again",
                    seq, first, cell.pos);
            }
        }
    }
    return true;
}

ChunkedBases::Total ChunkedBases::total() const {
    Total sum;
    for (uint32_t stream = 0; stream < n_stream_; ++stream) {
        for_each(stream, [&sum](const ChunkUnit & unit) {
            sum.bytes += unit.adapter.bytes_bases() + unit.adapter.bytes_sketch();
            sum.n_chunks += (size_t) unit.adapter.n_chunks();
        });
    }
    return sum;
}

bool ChunkedBases::stats(int32_t il, int64_t head, bool value, subkv_adapt_stats & sum) const {
    const ChunkedLayer * layer = this->layer(il);
    if (!layer || !layer->covers(value)) {
        return false;
    }
    for (uint32_t stream = 0; stream < n_stream_; ++stream) {
        layer->unit(stream, head, value)->adapter.add_stats(sum);
    }
    return true;
}

//
// state: per unit coded i32, size u64, bytes of Adapter::save
//

void ChunkedBases::state_write(StateWriter & w, uint32_t stream) const {
    for_each(stream, [&w](const ChunkUnit & unit) {
        const std::vector<uint8_t> state = unit.adapter.save();
        const uint64_t             size  = state.size();
        w.write(&unit.coded, sizeof(unit.coded));
        w.write(&size, sizeof(size));
        w.write(state.data(), state.size());
    });
}

void ChunkedBases::state_read(StateReader & r, uint32_t stream, int32_t n_pos) {
    constexpr uint64_t MOST  = UINT64_C(1) << 30; // of one head, far more than a sketch and 255 bases need
    constexpr uint64_t PIECE = 1 << 20;           // a forged size must not allocate more than the state has
    reset(stream);
    int32_t whole = -1; // positions that the first head has coded
    try {
        for_each(stream, [&](ChunkUnit & unit) {
            int32_t  coded = 0;
            uint64_t size  = 0;
            r.read(&coded, sizeof(coded));
            r.read(&size, sizeof(size));
            whole = whole < 0 ? coded : whole;
            if (coded < 0 || coded % request_.params.block != 0 || coded != whole || size > MOST) {
                fail("state: whole blocks of adaptive bases expected, %d positions in %llu bytes found", coded,
                     (unsigned long long) size);
            }
            std::vector<uint8_t> state;
            while (state.size() < size) {
                const auto n = (size_t) std::min(size - state.size(), PIECE);
                state.resize(state.size() + n);
                r.read(state.data() + state.size() - n, n);
            }
            unit.adapter.restore(state.data(), state.size());
            unit.coded = coded;
        });
        if (whole > 0 && whole > n_pos - request_.params.lookahead) {
            fail("state: adaptive bases of at most %d coded positions expected, %d found",
                 std::max(0, n_pos - request_.params.lookahead), whole);
        }
    } catch (...) {
        reset(stream);
        throw;
    }
}

} // namespace subkv
