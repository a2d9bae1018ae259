"""runtime.chat through a pipe, and conversations whose history is in the cache."""

from __future__ import annotations

import contextlib
import re
import signal
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from each import each

from runtime.chat import cli
from runtime.chat.conversation import ContextFullError, Conversation, Sampling, Turn, is_loop
from subkv.base.errors import StateError, SubkvError
from subkv.base.interrupts import Interrupt
from subkv.engine.llama import Llama
from subkv.engine.template import Template, TemplateError
from subkv.native import library

Models = Callable[..., Path]
Program = Callable[..., Any]
RATE = r"(?:[\d.]+ t/s|[1-7] tokens?)"
BRACKET = re.compile(rf"\[ Prompt: {RATE} \| Generation: {RATE} \| KV: [\d.]+ MiB(?:: .* than .*| \(f16: .*\)) \]")


def never() -> bool:
    return False


@pytest.fixture(params=["coded", "stock"])
def llm(request: pytest.FixtureRequest, coded_model: Models, tiny_model: Models) -> Iterator[Llama]:
    path, cache = (coded_model(), "subkv") if request.param == "coded" else (tiny_model("llama"), "f16")
    sizes = {"n_ctx": 512, "n_batch": 256, "n_ubatch": 32, "n_threads": 2, "n_threads_batch": 2}
    model = Llama(path, kv_cache=cache, verbose=False, **sizes)
    yield model
    model.close()


def talk(llm: Llama, system: str | None = None) -> Conversation:
    return Conversation(llm, system, Sampling(temp=0.0, seed=1))


def ask(conversation: Conversation, text: str, n: int = 6, stop: Callable[[], bool] = never) -> tuple[str, Turn]:
    turn = Turn()
    return "".join(conversation.ask(text, n, stop, turn)), turn


def next_logits(llm: Llama, tokens: list[int]) -> Any:
    llm.eval(tokens)
    return np.ctypeslib.as_array(llm._ctx.get_logits_ith(-1), (llm.n_vocab(),)).copy()


def test_the_first_prompt_is_the_models_template(llm: Llama) -> None:
    conversation = talk(llm, system="Be brief.")
    ask(conversation, "Hello", n=1)
    expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert conversation.tokens[: conversation.answer_start] == llm.tokenize(expected.encode(), special=True)


def test_later_turns_evaluate_only_their_own_tokens(llm: Llama) -> None:
    conversation = talk(llm)
    _, first = ask(conversation, "Tell me a long story about the sea and the wind.")
    held = conversation.tokens[:]
    assert first.n_prompt == conversation.answer_start
    _, second = ask(conversation, "Go on.")
    assert conversation.tokens[: len(held)] == held  # the generated answer stays unchanged
    added = llm.tokenize(b"<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n", False, True)
    assert conversation.tokens[len(held) : conversation.answer_start] == added
    assert second.n_prompt <= len(added) + 1  # and the last token of the answer, which was not evaluated before
    assert [m["role"] for m in conversation.messages] == ["user", "assistant"] * 2


def test_cells_match_the_tokens(llm: Llama) -> None:
    conversation = talk(llm)
    for text in ("Hello there.", "What is your name?", "Why?"):
        ask(conversation, text)
    ask_again = Turn()
    "".join(conversation.regenerate(4, never, ask_again))
    missing = conversation.tokens[llm.n_tokens :]
    got = next_logits(llm, missing + [40])
    tokens = conversation.tokens[:]
    llm.reset()
    llm._ctx.kv_cache_clear()
    expected = next_logits(llm, [*tokens, 40])
    np.testing.assert_allclose(got, expected, atol=5e-3 * float(np.abs(expected).max()))


def test_stop_keeps_the_answer_so_far(llm: Llama) -> None:
    conversation = talk(llm)
    turn = Turn()
    pieces: list[str] = []
    for piece in conversation.ask("Hello", -1, lambda: len(pieces) >= 3, turn):
        pieces.append(piece)
    assert turn.stopped in ("interrupt", "end")
    assert conversation.messages[-1] == {"role": "assistant", "content": "".join(pieces)}
    ask(conversation, "Go on.")
    assert len(conversation.messages) == 4


