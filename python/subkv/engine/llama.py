"""`subkv.Llama`: llama_cpp.Llama whose KV cache can hold coefficients.

    llm = subkv.Llama("model.gguf", n_ctx=8192)                  # on a coefficient cache, prepared or not
    llm = subkv.Llama("model.gguf", bases="bases.gguf")          # bases from a sidecar
    llm = subkv.Llama("model.gguf", kv_cache="f16")              # llama_cpp's cache; its other types work too

Differences from the parent class: unknown keyword arguments are errors; flash attention is "auto" by default, as on
llama.cpp's command line (llama_cpp disables it, and then a quantized V cache fails without a reason); errors contain
the native reason; without logits_all, a state contains no logits.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from subkv.base import hub
from subkv.base.closed import mark_closed
from subkv.base.errors import CacheError, ModelFileError, StateError, SubkvError, concerning
from subkv.base.numbers import shown, whole
from subkv.base.text import encodable
from subkv.engine import states
from subkv.engine.announced import report_cache
from subkv.engine.cache import (
    CacheChoice,
    attached,
    choose_cache,
    creation_error,
    flash_attention,
    open_or_f16,
)
from subkv.engine.drafts import (
    CheckedDrafts,
    DraftStats,
    as_draft_model,
    check_rollback,
    draft_length,
    with_room_for_drafts,
)
from subkv.engine.fitting import fitted, memory_size
from subkv.engine.guarded_context import GuardedContext
from subkv.engine.keywords import checked, checked_path, checked_text
from subkv.engine.memory import expected_params, require_memory
from subkv.engine.model import Model
from subkv.engine.pictures import LOST_PICTURE, Pictures
from subkv.engine.prompt_cache import PromptCache
from subkv.engine.request import CacheRequest
from subkv.engine.stats import KVStats, context_stats
from subkv.format.adapt import AdaptStats, adapt_stats, report
from subkv.format.window import Window
from subkv.native import library
from subkv.native.bases import AUTO
from subkv.native.binding import C, LogLines, captured_log, last_error, last_log_error, llama_cpp, loading
from subkv.native.gguf import check_model_file, sha256
from subkv.native.store import Found

__all__ = ["CacheError", "KVStats", "Llama", "StateError", "SubkvError"]


TYPES = ("type_k", "type_v")


def _choose(
    path: Path, requested: CacheRequest, arguments: dict[str, Any], flash_attn: str | bool | None, n_draft: int
) -> CacheChoice:
    """The cache that the arguments request, with room for drafts. arguments: of the parent class. Raises SubkvError."""
    derive = not (arguments["embedding"] or arguments["vocab_only"])  # these read a cache once, or have none
    choice = with_room_for_drafts(choose_cache(path, requested, derive), requested.window, n_draft)
    if requested.kv_memory is None:
        return choice
    return fitted(path, requested, choice, expected_params(arguments, choice, flash_attention(flash_attn, choice)))


class Llama(llama_cpp.Llama):
    """llama_cpp.Llama with a choice of KV cache.

    kv_cache: "auto" or "subkv" (coded, with the bases of `bases`, of the model file or of its sidecar, else with bases
        that are derived from the weights and stored in the cache folder), or one of llama.cpp's types ("f16", "q8_0",
        "q4_0", …). A model without a coded cache gets f16 with "auto", and an error with "subkv". With "auto", bases
        are not derived for embedding=True or vocab_only=True. type_k and type_v set K and V separately, by name or
        ggml's number.
    bases: a converted GGUF or a sidecar for this model; default: the model file itself, else its sidecar.
    sidecar: use the sidecar that `convert` has written, beside the model or in the cache folder.
    kv_bits: bits per K/V element, of those that the bases have plans for; kv_cache="subkv:3" is the same. Default: the
        variable SUBKV_BITS, or the file's default.
    kv_memory: bytes, or a size such as "2GiB": the largest of these budgets whose cache of n_ctx tokens fits in it.
    n_sink, n_recent: exact window in tokens; default: from the layout. n_rollback: exact rows beyond n_recent, so that
        the last n_rollback tokens can be removed without evaluating any again; default: 16, or the draft length.
    draft_model: source of drafts for speculative decoding, a LlamaDraftModel.
    swa_full: whether layers with a sliding window keep the cells of the whole context (llama_cpp's default), not those
        of their window only, which takes the memory of an ordinary cache of these layers. Default: False beside coded
        layers, else True. With False, an edit resumes at the last checkpoint before it.
    adapt: adaptive bases for keys, values or both: "v", "kv,length=256" (names: subkv.format.adapt.Adapt).
    flash_attn: "auto", "on"/True, "off"/False.
    progress: show a progress bar on stderr (if a terminal) while the model is loaded.
    prompt_cache: stores states of prompts on disk: a folder or a PromptCache, as for set_cache().

    A cache that no argument chooses ("auto") is reported in one line on stderr, once for each model of a process, also
    with verbose=False, as subkv's programs do: source, bits and size, or the reason for f16. Others are reported with
    verbose=True only.

    With embedding=True, a coded cache evaluates one text at a time, because every sequence needs an exact window. With
    an ordinary cache and pooled embeddings, a batch may hold several texts.

    Raises SubkvError (CacheError, …) with one sentence that starts with the argument, and TypeError for unknown keyword
    arguments.
    """

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        kv_cache: str | None = "auto",
        bases: str | os.PathLike[str] | None = None,
        n_sink: int | None = None,
        n_recent: int | None = None,
        n_rollback: int | None = None,
        adapt: str | None = None,
        sidecar: bool = True,
        kv_bits: float | None = None,
        kv_memory: str | int | None = None,
        flash_attn: str | bool | None = "auto",
        type_k: str | int | None = None,
        type_v: str | int | None = None,
        progress: bool = False,
        prompt_cache: str | os.PathLike[str] | PromptCache | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs, arguments = checked(kwargs, Llama.__init__.__kwdefaults__ or ())
        checked_text("adapt", adapt)
        with concerning(model="model_path"):
            path = check_model_file(checked_path("model_path", model_path))
        if not (prompt_cache is None or isinstance(prompt_cache, (str, os.PathLike, PromptCache))):
            raise SubkvError("prompt_cache", f"expected a folder or a PromptCache, found {shown(prompt_cache)}")
        draft = as_draft_model(kwargs.pop("draft_model", None))
        n_draft = draft_length(draft, arguments["n_batch"])
        requested = CacheRequest(
            AUTO if kv_cache is None else kv_cache,
            type_k,
            type_v,
            None if bases is None else checked_path("bases", bases),
            Window.of(n_sink, n_recent, n_rollback, adapt),
            sidecar,
            kv_bits,
            None if kv_memory is None else memory_size(kv_memory),
        )
        choice = _choose(path, requested, arguments, flash_attn, n_draft)
        store = PromptCache(prompt_cache) if isinstance(prompt_cache, (str, os.PathLike)) else prompt_cache
        choice = open_or_f16(
            choice, requested, lambda chosen: self._open(path, chosen, flash_attn, progress, arguments, kwargs)
        )
        own = replace(requested, kv_cache=choice.name if choice.coded else "f16").arguments()
        if choice.coded and kv_bits is kv_memory is None and choice.budget != choice.budget_default:
            own["kv_bits"] = float(f"{choice.budget:g}")  # also that of kv_cache="subkv:4.25"
        self._arguments = own | {"flash_attn": flash_attn, "progress": progress, "prompt_cache": prompt_cache}
        self._complete(path, arguments)
        self.set_cache(store)
        if arguments["vocab_only"]:  # no cells
            return
        self._draft_with(draft)
        report_cache(path, choice, self.kv_stats(), bool(arguments["verbose"]))

    def _open(
        self,
        path: Path,
        choice: CacheChoice,
        flash_attn: str | bool | None,
        progress: bool,
        arguments: dict[str, Any],
        given: dict[str, Any],
    ) -> CacheChoice:
        """Load the model and create the context. Returns `choice`. It can be called again after an error.

        arguments: of the parent class; given: those of the user. Raises SubkvError.
        """
        self._unload()
        self._choice, self._flash_attn_type = choice, flash_attention(flash_attn, choice)
        params = expected_params(arguments, choice, self._flash_attn_type)
        self._swa_full = bool(params.swa_full)
        require_memory(path, choice, params, arguments["n_gpu_layers"])
        with captured_log(forward=bool(arguments["verbose"])) as log, attached(choice):
            try:
                with loading(path, progress) as self._progress_callback:
                    super().__init__(os.fspath(path), type_k=choice.type_k, type_v=choice.type_v, **given)
            except (ValueError, RuntimeError) as error:
                if "_model" not in self.__dict__:
                    raise ModelFileError("model_path", last_log_error(log) or str(error)) from error
                if "_ctx" not in self.__dict__:
                    raise creation_error(choice, log, str(error)) from error
                raise SubkvError("", str(error)) from error
            if self.lora_path and not self._lora_adapter:  # the parent class ignores the error
                raise SubkvError("lora_path", last_log_error(log) or f"cannot use the adapter {self.lora_path}")
        self._kv_log: LogLines = log
        if choice.coded and not arguments["vocab_only"]:
            self._stats()  # raises if llama.cpp has created a context without cells
        return choice

    def _complete(self, path: Path, arguments: dict[str, Any]) -> None:
        """Set what the parent class lacks, once the context is open."""
        recurrent = self._is_recurrent or self._is_hybrid
        sliding = C.llama_model_n_swa(self._model.model) > 0 and not self._swa_full
        self._ctx = GuardedContext(self._ctx, recurrent, sliding, bool(arguments["vocab_only"]))
        self.loaded_model = Model(path, arguments["n_gpu_layers"], self._model.model)
        if len(self.input_ids) < self._n_ctx:  # llama.cpp rounds n_ctx up, but not the parent's arrays
            self.input_ids = np.zeros(self._n_ctx, dtype=np.intc)
            if self._logits_all:
                self.scores = np.empty((self._n_ctx, self._n_vocab), dtype=np.single)
        self._unpooled = self.pooling_type() == C.LLAMA_POOLING_TYPE_NONE
        self._identity: dict[str, Any] | None = None
        with concerning(model="lora_path"):
            # It is that of the bytes that were loaded, because another file may have this name later.
            self.lora_identity = [sha256([Path(self.lora_path)]), self.lora_scale] if self.lora_path else None
        self._pictures = Pictures(self.input_ids)

    def _unload(self) -> None:
        """Free what a failed _open() has left."""
        if "_stack" in self.__dict__:
            with captured_log(forward=False):  # llama.cpp logs buffer sizes
                self._stack.close()
        for name in ("_model", "_ctx"):
            self.__dict__.pop(name, None)

    @classmethod
    def from_pretrained(
        cls,
        repo_id: str,
        filename: str | None = None,
        additional_files: Sequence[str] | None = None,
        local_dir: str | os.PathLike[str] | None = None,
        local_dir_use_symlinks: Any = "auto",
        cache_dir: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> Llama:
        """Open a model of the Hugging Face hub; downloads it if needed (subkv.base.hub; the extra `hub`).

        repo_id: USER/MODEL, or USER/MODEL:QUANT as llama.cpp's -hf. filename, additional_files: names or patterns;
        without filename, the choice of -hf. Downloads all files of a split model. local_dir_use_symlinks: ignored.
        kwargs: arguments of Llama. Raises SubkvError.
        """
        if not isinstance(repo_id, str):
            raise SubkvError("repo_id", f"expected USER/MODEL or USER/MODEL:QUANT, found {shown(repo_id)}")
        more = additional_files or ()
        with concerning(hf_repo="repo_id", pattern="filename", more="additional_files"):
            path = hub.fetch(repo_id, filename, more=more, cache_dir=cache_dir, local_dir=local_dir)
        return cls(path, **kwargs)

    _drafts: CheckedDrafts | None = None
    _ctx: Any  # a GuardedContext, after the parent class has made its context
    loaded_model: Model  # metadata and tokenizer of this model
    _unpooled = False  # whether embeddings are unpooled, which is known once there is a context
    scores: Any  # of the parent: [n_ctx or n_batch, n_vocab] f32
    input_ids: Any  # of the parent: [n_ctx] i32
    n_tokens: int  # of the parent: number of evaluated tokens in the context

    @property
    def draft_model(self) -> Any:
        """The source of drafts, or None. The parent's loop calls it."""
        return self._drafts

    @draft_model.setter
    def draft_model(self, source: Any) -> None:
        model = as_draft_model(source)
        if model is not None:
            check_rollback(draft_length(model, self.n_batch), self.kv_stats().n_rollback or None)
        self._draft_with(model)

    def _draft_with(self, model: Any) -> None:
        """Use this draft model from now on; on an error, the previous one stays in use."""
        if model is None:
            self._drafts = None
            return
        if (self._is_recurrent or self._is_hybrid) and self._choice.window.adapts:
            raise CacheError(
                "draft_model", "expected a context that can go back, found recurrent state with adaptive bases"
            )
        self._drafts = CheckedDrafts(model, self._n_vocab, self.n_batch - 1, self._ctx.exclusive)

    def draft_stats(self) -> DraftStats:
        """Counts of drafted and accepted tokens so far."""
        return DraftStats() if self._drafts is None else self._drafts.stats

    @property
    def model_params(self) -> Any:
        """The model's parameters; the setter adds our progress callback, which the parent does not support."""
        return self._model_params

    @model_params.setter
    def model_params(self, params: Any) -> None:
        params.progress_callback = self._progress_callback
        self._model_params = params

    @property
    def context_params(self) -> Any:
        """The context's parameters; the getter adds those that the parent does not support.

        In the parent, flash attention is on or off (not "auto"), a context for embeddings has up to 256 sequences, and
        unpooled embeddings of a batch of several texts are read from the wrong place.
        """
        params = self._context_params
        params.flash_attn_type = self._flash_attn_type
        params.swa_full = self._swa_full
        if params.embeddings and (self._choice.coded or self._unpooled):
            params.n_seq_max = 1
        return params

    @context_params.setter
    def context_params(self, params: Any) -> None:
        self._context_params = params

    @property
    def cache_choice(self) -> CacheChoice:
        """The cache of this context."""
        return self._choice

    def kv_stats(self) -> KVStats:
        """Allocated bytes of the KV cache, and the size of an f16 cache."""
        self._ctx.require_weights()
        return self._stats()

    def _stats(self) -> KVStats:
        return context_stats(self._model.model, self._ctx.ctx, self._choice, self._kv_log)

    def adapt_stats(self) -> list[AdaptStats]:
        """Statistics of adaptive bases per layer and side; empty without them."""
        self._ctx.require_weights()
        return adapt_stats(self._ctx.ctx, C.llama_model_n_layer(self._model.model))

    def bases_report(self) -> dict[str, str]:
        """adapt_stats() for a person, a value per name; empty without adaptive bases."""
        return report(self.adapt_stats(), self.kv_stats().bytes_chunks)

    def fingerprint(self) -> str | None:
        """SHA-256 over layout and bases, to which saved states are bound; None for an ordinary cache."""
        return self.kv_stats().fingerprint

    def identity(self) -> dict[str, Any]:
        """The identity to which saved states are bound (subkv.engine.states.identity), computed once."""
        if self._identity is None:
            self._identity = states.identity(self)
        return self._identity

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        """As llama_cpp's, for any bytes."""
        return list(super().tokenize(encodable(text) if isinstance(text, bytes) else text, add_bos, special))

    def set_cache(self, cache: Any) -> None:
        """Look up and store prompts in a PromptCache or a cache of llama_cpp; None: stop using one.

        Raises SubkvError about `cache` for another object.
        """
        if cache is not None and not hasattr(cache, "__setitem__"):
            raise SubkvError("cache", f"expected a PromptCache or a cache of llama_cpp, found {shown(cache)}")
        super().set_cache(cache.bound_to(self) if isinstance(cache, PromptCache) else cache)

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluate tokens after the current position (`n_tokens`); a PromptCache may store beginnings meanwhile.

        Cells beyond that position are removed first. If a coded cache has lost exact rows before it, the last tokens
        (SUBKV_RESUME, 32 by default) are evaluated again; with recurrent state, tokens since the last checkpoint.
        Raises CacheError if the context is full or in use by another thread, or if cells of a picture would have to be
        evaluated again.
        """
        with self._ctx.exclusive():
            self._eval(list(tokens), 0 if self._drafts is None else self._drafts.evaluated(len(tokens) - 1))

    def _eval(self, tokens: list[int], n_draft: int) -> None:
        """As eval(); the last n_draft tokens are a draft: they and the token before them need logits."""
        self._ctx.require_weights()
        if self.n_tokens + len(tokens) > self._n_ctx:
            raise CacheError(
                "n_ctx", f"expected at most {self._n_ctx} tokens in the context, found {self.n_tokens + len(tokens)}"
            )
        self._pictures.update(self.n_tokens)
        if self.cache is not None:
            self._pictures.require_none(self.n_tokens, "cache", "a prompt cache, which stores tokens")
        old_tokens, n_valid = self._input_ids.tolist(), self._drop_tail()
        self._ctx.moved = self._ctx.moved and n_valid > 0
        if n_valid < len(old_tokens):
            picture_lost = self._pictures.any_after(n_valid)
            if picture_lost or n_valid == 0:
                self.reset()
                self._ctx.kv_cache_clear()
            if picture_lost:
                raise CacheError("", LOST_PICTURE)
            self.n_tokens = n_valid
            tokens = old_tokens[n_valid:] + tokens
        if isinstance(self.cache, PromptCache) and not n_draft:
            text = [*self._input_ids.tolist(), *tokens]
            for end in self.cache.positions(self.n_tokens, text):
                self._evaluate(text[self.n_tokens : end])
                self.cache.store()
            tokens = text[self.n_tokens :]
        self._evaluate(tokens, n_draft)

    def generate(self, tokens: Sequence[int], *args: Any, **kwargs: Any) -> Any:
        """As the parent's. With pictures, another prompt reuses only the tokens before the first picture."""
        tokens = list(tokens)
        if tokens != self._input_ids.tolist():
            self.n_tokens = self._pictures.tokens_before(self.n_tokens)
        return super().generate(tokens, *args, **kwargs)

    def require_shift(self, key: str) -> None:
        """Raises SubkvError about `key` if this model or cache does not support discard()."""
        context = self._ctx
        plain = context.memory is not None and context.checkpoints is None
        if not plain or not C.llama_memory_can_shift(context.memory):
            raise SubkvError(
                key,
                "expected a model and a cache whose positions can move, found others (recurrent state, sliding windows "
                "without swa_full (--swa-full), positions of several numbers, or adaptive bases); omit it",
            )

    def discard(self, n_keep: int, n_discard: int) -> None:
        """Remove n_discard tokens after the first n_keep, and shift the later ones (llama.cpp's context shift).

        Keys of shifted tokens are rotated to the new positions; their values still depend on the removed tokens. Raises
        CacheError if the cache refuses; then all tokens are evaluated again. With recurrent state, it raises before it
        changes anything.
        """
        with self._ctx.exclusive():
            self._pictures.require_none(self.n_tokens, "", "a shift of tokens")
            context, n, n_remaining = self._ctx, self.n_tokens, self.n_tokens - n_discard
            if n_keep < 0 or not 0 < n_discard <= n - n_keep:
                raise CacheError(
                    "n_discard", f"expected tokens after {n_keep} of {n} in the context, found {n_discard}"
                )
            if context.checkpoints is not None:
                raise CacheError(
                    "n_discard",
                    "expected a context that can remove tokens, found one with recurrent state or sliding windows",
                    "" if self._is_recurrent or self._is_hybrid else "swa_full=True keeps their cells",
                )
            ids = self.input_ids[n_keep + n_discard : n].copy()
            self.n_tokens = 0  # an error leaves an empty context
            if not (context.kv_cache_seq_rm(0, n, -1) and context.kv_cache_seq_rm(0, n_keep, n_keep + n_discard)):
                raise CacheError("n_discard", last_error() or "expected a cache that can remove tokens, found another")
            context.kv_cache_seq_shift(0, n_keep + n_discard, n, -n_discard)
            self.input_ids[n_keep:n_remaining] = ids
            if self._logits_all:
                self.scores[n_keep:n_remaining] = self.scores[n_keep + n_discard : n].copy()
            self.n_tokens = n_remaining

    def sample(self, *args: Any, idx: int | None = None, **kwargs: Any) -> int:
        """As the parent's: sample a token from the logits of the last eval. idx: which of the tokens with logits."""
        with self._ctx.exclusive():
            end = self.n_tokens
            if idx is None or idx + 1 == end or self._sampler is None:
                token: int = super().sample(*args, idx=idx, **kwargs)
                return token
            self.n_tokens = idx + 1  # logits processors read the text up to there, without the rest of the draft
            try:
                token = self._sampler.sample(self._ctx, idx - end)
            finally:
                self.n_tokens = end
            if self._drafts is not None:
                self._drafts.count(token == self.input_ids[idx + 1])
            return token

    def restorable(self, n: int) -> int:
        """How many of the first n tokens checkpoints can restore, if the later ones are removed."""
        return self._ctx.checkpoints.restorable(n) if self._ctx.checkpoints is not None else 0

    def keep(self, n: int) -> int:
        """Remove the cells from position n on, or more if the cache requires it. Returns the new n_tokens.

        Raises CacheError if there are fewer than n cells.
        """
        n = whole("n", n, 0, self.n_tokens, f"0 to {self.n_tokens} tokens, as the context has", CacheError)
        with self._ctx.exclusive():
            self._pictures.update(self.n_tokens)
            self.n_tokens = n
            self.n_tokens = self._drop_tail()
            self._pictures.update(self.n_tokens)
            return self.n_tokens

    def _drop_tail(self) -> int:
        """Remove the cells beyond n_tokens; returns the number of valid cells before it.

        Fewer than n_tokens are valid if the cache had to remove more, or after an interrupt; 0 if the removal failed.
        """
        if self._ctx.memory is None:
            return self.n_tokens
        first = self._pictures.last_cell(self.n_tokens)
        if self._ctx.checkpoints is not None:
            n_valid = self._ctx.checkpoints.rewind(self.n_tokens)
            return self.n_tokens if n_valid > first else n_valid
        if C.llama_memory_seq_pos_max(self._ctx.memory, 0) < first:
            return 0
        n_valid = (
            self.n_tokens if self._pictures.any_after(0) else library.load().subkv_resume(self.ctx, 0, self.n_tokens)
        )
        return n_valid if self._ctx.kv_cache_seq_rm(-1, n_valid, -1) else 0

    def _evaluate(self, tokens: Sequence[int], n_draft: int = 0) -> None:
        """Evaluate further tokens, and take checkpoints where they are due."""
        points = self._ctx.checkpoints
        if points is None:
            self._evaluate_on(tokens, 1 + n_draft)
            return
        first, end = self.n_tokens, self.n_tokens + len(tokens) - n_draft  # the logits of a draft must be in one batch
        if end - first > 1 or points.due(first):
            points.take(first)
        elif n_draft:
            points.take_for_draft(first)
        for stop in points.pauses(first, end):
            self._evaluate_on(tokens[self.n_tokens - first : stop - first])
            points.take(stop)
        self._evaluate_on(tokens[self.n_tokens - first :], 1 + n_draft)

    def _evaluate_on(self, tokens: Sequence[int], n_rows: int = 1) -> None:
        """As the parent's eval(); the last n_rows tokens are in one batch and have logits for sampling."""
        starts = [*range(0, len(tokens), self.n_batch), len(tokens)]
        starts[-2:-1] = [max(min(n, len(tokens) - n_rows), 0) for n in starts[-2:-1]]
        for start, stop in itertools.pairwise(starts):
            batch = tokens[start:stop]
            begin, end = self.n_tokens, self.n_tokens + len(batch)
            self._batch.set_batch(batch=batch, n_past=begin, logits_all=self._logits_all)
            if stop == len(tokens):
                np.ctypeslib.as_array(self._batch.batch.logits, (len(batch),))[-n_rows:] = True
            self._ctx.decode(self._batch)
            self.input_ids[begin:end] = batch
            if self._logits_all:
                self.scores[begin:end] = np.ctypeslib.as_array(self._ctx.get_logits(), (len(batch), self._n_vocab))
            self.n_tokens = end
            self._pictures.evaluated(end)
            self._requires_eval = False

    def reset(self) -> None:
        """Remove all tokens."""
        super().reset()
        self._pictures.evaluated(0)
        if self._ctx.checkpoints is not None:
            self._ctx.checkpoints.forget()

    def save_state(self) -> llama_cpp.LlamaState:
        """A copy of the context for load_state(): a few MiB plus the used cells; logits only with logits_all.

        Raises StateError, and CacheError if the context has a picture.
        """
        with self._ctx.exclusive():
            self._pictures.require_none(self.n_tokens, "", "a state, which contains tokens only")
            return states.save(self, self.identity(), self._logits_all)

    def load_state(self, state: llama_cpp.LlamaState) -> None:
        """Restore a state of this context, or of another one with the same model, cache and parameters.

        Raises StateError if the state is of another model or cache, or has too many tokens. The context is then
        unchanged or empty.
        """
        if not isinstance(state, llama_cpp.LlamaState):
            raise StateError("state", f"expected a LlamaState, found {shown(state)}")
        with self._ctx.exclusive():
            states.load(self, self.identity(), state, self._logits_all)
            self._pictures.evaluated(self.n_tokens)
            self._ctx.moved = not getattr(state, "evaluated", False)

    def load_prompt(self, found: Found) -> None:
        """Restore a stored prompt of this context (subkv.engine.prompt_cache). Raises StateError as load_state()."""
        with self._ctx.exclusive():
            states.load_sequence(self, found)
            self._pictures.evaluated(self.n_tokens)
            self._ctx.moved = False

    def close(self) -> None:
        """Free context and model. May be called twice, and after a failed construction.

        Raises CacheError if another thread is evaluating.
        """
        if "_stack" not in self.__dict__:
            return
        loud = self.verbose or sys.is_finalizing()  # llama.cpp logs buffer sizes on exit
        context = self.__dict__.get("_ctx")
        with contextlib.ExitStack() as stack:
            if isinstance(context, GuardedContext) and context.ctx is not None:
                stack.enter_context(context.exclusive())
            if not loud:
                stack.enter_context(captured_log(forward=False))
            super().close()
            self._mark_closed()

    def _mark_closed(self) -> None:
        """Also objects that share its native handles and that a program may still have."""
        own = self.__dict__
        for shared in (own.get("loaded_model"), own.get("_model")):
            if shared is not None:
                mark_closed(shared, "Llama")
        if isinstance(own.get("_ctx"), GuardedContext):
            own["_ctx"]._mark_closed()
        mark_closed(self, "Llama")

    def __enter__(self) -> Llama:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        types = {"type_k": None, "type_v": None} if self._choice.coded else {name: state[name] for name in TYPES}
        state |= self._arguments | types | {"draft_model": as_draft_model(self._drafts)}
        return state
