"""Hostile requests: their contents and the permitted results."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

NATIVE = "/completion"
CHAT = "/v1/chat/completions"
REFUSED = frozenset({400, 413, 500})
EITHER = REFUSED | {200}
AMBIGUOUS = 'root ::= "a" root | "a" root "b" | "a" root "c" | "z"'
ALWAYS_A = {"logit_bias": {"a": 1000.0}}
DEEP = b"[" * 1_000_000 + b"]" * 1_000_000


@dataclass(frozen=True)
class Attack:
    """A request: its route, a function that makes its body, and the permitted statuses."""

    name: str
    path: str
    content: Callable[[], bytes]
    statuses: frozenset[int] = REFUSED
    slow: bool = False
    """Takes seconds or a GiB."""


def native(name: str, statuses: frozenset[int] = REFUSED, slow: bool = False, **fields: Any) -> Attack:
    """A completion with these fields; functions are called when the body is built."""

    def content() -> bytes:
        values = {key: value() if callable(value) else value for key, value in fields.items()}
        return json.dumps({"prompt": "x", "n_predict": 8} | values).encode()

    return Attack(name, NATIVE, content, statuses, slow)


def grammar(
    name: str, text: str | Callable[[], str], statuses: frozenset[int] = REFUSED, slow: bool = False, **more: Any
) -> Attack:
    return native(f"grammar-{name}", statuses, slow, grammar=text, **more)


def schema(name: str, value: Any, statuses: frozenset[int] = REFUSED, slow: bool = False) -> Attack:
    """A chat whose answer must follow a JSON schema; functions are called when the body is built."""

    def content() -> bytes:
        form = {"type": "json_schema", "json_schema": {"schema": value() if callable(value) else value}}
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 8, "response_format": form}
        return json.dumps(body).encode()

    return Attack(f"schema-{name}", CHAT, content, statuses, slow)


def chat(name: str, statuses: frozenset[int] = EITHER, /, **fields: Any) -> Attack:
    """A chat with these fields; functions are called when the body is built."""

    def content() -> bytes:
        values = {key: value() if callable(value) else value for key, value in fields.items()}
        return json.dumps({"messages": [{"role": "user", "content": "x"}], "max_tokens": 8} | values).encode()

    return Attack(name, CHAT, content, statuses)


def tool(name: str, statuses: frozenset[int] = REFUSED, /, **function: Any) -> Attack:
    """A chat that must call a function."""

    def tools() -> list[dict[str, Any]]:
        values = {key: value() if callable(value) else value for key, value in function.items()}
        return [{"type": "function", "function": {"name": "f", **values}}]

    return chat(f"tool-{name}", statuses, tools=tools, tool_choice="required")


def raw(name: str, path: str, content: bytes | Callable[[], bytes], statuses: frozenset[int] = REFUSED) -> Attack:
    return Attack(name, path, content if callable(content) else lambda: content, statuses)


def nested(text: str, inner: str, end: str, n: int) -> Any:
    return json.loads(text * n + inner + end * n)


GRAMMARS = [
    grammar("optional", "root ::= " + "x? " * 200 + '"z"\nx ::= "a"?'),
    grammar("more-optional", "root ::= " + "x? " * 400 + '"z"\nx ::= [a-z ]?'),
    grammar("ambiguous", AMBIGUOUS, n_predict=500, **ALWAYS_A),
    grammar("hidden-left-recursion", 'root ::= b root "y" | "x"\nb ::= c\nc ::= ""'),
    grammar("hidden-later", 'root ::= "a" r\nr ::= b r "y" | "x"\nb ::= c c\nc ::= ""', **ALWAYS_A),
    grammar("no-stack-left", "root ::= b root\nb ::= c\nc ::= " + '""'),
    grammar("no-stack-later", 'root ::= "a" r | "x"\nr ::= b r\nb ::= c\nc ::= ""', EITHER, **ALWAYS_A),
    grammar("alternatives", lambda: doubling(40)),
    grammar("open-brackets", 'root ::= "a"\n' + "[" * 60_000),
    grammar("open-groups", "root ::= " + "(" * 60_000),
    grammar("groups", "root ::= " + "(" * 60_000 + '"a"' + ")" * 60_000),
    grammar("chain", lambda: chain(20_000), EITHER),
    grammar("repetitions-backwards", 'root ::= "a"{5,2}'),
    grammar("repetitions", 'root ::= "a"{2000000000}'),
    grammar("repetitions-of-5000-digits", 'root ::= "a"{1,' + "9" * 5000 + "}"),
    grammar("repetitions-nested", "root ::= " + "(" * 8 + '"a"' + "{0,2000})" * 8),
    grammar("repetitions-of-much", lambda: 'root ::= "' + "a" * 900_000 + '"{2000}'),
    grammar("repetitions-often", lambda: "root ::= " + '"a"{0,2000} ' * 20_000, slow=True),
    grammar("long", lambda: 'root ::= "' + "a" * 10_000_000 + '"'),
    grammar("many-rules", lambda: "root ::= r0\n" + "".join(f'r{i} ::= "a"\n' for i in range(200_000))),
    grammar("many-alternatives", lambda: "root ::= " + " | ".join(f'"a{i}"' for i in range(50_000)), slow=True),
    grammar("class", lambda: "root ::= [" + "a" * 900_000 + "]*", EITHER),
    grammar("impossible", "root ::= <[999999]>"),
    grammar("impossible-without-samplers", "root ::= <[999999]>", samplers=[]),
    grammar("range-backwards", "root ::= [z-a]"),
    grammar("null-character", 'root ::= "a\0b"'),
    grammar("left-recursion", 'root ::= root "a" | "b"'),
    grammar("empty-alternatives", "root ::= " + "|" * 20_000 + ' "a"', EITHER),
    grammar("rules-again", "root ::= r\n" + "r ::= r\n" * 5_000),
    grammar("half-a-character", 'root ::= "\ud83d"', EITHER),
    *(grammar(f"unfinished-{i}", 'root ::= "a"\n' + text, EITHER)  # slow if a scan starts at every position
      for i, text in enumerate(('"' * 60_001, '"\\' * 30_000, "[\\" * 30_000, "{" * 60_000, "#" * 60_000 + "["))),
    native("trigger-exponential", grammar='root ::= "z"', grammar_lazy=True, n_predict=60,
           grammar_triggers=[{"type": 2, "value": "(a*)*(a*)*(a*)*b"}], **ALWAYS_A),
    native("trigger-deep", grammar='root ::= "z"', grammar_lazy=True,
           grammar_triggers=[{"type": 2, "value": "(" * 100_000 + ")" * 100_000}]),
    native("trigger-unknown", grammar='root ::= "z"', grammar_lazy=True, grammar_triggers=[{"type": 99, "value": "a"}]),
    native("parser-of-a-client", chat_parser="garbage"),
]  # fmt: skip


def doubling(n: int) -> str:
    """n rules that each start with the next one in two ways: 2ⁿ initial stacks."""
    rules = "".join(f'x{i} ::= x{i + 1} "a" | x{i + 1} "b"\n' for i in range(n))
    return f'root ::= x0 "z"\n{rules}x{n} ::= "q"'


def chain(n: int) -> str:
    """n rules that each start with the next one."""
    return "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(n)) + f'r{n} ::= "a"'


def references(n: int) -> dict[str, Any]:
    """A schema with 2ⁿ paths through its definitions."""
    steps: dict[str, Any] = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(n)}
    return {"$defs": steps | {f"a{n}": {"type": "null"}}, "$ref": "#/$defs/a0"}


ARRAYS = '{"type":["array","array","array"],"items":'

SCHEMAS = [
    schema("pattern-bracket", {"type": "string", "pattern": "^]$"}, EITHER),
    schema("pattern-brace", {"type": "string", "pattern": "^a}$"}, EITHER),
    schema("pattern-repeated", {"type": "string", "pattern": "^(a|b){200000000}$"}),
    schema("pattern-optional", {"type": "string", "pattern": "^" + "(a|b)?" * 2000 + "$"}),
    schema("pattern-groups", {"type": "string", "pattern": "^" + "(" * 60_000 + "$"}, EITHER),
    schema("letters", {"type": "string", "minLength": 2 * 10**8}),
    schema("letters-backwards", {"type": "string", "minLength": 10, "maxLength": 2}),
    schema("items", {"type": "array", "items": {"type": "boolean"}, "minItems": 10**8}),
    schema("items-many", {"anyOf": [{"type": "array", "items": {}, "maxItems": 1e300}]}, EITHER),
    schema("items-negative", {"type": "array", "items": {"type": "boolean"}, "minItems": -1}, EITHER),
    schema("pattern-of-repetitions", {"type": "string", "pattern": "^[a]{1,100000000}$"}, EITHER),
    schema("constant", {"const": "x" * 200_000}, EITHER),
    schema("items-backwards", {"type": "array", "items": {"type": "integer"}, "minItems": 10, "maxItems": 2}),
    schema("properties", lambda: {"type": "object", "properties": {str(i): {"type": "integer"} for i in range(3000)}}),
    schema(
        "name-of-a-property",
        {"type": "object", "properties": {"a" * 60_000: {"type": "null"}}, "additionalProperties": {"type": "null"}},
    ),
    schema("name-of-signs", {"type": "object", "properties": {"!" * 200_000: {"type": "null"}}}),
    schema("enum", lambda: {"enum": list(range(100_000))}),
    schema("types", lambda: nested(ARRAYS, "{}", "}", 30)),
    schema("references", lambda: references(40), EITHER),
    schema("reference-to-itself", {"$ref": "#/"}),
    schema("references-in-a-ring", {"$ref": "#/a", "a": {"$ref": "#/b"}, "b": {"$ref": "#/a"}}),
    schema("reference-elsewhere", {"$ref": "https://x.invalid/"}),
    schema(
        "reference-chain",
        lambda: {"$defs": {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(20_000)}, "$ref": "#/$defs/a0"},
    ),
]

TOOLS = [
    tool("name-long", EITHER, name="x" * 60_000),
    tool("name-of-a-rule", EITHER, name='f" | root "'),
    tool("name-empty", EITHER, name=""),
    tool("name-number", name=5),
    tool("half-a-character", EITHER, description="\ud83d"),
    tool("items", parameters={"type": "array", "items": {"type": "boolean"}, "minItems": 10**8}),
    tool("letters", parameters={"type": "object", "properties": {"a": {"type": "string", "minLength": 2 * 10**8}}}),
    tool("pattern", EITHER, parameters={"type": "object", "properties": {"a": {"type": "string", "pattern": "^]$"}}}),
    tool("elsewhere", parameters={"$ref": "https://x.invalid/"}),
    tool("types", parameters=lambda: nested(ARRAYS, "{}", "}", 30)),
    tool("no-schema", EITHER, parameters=[1, 2]),
    chat("tools-many", tool_choice="required", tools=lambda: [
        {"type": "function", "function": {"name": f"f{i}", "parameters": {}}} for i in range(5_000)
    ]),
    chat("tools-number", tools=5),
    chat("tools-object", tools={}),
    chat("tools-null", tools=[None]),
    chat("tools-empty", tools=[{"type": "function"}]),
    chat("tools-none", tool_choice="required"),
    chat("tools-choice", tools=[{"type": "function", "function": {"name": "f"}}],
         tool_choice={"type": "function", "function": 5}),
    chat("functions", functions=[{"name": "", "parameters": {}}]),
]  # fmt: skip

USER = {"role": "user", "content": "x"}
# (route, body): fields of wrong types
WRONG_TYPES: list[tuple[str, Any]] = [
    (CHAT, {"messages": 5}),
    (CHAT, {"messages": [5]}),
    (CHAT, {"messages": [{"role": 5, "content": {}}]}),
    (CHAT, {"messages": [{"role": "assistant", "content": None, "tool_calls": "none"}]}),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": 5, "arguments": 5}}]}]}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///x"}}]}]}),
    (CHAT, {"messages": [USER], "response_format": 5}),
    (CHAT, {"messages": [USER], "chat_template_kwargs": "x"}),
    (CHAT, {"messages": [USER], "max_tokens": "many"}),
    (NATIVE, {"prompt": {"a": 1}}),
    (NATIVE, {"prompt": [[1, 2], {"prompt_string": 5}]}),
    (NATIVE, {"prompt": {"prompt_string": "x", "multimodal_data": ["!", 5]}}),
    (NATIVE, {"promt": "misspelt"}),
    ("/v1/completions", {"promt": "misspelt"}),
    ("/v1/completions", {"prompt": "x", "n": -1}),
    ("/tokenize", {"content": {"a": 1}}),
    ("/detokenize", {"tokens": "x"}),
    ("/detokenize", {"tokens": [1.5, None]}),
    ("/apply-template", {"messages": {}}),
    ("/infill", {"input_prefix": 5}),
    ("/infill", {"input_prefix": "a", "input_suffix": "b", "input_extra": [5]}),
    ("/embedding", {"content": "x"}),
    ("/v1/embeddings", {"input": []}),
    ("/rerank", {"query": "x", "documents": ["y"]}),
    ("/v1/messages", {"messages": 5, "max_tokens": 2}),
    ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "image", "source": 5}]}], "max_tokens": 2}),
    ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}], "max_tokens": 2}),
    ("/v1/messages", {"messages": [USER], "tools": [5], "max_tokens": 2}),
    ("/v1/messages/count_tokens", {"messages": "x"}),
    ("/v1/responses", {"input": {"a": 1}}),
    ("/v1/responses", {"input": [{"type": "nonsense"}, 5]}),
    ("/v1/responses", {"input": "x", "tools": [{"type": "web_search"}]}),
    ("/v1/chat/completions/control", {"id": 5}),
    ("/v1/streams/lookup", {"conversation_ids": 5}),
    ("/lora-adapters", [{"id": 10**30, "scale": "x"}]),
    ("/props", {"x": 5}),
    ("/slots/9?action=erase", {}),
    ("/nowhere", {}),
    ("/health", {}),
]

BODIES = [
    *(
        raw(
            f"kinds-{i}{path.partition('?')[0].replace('/', '-')}", path, json.dumps(body).encode(), EITHER | {404, 501}
        )
        for i, (path, body) in enumerate(WRONG_TYPES)
    ),
    raw("not-json", NATIVE, b"{"),
    raw("empty", CHAT, b""),
    raw("a-list", NATIVE, b"[]"),
    raw("not-utf-8", CHAT, b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}'),
    raw("half-a-character", NATIVE, b'{"prompt": "half \\ud83d of a pair", "n_predict": 2}', EITHER),
    raw("nan", NATIVE, b'{"prompt": "x", "temperature": NaN}'),
    raw("infinity", NATIVE, b'{"prompt": "x", "temperature": 1e999}'),
    raw("open-lists", CHAT, b"[" * 200_000),
    *(
        raw(f"deep-{where}", path, lambda text=text: text.replace(b"@", DEEP))  # type: ignore[misc]
        for where, path, text in (
            ("prompt", NATIVE, b'{"prompt": @}'),
            ("unknown-field", CHAT, b'{"messages": [{"role": "user", "content": "x"}], "x": @}'),
            ("kwargs", CHAT, b'{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"a": @}}'),
            (
                "tools",
                CHAT,
                b'{"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function":'
                b' {"name": "f", "parameters": {"a": @}}}]}',
            ),
            (
                "anthropic-tools",
                "/v1/messages",
                b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "tools":'
                b' [{"name": "f", "input_schema": {"a": @}}]}',
            ),
            ("response", "/v1/responses", b'{"input": @}'),
            ("schema", NATIVE, b'{"prompt": "x", "json_schema": {"const": @}}'),
            ("items", NATIVE, b'{"prompt": "x", "json_schema": ' + b'{"items":' * 20_000 + b"{}" + b"}" * 20_001),
        )
    ),
    raw("members", NATIVE, lambda: b'{"prompt":"x",' + b",".join(b'"%d":1' % i for i in range(10**6)) + b"}"),
    raw("a-hundred-mebibytes", NATIVE, lambda: b'{"prompt": "' + b"a" * (100 << 20) + b'"}', frozenset({413})),
    raw("messages", CHAT, lambda: b'{"messages": [' + b",".join([b'{"role":"user","content":"x"}'] * 10**6) + b"]}"),
    raw("prompts", NATIVE, lambda: json.dumps({"prompt": ["x"] * 100_000, "n_predict": 0}).encode()),
    raw("long-word", NATIVE, lambda: json.dumps({"prompt": "a" * 2_000_000}).encode()),
    raw("tokens-out-of-range", NATIVE, b'{"prompt": [1, 99999999, -1]}'),
    raw("detokenize-out-of-range", "/detokenize", b'{"tokens": [99999999, -1]}'),
    raw("slot-out-of-range", "/slots/99999999999999999999?action=erase", b"{}", REFUSED | {404, 501}),
    raw("slot-action", "/slots/0?action=dance", b"{}"),
    *(
        raw(f"file-{number}", f"/slots/0?action={action}", json.dumps({"filename": name}).encode())
        for action in ("save", "restore")
        for number, name in enumerate(("../x", "/etc/passwd", "a/../../b", ".", "", "a" * 300, "a\0b", "\ud800", "‥/x"))
    ),
]

NUMBERS = [
    native("n_predict-most", EITHER, slow=True, n_predict=2**31 - 1, ignore_eos=True),
    native("repeat_last_n-most", EITHER, repeat_last_n=2**31 - 1, repeat_penalty=1.1),
    native("dry_penalty_last_n-most", EITHER, dry_penalty_last_n=2**31 - 1, dry_multiplier=0.5),
    native("n_probs-most", EITHER, n_probs=2**31 - 1),
    native("top_k-beyond-the-vocabulary", frozenset({200}), backend_sampling=True, top_k=1_000_000),
    native("n_cmpl-most", n_cmpl=2**31 - 1),
    native("id_slot-out-of-range", EITHER, id_slot=99),
    native("bias-beyond-floats", EITHER, logit_bias=[[i, bias] for bias in (1e308, -1e308) for i in range(300)]),
    native("bias-of-all", EITHER, logit_bias=[[i, False] for i in range(500)], samplers=[]),
    native("bias-names", EITHER, logit_bias={"9" * 5000: 1.0, "x" * 100_000: 1.0, "-1": 1.0, "٣": 1.0}),
    native("bias-long", EITHER, slow=True, logit_bias=lambda: [[i % 300, 1.0] for i in range(10**6)]),
    native("samplers-long", EITHER, samplers=["top_k", "dry", "penalties", "xtc", "temperature"] * 20_000),
    native("samplers-none", samplers=["x", 3, None]),
    native("stops", EITHER, stop=lambda: ["a" * 500] * 20_000, n_predict=20),
    native("stops-no-strings", stop=[1, None, {}]),
    native("breakers", EITHER, dry_multiplier=0.5, dry_sequence_breakers=["a" * i for i in range(1, 1000)]),
    *(
        native(f"{field}-{number}", EITHER, **{field: value})
        for field in ("n_keep", "n_discard", "top_k", "min_keep", "seed", "mirostat", "temperature", "typical_p",
                      "xtc_probability", "dynatemp_range", "repeat_penalty", "mirostat_tau", "adaptive_decay")
        for number, value in enumerate((-1, -(2**31), 2**31 - 1, 2**63 - 1, 1e308, -1e308, "a", [], True))
    ),
]  # fmt: skip

GROUPS = {"grammars": GRAMMARS, "schemas": SCHEMAS, "tools": TOOLS, "bodies": BODIES, "numbers": NUMBERS}
