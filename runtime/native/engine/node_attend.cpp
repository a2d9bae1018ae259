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

// The open tiles are in [first, last); first begins a step.
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

// Copies the cells of a list, or cells that are stored as rows (cells nullptr: all of them), into consecutive tiles,
// and points `a` to them.
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

} // namespace

void attend_op(ggml_tensor * dst, int ith, int nth, const LayerNodes & layer) {
    const auto &        codec  = *layer.codec;
    const auto          in     = sources_of<AttendSources>(dst);
    const ggml_tensor * k_view = in.k_view;
    const ggml_tensor * v_view = in.v_view;
    const ggml_tensor * listed = in.chosen_cells();
    const ggml_tensor * shared = in.mask_node();
    const AttendShape   s      = attend_shape(layer, in.q, listed ? listed : k_view);

    float * m   = (float *) dst->data;
    float * z   = m + s.n_rows;
    float * acc = z + s.n_rows;

    const MaskSources      sources = { in.mask, in.cell_pos, in.tokens };
    const ProjectedQueries queries(layer, in.queries->data, s.n_tokens);
    const int64_t          n_units = s.n_blocks * s.n_parts * s.n_split;
    constexpr int64_t      TILES   = SEGMENT / TILE;

    static thread_local std::vector<float>   bias_buf, state_buf;
    static thread_local std::vector<uint8_t> open_buf, values_buf, keys_buf;
    uint8_t *                                open = scratch(open_buf, (shared ? 1 : s.block + 1) * TILES);
    MaskRows                                 own; // of one segment at a time
    own.bias        = shared ? nullptr : scratch(bias_buf, s.block * SEGMENT);
    own.open        = open + TILES;
    own.bias_stride = SEGMENT;
    own.open_stride = TILES;
    float      slope[MAX_GROUP];
    const auto first_stream = (uint32_t) (k_view->view_offs / k_view->nb[2]);

    // Threads take whole blocks in turn, since with a causal mask later blocks have more work.
    const bool    in_turn = s.n_split == 1;
    const int64_t first   = in_turn ? ith : n_units * ith / nth;
    const int64_t last    = in_turn ? n_units : n_units * (ith + 1) / nth;
    for (int64_t unit = first; unit < last; unit += in_turn ? nth : 1) {
        const int64_t split  = unit % s.n_split;
        const int64_t part   = unit / s.n_split % s.n_parts;
        const int64_t block  = unit / s.n_split / s.n_parts;
        const int64_t h0     = s.n_head_kv / s.n_parts * part;
        const int64_t h1     = h0 + s.n_head_kv / s.n_parts;
        const int64_t per    = s.n_blocks / s.n_stream;
        const int64_t stream = block / per;
        const int64_t t0     = stream * s.n_tps + block % per * s.block;
        const int64_t n_tok  = std::min(s.block, (stream + 1) * s.n_tps - t0);

        const int64_t n_rows   = n_tok * s.n_group;
        const auto    state_of = [&](int64_t h) -> RowStates {
            const int64_t row = s.row(split, h, t0);
            return { m + row, z + row, acc + row * s.width, n_rows, s.width };
        };
        float * const   states = scratch(state_buf, n_rows * (2 + s.width));
        const RowStates later  = { states, states + n_rows, states + 2 * n_rows, n_rows, s.width };
        for (int64_t h = h0; h < h1; ++h) {
            state_of(h).clear();
        }
        const auto tiles_of = [&](const ggml_tensor * view, int64_t c, int64_t offset) {
            return (const uint8_t *) view->data + stream * view->nb[2] + c * view->nb[1] + offset;
        };
        const auto args_of = [&](int64_t h, int64_t c, int64_t n, const MaskRows & mask, const RowStates & into) {
            AttendArgs a; // mask: from cell c on
            a.k           = &codec.k[(size_t) h];
            a.v           = &codec.v[(size_t) h];
            a.k_tiles     = tiles_of(k_view, c, codec.tile_offset(h, false));
            a.v_tiles     = tiles_of(v_view, c, codec.tile_offset(h, true));
            a.k_stride    = TILE * (int64_t) k_view->nb[1];
            a.v_stride    = TILE * (int64_t) v_view->nb[1];
            a.n_cells     = n;
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
        };
        const int64_t c_end = std::min(s.n_kv, (split + 1) * s.split);
        for (int64_t c0 = split * s.split; c0 < c_end; c0 += SEGMENT) {
            const int64_t n_tiles = (std::min(c0 + SEGMENT, c_end) - c0) / TILE;
            MaskRows      mask    = own;
            OpenTiles     tiles   = { 0, 0 };
            for (int64_t h = h0; h < h1; ++h) {
                if (h == h0 || n_masks(in.mask) > 1) {
                    if (shared) {
                        const int64_t first = mask_of(in.mask, h) * s.n_tokens;
                        mask                = mask_rows(shared, s.n_kv).of(first + t0, c0);
                    }
                    std::fill(open, open + n_tiles, (uint8_t) 0);
                    for (int64_t t = 0; t < n_tok; ++t) {
                        uint8_t * row_open = mask.open + t * mask.open_stride;
                        if (listed) {
                            const int32_t * cells = (const int32_t *) listed->data + t0 * s.n_kv + c0;
                            fill_listed_row(in.mask, cells, h, t0, n_tiles * TILE, mask.bias, row_open);
                        } else if (!shared) {
                            fill_mask_row(layer, sources, h, t0 + t, c0, n_tiles * TILE,
                                          mask.bias + t * mask.bias_stride, row_open);
                        }
                        std::transform(row_open, row_open + n_tiles, open, open, std::bit_or<uint8_t>());
                    }
                    tiles = open_tiles(open, n_tiles);
                }
                if (tiles.first >= tiles.last) {
                    continue;
                }
                const int64_t   c    = tiles.first * TILE;
                const MaskRows  rows = mask.of(0, c);
                const RowStates all  = state_of(h);
                const RowStates into = s.n_split > 1 ? all : later; // the only segment of the split
                if (s.n_split == 1) {
                    later.clear();
                }
                alibi_slopes(layer, h * s.n_group, s.n_group, slope);
                AttendArgs a = args_of(h, listed ? 0 : c0 + c, tiles.last * TILE - c, rows, into);
                if (listed || layer.by_rows) {
                    const int32_t * list = listed ? (const int32_t *) listed->data + t0 * s.n_kv + c0 + c : nullptr;
                    gather(a, list, layer, keys_buf, values_buf);
                }
                if (codec.latent) {
                    make_values(a, tiles.last - tiles.first, values_buf);
                }
                layer.bases->attend(a, first_stream + (uint32_t) stream, h, tiles_of(k_view, c0 + c, 0),
                                    tiles_of(v_view, c0 + c, 0));
                for (int64_t r = 0; s.n_split == 1 && r < n_rows; ++r) {
                    merge_softmax(all.m[r], all.z[r], all.acc + r * s.width, later.m[r], later.z[r],
                                  later.acc + r * s.width, a.v->rank);
                }
            }
        }
    }
}

} // namespace subkv
