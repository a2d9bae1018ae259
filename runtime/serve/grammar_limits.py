"""What a grammar and a JSON schema may be: checked in one pass over the text, before llama.cpp or llama_cpp sees them.

Neither has limits of its own: a pattern can stop llama_cpp's converter from ever advancing, a repetition becomes as
much text, and what is nested recurses.
"""

from __future__ import annotations

import json
import re
from typing import Any

from runtime.serve.refusals import bad_field

N_BYTES = 64 * 1024  # of a grammar, and of a schema as JSON
N_RULES = 4096
N_ALTERNATIVES = 16384
N_NESTED = 256  # groups of a grammar within groups
N_REPEAT = 1000  # {n,m}, minLength, maxLength, minItems, maxItems; llama.cpp refuses what is a little more
N_DEPTH = 64  # of a schema
N_VALUES = 8192  # of a schema: objects, lists, texts, numbers
N_PROPERTIES = 256  # of one object: llama_cpp writes a rule for each pair of optional ones
N_PATTERN = 1024  # characters of a pattern

# Unfinished ones end with the text: no alternative ever fails, so nothing is read twice.
QUOTED = r'"(?:[^"\\]|\\.?)*"?|\[(?:[^\]\\]|\\.?)*\]?'
MARKS = re.compile(QUOTED + r"|#[^\n]*|::=|\{[^}\n]*\}?|[(|)]", re.DOTALL)
LITERAL = re.compile(r"\\.?|\[(?:[^\]\\]|\\.?)*\]?", re.DOTALL)
COUNTED = re.compile(r"\{[^}]*\}?")
NUMBER = re.compile(r"\d+")
COUNTS = ("minLength", "maxLength", "minItems", "maxItems")


def check_grammar(text: str, param: str = "grammar") -> None:
    """Refuse a GBNF grammar beyond the limits. Raises ApiError."""
    _check_length(text, param)
    n_rules = n_alternatives = depth = deepest = 0
    for match in MARKS.finditer(text):
        mark = match[0]
        n_rules += mark == "::="
        n_alternatives += mark == "|"
        depth += (mark == "(") - (mark == ")")
        deepest = max(deepest, depth)
        if mark[0] == "{":
            _check_counts(mark, param)
    for found, limit, what in (
        (n_rules, N_RULES, "rules"),
        (n_alternatives, N_ALTERNATIVES, "alternatives"),
        (deepest, N_NESTED, "nested groups"),
    ):
        if found > limit:
            raise bad_field(param, f"expected a grammar of at most {limit} {what}, found {found}")


def check_schema(schema: Any, param: str) -> str:
    """The schema as JSON. Refuses one beyond the limits: ApiError."""
    n_values = 0
    todo = [(schema, 1)]
    while todo:
        value, depth = todo.pop()
        n_values += 1
        if n_values > N_VALUES or depth > N_DEPTH:
            raise bad_field(param, f"expected a schema of at most {N_VALUES} values and {N_DEPTH} levels, found more")
        if isinstance(value, dict):
            _check_object(value, param)
            todo += [(inner, depth + 1) for inner in value.values()]
        elif isinstance(value, list):
            todo += [(inner, depth + 1) for inner in value]
    text = json.dumps(schema)
    _check_length(text, param)
    return text


def _check_object(value: dict[str, Any], param: str) -> None:
    for name in COUNTS:
        count = value.get(name)
        if isinstance(count, (int, float)) and not 0 <= count <= N_REPEAT:
            raise bad_field(param, f"expected {name} from 0 to {N_REPEAT}, found {count!s:.20}")
    properties = value.get("properties")
    if isinstance(properties, dict) and len(properties) > N_PROPERTIES:
        raise bad_field(param, f"expected at most {N_PROPERTIES} properties of an object, found {len(properties)}")
    pattern = value.get("pattern")
    if not isinstance(pattern, str):
        return
    if len(pattern) > N_PATTERN:
        raise bad_field(param, f"expected a pattern of at most {N_PATTERN} characters, found {len(pattern)}")
    bare = LITERAL.sub("", pattern)
    _check_counts(" ".join(COUNTED.findall(bare)), param)
    bare = COUNTED.sub("", bare)
    for bracket in "]}":
        if bracket in bare:  # llama_cpp's converter would wait there for ever
            raise bad_field(param, f"expected a pattern whose brackets are paired or escaped, found a lone {bracket!r}")
    if bare.count("(") > N_NESTED:
        raise bad_field(param, f"expected a pattern of at most {N_NESTED} groups, found {bare.count('(')}")


def _check_counts(text: str, param: str) -> None:
    for number in NUMBER.findall(text):
        if len(number) > 9 or int(number) > N_REPEAT:
            raise bad_field(param, f"expected repetitions of at most {N_REPEAT}, found {number:.20}")


def _check_length(text: str, param: str) -> None:
    try:
        n = len(text.encode())
    except UnicodeEncodeError:
        raise bad_field(param, "expected text, found half of a surrogate pair") from None
    if n > N_BYTES:
        raise bad_field(param, f"expected at most {N_BYTES} bytes, found {n}")
