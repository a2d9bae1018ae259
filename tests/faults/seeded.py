"""Seeded faults: small changes of the product, each of which some test must notice (try_faults.py)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """before: text that occurs once in the file; after: its replacement; tests: paths of tests that must fail then."""

    name: str
    file: str
    before: str
    after: str
    tests: str

    @property
    def native(self) -> bool:
        return self.file.endswith((".cpp", ".h"))


ATTEND = "tests/kernels/test_attend.py tests/kernels/test_trellis.py"
ENCODE = "tests/kernels/test_rows.py tests/kernels/test_trellis.py"
TILES = "tests/kernels/test_tiles.py"
LINEAR = "tests/kernels/test_linear.py"
RECENT = "tests/kernels/test_recent.py"
EXACT = "tests/kernels/test_attend_exact.py"
ENGINE = "tests/runtime/test_exact.py tests/runtime/test_recent_rows.py"
SEQUENCES = "tests/runtime/test_sequences.py tests/runtime/test_variants.py"
SHIFT = "tests/runtime/test_shift.py"
STATES = "tests/runtime/test_states.py tests/runtime/test_restore.py tests/runtime/test_forged_states.py"
CHOSEN = "tests/architectures/test_chosen.py tests/architectures/test_architectures.py"
AUTOMATIC = "tests/runtime/test_automatic.py"
STORE = "tests/runtime/test_prefix_store.py tests/runtime/test_prefix_store_damage.py"
METADATA = "tests/format/test_metadata_bad.py tests/format/test_metadata.py"
PLANS = "tests/format/test_plans.py"
PROMPTS = "tests/python/test_prompt_cache.py"
LLAMA = "tests/python/test_llama.py tests/python/test_drop_in.py"
LLAMA_DEFAULT = "tests/python/test_own_model.py"
PLAN = "tests/format/test_layout_plan.py tests/format/test_convert.py"

FAULTS = [
    # the codec
    Fault("round down", "kernels/ref/encode.cpp", "std::nearbyint(std::fma(c,", "std::floor(std::fma(c,", ENCODE),
    Fault("ties to the smaller scale", "kernels/ref/encode.cpp", "error < best_error", "error <= best_error", ENCODE),
    Fault(
        "one candidate of the scale fewer",
        "kernels/ref/encode.cpp",
        "k >= k0 - SCALE_CANDIDATES_BELOW",
        "k > k0 - SCALE_CANDIDATES_BELOW",
        ENCODE,
    ),
    Fault(
        "16-bit bands overflow",
        "kernels/ref/encode.cpp",
        "float_to_half(std::fmin(std::fmax(x, -HALF_MAX), HALF_MAX))",
        "float_to_half(x)",
        ENCODE,
    ),
    Fault("offset added", "kernels/ref/encode.cpp", "c[(size_t) i] -= codec", "c[(size_t) i] += codec", ENCODE),
    Fault("zero rows get a scale", "kernels/ref/encode.cpp", "zero && value == 0.0f", "zero && value > 0.0f", ENCODE),
    Fault("errors are not squared", "kernels/ref/encode.cpp", "std::fma(e, e, lane", "std::fma(e, 1.0f, lane", ENCODE),
    Fault("ties of branches", "kernels/ref/trellis.cpp", "= b < a;", "= b <= a;", ENCODE),
    Fault("ties of scales", "kernels/ref/trellis.cpp", "if (cost < least) {", "if (cost <= least) {", ENCODE),
    Fault(
        "bits of the path swapped",
        "kernels/ref/trellis.cpp",
        "2 * code[j] ^ 2 * two ^ one",
        "2 * code[j] ^ 2 * one ^ two",
        ENCODE,
    ),
    Fault(
        "the second place of a lane",
        "kernels/ref/trellis.cpp",
        "(first || second)",
        "(first || (second && t == 0))",
        ENCODE,
    ),
    Fault("lanes go on", "kernels/ref/trellis.cpp", "    cost[0] = least_of(cost);", "    cost[0] = 0.0f;", ENCODE),
    Fault(
        "a scale below is not tried",
        "kernels/cpu/path_search.h",
        "for (int i = 0; i < TRELLIS_TRIED; ++i) {",
        "for (int i = 1; i < TRELLIS_TRIED; ++i) {",
        ENCODE,
    ),
    Fault(
        "first of equal states", "kernels/cpu/path_search.h", "cost[w] < cost[best]", "cost[w] <= cost[best]", ENCODE
    ),
    # tiles
    Fault("bits of other codes", "kernels/cpu/tiles.cpp", "(from >> in_shift & mask)", "(from >> in_shift)", TILES),
    Fault(
        "halves of the first cell",
        "kernels/cpu/tiles.cpp",
        "tile + TILE * band.offset + 2 * (j * TILE + c), 2, row",
        "tile + TILE * band.offset + 2 * (j * TILE), 2, row",
        TILES,
    ),
    Fault(
        "a listed cell's place", "kernels/cpu/gather.cpp", "(int32_t) (i % TILE)", "(int32_t) ((i + 1) % TILE)", TILES
    ),
    Fault(
        "the last tile is not cleared",
        "kernels/cpu/gather.cpp",
        "(n + TILE - 1) / TILE * size,",
        "n / TILE * size,",
        TILES,
    ),
    Fault("half an octet twice", "kernels/cpu/gather.cpp", "codes + 4, 4);", "codes, 4);", TILES),
    Fault(
        "values without scales",
        "kernels/cpu/tiles.cpp",
        "std::copy_n(key_tile, TILE,",
        "std::copy_n(key_tile, 1,",
        TILES,
    ),
    # attention
    Fault("soft cap", "kernels/ref/attend.cpp", "std::tanh(dot / softcap)", "std::tanh(dot)", ATTEND),
    Fault("shift of the first row", "kernels/ref/attend.cpp", "a.shift[row] : 0.0f", "a.shift[0] : 0.0f", ATTEND),
    Fault(
        "bias without slope",
        "kernels/ref/attend.cpp",
        "(double) slope * (double) bias[c]",
        "(double) bias[c] + 0.0 * (double) slope",
        ATTEND,
    ),
    Fault(
        "the state is not shrunk", "kernels/ref/attend.cpp", "total = keep * (double) *z", "total = (double) *z", ATTEND
    ),
    Fault(
        "the state is not shrunk, fast",
        "kernels/cpu/attend_tiles.h",
        "row.z * row.shrink + row.weight_scale",
        "row.z + row.weight_scale",
        ATTEND,
    ),
    Fault("share of a step", "kernels/cpu/attend_tiles.h", "m == top ? 1.0f", "m != top ? 1.0f", ATTEND),
    Fault(
        "hidden cells in the last step",
        "kernels/cpu/attend_tiles.h",
        "step.bias[c] = MINUS_INF;",
        "step.bias[c] = 0.0f;",
        ATTEND,
    ),
    Fault(
        "the largest scale of the first token",
        "kernels/cpu/attend_tiles.h",
        "index % call.a.n_group == 0)",
        "index == 0)",
        ATTEND,
    ),
    Fault(
        "the middle of a code",
        "kernels/cpu/tile_codes.h",
        "BYTE_MIDDLE - (1 << (BITS - 1)))",
        "BYTE_MIDDLE - (1 << (BITS - 1)) + 1)",
        ATTEND,
    ),
    Fault(
        "where a path begins",
        "kernels/cpu/tile_codes.h",
        "last[n++] = { TILE * band.offset + j * band.bits * LINE / 8",
        "last[n++] = { TILE * band.offset + 0 * j",
        ATTEND,
    ),
    Fault("rows in bytes", "kernels/ref/linear.cpp", "row = i - m.n_halves", "row = i - m.n_halves / 2", LINEAR),
    Fault("the tail of a product", "kernels/cpu/linear.h", "total += Isa::to_float(a[j]) * b[j];", "", LINEAR),
    Fault("the mirrored half", "kernels/cpu/linear.h", "s[j * d + i] += upper[i * ld + j];", "", LINEAR),
    Fault("low bits of recent rows", "kernels/ref/recent.cpp", "(size_t) (d / 4));", "(size_t) (d / 8));", RECENT),
    Fault("the middle of recent rows", "kernels/ref/recent.cpp", "(u - RECENT_MOST - 1)", "(u - RECENT_MOST)", RECENT),
    # the engine
    Fault(
        "exact cells count twice",
        "runtime/native/engine/node_mask.cpp",
        "((hidden != 0) | exact) != 0",
        "(hidden != 0)",
        f"{ENGINE} {SEQUENCES}",
    ),
    Fault("ALiBi", "runtime/native/engine/node_mask.cpp", "other != 0 && c < TILE", "other < 0 && c < TILE", SEQUENCES),
    Fault(
        "a listed cell counts twice",
        "runtime/native/engine/node_mask.cpp",
        "!is_exact(pos[c], tokens[t].pos, n_sink, n_recent) &&",
        "pos != nullptr && tokens != nullptr && n_sink + n_recent >= 0 &&",
        CHOSEN,
    ),
    Fault(
        "a segment's state stays",
        "runtime/native/engine/node_attend.cpp",
        "later.clear();",
        "",
        ENGINE,
    ),
    Fault(
        "the mask of the first head",
        "runtime/native/engine/node_attend.cpp",
        "mask_of(in.mask, h) * s.n_tokens",
        "mask_of(in.mask, 0) * s.n_tokens",
        CHOSEN,
    ),
    Fault(
        "the last sink is an integer",
        "runtime/native/engine/node_encode.cpp",
        "tokens[t].pos >= layer.window->n_sink()",
        "tokens[t].pos + 1 >= layer.window->n_sink()",
        ENGINE,
    ),
    Fault(
        "NaN in the window",
        "runtime/native/engine/nodes.h",
        "if (may_be_bad && !is_finite_row(x, n)) {",
        "if (may_be_bad && is_finite_row(x, n)) {",
        SEQUENCES,
    ),
    Fault(
        "all keys move by as much",
        "runtime/native/engine/node_shift.cpp",
        "by[n]    = of_cells[tile * TILE + c];",
        "by[n]    = of_cells[tile * TILE];",
        f"{SHIFT} tests/runtime/test_machine.py",
    ),
    Fault(
        "gain of the mean",
        "runtime/native/engine/read_rows.cpp",
        "(x[i] - of_mean) / gamma + of_mean",
        "(x[i] - 0.0f * of_mean) / gamma",
        SHIFT,
    ),
    Fault(
        "one row more is lost",
        "runtime/native/engine/window.cpp",
        "std::min(n, n_recent_ - 1)",
        "std::min(n, n_recent_)",
        SEQUENCES,
    ),
    Fault(
        "a copy keeps the older row",
        "runtime/native/engine/window.cpp",
        "pos_[(size_t) to] <= pos",
        "pos_[(size_t) to] < 0",
        SEQUENCES,
    ),
    Fault(
        "a lost row hides its codes",
        "runtime/native/engine/window.cpp",
        "in.cell_pos->data && cell < in.cell_pos->ne[0]",
        "in.cell_pos->data && cell < 0",
        SEQUENCES,
    ),
    Fault(
        "a moved row is not rotated",
        "runtime/native/engine/window.cpp",
        "row.rotation += by;",
        "row.rotation += 0;",
        SHIFT,
    ),
    Fault(
        "rows that are not held",
        "runtime/native/engine/window.cpp",
        "exact_cells(seq, range.min, range.max, cells)",
        "exact_cells(seq, range.max, range.max, cells)",
        "tests/runtime/test_adaptive.py",
    ),
    Fault(
        "the oldest of a ubatch",
        "runtime/native/engine/window.cpp",
        "tokens[(size_t) slots[slot].token].pos <= token.pos",
        "tokens[(size_t) slots[slot].token].pos >= token.pos",
        f"{ENGINE} {SEQUENCES}",
    ),
    Fault(
        "a removed text leaks",
        "runtime/native/engine/window.cpp",
        "ggml_backend_tensor_memset(rows.tensor, 0, at, rows.offset(to - pos_.begin()) - at);",
        "(void) at;",
        f"{STATES} {SEQUENCES}",
    ),
    Fault(
        "positions beyond the end",
        "runtime/native/engine/window.cpp",
        "if (pos >= MAX_POSITION) {",
        "if (pos < 0 && pos >= MAX_POSITION) {",
        SHIFT,
    ),
    Fault(
        "the ring turns back",
        "runtime/native/engine/window.cpp",
        "(origin - by % n_ring_",
        "(origin + by % n_ring_",
        SHIFT,
    ),
    # states
    Fault(
        "slots of a forged state", "runtime/native/engine/window.cpp", "|| slot_of(of, pos[i]) != slot)", ")", STATES
    ),
    Fault(
        "rows without cells",
        "runtime/native/engine/window.cpp",
        "if (cell.empty()) {",
        "if (cell.empty() && n < 0) {",
        STATES,
    ),
    Fault(
        "states of other bases",
        "runtime/native/engine/cache_state.cpp",
        "if (fingerprint != layout_->fingerprint) {",
        "if (fingerprint.size() != layout_->fingerprint.size()) {",
        STATES,
    ),
    Fault(
        "integers taken for halves",
        "runtime/native/engine/cache_state.cpp",
        "want.kinds != found.kinds",
        "want.kinds == 1",
        STATES,
    ),
    Fault(
        "states from before a shift",
        "runtime/native/engine/cache_state.cpp",
        "moves != here",
        "moves.empty()",
        f"{STATES} {SHIFT}",
    ),
    Fault(
        "n_rollback is not counted",
        "python/subkv/format/window.py",
        "self.n_recent + self.n_rollback)",
        "self.n_recent)",
        PLAN,
    ),
    Fault("states of other RoPE", "python/subkv/engine/states.py", '    "rope_freq_base",\n', "", f"{LLAMA} {PROMPTS}"),
    Fault(
        "a longer state",
        "python/subkv/engine/states.py",
        "if state.n_tokens > llm.n_ctx():",
        "if state.n_tokens < 0:",
        LLAMA,
    ),
    Fault(
        "tokens have no checksum",
        "python/subkv/engine/states.py",
        "state.input_ids[: state.n_tokens]).tobytes()",
        "[]).tobytes()",
        LLAMA,
    ),
    Fault(
        "f16 replaces bases that somebody has prepared",
        "python/subkv/engine/cache.py",
        "if not choice.automatic or not choice.gain:",
        "if not choice.automatic:",
        LLAMA_DEFAULT,
    ),
    Fault(
        "the line about a default cache is repeated",
        "python/subkv/engine/announced.py",
        " and _is_first(path)",
        "",
        LLAMA_DEFAULT,
    ),
    # the prompt cache and the store
    Fault(
        "a tail that stays",
        "python/subkv/engine/prompt_cache.py",
        "len(own) - n_common <= self._n_removable",
        "True",
        PROMPTS,
    ),
    Fault(
        "a refused operation is believed",
        "runtime/native/hook/memory.cpp",
        "noted[seq].refused = std::min(noted[seq].refused, std::max(p0, 0));",
        "(void) seq, (void) p0;",
        SHIFT,
    ),
    Fault("a shared cell moves", "runtime/native/hook/shift.cpp", "seq_count(it->second) > 1", "size() == 0", SHIFT),
    Fault(
        "moved text is stored",
        "runtime/native/hook/store.cpp",
        "moved = text.moved != llama_subkv::NO_POSITION;",
        "moved = text.moved == -1;",
        "tests/programs/test_slot_cells.py",
    ),
    Fault(
        "recurrent state without its past",
        "runtime/native/hook/store.cpp",
        "if (!caches.base || caches.recurrent) {",
        "if (!caches.base) {",
        PROMPTS,
    ),
    Fault(
        "the shorter of two prefixes",
        "runtime/native/store/prefix_store.cpp",
        "return a.gain > b.gain;",
        "return a.gain < b.gain;",
        STORE,
    ),
    Fault(
        "pieces without checksums",
        "runtime/native/store/prefix_index.cpp",
        "address(identity, bytes) != piece.name)",
        "address(identity, bytes).empty())",
        STORE,
    ),
    Fault(
        "heads under other names",
        "runtime/native/store/prefix_index.cpp",
        "head->name() != name",
        "head->name().empty()",
        STORE,
    ),
    Fault(
        "prompts of other servers",
        "runtime/native/store/prefix_index.cpp",
        "if (it->second->identity == identity) {",
        "if (!it->second->identity.empty() && !identity.empty()) {",
        STORE,
    ),
    Fault(
        "rows by cell",
        "runtime/native/store/prefix_blocks.cpp",
        "    std::sort(places.begin(), places.end());\n",
        "",
        STORE,
    ),
    Fault(
        "a removal that fails counts as done",
        "runtime/native/store/store_folder.cpp",
        'broken("remove", full(name), error);',
        "return;",
        STORE,
    ),
    Fault(
        "a model that was replaced after it was loaded",
        "runtime/native/bases/model_file.cpp",
        "|| !(now == stamp)",
        "",
        "tests/python/test_model_digest.py",
    ),
    # files and variables
    Fault(
        "types that were requested are replaced",
        "runtime/native/hook/request.cpp",
        'type == GGML_TYPE_F16 ? ""',
        'stock(type) == GGML_TYPE_F16 ? ""',
        AUTOMATIC,
    ),
    Fault(
        "a file that belongs to another model",
        "runtime/native/bases/resolve.cpp",
        "asked.variables == Variables::OF_ANOTHER ? AUTO : value",
        "value.empty() ? AUTO : value",
        AUTOMATIC,
    ),
    Fault(
        "a file for every model",
        "runtime/native/engine/automatic.cpp",
        "owner == owners_.end() || owner->second == model ||",
        "owner == owners_.end() || !owner->second.empty() ||",
        AUTOMATIC,
    ),
    Fault(
        "numbers without a limit",
        "runtime/native/base/variables.h",
        "number < least || number > most",
        "number < least",
        AUTOMATIC,
    ),
    Fault(
        "gains of any size",
        "runtime/native/bases/layout.cpp",
        "value > 0.0f && value <= MAX_FACTOR",
        "value > 0.0f",
        METADATA,
    ),
    Fault(
        "means that are not finite",
        "runtime/native/bases/layout.cpp",
        "(half & 0x7c00) == 0x7c00",
        "(half & 0x7c00) == 1",
        METADATA,
    ),
    Fault(
        "plans without the gains of quantizers",
        "runtime/native/bases/plan.cpp",
        "value /= gain(bits)",
        "value /= 0.0 * gain(bits) + 1.0",
        PLANS,
    ),
    Fault(
        "a plan of another budget",
        "runtime/native/bases/layout.cpp",
        "distance < CLOSE",
        "distance < 64 * CLOSE",
        PLANS,
    ),
    Fault(
        "plans that the digest does not cover",
        "runtime/native/bases/layout.cpp",
        "check_digest(ctx.get(), keys, *l, sha.hex());",
        "(void) sha;",
        PLANS,
    ),
    Fault(
        "a key twice",
        "runtime/native/bases/layout_keys.cpp",
        "is_ours(key) && !seen.insert(key).second",
        "is_ours(key) && seen.empty()",
        METADATA,
    ),
    Fault(
        "bits behind the end of base64",
        "runtime/native/bases/base64.cpp",
        "if (bits & unused) {",
        "if (bits & unused & 0) {",
        METADATA,
    ),
    # the planner
    Fault("means cost nothing", "python/subkv/plan/budget.py", "(32.0 if head.centred else 0.0)", "0.0", PLAN),
    Fault("steps that do not fit", "python/subkv/plan/budget.py", "or cost(h, old, new) > spare:", ":", PLAN),
    Fault("later groups", "python/subkv/plan/budget.py", "push_step(h, g + 1)", "push_step(h, g)", PLAN),
]
