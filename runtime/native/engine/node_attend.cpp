// node_attend.cpp: attention to the coded cells, see nodes.cpp.
#include "nodes.h"

#include <algorithm>
#include <functional>

namespace subkv {

//
// attend: dst F32 [n_rows * (2 + width)] = m [n_rows], z [n_rows], acc [n_rows][width]
//         AttendSources; a latent layer's tiles of values are computed from its tiles of keys, segment by segment
//

namespace {

// The open tiles are in [first, last), and `first` begins a step.
struct OpenTiles {
    int64_t first, last;
};

OpenTiles open_tiles(const uint8_t * open, int64_t n_tiles) {
    constexpr int64_t tiles = STEP / TILE;
    const int64_t     first = std::find(open, open + n_tiles, (uint8_t) 1) - open;
    int64_t           last  = n_tiles;
    while (last > first && !open[last - 1]) {
        --last;
    }
    return { first < last ? first / tiles * tiles : last, last };
}

// Softmax states of the query rows of one block and head.
struct RowStates {
    float * m;
    float * z;
    float * acc; // [n][width]
    int64_t n, width;

    void clear() const {
        std::fill(m, m + n, -INFINITY);
        std::fill(z, z + n, 0.0f);
        std::fill(acc, acc + n * width, 0.0f);
    }
};

uint8_t * aligned(std::vector<uint8_t> & buf, int64_t n) {
    uint8_t * out = scratch(buf, n + LINE);
    return out + (LINE - (uintptr_t) out % LINE) % LINE;
}

// Computes n_tiles tiles of values of a latent layer from the tiles of keys at a.k_tiles.
void make_values(AttendArgs & a, int64_t n_tiles, std::vector<uint8_t> & buf) {
    a.v_stride    = TILE * a.v->row_bytes;
    uint8_t * out = aligned(buf, n_tiles * a.v_stride);
    a.v_tiles     = out;
    for (int64_t t = 0; t < n_tiles; ++t) {
        keys_to_values(*a.v, a.k_tiles + t * a.k_stride, out + t * a.v_stride);
    }
}

// fill_mask_row for the cells of a list.
void fill_listed_row(const ggml_tensor * mask, const int32_t * cells, int64_t h, int64_t t, int64_t n, float * bias,
                     uint8_t * open) {
    const int64_t row = mask_row(mask, h, t);
    for (int64_t i = 0; i < n; ++i) {
        bias[i] = cells[i] < 0 ? -INFINITY : mask_value(mask, row + cells[i]);
    }
    for (int64_t i = 0; i < n; i += TILE) {
        open[i / TILE] = cells[i] >= 0; // cells come before the -1
    }
}

// Copies the cells of a list, or cells that are stored as rows (all of them if `cells` is nullptr), into consecutive
// tiles, and points `a` to them.
void gather(AttendArgs & a, const int32_t * cells, const LayerNodes & layer, std::vector<uint8_t> & keys,
            std::vector<uint8_t> & values) {
    const auto side = [&](const HeadCodec & codec, const uint8_t *& tiles, int64_t & stride,
                          std::vector<uint8_t> & buf) {
        uint8_t * out = aligned(buf, a.n_cells * codec.row_bytes);
        if (layer.by_rows) {
            rows_to_tiles(codec, tiles, stride / TILE, cells, a.n_cells, out);
        } else {
            gather_cells(codec, tiles, stride, cells, a.n_cells, out);
        }
        tiles  = out;
        stride = TILE * codec.row_bytes;
    };
    side(*a.k, a.k_tiles, a.k_stride, keys);
    if (!layer.codec->latent) {
        side(*a.v, a.v_tiles, a.v_stride, values);
    }
}

// Memory that a thread keeps between nodes.
struct Scratch {
    std::vector<float>   bias, state;
    std::vector<uint8_t> open, values, keys;
};

// The stages of a unit of work, which is some heads of one block of tokens and one split of the cells.
class Attend {
public:
    Attend(ggml_tensor * dst, const LayerNodes & layer, Scratch & scratch_of_thread) :
        layer(layer), codec(*layer.codec), in(sources_of<AttendSources>(dst)), listed(in.selected_cells()),
        shared(in.mask_node()), s(attend_shape(layer, in.q, listed ? listed : in.k_view)), m((float *) dst->data),
        z(m + s.n_rows), acc(z + s.n_rows), queries(layer, in.queries->data, s.n_tokens),
        first_stream((uint32_t) (in.k_view->view_offs / in.k_view->nb[2])), buffers(scratch_of_thread) {
        constexpr int64_t n_tiles = SEGMENT / TILE;

        open            = scratch(buffers.open, (shared ? 1 : s.block + 1) * n_tiles);
        own.bias        = shared ? nullptr : scratch(buffers.bias, s.block * SEGMENT);
        own.open        = open + n_tiles;
        own.bias_stride = SEGMENT;
        own.open_stride = n_tiles;
    }

