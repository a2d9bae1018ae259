"""Valid requests to llama-server with random values of every field of its schema, in an order that changes its cells.

Most fields change only how a token is chosen. The others decide which cells a slot keeps, and which it removes, copies
or moves (docs/server.md); prompts are parts of a few texts, joined in other ways by each request.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Value = Callable[[random.Random], Any]

GRAMMAR = 'root ::= [a-z ]{1,12} "."'
SCHEMA = {"type": "string", "enum": ["yes", "no"]}
SAMPLERS = ["top_k", "dry", "penalties", "xtc", "temperature", "top_p", "min_p", "typ_p", "top_n_sigma"]


def one(*values: Any) -> Value:
    return lambda rng: rng.choice(values)


def between(low: float, high: float) -> Value:
    return lambda rng: round(rng.uniform(low, high), 3)


def some(*values: Any) -> Value:
    return lambda rng: rng.sample(values, rng.randint(1, len(values)))


YES_OR_NO = one(True, False)

CELLS: dict[str, Value] = {
    "cache_prompt": one(True, True, False),
    "n_predict": one(0, 1, 2, 8, 40, 300),
    "n_keep": one(-1, 0, 1, 5, 40, 200, 10**6),
    "n_discard": one(0, 1, 7, 64, 200, 10**6),
    "n_cmpl": one(1, 2),
    "n_cache_reuse": one(0, 1, 8, 64, 10**6),
    "id_slot": one(-1, 0, 1, 2, 7),
    "message_delimiters": one([], [{"role": "user", "delimiter": " the "}], [{"role": "user", "delimiter": "."}]),
    "lora": one([], [{"id": 0, "scale": 1.0}]),
}
OTHERS: dict[str, Value] = {
    "verbose": YES_OR_NO,
    "timings_per_token": YES_OR_NO,
    "stream": YES_OR_NO,
    "stream_options": one({"include_usage": True}, {}),
    "return_tokens": YES_OR_NO,
    "return_progress": YES_OR_NO,
    "sse_ping_interval": one(-1, 0, 1, 30),
    "n_indent": one(0, 0, 1),
    "t_max_predict_ms": one(-1, 0, 1, 1000),
    "response_fields": one([], ["content", "timings/prompt_n"]),
    "top_k": one(0, 1, 40, 10**6),
    "top_p": between(0, 1),
    "min_p": between(0, 1),
    "top_n_sigma": one(-1, 0.5, 3),
    "xtc_probability": between(0, 1),
    "xtc_threshold": between(0, 0.6),
    "typical_p": between(0.1, 1),
    "temperature": one(0, 0.5, 1, 5),
    "dynatemp_range": between(0, 1),
    "dynatemp_exponent": between(0, 2),
    "repeat_last_n": one(0, 4, 64, 10**6),
    "repeat_penalty": between(1, 2),
    "frequency_penalty": between(-2, 2),
    "presence_penalty": between(-2, 2),
    "dry_multiplier": between(0, 2),
    "dry_base": between(1, 3),
    "dry_allowed_length": one(0, 2, 10),
    "dry_penalty_last_n": one(0, 64, 10**6),
    "dry_sequence_breakers": some("\n", ":", "the"),
    "mirostat": one(0, 1, 2),
    "mirostat_tau": between(0, 10),
    "mirostat_eta": between(0, 1),
    "adaptive_target": one(-1, 0, 0.5, 1),
    "adaptive_decay": between(0, 0.99),
    "seed": one(0, 1, 2**31 - 1),
    "n_probs": one(0, 1, 5),
    "min_keep": one(0, 1, 100),
    "backend_sampling": YES_OR_NO,
    "post_sampling_probs": YES_OR_NO,
    "json_schema": one(SCHEMA, {}),
    "grammar": one(GRAMMAR, ""),
    "grammar_lazy": one(False),
    "chat_format": one(0),
    "reasoning_format": one("none", "auto", "deepseek"),
    "generation_prompt": one("", "so "),
    "parse_tool_calls": YES_OR_NO,
    "continue_final_message": one(False),
    "echo": YES_OR_NO,
    "preserved_tokens": some("<|im_end|>", "the"),
    "reasoning_control": YES_OR_NO,
    "reasoning_budget_tokens": one(-1, 0, 4),
    "reasoning_budget_start_tag": one("<|im_start|>"),
    "reasoning_budget_end_tags": one(["<|im_end|>"]),
    "reasoning_budget_message": one("", "enough"),
    "logit_bias": one([], {"the": 2.0}, [[65, False]], {"66": -1.5}),
    "ignore_eos": one(True, True, False),
    "stop": one([], ["e"], "zzz", ["\n", "the"]),
    "samplers": some(*SAMPLERS),
}
# names that are alternatives of another field, and those that only the chat routes may set
ALIASES = {"max_completion_tokens", "max_tokens", "n", "logprobs", "reasoning_budget_end_tag"}
REFUSED = {"grammar_triggers", "chat_parser"}
TEXTS = ((0, 300), (250, 400), (0, 460), (700, 200), (900, 480))
"""First token and length of each text, in a longer one: some share a beginning or a middle."""


@dataclass(frozen=True)
class Request:
    """A request; `leaves`: the client closes the connection after the first bytes of the answer."""

    path: str
    body: dict[str, Any]
    leaves: bool = False


def prompt(rng: random.Random, texts: Sequence[list[int]]) -> Any:
    """A text, its beginning, one with a part removed, moved or replaced; now and then too long, several, or empty."""
    whole, other = (list(text) for text in rng.sample(texts, 2))
    cut = rng.randrange(1, len(whole))
    gap = rng.choice([1, 3, 15, 17, 40, 150])
    shape = rng.randrange(20)
    if shape < 5:
        return whole[:cut]
    if shape < 10:
        return whole[:cut] + whole[cut + gap :]
    if shape < 13:
        return whole[:cut] + other[:gap] + whole[cut:]
    if shape < 15:
        return whole[cut:] + whole[:cut]
    if shape < 17:
        return other[:gap] + whole[gap:cut]
    return rng.choice([whole + other, [whole[:9], other[:30]], [], whole[:1], whole])


def completion(rng: random.Random, texts: Sequence[list[int]]) -> Request:
    body: dict[str, Any] = {"prompt": prompt(rng, texts), "n_predict": rng.choice([1, 4, 16, 200])}
    for fields, n in ((CELLS, 4), (OTHERS, 3)):
        body |= {name: fields[name](rng) for name in rng.sample(sorted(fields), rng.randint(0, n))}
    if rng.randrange(3) == 0:
        body["temperature"] = 0
    leaves = bool(body.get("stream")) and rng.randrange(3) == 0
    return Request(rng.choice(["/completion", "/completion", "/v1/completions"]), body, leaves)


def requests(rng: random.Random, texts: Sequence[list[int]]) -> list[Request]:
    """One request, or several to send at the same time."""
    if rng.randrange(8) == 0:
        slot, action = rng.choice([0, 1, 5]), rng.choice(["save", "save", "restore", "restore", "erase"])
        return [Request(f"/slots/{slot}?action={action}", {"filename": rng.choice(["a.bin", "b.bin", "none.bin"])})]
    n = rng.choice([1, 1, 2, 3])
    return [completion(rng, texts) for _ in range(n)]