def test_stop_while_the_prompt_is_read_undoes_the_turn(llm: Llama) -> None:
    conversation = talk(llm)
    ask(conversation, "Hello")
    tokens, messages = conversation.tokens[:], conversation.messages[:]
    calls = iter(range(100))
    text, turn = ask(conversation, "word " * 100, stop=lambda: next(calls) >= 2)
    assert (text, turn.stopped, turn.n_answer) == ("", "interrupt", 0)
    assert (conversation.tokens, conversation.messages) == (tokens, messages)
    assert llm.n_tokens <= len(tokens)
    _, after = ask(conversation, "Go on.")
    assert after.n_answer > 0


def test_an_abandoned_answer_undoes_the_turn(llm: Llama) -> None:
    conversation = talk(llm)
    pieces = conversation.ask("Hello", -1, never, Turn())
    next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    assert (conversation.tokens, conversation.messages) == ([], [])


def test_a_full_context_is_reported_and_survived(coded_model: Models) -> None:
    with Llama(coded_model(), n_ctx=256, n_batch=64, verbose=False) as llm:
        conversation = talk(llm)
        with pytest.raises(
            ContextFullError, match=r"n_ctx: the message needs \d+ of the 256 tokens left in a context of 256"
        ):
            ask(conversation, "many words " * 100)
        assert conversation.tokens == []
        for _ in range(100):
            _, turn = ask(conversation, "more and more", n=-1)
            if turn.stopped == "full":
                break
            if conversation.room < 60:
                break
        assert len(conversation.tokens) <= 256
        conversation.clear()
        assert ask(conversation, "Hello")[1].n_answer > 0


@pytest.mark.parametrize("coded", [True, False])
def test_a_full_context_shifts_with_the_option(coded_model: Models, tiny_model: Models, coded: bool) -> None:
    path, cache = (coded_model(), "subkv") if coded else (tiny_model("llama"), "f16")
    with Llama(path, kv_cache=cache, n_ctx=256, n_batch=64, verbose=False) as llm:
        conversation = Conversation(llm, "Be brief.", Sampling(temp=0.0, seed=1), shift=True)
        start = llm.tokenize(b"<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n", special=True)
        n_tokens = 0
        for i in range(6):
            _, turn = ask(conversation, f"Number {i}, and some more words.", n=90)
            n_tokens += turn.n_prompt + turn.n_answer
            assert turn.n_prompt < 60, "nothing is to be evaluated twice"
            assert turn.stopped in ("length", "end")
            assert len(conversation.tokens) <= 256 and conversation.tokens[: len(start)] == start
            assert llm.input_ids[: llm.n_tokens].tolist() == conversation.tokens[: llm.n_tokens]
        assert n_tokens > 512
        assert conversation.answer_start > 0
        before = conversation.tokens[: conversation.answer_start]
        "".join(conversation.regenerate(5, never, Turn()))
        assert conversation.tokens[: conversation.answer_start] == before
        held = conversation.tokens[:]
        with pytest.raises(ContextFullError, match="the message needs"):
            ask(conversation, "many words " * 100)
        assert conversation.tokens == held, "what is refused changes nothing"
        assert ask(conversation, "Still there?")[1].n_answer > 0


def test_an_answer_after_its_question_was_removed(tiny_model: Models, tmp_path: Path) -> None:
    with Llama(tiny_model("llama"), kv_cache="f16", n_ctx=256, n_batch=64, verbose=False) as llm:
        conversation = Conversation(llm, None, Sampling(temp=0.0, seed=1), shift=True)
        while conversation.answer_start >= 0:
            _, turn = ask(conversation, "Hello", n=400)
            assert turn.n_answer > 0
        with pytest.raises(SubkvError, match="shifted out"):
            list(conversation.regenerate(5, never, Turn()))
        conversation.save(tmp_path / "chat")
        tokens = conversation.tokens[:]
        conversation.clear()
        conversation.load(tmp_path / "chat")
        assert (conversation.tokens, conversation.answer_start) == (tokens, -1)


def test_context_shift_is_refused_if_the_cache_cannot_shift(coded_model: Models) -> None:
    error_start = "context_shift: expected a model and a cache whose positions can move"
    with (
        Llama(coded_model(), n_ctx=512, adapt="kv", n_recent=64, verbose=False) as llm,
        pytest.raises(SubkvError, match=error_start),
    ):
        Conversation(llm, None, Sampling(), shift=True)


