// llama-subkv-cells.h: the cells and tokens of cell_reader.h in llama.cpp's K/V cache and batches. Part of libllama.
#pragma once

#include "llama-subkv-memory.h"
#include "releases.h"

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

// Positions [first, second). As in llama.cpp, a negative end is open.
inline std::pair<llama_pos, llama_pos> positions(llama_pos p0, llama_pos p1) {
    return { p0 < 0 ? 0 : p0, p1 < 0 ? std::numeric_limits<llama_pos>::max() : p1 };
}

// With M-RoPE, a text token has the same position in time, width and height, unlike a token of a picture.
inline bool is_in_picture(llama_pos pos, llama_pos x, llama_pos y) {
    return x != pos || y != pos;
}

// Appends the tokens of a ubatch, without their cells.
inline void add_tokens(const llama_ubatch & ubatch, std::vector<subkv::TokenDesc> & out) {
    for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
        const llama_pos * pos = ubatch.pos + i; // first all positions in time, then in height, then in width
        const bool        in_picture =
            ubatch.is_pos_2d() && is_in_picture(*pos, pos[2 * ubatch.n_tokens], pos[ubatch.n_tokens]);
        out.push_back({ *pos, ubatch.n_seq_id[i], ubatch.seq_id[i], 0, -1, in_picture });
    }
}

namespace llama_subkv {

class reader : public subkv::CellReader {
public:
    explicit reader(const llama_kv_cache & kv) : kv(kv), pictures(access::hparams(kv).n_pos_per_embd() > 1) {}

    uint32_t stream_of(int32_t seq) const override { return access::seq_to_stream(kv)[seq]; }

    void positions(uint32_t stream, uint32_t n, int32_t * out) const override {
        const auto & cells      = access::v_cells(kv)[stream];
        int32_t * __restrict to = out; // and one condition: the compiler vectorizes this loop over all cells
        for (uint32_t i = 0; i < n; ++i) {
            to[i] = cells.is_empty(i) ? -1 : cells.pos_get(i);
        }
        for (uint32_t i = 0; pictures && i < n; ++i) {
            to[i] = to[i] >= 0 && in_picture(cells, i) ? subkv::MAX_POSITION : to[i];
        }
    }

    void find(int32_t seq, int32_t p0, int32_t p1, std::vector<subkv::PosCell> & out) const override {
        find_all(seq, p0, p1, out);
        const auto & cells = access::v_cells(kv)[access::seq_to_stream(kv)[seq]];
        const auto   is    = [&](const subkv::PosCell & cell) { return in_picture(cells, (uint32_t) cell.cell); };
        out.erase(std::remove_if(out.begin(), out.end(), is), out.end());
    }

    void find_all(int32_t seq, int32_t p0, int32_t p1, std::vector<subkv::PosCell> & out) const override {
        out.clear();
        const auto & cells = cells_of(access::v_cells(kv)[access::seq_to_stream(kv)[seq]], seq);
        for (auto it = cells.lower_bound({ p0, 0 }); it != cells.end() && it->first < p1; ++it) {
            out.push_back({ it->first, (int32_t) it->second });
        }
    }

    bool shared(int32_t seq, int32_t cell) const override {
        return access::v_cells(kv)[access::seq_to_stream(kv)[seq]].seq_count((uint32_t) cell) > 1;
    }

    int32_t max_pos_outside(int32_t seq, int32_t p0, int32_t p1) const override {
        const auto & cells = cells_of(access::v_cells(kv)[access::seq_to_stream(kv)[seq]], seq);
        for (auto it = cells.rbegin(); it != cells.rend(); ++it) {
            if (it->first < p0 || it->first >= p1) {
                return it->first;
            }
        }
        return -1;
    }

private:
    bool in_picture(const llama_kv_cells & cells, uint32_t cell) const {
        return pictures && is_in_picture(cells.pos_get(cell), cells.ext_get(cell).x, cells.ext_get(cell).y);
    }

    const llama_kv_cache & kv;
    const bool             pictures;
};

} // namespace llama_subkv
