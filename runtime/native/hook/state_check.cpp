// state_check.cpp: validates parts of a state that llama.cpp trusts, before anything changes. Part of libllama.
#include "llama-subkv-body.h"
#include "llama-subkv-cells.h"
#include "releases.h"

#include "llama-memory-recurrent.h"

#include <set>

static void demand(bool held, const std::string & expected, int64_t found) {
    if (!held) {
        throw std::runtime_error("state: " + expected + " expected, " + std::to_string(found) + " found");
    }
}

static void demand_position(llama_pos pos) {
    demand(pos >= 0 && pos < subkv::MAX_POSITION, "positions from 0 to " + std::to_string(subkv::MAX_POSITION - 1),
           pos);
}

// This covers what llama.cpp does not check, which is the positions and sequences of cells, duplicate cells, and the
// widths of rows.
void llama_subkv::row_reader::check(const llama_kv_cache & of, llama_seq_id seq) const {
    cursor     in(bytes);
    const auto n_stream = in.value<uint32_t>();
    demand(n_stream == access::n_stream(of), std::to_string(access::n_stream(of)) + " streams", n_stream);
    for (uint32_t s = 0; s < n_stream; ++s) {
        const auto n_cells = in.value<uint32_t>();
        demand(n_cells <= of.get_size(), "at most " + std::to_string(of.get_size()) + " cells", n_cells);
        if (n_cells == 0) {
            continue;
        }
        std::set<std::pair<llama_seq_id, llama_pos>> seen;
        for (uint32_t i = 0; i < n_cells; ++i) {
            const auto pos   = in.value<llama_pos>();
            const auto n_seq = in.value<uint32_t>();
            demand_position(pos);
            demand(n_seq >= 1 && n_seq <= (seq < 0 ? access::n_seq_max(of) : 1), "a cell of its sequences", n_seq);
            const auto ext        = has_cell_ext(of) ? in.value<llama_kv_cell_ext>() : llama_kv_cell_ext{};
            const bool in_picture = access::hparams(of).n_pos_per_embd() > 1 && is_in_picture(pos, ext.x, ext.y);
            for (uint32_t j = 0; j < n_seq; ++j) {
                const auto id = in.value<llama_seq_id>();
                demand(seq >= 0 ||
                           (id >= 0 && (uint32_t) id < access::n_seq_max(of) && access::seq_to_stream(of)[id] == s),
                       "a sequence of stream " + std::to_string(s), id);
                demand(in_picture || seen.insert({ seq < 0 ? id : seq, pos }).second, "one cell at a position", pos);
            }
        }
        const bool by_element = in.value<uint32_t>() != 0;
        demand(by_element == access::v_trans(of), access::v_trans(of) ? "values by element" : "values by cell",
               by_element);
        const auto n_layer = in.value<uint32_t>();
        demand(n_layer == access::layers(of).size(), std::to_string(access::layers(of).size()) + " layers", n_layer);
        for (const bool value : { false, true }) {
            for (const auto & layer : access::layers(of)) {
                const ggml_tensor * t = value ? layer.v : layer.k;
                if (!t) {
                    continue;
                }
                const auto type = in.value<int32_t>();
                demand(type == (int32_t) t->type, "tensors of type " + std::to_string(t->type), type);
                if (value && by_element) {
                    const uint32_t width = access::hparams(of).n_embd_v_gqa(layer.il), size = ggml_type_size(t->type);
                    const auto     found = in.value<uint32_t>();
                    demand(found == size, "elements of " + std::to_string(size) + " bytes", found);
                    const auto found_width = in.value<uint32_t>();
                    demand(found_width == width, std::to_string(width) + " values of a cell", found_width);
                    in.take((size_t) n_cells * width * size);
                    continue;
                }
                const auto row = in.value<uint64_t>();
                demand(row == t->nb[1], "rows of " + std::to_string(t->nb[1]) + " bytes", (int64_t) row);
                const uint8_t * rows = in.take(n_cells * t->nb[1]);
                if (row_bytes(of, layer.il, value) > 0) {
                    access::hook(of)->check_rows((int32_t) layer.il, value, n_cells, rows);
                }
            }
        }
    }
}

// The same for recurrent state, where llama.cpp aborts the process at a second cell of a sequence.
void llama_subkv::row_reader::check(const llama_memory_recurrent &, llama_seq_id seq) const {
    cursor         in(bytes);
    const uint32_t most    = seq < 0 ? access::n_seq_max(kv) : 1;
    const auto     n_cells = in.value<uint32_t>();
    demand(n_cells <= most, "recurrent state of at most " + std::to_string(most) + " sequences", n_cells);
    std::set<llama_seq_id> seen;
    for (uint32_t i = 0; i < n_cells; ++i) {
        demand_position(in.value<llama_pos>());
        const auto n_seq = in.value<uint32_t>();
        demand(seq < 0 ? n_seq >= 1 && n_seq <= most : n_seq == 0, "recurrent state of its sequences", n_seq);
        for (uint32_t j = 0; j < n_seq; ++j) {
            const auto id = in.value<llama_seq_id>();
            demand(id >= 0 && (uint32_t) id < most && seen.insert(id).second, "one recurrent state of a sequence", id);
        }
    }
}

void llama_subkv::row_reader::check(const llama_memory_i & of, llama_seq_id seq) const {
    if (const auto * cells = dynamic_cast<const llama_kv_cache *>(&of)) {
        check(*cells, seq);
    } else {
        check(dynamic_cast<const llama_memory_recurrent &>(of), seq);
    }
}
