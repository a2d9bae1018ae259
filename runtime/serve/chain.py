"""llama.cpp's samplers of one request, in the order that it asks for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from runtime.serve.native import ORDER, Native
from runtime.serve.slots_llama import SlotsLlama
from subkv.native.binding import C, internals

N_MIROSTAT = 100  # tokens that the first Mirostat estimates from; llama.cpp's number


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The samplers' arguments that llama_cpp's completions have; `asked` holds the others.

    exact: the probabilities after the chain are wanted: it ends with a draw, also where only one token is left to it.
    """

    temp: float
    seed: int
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    mirostat_mode: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    exact: bool = False

    @property
    def penalizes(self) -> bool:
        return (self.repeat_penalty, self.frequency_penalty, self.presence_penalty) != (1.0, 0.0, 0.0)


def chain(llm: SlotsLlama, tuning: Tuning, asked: Native, prompt: Sequence[int], n_ctx: int) -> internals.LlamaSampler:
    """The samplers, those against repetition told of the prompt; the last one selects. n_ctx: tokens of a slot."""
    made = internals.LlamaSampler()
    window, dry_window = (n_ctx if n < 0 else min(n, n_ctx) for n in (asked.repeat_last_n, asked.dry_penalty_last_n))
    n_keep = max(asked.min_keep, 1)
    dry = asked.dry_multiplier > 0 and dry_window > 0

    def penalties() -> None:
        if tuning.penalizes:
            made.add_penalties(
                llm.n_vocab(), window, tuning.repeat_penalty, tuning.frequency_penalty, tuning.presence_penalty
            )

    def against_repetition() -> None:
        if dry:
            breakers = [text.encode("utf-8", "replace").decode() for text in asked.dry_sequence_breakers]
            made.add_dry(
                llm._model, asked.dry_multiplier, asked.dry_base, asked.dry_allowed_length, dry_window, breakers
            )

    def sigma() -> None:
        if asked.top_n_sigma > 0:
            made.add_top_n_sigma(asked.top_n_sigma)

    def xtc() -> None:
        if asked.xtc_probability > 0:
            made.add_xtc(asked.xtc_probability, asked.xtc_threshold, n_keep, tuning.seed)

    add: dict[str, Callable[[], Any]] = {
        "penalties": penalties,
        "dry": against_repetition,
        "top_n_sigma": sigma,
        "top_k": lambda: made.add_top_k(tuning.top_k),
        "typ_p": lambda: made.add_typical(asked.typical_p, n_keep),
        "top_p": lambda: made.add_top_p(tuning.top_p, n_keep),
        "min_p": lambda: made.add_min_p(tuning.min_p, n_keep),
        "xtc": xtc,
        "temperature": lambda: made.add_temp_ext(tuning.temp, asked.dynatemp_range, asked.dynatemp_exponent),
        "infill": lambda: made.add_infill(llm._model),
    }
    order = ORDER if asked.samplers is None else asked.samplers
    # the most likely token, where none of them takes it away and nobody asks for its probability
    greedy = tuning.temp <= 0 and asked.samplers is None and asked.typical_p == 1 and asked.xtc_probability == 0
    if greedy and not asked.dynatemp_range and not tuning.exact:
        penalties()
        against_repetition()
        made.add_greedy()
    elif tuning.mirostat_mode and tuning.temp > 0:
        penalties()
        made.add_temp(tuning.temp)
        how = tuning.seed, tuning.mirostat_tau, tuning.mirostat_eta
        if tuning.mirostat_mode == 1:
            made.add_mirostat(llm.n_vocab(), *how, N_MIROSTAT)
        else:
            made.add_mirostat_v2(*how)
    else:
        for name in order:
            add[name]()
        made.add_dist(tuning.seed)
    n_seen = max(window if tuning.penalizes else 0, dry_window if dry else 0)
    for token in prompt[max(len(prompt) - n_seen, 0) :]:
        C.llama_sampler_accept(made.sampler, token)
    return made