    int64_t n_units() const { return s.n_blocks * s.n_parts * s.n_split; }
    bool    is_split() const { return s.n_split > 1; }

    void unit(int64_t unit) {
        split                = unit % s.n_split;
        const int64_t part   = unit / s.n_split % s.n_parts;
        const int64_t block  = unit / s.n_split / s.n_parts;
        const int64_t per    = s.n_blocks / s.n_stream;
        const int64_t n_head = s.n_head_kv / s.n_parts;
        stream               = block / per;
        t0                   = stream * s.n_tps + block % per * s.block;
        n_tok                = std::min(s.block, (stream + 1) * s.n_tps - t0);
        n_rows               = n_tok * s.n_group;
        float * const states = scratch(buffers.state, n_rows * (2 + s.width));
        later                = { states, states + n_rows, states + 2 * n_rows, n_rows, s.width };
        for (int64_t h = n_head * part; h < n_head * (part + 1); ++h) {
            state_of(h).clear();
        }
        const int64_t c_end = std::min(s.n_kv, (split + 1) * s.split);
        for (int64_t c0 = split * s.split; c0 < c_end; c0 += SEGMENT) {
            const int64_t n_tiles = (std::min(c0 + SEGMENT, c_end) - c0) / TILE;
            MaskRows      mask    = own;
            OpenTiles     tiles   = { 0, 0 };
            for (int64_t h = n_head * part; h < n_head * (part + 1); ++h) {
                if (h == n_head * part || n_masks(in.mask) > 1) {
                    mask  = mask_of_segment(h, c0, n_tiles);
                    tiles = open_tiles(open, n_tiles);
                }
                if (tiles.first < tiles.last) {
                    head(h, c0, tiles, mask);
                }
            }
        }
    }

private:
    // The states of the block and the split.
    RowStates state_of(int64_t h) const {
        const int64_t row = s.row(split, h, t0);
        return { m + row, z + row, acc + row * s.width, n_rows, s.width };
    }

    const uint8_t * tiles_of(const ggml_tensor * view, int64_t c, int64_t offset) const {
        return (const uint8_t *) view->data + stream * view->nb[2] + c * view->nb[1] + offset;
    }

    // The list of the block's only token from cell c on, or nullptr if all cells are read.
    const int32_t * list_of(int64_t c) const {
        return listed ? (const int32_t *) listed->data + t0 * s.n_kv + c : nullptr;
    }

    // The mask of a head in a segment that begins at cell c0. Sets `open` to the tiles that any token of the block
    // sees.
    MaskRows mask_of_segment(int64_t h, int64_t c0, int64_t n_tiles) {
        const MaskSources sources = { in.mask, in.cell_pos, in.tokens };
        const MaskRows    mask = shared ? mask_rows(shared, s.n_kv).of(mask_of(in.mask, h) * s.n_tokens + t0, c0) : own;
        std::fill(open, open + n_tiles, (uint8_t) 0);
        for (int64_t t = 0; t < n_tok; ++t) {
            uint8_t * row_open = mask.open + t * mask.open_stride;
            if (listed) {
                fill_listed_row(in.mask, list_of(c0), h, t0, n_tiles * TILE, mask.bias, row_open);
            } else if (!shared) {
                fill_mask_row(layer, sources, h, t0 + t, c0, n_tiles * TILE, mask.bias + t * mask.bias_stride,
                              row_open);
            }
            std::transform(row_open, row_open + n_tiles, open, open, std::bit_or<uint8_t>());
        }
        return mask;
    }

