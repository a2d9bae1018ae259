// ops.cpp: a layer's tables, and the dispatches of its ops.
#include "ops.h"

#include "shaders.h"
#include "subkv/trellis.h"

#include <algorithm>
#include <cstring>

namespace subkv::vulkan {

namespace {

constexpr uint32_t MAX_ROWS         = 8;     // rows per workgroup of attend
constexpr uint32_t MAX_ACCUMULATORS = 40;    // registers per thread of attend, which hold rows times coefficients
constexpr int64_t  MAX_GROUPS       = 65535; // maximum groups per dimension, which every device supports
constexpr int32_t  MAX_DOT = 256; // largest rank whose integer products fit 32 bits and 16 KiB of shared memory

uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof(bits));
    return bits;
}

// The words of LayerTables; tables.glsl has the order of the first ones.
class Words {
public:
    explicit Words(size_t n) : words_(n) {}

    uint32_t size() const { return (uint32_t) words_.size(); }

    void set(size_t at, uint32_t word) { words_[at] = word; }

    void add(uint32_t word) { words_.push_back(word); }

    void add(float x) { add(bits_of(x)); }

    // Appends halves or floats, and returns their first word, or 0 for nullptr.
    template <typename T> uint32_t add(const T * data, size_t n) {
        if (!data) {
            return 0;
        }
        const uint32_t at = size();
        words_.resize(at + (n * sizeof(T) + 3) / 4);
        std::memcpy(words_.data() + at, data, n * sizeof(T));
        return at;
    }

    std::vector<uint32_t> take() { return std::move(words_); }

private:
    std::vector<uint32_t> words_;
};

enum Header {
    N_BAD,
    N_HEAD_KV,
    N_GROUP,
    D_K,
    D_V,
    WIDTH_K,
    N_SINK,
    N_RECENT,
    LATENT,
    SLOPES,
    FIELDS,
    ROOTS,
    ALPHABETS,
    HEADS,
    N_HEADER
};

constexpr uint32_t NO_PLACE = UINT32_MAX;

int32_t largest_rank(const std::vector<HeadCodec> & heads) {
    int32_t rank = 0;
    for (const HeadCodec & head : heads) {
        rank = std::max(rank, head.rank);
    }
    return rank;
}

void add_fields(Words & words) {
    for (int32_t bits = 0; bits <= 8; ++bits) {
        for (int32_t rho = 0; rho < 8; ++rho) {
            const TileFields fields = tile_fields(bits, rho);
            words.add((uint32_t) fields.n);
            for (const TileField & f : fields.field) {
                words.add((uint32_t) (f.line | f.shift << 8 | f.width << 16 | f.from << 24));
            }
        }
    }
}

void add_alphabets(Words & words) {
    for (int32_t bits = 0; bits <= TRELLIS_BITS; ++bits) {
        words.add((uint32_t) trellis_double(bits));
        words.add((uint32_t) trellis_triple(bits));
        for (int32_t n = 0; n < N_LINES; ++n) {
            words.add(trellis_line(bits, n).a);
            words.add(trellis_line(bits, n).b);
        }
    }
}

// First word and number of the octets on the head's path.
struct Path {
    uint32_t at, n;
};

Path add_path(Words & words, const HeadCodec & head) {
    Path path = { words.size(), 0 };
    for (const Band & band : head.bands) {
        for (int32_t j = 0; on_path(head, band) && j < band.n; j += BAND_STEP) {
            words.add((uint32_t) (TILE * (band.offset + j / BAND_STEP * band.bits) / 4));
            words.add((uint32_t) band.bits);
            words.add((uint32_t) (band.first + j));
            words.add(level_step(head, band));
            ++path.n;
        }
    }
    return path;
}

} // namespace

