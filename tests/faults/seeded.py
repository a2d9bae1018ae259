"""Seeded faults: small changes of the product, each of which some test must notice (try_faults.py)."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from mutations import Always, Argument, Change, Left, Negated, Never, NoPlaceError, Omit, Result, Right, Swap
from syntax import LANGUAGES, Function, functions

REPO = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Fault:
    """room: the folder (or file) of the function; change: of that function; tests: paths of tests that must fail then.

    A constant of a Python module counts as a function.
    """

    name: str
    room: str
    function: str
    change: Change | tuple[Change, ...]
    tests: str

    def changed(self, checkout: Path = REPO) -> tuple[Path, bytes]:
        """The file of the function, and its text with this fault. Raises NoPlaceError."""
        defined = [
            function
            for path in sources(checkout / self.room, self.function.split("::")[-1])
            for function in functions(path)
            if function.is_called(self.function)
        ]
        paths = {function.path for function in defined}
        if len(paths) != 1:
            raise NoPlaceError(f"expected one file of {self.room} that defines {self.function}, found {len(paths)}")
        changes = self.change if isinstance(self.change, tuple) else (self.change,)
        path = paths.pop()
        text = path.read_bytes()
        for start, end, new in sorted((edit_of(change, defined) for change in changes), reverse=True):
            text = text[:start] + new + text[end:]
        return path, text


def edit_of(change: Change, overloads: list[Function]) -> tuple[int, int, bytes]:
    """In the one overload that has a place for it."""
    found, failures = [], []
    for function in overloads:
        try:
            found.append(change.edit(function.node))
        except NoPlaceError as error:
            failures.append(f"{function.name}: {error}")
    if len(found) != 1:
        raise NoPlaceError(
            "; ".join(failures) or f"expected one overload with a place for {change}, found {len(found)}"
        )
    return found[0]


@functools.cache
def sources(room: Path, word: str) -> list[Path]:
    """The files of a room that contain the word."""
    files = [room] if room.is_file() else sorted(path for path in room.rglob("*") if path.suffix in LANGUAGES)
    return [path for path in files if word in path.read_text("utf-8")]


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
CHOSEN = "tests/architectures/test_selected.py tests/architectures/test_architectures.py"
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
    Fault("round down", "kernels/ref", "quantize", Swap("nearbyint", "floor"), ENCODE),
    Fault("ties to the smaller scale", "kernels/ref", "choose_scale", Swap("<", "<=", beside="best_error"), ENCODE),
    Fault(
        "one candidate of the scale fewer",
        "kernels/ref",
        "choose_scale",
        Swap(">=", ">", beside="SCALE_CANDIDATES_BELOW"),
        ENCODE,
    ),
    Fault("16-bit bands overflow", "kernels/ref", "put_row", Swap("HALF_MAX", "INFINITY", beside="fmin"), ENCODE),
    Fault("offset added", "kernels/ref", "encode", Swap("-=", "+="), ENCODE),
    Fault("zero rows get a scale", "kernels/ref", "encode", Swap("==", ">", beside="value"), ENCODE),
    Fault("errors are not squared", "kernels/ref", "squared_error", Argument("fma", 1, "1.0f", beside="lane"), ENCODE),
    Fault("ties of branches", "kernels/ref", "extend", Swap("<", "<=", beside="b"), ENCODE),
    Fault("ties of scales", "kernels/ref", "choose_path_scale", Swap("<", "<=", beside="least"), ENCODE),
    Fault(
        "bits of the path swapped",
        "kernels/ref",
        "path_levels",
        (Swap("one", "two", beside="^"), Swap("two", "one", beside="^")),
        ENCODE,
    ),
    Fault("the second place of a lane", "kernels/ref", "path_levels", Never(beside="second"), ENCODE),
    Fault("lanes go on", "kernels/ref", "begin_lane", Result("least_of", "0.0f"), ENCODE),
    Fault("a scale below is not tried", "kernels/cpu", "choose_path_scales", Swap("0", "1", beside="i", nth=1), ENCODE),
    Fault("first of equal states", "kernels/cpu", "first_least", Swap("<", "<=", beside="cost"), ENCODE),
    # tiles
    Fault("bits of other codes", "kernels/cpu", "move_word", Left("&", beside="in_shift"), TILES),
    Fault("halves of the first cell", "kernels/cpu", "tile_to_row", Left("+", beside="c"), TILES),
    Fault("a listed cell's place", "kernels/cpu", "gather_cells", Swap("i", "(i + 1)", beside="place"), TILES),
    Fault("the last tile is not cleared", "kernels/cpu", "gather_cells", Left("+", beside="n"), TILES),
    Fault("half an octet twice", "kernels/cpu", "put_eight", Left("+", beside="codes"), TILES),
    Fault(
        "values without scales", "kernels/cpu", "keys_to_values", Argument("copy_n", 1, "1", beside="key_tile"), TILES
    ),
    # attention
    Fault("soft cap", "kernels/ref", "attend_row", Left("/", beside="softcap"), ATTEND),
    Fault("shift of the first row", "kernels/ref", "attend", Swap("row", "0", beside="shift"), ATTEND),
    Fault("bias without slope", "kernels/ref", "attend_row", Right("*", beside="slope"), ATTEND),
    Fault("the state is not shrunk", "kernels/ref", "attend_row", Right("*", beside="z"), ATTEND),
    Fault("the state is not shrunk, fast", "kernels/cpu", "quantize_weights", Left("*", beside="shrink"), ATTEND),
    Fault("share of a step", "kernels/cpu", "quantize_weights", Swap("==", "!=", beside="top"), ATTEND),
    Fault(
        "hidden cells in the last step", "kernels/cpu", "softmax_step", Swap("MINUS_INF", "0.0f", beside="bias"), ATTEND
    ),
    Fault("the largest scale of the first token", "kernels/cpu", "softmax_step", Left("%", beside="n_group"), ATTEND),
    Fault("the middle of a code", "kernels/cpu", "FromCodes::bytes", Swap("BYTE_MIDDLE", "1 + BYTE_MIDDLE"), ATTEND),
    Fault("where a path begins", "kernels/cpu", "last_octets", Swap("j", "0", beside="LINE"), ATTEND),
    Fault("rows in bytes", "kernels/ref", "entry", Swap("n_halves", "n_halves / 2", beside="row"), LINEAR),
    Fault("the tail of a product", "kernels/cpu", "dot", Omit("total"), LINEAR),
    Fault("the mirrored half", "kernels/cpu", "cpu::moment", Omit("s", nth=1), LINEAR),
    Fault("low bits of recent rows", "kernels/ref", "pack_recent", Swap("4", "8", beside="memset"), RECENT),
    Fault("the middle of recent rows", "kernels/ref", "unpack_recent", Left("-", beside="1"), RECENT),
    # the engine
    Fault(
        "exact cells count twice",
        "runtime/native/engine",
        "row_of_halves",
        Left("|", beside="exact"),
        f"{ENGINE} {SEQUENCES}",
    ),
    Fault("ALiBi", "runtime/native/engine", "row_of_halves", Swap("!=", "<", beside="other"), SEQUENCES),
    Fault(
        "a listed cell counts twice", "runtime/native/engine", "selected_cells_op", Always(beside="is_exact"), CHOSEN
    ),
    Fault("a segment's state stays", "runtime/native/engine", "Attend::head", Omit("clear"), ENGINE),
    Fault(
        "the mask of the first head",
        "runtime/native/engine",
        "Attend::mask_of_segment",
        Argument("mask_of", 1, "0"),
        CHOSEN,
    ),
    Fault(
        "the last sink is an integer",
        "runtime/native/engine",
        "FreshRows::operator()",
        Swap(">=", "+ 1 >=", beside="n_sink"),
        ENGINE,
    ),
    Fault("NaN in the window", "runtime/native/engine", "subkv::exact_row", Negated(beside="is_finite_row"), SEQUENCES),
    Fault(
        "all keys move by as much",
        "runtime/native/engine",
        "shift_op",
        Left("+", beside="of_cells"),
        f"{SHIFT} tests/runtime/test_machine.py",
    ),
    Fault("gain of the mean", "runtime/native/engine", "without_gamma", Left("+", beside="of_mean"), SHIFT),
    Fault("one row more is lost", "runtime/native/engine", "Window::resume", Left("-", beside="n_recent_"), SEQUENCES),
    Fault(
        "a copy keeps the older row",
        "runtime/native/engine",
        "Window::copy_seq",
        Swap("pos", "-1", beside="<="),
        SEQUENCES,
    ),
    Fault("a lost row hides its codes", "runtime/native/engine", "Window::set_inputs", Never(beside="ne"), SEQUENCES),
    Fault("a moved row is not rotated", "runtime/native/engine", "Window::add", Omit("rotation"), SHIFT),
    Fault(
        "rows that are not held",
        "runtime/native/engine",
        "Window::is_complete",
        Swap("min", "max", beside="exact_cells"),
        "tests/runtime/test_adaptive.py",
    ),
    Fault(
        "the oldest of a ubatch",
        "runtime/native/engine",
        "Window::set_inputs",
        Swap("<=", ">=", beside="slots"),
        f"{ENGINE} {SEQUENCES}",
    ),
    Fault(
        "a removed text leaks",
        "runtime/native/engine",
        "Window::forget",
        Omit("ggml_backend_tensor_memset"),
        f"{STATES} {SEQUENCES}",
    ),
    Fault("positions beyond the end", "runtime/native/engine", "Window::can_add", Never(beside="MAX_POSITION"), SHIFT),
    Fault("the ring turns back", "runtime/native/engine", "Window::add", Swap("-", "+", beside="by"), SHIFT),
    # states
    Fault("slots of a forged state", "runtime/native/engine", "Window::state_read", Never(beside="slot_of"), STATES),
    Fault("rows without cells", "runtime/native/engine", "Window::state_read", Never(beside="empty"), STATES),
    Fault("states of other bases", "runtime/native/engine", "check_layout", Always(beside="fingerprint"), STATES),
    Fault("integers taken for halves", "runtime/native/engine", "check_numbers", Never(beside="exact_rows"), STATES),
    Fault(
        "states from before a shift",
        "runtime/native/engine",
        "Cache::read_head",
        Never(beside="here"),
        f"{STATES} {SHIFT}",
    ),
    Fault("n_rollback is not counted", "python/subkv/format", "Window::bits", Left("+", beside="n_rollback"), PLAN),
    Fault(
        "states of other RoPE",
        "runtime/native/hook",
        "state_identity",
        Swap("rope_freq_base", "rope_freq_scale", nth=1),
        "tests/python/test_identity.py",
    ),
    Fault("a longer state", "python/subkv/engine/states.py", "load", Never(beside="n_ctx"), LLAMA),
    Fault("tokens have no checksum", "python/subkv/engine", "checksum", Argument("asarray", 0, "[]"), LLAMA),
    Fault(
        "f16 replaces bases that somebody has prepared",
        "python/subkv/engine",
        "open_or_f16",
        Never(beside="gain"),
        LLAMA_DEFAULT,
    ),
    Fault(
        "the line about a default cache is repeated",
        "python/subkv/engine",
        "report_cache",
        Always(beside="_is_first"),
        LLAMA_DEFAULT,
    ),
    # the prompt cache and the store
    Fault("a tail that stays", "python/subkv/engine", "PromptCache::_n_held", Always(beside="len"), PROMPTS),
    Fault("a refused operation is believed", "runtime/native/hook", "memory::note_refused", Omit("refused"), SHIFT),
    Fault("a shared cell moves", "runtime/native/hook", "unshare", Never(beside="seq_count"), SHIFT),
    Fault(
        "moved text is stored",
        "runtime/native/hook",
        "identity_of_sequence",
        Swap("!=", ">", beside="moved"),
        "tests/programs/test_slot_cells.py",
    ),
    Fault("recurrent state without its past", "runtime/native/hook", "n_removable", Never(beside="recurrent"), PROMPTS),
    Fault(
        "the shorter of two prefixes",
        "runtime/native/store",
        "PrefixStore::Core::find",
        Swap(">", "<", beside="a"),
        STORE,
    ),
    Fault("pieces without checksums", "runtime/native/store", "PrefixIndex::read", Never(beside="address"), STORE),
    Fault("heads under other names", "runtime/native/store", "PrefixIndex::learn", Never(beside="head"), STORE),
    Fault("prompts of other servers", "runtime/native/store", "PrefixIndex::heads", Always(beside="identity"), STORE),
    Fault("rows by cell", "runtime/native/store", "read_cells", Omit("sort"), STORE),
    Fault("a removal that fails counts as done", "runtime/native/store", "StoreFolder::remove", Omit("broken"), STORE),
    Fault(
        "a model that was replaced after it was loaded",
        "runtime/native/bases",
        "LoadedFile::check",
        Never(beside="stamp"),
        "tests/python/test_model_digest.py",
    ),
    # files and variables
    Fault(
        "types that were requested are replaced",
        "runtime/native/hook",
        "asked_type",
        Always(beside="GGML_TYPE_F16"),
        AUTOMATIC,
    ),
    Fault(
        "a file that belongs to another model",
        "runtime/native/bases",
        "take_variable",
        Never(beside="OF_ANOTHER"),
        AUTOMATIC,
    ),
    Fault(
        "a file for every model", "runtime/native/engine", "Owners::may_use", Always(beside="model", nth=0), AUTOMATIC
    ),
    Fault("numbers without a limit", "runtime/native/base", "number_of", Never(beside="most"), AUTOMATIC),
    Fault("gains of any size", "runtime/native/bases", "BlockReader::positive", Always(beside="MAX_FACTOR"), METADATA),
    Fault("means that are not finite", "runtime/native/bases", "BlockReader::halves", Never(beside="0x7c00"), METADATA),
    Fault(
        "plans without the gains of quantizers",
        "runtime/native/bases",
        "write_matrices",
        Omit("value", beside="gain"),
        PLANS,
    ),
    Fault(
        "a plan of another budget",
        "runtime/native/bases",
        "plan_of",
        Swap("CLOSE", "64 * CLOSE", beside="distance"),
        PLANS,
    ),
    Fault(
        "plans that the digest does not cover",
        "runtime/native/bases",
        "read_layout",
        Omit("check_digest", nth=1),
        PLANS,
    ),
    Fault("a key twice", "runtime/native/bases", "Keys::Keys", Never(beside="insert"), METADATA),
    Fault("bits behind the end of base64", "runtime/native/bases", "base64_decode", Never(beside="unused"), METADATA),
    # the planner
    Fault("means cost nothing", "python/subkv/plan", "Overhead::basis_bits", Swap("32.0", "0.0"), PLAN),
    Fault("steps that do not fit", "python/subkv/plan", "_filled", Never(beside="spare"), PLAN),
    Fault("later groups", "python/subkv/plan", "_filled", Left("+", beside="push_step"), PLAN),
]
