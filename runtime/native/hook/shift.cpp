// shift.cpp: shifts of coded cells' positions (llama-subkv.h). Part of libllama.
#include "llama-subkv-body.h"
#include "llama-subkv-cells.h"
#include "llama-subkv-graph.h"
#include "llama-subkv-sequences.h"

#include "llama-context.h"
#include "llama-graph.h"
#include "llama-model.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <new>
#include <set>
#include <vector>

bool llama_subkv::can_shift(const llama_kv_cache & kv) {
    return !llm_arch_is_hybrid(access::model(kv).arch) && access::hook(kv)->facts().shifts;
}

bool llama_subkv::seq_add(llama_context & ctx, const caches & parts, llama_seq_id seq, llama_pos p0, llama_pos p1,
                          llama_pos shift) {
    const auto & kv = *parts.base;
    if (llm_arch_is_hybrid(access::model(kv).arch)) {
        return access::hook(kv)->report(
            "seq_add: positions of a model that keeps recurrent state beside its cells cannot be "
            "shifted; remove the sequence and decode it again with new positions");
    }
    if (access::hook(kv)->facts().shifts && !kv.get_can_shift()) {
        return access::hook(kv)->report(
            "seq_add: llama.cpp cannot shift positions of this model; remove the sequence and decode it "
            "again with new positions");
    }
    const auto [first, last] = positions(p0, p1);
    return access::hook(kv)->can_shift(seq, first, last, shift, reader(kv)) && unshare(ctx, parts, seq, first, last) &&
           access::hook(kv)->shift(seq, first, last, shift, reader(kv));
}

bool llama_subkv::unshare(llama_context & ctx, const caches & parts, llama_seq_id seq, llama_pos first,
                          llama_pos last) {
    const auto & hook = *access::hook(*parts.base);
    try {
        std::vector<uint32_t> of_tokens; // the cells of the full-attention half, where an indexer has its keys
        for (llama_kv_cache * kv : { parts.base, parts.index, parts.swa }) {
            if (!kv) {
                continue;
            }
            const uint32_t        stream = access::seq_to_stream(*kv)[seq];
            auto &                cells  = access::v_cells(*kv)[stream];
            std::vector<uint32_t> from, to;
            const auto &          own = cells_of(cells, seq);
            for (auto it = own.lower_bound({ first, 0 }); it != own.end() && it->first < last; ++it) {
                if (cells.seq_count(it->second) > 1) {
                    from.push_back(it->second);
                }
            }
            for (uint32_t i = 0; i < cells.size() && to.size() < from.size(); ++i) {
                if (cells.is_empty(i)) {
                    to.push_back(i);
                }
            }
            if (kv == parts.index) {
                to = of_tokens;
            }
            if (from.empty()) {
                continue;
            }
            if (to.size() < from.size()) {
                return hook.report(format("seq_add: %zu free cells expected for those that sequence %d shares with "
                                          "others from position %d on, %zu found; remove another sequence, or remove "
                                          "these positions and decode them again",
                                          from.size(), seq, std::max(first, own.begin()->first), to.size()));
            }
            ctx.synchronize();
            const tiles coded(*kv);
            for (const auto & layer : access::layers(*kv)) {
                if (auto * k = layer.k_stream[stream]) {
                    coded.set(k, to, coded.get(k, from));
                }
                auto * v = layer.v_stream[stream];
                if (v && !access::v_trans(*kv)) {
                    coded.set(v, to, coded.get(v, from));
                }
                const size_t         size = v && access::v_trans(*kv) ? ggml_type_size(v->type) : 0; // of an element
                std::vector<uint8_t> column(size * cells.size());                                    // all cells
                for (size_t at = 0; size > 0 && at < ggml_nbytes(v); at += column.size()) {
                    ggml_backend_tensor_get(v, column.data(), at, column.size());
                    for (size_t i = 0; i < from.size(); ++i) {
                        std::copy_n(column.data() + from[i] * size, size, column.data() + to[i] * size);
                    }
                    ggml_backend_tensor_set(v, column.data(), at, column.size());
                }
            }
            for (size_t i = 0; i < from.size(); ++i) {
                const auto pos = cells.pos_get(from[i]), by = cells.get_shift(from[i]);
                const auto ext = cells.ext_get(from[i]);
                cells.seq_rm(from[i], seq);
                cells.pos_set(to[i], pos - by);
                cells.ext_set(to[i], ext);
                cells.seq_add(to[i], seq);
                if (by != 0) {
                    cells.pos_add(to[i], by); // llama.cpp rotates its key
                }
            }
            of_tokens = kv == parts.base ? to : of_tokens;
        }
    } catch (const std::bad_alloc &) {
        return hook.report("seq_add: memory for a copy of shared cells expected, too little found; remove these "
                           "positions and decode them again");
    }
    return true;
}

bool llama_subkv::rotation_pending(const llama_kv_cache & kv) {
    if (!kv.get_has_shift()) {
        return false;
    }
    access::hook(kv)->report("shift: the rotation of moved keys is incomplete (it was stopped, or memory was short); "
                             "clear the cache, or decode "
                             "again to resume it");
    return true;
}