Tables make_tables(const LayerTables & layer) {
    Words        words(N_HEADER);
    const size_t n_head = layer.k.size();
    words.set(N_HEAD_KV, (uint32_t) n_head);
    words.set(N_GROUP, (uint32_t) (layer.slope.size() / n_head));
    words.set(D_K, (uint32_t) layer.k[0].d);
    words.set(D_V, (uint32_t) layer.v[0].d);
    words.set(WIDTH_K, (uint32_t) largest_rank(layer.k));
    words.set(N_SINK, (uint32_t) layer.n_sink);
    words.set(N_RECENT, (uint32_t) layer.n_recent);
    words.set(LATENT, layer.latent);
    const uint32_t slopes_at = words.add(layer.slope.data(), layer.slope.size());
    words.set(SLOPES, slopes_at);
    words.set(FIELDS, words.size());
    add_fields(words);
    words.set(ROOTS, words.add(EIGHTHS, 8));
    words.set(ALPHABETS, words.size());
    add_alphabets(words);

    struct Arrays {
        uint32_t encode, decode, offset, mean;
        Path     path;
    };
    std::vector<Arrays>   arrays;
    std::vector<uint16_t> halves;
    for (int side = 0; side < 2; ++side) {
        for (size_t h = 0; h < n_head; ++h) {
            const HeadCodec & head = (side == 0 ? layer.k : layer.v)[h];
            const size_t      n    = (size_t) head.rank * (size_t) head.d;
            const auto        add  = [&](const Matrix & matrix) -> uint32_t {
                if (!present(matrix)) { // Latent values have no encode matrix.
                    return 0;
                }
                halves.resize(n);
                to_halves(matrix, head.rank, head.d, halves.data());
                return words.add(halves.data(), n);
            };
            const uint32_t encode = add(head.encode);
            const uint32_t decode = add(head.decode);
            const uint32_t offset = words.add(head.offset, (size_t) head.rank);
            const uint32_t mean   = words.add(side == 0 ? layer.mean[h] : nullptr, (size_t) head.d);
            arrays.push_back({ encode, decode, offset, mean, add_path(words, head) });
        }
    }
    words.set(HEADS, words.size());
    for (int side = 0; side < 2; ++side) {
        for (size_t h = 0; h < n_head; ++h) {
            const HeadCodec & head = (side == 0 ? layer.k : layer.v)[h];
            const Arrays &    a    = arrays[(size_t) side * n_head + h];
            const int64_t     tile = (side == 0 ? layer.k_offset : layer.v_offset)[h];
            for (const uint32_t word : { (uint32_t) head.d, (uint32_t) head.rank, (uint32_t) head.n_bands, a.encode,
                                         a.decode, a.offset, a.mean, (uint32_t) (tile / 4) }) {
                words.add(word);
            }
            words.add(layer.gamma[h]);
            words.add(a.path.n);
            words.add(a.path.at);
            uint32_t place = 0;
            for (const Band & band : head.bands) {
                const bool on = on_path(head, band);
                words.add((uint32_t) band.n);
                words.add((uint32_t) band.bits);
                words.add((uint32_t) band.first);
                words.add((uint32_t) (TILE * band.offset / 4));
                words.add(on ? place : NO_PLACE);
                words.add(band.ratio);
                words.add(level_step(head, band));
                place += on ? (uint32_t) band.n / BAND_STEP : 0;
            }
        }
    }
    return { words.take(), slopes_at };
}

namespace {

class Builder {
public:
    explicit Builder(const Shader & shader) {
        d_.name        = shader.name;
        d_.spirv       = shader.spirv;
        d_.spirv_bytes = shader.bytes;
    }

    Builder & constant(uint32_t x) {
        d_.constants[d_.n_constants++] = x;
        return *this;
    }

    // Adds the next binding.
    Builder & bind(const Place & place) {
        d_.buffers[d_.n_buffers++] = place.buffer;
        return *this;
    }

    // Pushes the place in its buffer, in elements of `unit` bytes.
    Builder & at(const Place & place, uint64_t unit = 4) {
        return push((int64_t) (place.at / unit), place.at % unit == 0);
    }

    Builder & stride(int64_t bytes) { return push(bytes / 4, bytes % 4 == 0); }

    Builder & push(int64_t x, bool fine = true) {
        fits_                = fits_ && fine && x >= 0 && x <= UINT32_MAX;
        d_.push[d_.n_push++] = (uint32_t) x;
        return *this;
    }

    Builder & number(float x) {
        d_.push[d_.n_push++] = bits_of(x);
        return *this;
    }

    const char * run(int64_t x, int64_t y, int64_t z, Run run, void * recorder) {
        if (!fits_) {
            return "places and strides that are multiples of their unit, and fit 32 bits";
        }
        if (std::max({ x, y, z }) > MAX_GROUPS) {
            return "at most 65535 workgroups in a dimension";
        }
        d_.groups[0] = (uint32_t) x;
        d_.groups[1] = (uint32_t) y;
        d_.groups[2] = (uint32_t) z;
        return x * y * z == 0 ? nullptr : run(recorder, d_);
    }

private:
    Dispatch d_    = {};
    bool     fits_ = true;
};

} // namespace

