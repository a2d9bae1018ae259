"""Fields of llama-server's completions beside OpenAI's: more samplers and their order, a slot, more to be told."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

# llama.cpp's samplers, in the order in which they work where no other is asked for; "infill" is in none but asked for
ORDER = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")
NAMES = (*ORDER, "infill")
SPELLINGS = {name.replace("_", ""): name for name in NAMES}
SPELLINGS |= {"nucleus": "top_p", "temp": "temperature", "typ": "typ_p", "typicalp": "typ_p"}
LETTERS = dict(zip("edskypmxti", NAMES, strict=True))  # where the order is one text
N_SAMPLERS = 32
N_BREAKERS, N_BREAKER = 16, 40  # of DRY: how many, as each is looked for in the whole vocabulary; bytes of one

Share = Annotated[float, Field(ge=0.0, le=1.0)]
Count = Annotated[int, Field(ge=0, lt=2**31)]
Window = Annotated[int, Field(ge=-1, lt=2**31)]  # tokens, -1: all that a slot holds


class Native(BaseModel):
    """What every completion takes, with llama-server's defaults. Numbers are finite, as its samplers expect."""

    model_config = ConfigDict(allow_inf_nan=False)

    id_slot: int = Field(-1, ge=-1, description="The slot to use, -1: any.")
    cache_prompt: bool = Field(True, description="false: nothing that is remembered of the prompt is used.")
    timings_per_token: bool = Field(False, description="Timings with every piece of a stream.")
    ignore_eos: bool = False
    samplers: list[str] | None = None
    min_keep: Count = 0
    typical_p: Share = 1.0
    top_n_sigma: float = Field(-1.0, ge=-1e3, le=1e3)
    xtc_probability: Share = 0.0
    xtc_threshold: Share = 0.1
    dynatemp_range: float = Field(0.0, ge=0.0, le=1e4)
    dynatemp_exponent: float = Field(1.0, ge=0.0, le=1e2)
    repeat_last_n: Window = 64
    dry_multiplier: float = Field(0.0, ge=0.0, le=1e3)
    dry_base: float = Field(1.75, ge=1.0, le=1e3)
    dry_allowed_length: Count = 2
    dry_penalty_last_n: Window = -1
    dry_sequence_breakers: Annotated[list[str], Field(min_length=1, max_length=N_BREAKERS)] = ["\n", ":", '"', "*"]
    lora: list[Any] = []

    @field_validator("samplers", mode="before")
    @classmethod
    def ordered(cls, given: Any) -> Any:
        """Names in any of llama-server's spellings, or a letter for each."""
        if isinstance(given, str):
            found = {letter: LETTERS.get(letter) for letter in given}
            given = list(given)
        elif isinstance(given, list) and all(isinstance(name, str) for name in given):
            found = {name: SPELLINGS.get(name.lower().replace("-", "").replace("_", "")) for name in given}
        else:
            return given
        if len(given) > N_SAMPLERS:
            raise ValueError(f"expected at most {N_SAMPLERS}, found {len(given)}")
        wrong = next((name for name, known in found.items() if known is None), None)
        if wrong is not None:
            raise ValueError(f"expected some of {', '.join(NAMES)}, found {wrong!r:.80}")
        return [found[name] for name in given]

    @field_validator("dry_sequence_breakers", mode="after")
    @classmethod
    def of_text(cls, breakers: list[str]) -> list[str]:
        """Each as llama.cpp reads it: it would skip what is empty and cut what is longer."""
        sizes = [len(text.encode("utf-8", "replace")) for text in breakers]
        if min(sizes) < 1 or max(sizes) > N_BREAKER or any("\0" in text for text in breakers):
            raise ValueError(f"expected texts of 1 to {N_BREAKER} bytes without zeros, found others")
        return breakers

    @field_validator("lora", mode="after")
    @classmethod
    def without_adapters(cls, adapters: list[Any]) -> list[Any]:
        if adapters:
            raise ValueError(f"expected none, as this server has no adapters, found {len(adapters)}")
        return adapters