def test_after_clear_nothing_of_the_old_conversation_is_left(llm: Llama) -> None:
    conversation = talk(llm)
    expected = ask(conversation, "Something else entirely, no?")[0]
    conversation.clear()
    ask(conversation, "Hello there, my friend, how are you?")
    conversation.clear()
    assert ask(conversation, "Something else entirely, no?")[0] == expected
    assert llm.input_ids[: llm.n_tokens].tolist() == conversation.tokens[: llm.n_tokens]


class Greeting:
    """A source of first tokens: its answers begin with two tokens, drawn before anything is evaluated."""

    n_cells = 3

    def __init__(self, llm: Llama) -> None:
        self.llm = llm
        self.begun: list[tuple[int, int]] = []
        self.read: list[list[int]] = []

    def begin(self, prompt: list[int], n_held: int, sampler: Any) -> Iterator[int]:
        self.begun.append((len(prompt), n_held))
        self.llm.reset()
        for token in (40, 41):
            sampler.accept(token)
            yield token

    @contextlib.contextmanager
    def reading(self, prompt: list[int]) -> Iterator[None]:
        yield
        self.read.append(prompt)

    def report(self) -> tuple[str, list[str]]:
        return "", []


def test_first_tokens_come_before_the_first_answer(llm: Llama) -> None:
    first_tokens = Greeting(llm)
    conversation = Conversation(llm, None, Sampling(temp=0.0, seed=1), first_tokens)
    _, turn = ask(conversation, "Hello")
    start = conversation.answer_start
    assert conversation.tokens[start : start + 2] == [40, 41]
    assert (turn.first_tokens, turn.n_first_tokens, turn.n_prompt) == (first_tokens, 2, 3)
    assert (first_tokens.begun, first_tokens.read) == ([(start, 0)], [conversation.tokens[:start]])
    assert llm.input_ids[: llm.n_tokens].tolist() == conversation.tokens[: llm.n_tokens]  # all of it is exact
    _, later = ask(conversation, "Go on.")
    assert later.first_tokens is None and len(first_tokens.begun) == 1


def test_save_and_load(llm: Llama, tmp_path: Path) -> None:
    conversation = talk(llm)
    ask(conversation, "Hello there, how are you?")
    file = tmp_path / "chat"
    conversation.save(file)
    saved = (conversation.tokens[:], conversation.messages[:])
    expected = ask(conversation, "Go on.")
    conversation.clear()
    ask(conversation, "Something else")
    conversation.load(file)
    assert (conversation.tokens, conversation.messages) == saved
    got = ask(conversation, "Go on.")
    assert got[0] == expected[0]
    assert got[1].n_prompt == expected[1].n_prompt
    assert [p.name for p in tmp_path.iterdir()] == ["chat"]


def test_files_that_do_not_fit(llm: Llama, coded_model: Models, tmp_path: Path) -> None:
    conversation = talk(llm)
    ask(conversation, "Hello")
    before = conversation.tokens[:]
    other = coded_model("--codec", "int8", "--n-recent", "16", "--basis-k", "pca")
    with Llama(other, n_ctx=512, verbose=False) as second:
        elsewhere = talk(second)
        ask(elsewhere, "Hello")
        elsewhere.save(tmp_path / "other")
    (tmp_path / "text").write_text("hello")
    (tmp_path / "cut").write_bytes((tmp_path / "other").read_bytes()[:-50])
    cases = {"other": r"/load: (cells|fingerprint): expected .*, found ", "text": "expected a file written by /save"}
    cases |= {"cut": "expected a file written by /save", "missing": "/load: cannot read"}
    for name, message in cases.items():
        with pytest.raises(StateError, match=message):
            conversation.load(tmp_path / name)
        assert conversation.tokens == before
    with pytest.raises(StateError, match="/save: cannot write"):
        conversation.save(tmp_path / "no" / "such" / "folder")
    assert ask(conversation, "Go on.")[1].n_answer > 0


def test_regenerate_needs_an_answer(llm: Llama) -> None:
    with pytest.raises(SubkvError, match="/regen: expected an answer to replace, found none"):
        list(talk(llm).regenerate(4, never, Turn()))


