// node_sources.h: names for the sources of every custom node, and for the rows of a graph's I32 inputs.
//
// Each struct lists the sources of one kind of node in the node's order, which is written nowhere else. Code that
// builds a node fills the struct. Code that computes the node, on a CPU or a GPU, reads it back with sources_of. A
// member is nullptr if the node does not have that source.
#pragma once

#include "ggml.h"
#include "node_work.h"
#include "subkv/batch.h"

#include <array>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

namespace subkv {

struct EncodeSources {
    ggml_tensor * k;
    ggml_tensor * v; // k in a latent layer, as in the following pairs
    ggml_tensor * k_cache;
    ggml_tensor * v_cache;
    ggml_tensor * k_idxs;
    ggml_tensor * v_idxs; // not read because the numbers are the same, but only a source's input is filled by llama.cpp
    // Only a node on a CPU has the following.
    ggml_tensor * q;
    ggml_tensor * tokens;
    ggml_tensor * mask_node; // or nullptr
};

struct ProjectSources {
    ggml_tensor * q;
    ggml_tensor * mask_node; // or nullptr
};

struct AttendSources {
    ggml_tensor * q;
    ggml_tensor * queries; // projected, but on a GPU fresh, since attend projects them there
    ggml_tensor * k_view;
    ggml_tensor * v_view; // of a latent layer k_view
    ggml_tensor * mask;
    ggml_tensor * cell_pos;
    ggml_tensor * tokens;
    ggml_tensor * written; // not read, but makes attend run after this node
    ggml_tensor * extra;   // the mask node, the list of selected cells, or nullptr

    const ggml_tensor * selected_cells() const { return extra && extra->type == GGML_TYPE_I32 ? extra : nullptr; }
    const ggml_tensor * mask_node() const { return extra && extra->type != GGML_TYPE_I32 ? extra : nullptr; }
};

// A node on a GPU, with one token per stream, that stores the exact rows in the window and attends.
struct StoreAttendSources {
    ggml_tensor * q;
    ggml_tensor * k;
    ggml_tensor * v;
    ggml_tensor * k_view; // of the whole cache, which is changed
    ggml_tensor * v_view;
    ggml_tensor * mask;
    ggml_tensor * cell_pos;
    ggml_tensor * tokens;
    ggml_tensor * slots;
};

struct CombineSources {
    ggml_tensor * partial; // of attend or store_attend
    ggml_tensor * q;
    ggml_tensor * fresh;
    ggml_tensor * window; // without one fresh
    ggml_tensor * mask;
    ggml_tensor * tokens;
    ggml_tensor * slots;
    ggml_tensor * cells; // k_view or the list of selected cells, for its shape
    ggml_tensor * sinks; // or nullptr
};

struct StoreWindowSources {
    ggml_tensor * window; // changed in place
    ggml_tensor * fresh;
    ggml_tensor * slots;
    ggml_tensor * combined; // not read, but makes this node run before the rows are overwritten
};

struct MaskSources {
    ggml_tensor * mask;
    ggml_tensor * cell_pos;
    ggml_tensor * tokens;
};

struct SelectedMaskSources {
    ggml_tensor * mask;
    ggml_tensor * selected;
};

struct SelectedCellsSources {
    ggml_tensor * mask;
    ggml_tensor * selected;
    ggml_tensor * cell_pos;
    ggml_tensor * tokens;
};

struct PromptMaskSources {
    ggml_tensor * mask;
    ggml_tensor * cell_pos;
    ggml_tensor * tokens;
    ggml_tensor * slots;
};

struct PromptRowsSources {
    ggml_tensor * k_view;
    ggml_tensor * v_view;
    ggml_tensor * fresh;
    ggml_tensor * window; // without one fresh
    ggml_tensor * tokens;
    ggml_tensor * slots;
    ggml_tensor * written; // not read, but makes this node run after it
};

struct PromptLostSources {
    ggml_tensor * out; // of flash attention, changed in place
    ggml_tensor * mask;
    ggml_tensor * cell_pos;
    ggml_tensor * tokens;
    ggml_tensor * slots;
    ggml_tensor * k_view;
    ggml_tensor * v_view;
    ggml_tensor * fresh;
    ggml_tensor * window; // without one fresh
};

struct ShiftSources {
    ggml_tensor * of_cells;
    ggml_tensor * distances;
    ggml_tensor * pairs;
    ggml_tensor * of_slots; // nullptr without a window
};

struct ObserveSources {
    ggml_tensor * q;
    ggml_tensor * tokens;
    ggml_tensor * k; // nullptr, like v, if q reads another layer's rows
    ggml_tensor * v;
};

struct ObserveOutputSources {
    ggml_tensor * out;
    ggml_tensor * tokens;
};

// The sources as a list for ggml, without nullptrs at its end.
template <typename Sources> std::vector<ggml_tensor *> source_list(const Sources & sources) {
    static_assert(std::is_trivially_copyable_v<Sources> && sizeof(Sources) % sizeof(ggml_tensor *) == 0);
    static_assert(sizeof(Sources) / sizeof(ggml_tensor *) < GGML_MAX_SRC); // as ggml_custom_4d checks
    std::vector<ggml_tensor *> list(sizeof(Sources) / sizeof(ggml_tensor *));
    std::memcpy(list.data(), &sources, sizeof(Sources));
    while (!list.back()) {
        list.pop_back();
    }
    return list;
}

// A node that all threads compute.
template <typename Sources>
ggml_tensor * new_node(ggml_context * ctx, ggml_type type, const std::array<int64_t, 4> & ne, const Sources & sources,
                       const NodeWork & work) {
    auto list = source_list(sources);
    return ggml_custom_4d(ctx, type, ne[0], ne[1], ne[2], ne[3], list.data(), (int) list.size(), work.function(),
                          GGML_N_TASKS_MAX, work.userdata());
}

// The same for a node that changes its first source in place.
template <typename Sources>
ggml_tensor * new_node_inplace(ggml_context * ctx, const Sources & sources, const NodeWork & work) {
    auto list = source_list(sources);
    return ggml_custom_inplace(ctx, list[0], list.data() + 1, (int) list.size() - 1, work.function(), GGML_N_TASKS_MAX,
                               work.userdata());
}

template <typename Sources> Sources sources_of(const ggml_tensor * node) {
    static_assert(std::is_trivially_copyable_v<Sources> && sizeof(Sources) <= sizeof(node->src));
    Sources sources;
    std::memcpy(&sources, node->src, sizeof(Sources));
    return sources;
}

// I32 tensors whose rows are structs (Inputs in graph_build.h), and their data.
inline ggml_tensor * new_token_rows(ggml_context * ctx, int64_t n_tokens) {
    return ggml_new_tensor_2d(ctx, GGML_TYPE_I32, sizeof(TokenRow) / sizeof(int32_t), n_tokens);
}

inline ggml_tensor * new_slot_rows(ggml_context * ctx, int64_t n_slots) {
    return ggml_new_tensor_2d(ctx, GGML_TYPE_I32, sizeof(SlotRow) / sizeof(int32_t), n_slots);
}

inline TokenRow * token_rows(const ggml_tensor * tokens) {
    return (TokenRow *) tokens->data;
}

inline SlotRow * slot_rows(const ggml_tensor * slots) {
    return (SlotRow *) slots->data;
}

} // namespace subkv