    // a.k_tiles and a.v_tiles point to cell c, and `mask` begins there.
    AttendArgs args_of(int64_t h, int64_t c, int64_t n_cells, const MaskRows & mask, const RowStates & into) const {
        AttendArgs a;
        a.k           = &codec.k[(size_t) h];
        a.v           = &codec.v[(size_t) h];
        a.k_tiles     = tiles_of(in.k_view, c, codec.tile_offset(h, false));
        a.v_tiles     = tiles_of(in.v_view, c, codec.tile_offset(h, true));
        a.k_stride    = TILE * (int64_t) in.k_view->nb[1];
        a.v_stride    = TILE * (int64_t) in.v_view->nb[1];
        a.n_cells     = n_cells;
        a.n_tok       = n_tok;
        a.n_group     = s.n_group;
        a.qt          = queries.rows(s, h) + t0 * s.n_group * a.k->rank;
        a.shift       = a.k->offset ? queries.shift + (h * s.n_tokens + t0) * s.n_group : nullptr;
        a.bias        = mask.bias;
        a.bias_stride = mask.bias_stride;
        a.slope       = slope;
        a.softcap     = layer.softcap;
        a.m           = into.m;
        a.z           = into.z;
        a.acc         = into.acc;
        a.acc_stride  = s.width;
        return a;
    }

    // Attends to the open tiles of a segment. A split has one segment, and without splits the states of segments are
    // merged.
    void head(int64_t h, int64_t c0, OpenTiles tiles, const MaskRows & mask) {
        const int64_t   c    = c0 + tiles.first * TILE;
        const RowStates all  = state_of(h);
        const RowStates into = is_split() ? all : later;
        if (!is_split()) {
            later.clear();
        }
        alibi_slopes(layer, h * s.n_group, s.n_group, slope);
        AttendArgs a = args_of(h, listed ? 0 : c, (tiles.last - tiles.first) * TILE, mask.of(0, c - c0), into);
        if (listed || layer.by_rows) {
            gather(a, list_of(c), layer, buffers.keys, buffers.values);
        }
        if (codec.latent) {
            make_values(a, tiles.last - tiles.first, buffers.values);
        }
        layer.bases->attend(a, first_stream + (uint32_t) stream, h, tiles_of(in.k_view, c, 0),
                            tiles_of(in.v_view, c, 0));
        for (int64_t r = 0; !is_split() && r < n_rows; ++r) {
            merge_softmax(all.m[r], all.z[r], all.acc + r * s.width, later.m[r], later.z[r], later.acc + r * s.width,
                          a.v->rank);
        }
    }

    const LayerNodes &        layer;
    const LayerCodec &        codec;
    const AttendSources       in;
    const ggml_tensor * const listed; // selected cells
    const ggml_tensor * const shared; // a node that made the mask for all layers
    const AttendShape         s;
    float * const             m;
    float * const             z;
    float * const             acc;
    const ProjectedQueries    queries;
    const uint32_t            first_stream;
    Scratch &                 buffers;

    uint8_t * open;
    MaskRows  own; // of one segment at a time
    float     slope[MAX_GROUP];

    // the unit
    RowStates later{}; // of one segment
    int64_t   split = 0, stream = 0, t0 = 0, n_tok = 0, n_rows = 0;
};

} // namespace

void attend_op(ggml_tensor * dst, int ith, int nth, const LayerNodes & layer) {
    static thread_local Scratch buffers;
    Attend                      attend(dst, layer, buffers);
    const int64_t               n = attend.n_units();
    if (attend.is_split()) {
        for (int64_t unit = n * ith / nth; unit < n * (ith + 1) / nth; ++unit) {
            attend.unit(unit);
        }
    } else { // threads take whole blocks in turn, since with a causal mask later blocks have more work
        for (int64_t unit = ith; unit < n; unit += nth) {
            attend.unit(unit);
        }
    }
}

} // namespace subkv