const char * encode(const Encode & e, Run run, void * recorder) {
    Builder d(ENCODE);
    if (e.layer.latent) {
        d.constant(1); // PATH_LANES
    }
    d.bind(e.layer.tables).bind(e.k).bind(e.v).bind(e.k_tiles).bind(e.v_tiles).bind(e.cells).bind(e.fresh);
    d.at(e.k).push(e.k_head).push(e.k_token).at(e.v).push(e.v_head).push(e.v_token);
    d.at(e.k_tiles).stride(e.k_stride).at(e.v_tiles).stride(e.v_stride).at(e.cells, 8).at(e.fresh);
    return d.run(e.n_tok, e.layer.n_head_kv, e.layer.latent ? 1 : 2, run, recorder);
}

const char * project_queries(const Attend & a, Run run, void * recorder) {
    const int64_t n_tokens = a.n_stream * a.n_tps;
    Builder       d(PROJECT);
    d.bind(a.layer.tables).bind(a.q).bind(a.qt);
    d.at(a.q).push(a.q_head).push(a.q_token).at(a.qt).at(a.shift).push(n_tokens).number(a.layer.scale);
    return d.run(n_tokens, a.layer.n_head_kv, (a.layer.width_k + 1 + 15) / 16, run, recorder);
}

int64_t packed_words(const Layer & l) {
    return l.integer_dot && !l.latent && std::max(l.width_k, l.width_v) <= MAX_DOT ? l.width_k / 2 + 2 : 0;
}

static const char * quantize_queries(const Attend & a, Run run, void * recorder) {
    const int64_t n_tokens = a.n_stream * a.n_tps;
    Builder       d(QUANTIZE);
    d.bind(a.layer.tables).bind(a.qt).bind(a.packed);
    d.at(a.qt).at(a.packed).push(n_tokens);
    return d.run(n_tokens, a.layer.n_head_kv, a.layer.n_group, run, recorder);
}

static uint32_t coefficients_of_thread(const Layer & l) {
    return (uint32_t) ((l.width_v + TILE - 1) / TILE);
}

// Returns the query rows of a workgroup of attend.
static uint32_t rows_at_once(const Layer & l, int64_t n_rows) {
    if (l.latent) {
        return n_rows <= 4 ? 4 : n_rows <= 8 ? 8 : 16;
    }
    const auto most = std::min<int64_t>(MAX_ROWS, std::max<uint32_t>(1, MAX_ACCUMULATORS / coefficients_of_thread(l)));
    return (uint32_t) std::min<int64_t>(most, std::max<int64_t>(1, n_rows));
}

const char * attend(const Attend & a, Run run, void * recorder) {
    const bool   dot   = packed_words(a.layer) > 0;
    const char * error = project_queries(a, run, recorder);
    if (!error && dot) {
        error = quantize_queries(a, run, recorder);
    }
    if (error) {
        return error;
    }
    const auto     n_rows = a.n_tps * a.layer.n_group; // rows per stream
    const uint32_t rows   = rows_at_once(a.layer, n_rows);
    Builder        d(a.layer.latent ? ATTEND_LATENT : dot ? ATTEND_DOT : ATTEND);
    d.constant(rows);
    if (!a.layer.latent) {
        d.constant(coefficients_of_thread(a.layer));
    }
    d.bind(a.layer.tables).bind(a.m).bind(a.k_tiles).bind(a.v_tiles).bind(a.mask).bind(a.cell_pos).bind(a.tokens);
    d.bind(a.qt);
    if (dot) {
        d.bind(a.packed);
    }
    d.at(a.qt).at(dot ? a.packed : a.qt).at(a.shift).at(a.m).at(a.z).at(a.acc).push(a.layer.width_v);
    d.at(a.k_tiles).stride(a.k_stride).stride(a.k_stream).at(a.v_tiles).stride(a.v_stride).stride(a.v_stream);
    d.at(a.mask, a.mask_half ? 2 : 4).push(a.mask_half).at(a.cell_pos).at(a.tokens);
    d.push(a.n_kv).push(a.n_tps).push(a.n_stream * a.n_tps).push(a.split).number(a.layer.softcap);
    return d.run(a.layer.n_head_kv, (n_rows + rows - 1) / rows * a.n_split, a.n_stream, run, recorder);
}

const char * combine(const Combine & b, Run run, void * recorder) {
    const Attend & a     = b.a;
    const Layer &  l     = a.layer;
    const bool     sinks = b.sinks.buffer != nullptr;
    Builder        d(COMBINE);
    d.bind(l.tables).bind(a.m).bind(a.q).bind(b.fresh).bind(b.window).bind(a.mask).bind(a.tokens).bind(b.slots);
    d.bind(sinks ? b.sinks : a.q).bind(b.out);
    d.at(a.m).at(a.z).at(a.acc).push(l.width_v).push(a.n_split);
    d.at(a.q).push(a.q_head).push(a.q_token).at(b.fresh).at(b.window).at(a.mask, a.mask_half ? 2 : 4).push(a.mask_half);
    d.at(a.tokens).at(b.slots).push(b.slots_of_seq);
    d.at(b.sinks).push(sinks).at(b.out).push(b.out_stride);
    d.push(a.n_kv).push(a.n_tps).push(a.n_stream * a.n_tps).number(l.scale).number(l.softcap);
    return d.run((int64_t) l.n_head_kv * l.n_group, a.n_stream * a.n_tps, 1, run, recorder);
}