namespace llama_subkv {

// The pending rotations of cells and slots.
class shift_input : public llm_graph_input_i {
public:
    shift_input(const llama_kv_cache & kv, ggml_context * ctx) :
        ctx(ctx), slots((size_t) access::hook(kv)->facts().n_slots) {
        access::hook(kv)->rotations(slots.data());
        std::set<int32_t> all(slots.begin(), slots.end());
        for (const auto & cells : access::v_cells(kv)) {
            for (uint32_t i = 0; i < cells.size(); ++i) {
                all.insert(cells.is_empty(i) ? 0 : cells.get_shift(i));
            }
        }
        if (all.size() > 1) {
            all.erase(0);
        }
        by.assign(all.begin(), all.end());
        distances = input(GGML_TYPE_I32, (int64_t) by.size(), 1);
        of_slots  = slots.empty() ? nullptr : input(GGML_TYPE_I32, (int64_t) slots.size(), 1);
    }

    // F32 [n_rot, 1, distances]
    ggml_tensor * pairs(int64_t n_rot) {
        ggml_tensor *& input_pairs = pairs_[n_rot];
        input_pairs                = input_pairs ? input_pairs : input(GGML_TYPE_F32, n_rot, (int64_t) by.size());
        return input_pairs;
    }

    void set_input(const llama_ubatch *) override {
        const auto set = [](ggml_tensor * t, const void * data) {
            if (t && t->buffer) {
                ggml_backend_tensor_set(t, data, 0, ggml_nbytes(t));
            }
        };
        set(distances, by.data());
        set(of_slots, slots.data());
        for (const auto & [n_rot, t] : pairs_) {
            std::vector<float> ones((size_t) ggml_nelements(t));
            for (size_t i = 0; i < ones.size(); ++i) {
                const auto at = (int64_t) i % n_rot;
                ones[i]       = (apart ? at < n_rot / 2 : at % 2 == 0) ? 1.0f : 0.0f;
            }
            set(t, ones.data());
        }
    }

    ggml_tensor * distances;
    ggml_tensor * of_slots;
    bool          apart = false;

private:
    ggml_tensor * input(ggml_type type, int64_t n, int64_t n_rotations) {
        ggml_tensor * t = ggml_new_tensor_3d(ctx, type, n, 1, n_rotations);
        ggml_set_input(t);
        return t;
    }

    ggml_context *                   ctx;
    std::vector<int32_t>             slots, by;
    std::map<int64_t, ggml_tensor *> pairs_; // by n_rot
};

static void build_layer_shift(const llama_kv_cache & kv, const llama_cparams & cparams, llm_graph_result & res,
                              ggml_tensor * k_shift, uint32_t il, shift_input & input) {
    ggml_context * ctx   = res.get_ctx();
    const int64_t  n_rot = access::hparams(kv).n_rot(il);

    // YaRN and similar methods scale queries and keys, but stored keys are already scaled.
    const float   freq_scale = access::model(kv).get_rope_freq_scale(cparams, il);
    llama_cparams rope       = cparams;
    rope.yarn_attn_factor    = rope.yarn_ext_factor != 0.0f ? 1.0f / (1.0f - 0.1f * std::log(freq_scale)) : 1.0f;

    subkv::ShiftBuild b;
    b.ctx       = ctx;
    b.gf        = res.get_gf();
    b.il        = (int32_t) il;
    b.k_cache   = access::layer(kv, (int32_t) il).k;
    b.of_cells  = k_shift;
    b.of_slots  = input.of_slots;
    b.distances = input.distances;
    b.pairs     = access::build_rope_shift(kv, rope, ctx, ggml_dup(ctx, input.pairs(n_rot)), input.distances, nullptr,
                                           access::model(kv).get_rope_factors(cparams, il),
                                           access::model(kv).get_rope_freq_base(cparams, il), freq_scale, il);
    b.first     = access::hparams(kv).n_lora_kv > 0 ? access::hparams(kv).n_embd_head_k(il) - n_rot :
                                                      0; // latent rows end with the rotated elements
    b.apart     = input.apart;
    access::hook(kv)->build_shift(b);
}

} // namespace llama_subkv

bool llama_subkv::build_shift(const llama_kv_cache & kv, const llama_cparams & cparams, llm_graph_result & res,
                              ggml_tensor * k_shift, uint32_t il) {
    const auto rotates = [&](uint32_t layer) {
        return row_bytes(kv, layer, false) > 0 && has_rope(access::hparams(kv), layer, 0);
    };
    const auto built = [](const auto & input) { return dynamic_cast<shift_input *>(input.get()) != nullptr; };
    if (coded(kv) && std::none_of(res.inputs.begin(), res.inputs.end(), built)) { // before all ordinary layers
        auto * input = static_cast<shift_input *>(res.add_input(std::make_unique<shift_input>(kv, res.get_ctx())));
        input->apart = access::hparams(kv).rope_type != LLAMA_ROPE_TYPE_NORM;
        for (const auto & layer : access::layers(kv)) {
            if (rotates(layer.il)) {
                build_layer_shift(kv, cparams, res, k_shift, layer.il, *input);
            }
        }
        // ggml may ask whether to stop before a node's other threads have finished, but behind this node they have.
        ggml_build_forward_expand(res.get_gf(), ggml_dup(res.get_ctx(), k_shift));
    }
    return rotates(il);
}