def test_templates_that_refuse(monkeypatch: pytest.MonkeyPatch, llm: Llama) -> None:
    conversation = talk(llm)
    conversation.template.formatter._environment = conversation.template.formatter._environment.environment.from_string(
        "{{ raise_exception('roles must alternate') }}"
    )
    with pytest.raises(TemplateError, match=r"tokenizer.chat_template: .*roles must alternate"):
        ask(conversation, "Hello")
    monkeypatch.setattr("subkv.engine.model.C.llama_model_chat_template", lambda *_: None)
    with pytest.raises(SubkvError, match="expected a chat template in the model's metadata, found none"):
        Template(llm.loaded_model)


def test_an_empty_system_message_replaces_the_templates(llm: Llama) -> None:
    own = Template(
        llm.loaded_model, "{% if messages[0].role != 'system' %}Be kind.{% endif %}{{ messages[0].content }}"
    )
    strict = Template(llm.loaded_model, "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}Hi")
    for system, template, expected in (
        (None, own, "Be kind.a"),
        ("", own, ""),
        ("Hello", own, "Hello"),
        ("", strict, "Hi"),
    ):
        conversation = Conversation(llm, system, Sampling(temp=0.0), template=template)
        tokens = conversation._prompt_tokens({"role": "user", "content": "a"})
        assert tokens == llm.loaded_model.tokenize_chat(expected), (system, expected)


@each(
    ("tokens", "loop"),
    [
        ([7] * 31, False),
        ([7] * 32, True),
        ([*range(40), *[1, 2, 3] * 11], True),
        ([*range(16)] * 4, True),
        ([*range(16)] * 3, False),
        ([*range(64)] * 4, True),
        ([*range(65)] * 8, False),  # a repeated page may be meant
        ([1, 2, 3] * 20 + [4], False),
        ([], False),
    ],
)
def test_loops(tokens: list[int], loop: bool) -> None:
    assert is_loop(tokens) is loop


def test_a_loop_ends_the_answer(llm: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sampling, "sampler", lambda *_: types.SimpleNamespace(sample=lambda *_: 65))
    conversation = Conversation(llm, None, Sampling(), stop_loops=True)
    _, turn = ask(conversation, "Hello", 100)
    assert (turn.stopped, turn.n_answer) == ("loop", 32)
    _, turn = ask(Conversation(llm, None, Sampling()), "Hello", 100)
    assert (turn.stopped, turn.n_answer) == ("length", 100)


MARKED = "{% for m in messages %}<<{{ m.role }}>>{{ m.content }}<</end>>\n{% endfor %}<<assistant>>"


