"""lm-evaluation-harness on models of this engine, with any KV cache. Extra `eval`.

    python -m research.lm_eval run --model subkv --model_args model=M.gguf,cache=subkv:bases.gguf --tasks hellaswag

The command line is that of lm_eval (`lm_eval run --help`); this module registers the model `subkv` there.
Requests are sorted so that those with a common prefix share its cells.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from converter.scoring import log_softmax
from runtime.options import open_context
from subkv.base.errors import CacheError, SubkvError, concerning
from subkv.engine.cache import parse_cache
from subkv.engine.context import ContextOptions, Logits
from subkv.engine.model import Model
from subkv.engine.template import Template
from subkv.native.binding import C

N_ROLLBACK = 64  # exact rows, so that the next continuation of a long prompt does not evaluate the prompt again
IGNORED = ("batch_size", "max_batch_size", "device")  # arguments that lm_eval passes to every model
MAX_NEW = 256  # tokens of an answer, unless the task sets a limit


@register_model("subkv")
class SubkvLM(TemplateLM):  # type: ignore[misc]
    """A GGUF under one cache type.

    model: the file. cache: as -ctk of the programs: auto, f16, q8_0, subkv, subkv:FILE. n_ctx: maximum tokens of a
    request with its answer; longer requests lose their start; default: the trained context, at most 4096. threads:
    default all processors. Arguments in IGNORED have no effect, because one request runs at a time.
    Raises SubkvError if the model cannot be loaded, and CacheError for invalid arguments.
    """

    def __init__(
        self, model: str = "", cache: str = "auto", n_ctx: int | None = None, threads: int | None = None, **others: Any
    ) -> None:
        super().__init__()
        unknown = [f"{name}={value}" for name, value in others.items() if name not in IGNORED]
        if unknown or not model:
            raise CacheError(
                "--model_args",
                f"expected model=FILE and cache, n_ctx or threads, found {', '.join(unknown) or 'no model'}",
            )
        for name, number in (("n_ctx", n_ctx), ("threads", threads)):
            if number is not None and not (isinstance(number, int) and number > 0):
                raise CacheError(f"--model_args {name}", f"expected a positive number, found {number}")
        with concerning(model="--model_args model", kv_cache="--model_args cache"):
            self._model = Model(model)
            choice = parse_cache(cache, self._model.path).with_rollback(N_ROLLBACK)
        self._n_ctx = n_ctx or min(4096, self._model.n_ctx_train)
        sized = ContextOptions(self._n_ctx, n_threads=threads)
        self._context = open_context(self._model, choice, sized, "", contextlib.ExitStack())
        self._held: list[int] = []  # tokens that the context holds
        self._path = model

    #
    # tokens
    #

    @property
    def eot_token_id(self) -> int:
        return int(C.llama_vocab_eos(self._model.vocab))

    @property
    def prefix_token_id(self) -> int:
        """The token in front of a text without context."""
        return self._model.bos if self._model.bos >= 0 else self.eot_token_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Tokens of a text; special tokens in it are parsed. add_special_tokens None: the model's default."""
        special = self._model.add_bos if add_special_tokens is None else add_special_tokens
        return self._model.tokenize(string.encode("utf-8", "replace"), special, markup=True).tolist()

    @property
    def tokenizer_name(self) -> str:
        return self._path

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The model's own template. Raises SubkvError if it has none."""
        return self._model.chat_template()

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The prompt of a chat. Raises SubkvError if there is no template, or it rejects the messages."""
        return Template(self._model).render(chat_history, add_generation_prompt)

    #
    # evaluation
    #

    def _logits(self, tokens: Sequence[int], first: int) -> Logits:
        """Logits [len(tokens) − first, n_vocab] from position `first` on; the context then holds all tokens."""
        held = self._held
        n_common = next((i for i, (a, b) in enumerate(zip(held, tokens, strict=False)) if a != b), len(held))
        keep = min(n_common, first, len(tokens))
        try:
            self._context.drop_tail(keep)
        except CacheError:  # it would have to remove more than N_ROLLBACK tokens
            self._context.clear()
            keep = 0
        self._held = []
        rows = []
        for low in range(keep, len(tokens), self._context.n_batch):
            piece = tokens[low : low + self._context.n_batch]
            n_rows = self._context.decode(piece, low, first - low)
            rows.append(self._context.logits(n_rows).copy() if n_rows > 0 else self._context.logits(0))
        self._held = list(tokens)
        return np.concatenate(rows)

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """(ln p of the continuation, whether it is the greedy one) for (texts, context tokens, continuation tokens)."""
        results: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        order = sorted(range(len(requests)), key=lambda i: requests[i][1] + requests[i][2])
        for i in tqdm(order, desc="loglikelihood", disable=disable_tqdm):
            texts, context, continuation = requests[i]
            if len(continuation) > self._n_ctx:
                raise CacheError("--model_args n_ctx", f"expected at least {len(continuation)}, found {self._n_ctx}")
            tokens = (context + continuation)[-self._n_ctx - 1 : -1]
            logits = self._logits(tokens, len(tokens) - len(continuation))
            steps = np.arange(len(continuation))
            results[i] = (
                float(log_softmax(logits)[steps, continuation].sum()),
                bool((logits.argmax(-1) == continuation).all()),
            )
            self.cache_hook.add_partial("loglikelihood", texts, results[i])
        return results

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """ln p of whole texts, in windows of n_ctx tokens that overlap by one token."""
        sums = []
        for (text,) in tqdm([request.args for request in requests], desc="rolling", disable=disable_tqdm):
            tokens = self.tok_encode(text, add_special_tokens=False)
            windows = get_rolling_token_windows(tokens, self.prefix_token_id, self._n_ctx, 1)
            pairs = [(("", text), *make_disjoint_window(window)) for window in windows]
            sums.append(sum(nll for nll, _ in self._loglikelihood_tokens(pairs, disable_tqdm=True)))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), sums[-1])
        return sums

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Greedy answers up to a stop text, an end token or the maximum length of the task."""
        prompts = [self.tok_encode(request.args[0]) for request in requests]
        answers = [""] * len(requests)
        order = sorted(range(len(requests)), key=lambda i: prompts[i])
        for i in tqdm(order, desc="generate", disable=disable_tqdm):
            settings = normalize_gen_kwargs(requests[i].args[1], MAX_NEW)
            if settings["do_sample"]:
                raise CacheError("gen_kwargs", "expected greedy generation (do_sample=False), found sampling")
            n_new = settings["max_gen_toks"]
            if not 0 < n_new < self._n_ctx:
                raise CacheError(
                    "--model_args n_ctx", f"expected more than the {n_new} tokens of an answer, found {self._n_ctx}"
                )
            answers[i] = self._generate(prompts[i][n_new - self._n_ctx :], n_new, [s for s in settings["until"] if s])
            self.cache_hook.add_partial("generate_until", requests[i].args, answers[i])
        return answers

    def _generate(self, prompt: list[int], n_new: int, stops: list[str]) -> str:
        tokens, answer = list(prompt), b""
        for _ in range(n_new):
            token = int(self._logits(tokens, len(tokens) - 1)[0].argmax())
            if self._model.is_end(token):
                break
            tokens.append(token)
            answer += self._model.piece(token, special=True)
            if any(stop.encode() in answer for stop in stops):
                break
        text = answer.decode("utf-8", "replace")
        return text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]


def main() -> None:
    """Entry point of `python -m research.lm_eval`."""
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except SubkvError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