const char * store_window(const Store & s, Run run, void * recorder) {
    Builder d(STORE_WINDOW);
    d.bind(s.window).bind(s.fresh).bind(s.slots);
    d.at(s.window).at(s.fresh).at(s.slots).push(s.n_slots).push(s.width / 2, s.width % 2 == 0);
    return d.run(std::min<int64_t>(s.n_slots, 16384), 1, 1, run, recorder);
}

const char * prompt_rows(const Prompt & p, Run run, void * recorder) {
    constexpr int64_t COLUMNS = 64; // columns per workgroup
    const Attend &    a       = p.c.a;
    const int64_t     tiles   = (a.n_kv + TILE - 1) / TILE;
    const int64_t     parts   = (std::max(a.layer.d_k, a.layer.d_v) + COLUMNS - 1) / COLUMNS;
    Builder           cells(PROMPT_ROWS);
    cells.bind(a.layer.tables).bind(p.k).bind(p.v).bind(a.k_tiles).bind(a.v_tiles);
    cells.at(p.k).at(p.v).push(p.n_rows).push(p.first).push(p.n_heads).push(a.n_kv);
    cells.at(a.k_tiles).stride(a.k_stride).stride(a.k_stream).at(a.v_tiles).stride(a.v_stride).stride(a.v_stream);
    if (const char * error = cells.run(tiles, 2 * p.n_heads * parts, a.n_stream, run, recorder)) {
        return error;
    }
    Builder exact(PROMPT_EXACT);
    exact.bind(a.layer.tables).bind(p.k).bind(p.v).bind(p.c.fresh).bind(p.c.window).bind(a.tokens);
    exact.at(p.k).at(p.v).push(p.n_rows).push(p.first).push(p.n_heads).push(a.n_kv).push(p.n_slots).push(a.n_stream);
    exact.push(a.n_tps).at(p.c.fresh).at(p.c.window).at(a.tokens);
    return exact.run(p.n_rows - a.n_kv, a.n_stream, 1, run, recorder);
}

const char * prompt_mask(const Prompt & p, Run run, void * recorder) {
    constexpr int64_t ROWS = 256; // rows per workgroup
    const Attend &    a    = p.c.a;
    Builder           d(PROMPT_MASK);
    d.bind(a.layer.tables).bind(p.mask).bind(a.mask).bind(a.cell_pos).bind(a.tokens).bind(p.c.slots);
    d.at(p.mask, 2).push(p.n_rows, p.n_rows % 2 == 0).push(a.n_kv).push(p.n_slots).push(a.n_stream).push(a.n_tps);
    d.at(a.mask, a.mask_half ? 2 : 4).push(a.mask_half).at(a.cell_pos).at(a.tokens).at(p.c.slots);
    d.push(p.c.slots_of_seq);
    return d.run((p.n_rows + ROWS - 1) / ROWS, a.n_stream * a.n_tps, 1, run, recorder);
}

const char * prompt_lost(const Prompt & p, Run run, void * recorder) {
    const Attend & a = p.c.a;
    Builder        d(PROMPT_LOST);
    d.bind(a.layer.tables).bind(p.c.out).bind(a.mask).bind(a.cell_pos).bind(a.tokens).bind(p.c.slots);
    d.bind(a.k_tiles).bind(a.v_tiles).bind(p.c.fresh).bind(p.c.window);
    d.at(p.c.out).push(p.c.out_stride).push(p.first).push(p.n_heads).push(a.n_kv).push(p.n_slots);
    d.push(a.n_stream).push(a.n_tps).at(a.mask, a.mask_half ? 2 : 4).push(a.mask_half).at(a.cell_pos);
    d.at(a.tokens).at(p.c.slots).push(p.c.slots_of_seq);
    d.at(a.k_tiles).stride(a.k_stride).stride(a.k_stream).at(a.v_tiles).stride(a.v_stride).stride(a.v_stream);
    d.at(p.c.fresh).at(p.c.window);
    return d.run(a.n_stream * a.n_tps, 1, 1, run, recorder);
}

} // namespace subkv::vulkan