@pytest.mark.parametrize("coming", ["Fine.<</end>>\n<<user>>No", "<</end>>", "a <</en <</end>>", "x<</e"])
def test_marks_of_several_tokens_end_an_answer(coming: str, llm: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llm.loaded_model
    tokens = model.tokenize(coming.encode(), special=False).tolist()
    given = iter(tokens)
    monkeypatch.setattr(Sampling, "sampler", lambda *_: types.SimpleNamespace(sample=lambda *_: next(given)))
    conversation = Conversation(llm, None, Sampling(), template=Template(model, MARKED))
    turn = Turn()
    pieces = list(conversation.ask("Hello", len(tokens), never, turn))
    text, mark, _ = coming.partition("<</end>>")
    assert "".join(pieces) == text and conversation.messages[-1]["content"] == text
    assert turn.stopped == ("end" if mark else "length")
    kept = b"".join(model.piece(token) for token in conversation.tokens[conversation.answer_start :])
    assert kept.decode() == text
    given = iter(model.tokenize(b"Yes<</end>>", special=False).tolist())
    assert "".join(conversation.ask("Sure?", 99, never, Turn())) == "Yes"
    whole = b"".join(model.piece(token, special=True) for token in conversation.tokens).decode()
    assert whole.endswith(
        f"<<user>>Hello<</end>>\n<<assistant>>{text}<</end>>\n<<user>>Sure?<</end>>\n<<assistant>>Yes"
    )


def test_a_token_with_the_end_of_an_answer_and_the_start_of_a_mark(llm: Llama) -> None:
    """Its cells are replaced by those of the answer's end."""
    conversation = Conversation(llm, None, Sampling(), template=Template(llm.loaded_model, MARKED))
    conversation.tokens = [1, 2, 70, 71, 72]
    conversation._cut("ab!", [0, 2, 4])
    assert conversation.tokens == [1, 2, 70, *conversation.tokenize("!")]
    conversation._cut("", [0])
    assert len(conversation.tokens) == 3 + len(conversation.tokenize("!")) - 1


def test_only_the_second_ctrl_c_raises() -> None:
    pressed = []
    interrupt = Interrupt(lambda: pressed.append(1))
    with interrupt:
        assert not interrupt.pressed
        signal.raise_signal(signal.SIGINT)
        assert interrupt.pressed
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    with interrupt:
        assert not interrupt.pressed
    assert pressed == [1]


#
# as a program
#


def test_single_turn(program: Program, coded_model: Models) -> None:
    arguments = ("runtime.chat", "-m", coded_model(), "-c", 256, "--temp", 0, "-n", 8, "-st")
    done = program(*arguments, "-p", "Hello")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\n")
    assert BRACKET.search(done.stderr.splitlines()[-1])
    assert re.match(r"KV cache: subkv, [\d.]+ bits per element, .*, kernel \w+$", done.stderr.splitlines()[0])
    assert program(*arguments, stdin="Hello").stdout == done.stdout  # the message may come from a pipe


def test_layers_for_a_gpu_that_is_not_there_are_noted(program: Program, coded_model: Models) -> None:
    from subkv.native.binding import C

    if C.llama_supports_gpu_offload():
        pytest.skip("there is a GPU")
    arguments = ("runtime.chat", "-m", coded_model(), "-c", 256, "-n", 1, "-st", "-p", "Hello")
    done = program(*arguments, "-ngl", 99)
    assert done.returncode == 0, done.stderr
    assert re.match(r"-ngl 99: expected a GPU, found none \(.+\); all layers are on the CPU\nKV cache: ", done.stderr)
    assert "-ngl" not in program(*arguments).stderr


def test_piped_conversation(program: Program, coded_model: Models, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("some notes")
    lines = [
        "Hello \\",
        "there",
        "",
        f"/read {tmp_path / 'notes.txt'}",
        "What do they say?",
        "/regen",
        "/stats",
        f"/save {tmp_path / 'chat'}",
        "/clear",
        f"/load {tmp_path / 'chat'}",
        "/read missing.txt",
        "/read",
        "/nonsense",
        "/help",
        "/exit",
        "never read",
    ]
    done = program("runtime.chat", "-m", coded_model(), "-c", 512, "--temp", 0, "-n", 5, stdin="\n".join(lines))
    assert done.returncode == 0, done.stderr
    assert len(BRACKET.findall(done.stderr)) == 3
    assert "tokens go in front of the next message" in done.stderr
    assert "fingerprint" in done.stderr
    assert "4 messages, " in done.stderr
    assert "/read: cannot read missing.txt" in done.stderr
    assert "/read: expected a file name, found none" in done.stderr
    assert "/nonsense: unknown command" in done.stderr
    assert "/regen         answer" in done.stderr
    assert "--temp 0 gives the same answer again; " in done.stderr
    assert "[ Prompt" not in done.stdout
    other = program("runtime.chat", "-m", coded_model(), "-c", 512, "-ctk", "f16", stdin=f"/load {tmp_path / 'chat'}\n")
    assert other.returncode == 0
    assert "/load: cells: expected f16/f16 " in other.stderr
    assert other.stdout == ""


@each(
    ("arguments", "expected"),
    [
        ([], (0.0, 1.1, None)),
        (["--temp", "0.5", "-n", "9"], (0.5, 1.1, 9)),
        (["--temp", "0.5", "-m", "m.gguf"], (0.5, 1.0, None)),
        (["m.gguf"], (0.8, 1.0, None)),
        (["-hf", "user/model", "-n", "-1"], (0.8, 1.0, -1)),
    ],
)
def test_defaults_for_the_demo_model(
    arguments: list[str], expected: tuple[float, float, int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[str, Any] = {}
    monkeypatch.setattr(cli, "run", lambda **given: found.update(given))
    result = CliRunner().invoke(cli.main, arguments)
    assert result.exit_code == 0, result.output
    sampling = found["sampling"]
    assert (sampling.temp, sampling.repeat_penalty, found["n_predict"]) == expected


def test_a_full_context_ends_the_answer_and_refuses_longer_messages(
    program: Program, coded_model: Models, tmp_path: Path
) -> None:
    (tmp_path / "long").write_text("many words " * 100)
    lines = [f"/read {tmp_path / 'long'}", "Hello " * 39, "and more " * 10, "/clear", "Hello"]
    done = program("runtime.chat", "-m", coded_model(), "-c", 256, "--temp", 0, "-n", 200, stdin="\n".join(lines))
    assert done.returncode == 0, done.stderr
    assert re.search(r"^/read: the text needs \d+ of the 256 tokens left in a context of 256; ", done.stderr, re.M)
    assert "-c: the context of 256 tokens is full; /clear starts over" in done.stderr
    assert "-c: the message needs " in done.stderr
    assert len(BRACKET.findall(done.stderr)) == 2  # the first and the one after /clear


def test_environment_variables(program: Program, tiny_model: Models) -> None:
    env = {"LLAMA_ARG_MODEL": str(tiny_model("llama")), "LLAMA_ARG_CACHE_TYPE_K": "q8_0", "LLAMA_ARG_CTX_SIZE": "256"}
    done = program("runtime.chat", "-st", "-p", "Hi", "-n", 2, **env)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("KV cache: q8_0, 8.50 bits per element")


@each(
    ("arguments", "code", "message"),
    [
        (["-m", "missing.gguf"], 1, "-m: expected a GGUF file, found no file missing.gguf"),
        (["-m", "MODEL", "--bases", "MODEL"], 1, "--bases: expected subkv.* keys (a converted model or a sidecar)"),
        (["-m", "MODEL", "--bases", "missing.gguf"], 1, "--bases: expected a GGUF file, found no file missing.gguf"),
        (["-m", "MODEL", "-ctk", "q4_0", "-fa", "off"], 1, "-fa: expected 'on' or 'auto' for a q4_0 V cache"),
        (
            ["-m", "MODEL", "--n-recent", "4", "-ctk", "f16"],
            1,
            "--n-recent: expected a coefficient cache ('subkv'), found f16",
        ),
        (["-m", "MODEL", "--temp", "-1"], 2, "'--temp' / '--temperature': -1.0 is not in the range x>=0."),
        (["-m", "MODEL", "--temp", "nan"], 2, "'--temp' / '--temperature': nan is not a finite number."),
        (["-m", "MODEL", "--top-p", "nan"], 2, "'--top-p': nan is not a finite number."),
        (["-m", "MODEL", "-t", "0"], 2, "'--threads': expected 1 to 512 threads, or -1 for all processors, found 0"),
        (["--no-such-flag"], 2, "No such option"),
        (["--seeds", "1"], 2, "Did you mean"),
        (["model.txt"], 2, "model.txt: expected a model file (*.gguf) or an option, found another word"),
        (["-m", "MODEL", "MODEL"], 2, "-m: expected one model, found "),
        (["MODEL", "-m", "MODEL"], 2, "-m: expected one model, found "),
        (["missing.gguf"], 1, "-m: expected a GGUF file, found no file missing.gguf"),
    ],
)
def test_refusals(program: Program, tiny_model: Models, arguments: list[str], code: int, message: str) -> None:
    given = [str(tiny_model("llama")) if a == "MODEL" else a for a in arguments]
    done = program("runtime.chat", *given)
    assert done.returncode == code
    assert done.stdout == ""
    assert message in done.stderr
    if code == 1:
        assert done.stderr == f"{done.stderr.splitlines()[0]}\n"
        assert done.stderr.startswith(message)


def test_only_near_options_are_suggested(program: Program) -> None:
    assert "Did you mean" not in program("runtime.chat", "--nonsense").stderr  # click would name --seed


def test_an_option_of_llama_cli_is_named_as_such(program: Program, tmp_path: Path) -> None:
    assert program("runtime.chat", "--mlock").stderr.endswith("subkv run llama-cli --load-mode mlock\n")
    if not (library.lib_dir() / "llama-cli").is_file():
        pytest.skip("a build without llama.cpp's programs")
    assert program("runtime.chat", "--numa", "numactl").stderr.endswith(
        "; llama.cpp's llama-cli has it: subkv run llama-cli --numa\n"
    )


def test_a_single_turn_that_does_not_fit_fails(program: Program, coded_model: Models) -> None:
    done = program("runtime.chat", "-m", coded_model(), "-c", 256, "-st", "-p", "many words " * 100)
    assert done.returncode == 1
    assert "-c: the message needs " in done.stderr
