"""Reads the model and the cache types from the arguments of a llama.cpp program.

All other arguments stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from subkv.base.errors import CacheError
from subkv.base.files import open_regular

MODEL, REPO, REPO_FILE, FROM_URL, FOLDER = "model", "repo", "repo_file", "from_url", "folder"
TYPE_K, TYPE_V = "type_k", "type_v"
# kind of value -> its flags, its environment variables without LLAMA_ARG_
_KINDS = {
    MODEL: ("-m --model", "MODEL"),
    REPO: ("-hf -hfr --hf-repo", "HF_REPO"),
    REPO_FILE: ("-hff --hf-file", "HF_FILE"),
    FROM_URL: ("-mu --model-url -dr --docker-repo", "MODEL_URL DOCKER_REPO"),
    FOLDER: ("--models-dir --models-preset", "MODELS_DIR MODELS_PRESET"),
    TYPE_K: ("-ctk --cache-type-k", "CACHE_TYPE_K"),
    TYPE_V: ("-ctv --cache-type-v", "CACHE_TYPE_V"),
}
FLAGS = {flag: kind for kind, (flags, _) in _KINDS.items() for flag in flags.split()}
VARIABLES = {f"LLAMA_ARG_{name}": kind for kind, (_, names) in _KINDS.items() for name in names.split()}
OURS = ("subkv", "auto")  # our cache types, which llama.cpp's parsers reject
MAGIC = b"GGUF"


def program_name(program: str) -> str:
    """A program's name without its folder."""
    return re.split(r"[/\\]", program)[-1].removesuffix(".exe")


def is_llama_cpp_program(program: str) -> bool:
    """Whether a name is that of a llama.cpp program: llama-server, llama-bench, llama."""
    return re.fullmatch(r"llama(-[\w.-]+)?", program_name(program)) is not None


def is_gguf(path: Path) -> bool:
    """Whether a file starts with GGUF's magic number."""
    try:
        with open_regular(path) as handle:
            return handle.read(len(MAGIC)) == MAGIC
    except (OSError, ValueError):  # a name with a zero byte
        return False


@dataclass(frozen=True)
class ProgramArguments:
    """The model and the cache types that a command line and its environment name.

    arguments, environment: those of the program, without cache types that it does not know. models: files, as given.
    repos, repo_file: models of the Hugging Face hub, and the file in them. from_url: the program downloads its model.
    folder: a router's models. type_k, type_v: names of cache types, None if not given.
    """

    arguments: tuple[str, ...]
    environment: dict[str, str]
    models: tuple[Path, ...] = ()
    repos: tuple[str, ...] = ()
    repo_file: str | None = None
    from_url: bool = False
    folder: str | None = None
    type_k: str | None = None
    type_v: str | None = None

    @property
    def strict(self) -> bool:
        """Whether the user requested a coded cache by name; then no other cache may replace it."""
        return "subkv" in (self.type_k, self.type_v)

    @property
    def ordinary(self) -> bool:
        """Whether the user requested one of llama.cpp's own cache types."""
        return {self.type_k, self.type_v} - {None, *OURS} != set()


@dataclass(frozen=True)
class _Flag:
    """A flag and its value. index: the flag's place in the arguments; n: arguments that both take."""

    kind: str
    value: str
    index: int
    n: int


def _flags(arguments: Sequence[str]) -> Iterator[_Flag]:
    i = 0
    while i < len(arguments):
        name, equals, value = arguments[i].partition("=")
        kind = FLAGS.get(name.replace("_", "-") if name.startswith("--") else name)
        n = 1 if equals else 2
        if kind is None or i + n > len(arguments):
            i += 1
            continue
        yield _Flag(kind, value if equals else arguments[i + 1], i, n)
        i += n


def _one_type(key: str, values: Sequence[str], stock: Collection[str], takes_lists: bool) -> str | None:
    """The cache type in effect: the last one given, or one of llama-bench's lists. Raises CacheError about `key`."""
    named = [value.split(",") if takes_lists else [value] for value in values]
    known = [types for types in named if set(types) <= {*OURS, *stock}]
    in_effect = sum(known, []) if takes_lists else (known or [[]])[-1]
    if len(set(in_effect)) > 1 and not set(in_effect).isdisjoint(OURS):
        reason = "expected subkv alone, since a process has coded or ordinary caches"
        raise CacheError(key, f"{reason}, found {','.join(in_effect)}")
    return in_effect[0] if in_effect else None


def read(
    program: str, arguments: Sequence[str], environment: Mapping[str, str], stock: Collection[str]
) -> ProgramArguments:
    """Read the arguments of `program`. A flag overrides its variable. stock: llama.cpp's cache types.

    Other programs may use -m for something else, so only a GGUF file counts as their model. Raises CacheError about
    `type_k` or `type_v`.
    """
    is_llama_cpp = is_llama_cpp_program(program)
    takes_lists = is_llama_cpp and (program_name(program) == "llama-bench" or list(arguments[:1]) == ["bench"])
    flags = list(_flags(arguments))

    def values(kind: str) -> list[str]:
        named = [flag.value for flag in flags if flag.kind == kind]
        if not named and (is_llama_cpp or kind in (TYPE_K, TYPE_V)):
            named = [environment[name] for name, of in VARIABLES.items() if of == kind and environment.get(name)]
        return named

    type_k, type_v = (_one_type(kind, values(kind), stock, takes_lists) for kind in (TYPE_K, TYPE_V))
    if None not in (type_k, type_v) and type_k != type_v and {type_k, type_v} & set(OURS):
        raise CacheError(TYPE_V, f"expected the same cache for K and V with {type_k!r}, found {type_v!r}")
    models, repos = values(MODEL), values(REPO) if is_llama_cpp else []
    from_url = is_llama_cpp and bool(values(FROM_URL))
    if takes_lists:
        models, repos = ([name for value in lists for name in value.split(",")] for lists in (models, repos))
    elif is_llama_cpp:
        models, repos = models[-1:], repos[-1:]
        if from_url or repos:  # -m is the target of the download
            models = []
    else:
        models = [value for value in models if is_gguf(Path(value))]
    ours = type_k in OURS or type_v in OURS
    dropped = {*OURS, *stock} if ours else set(OURS)
    rest, variables = list(arguments), dict(environment)
    for flag in reversed(flags):
        if flag.kind in (TYPE_K, TYPE_V) and set(flag.value.split(",")) <= dropped:
            del rest[flag.index : flag.index + flag.n]
    for name, kind in VARIABLES.items():
        if kind in (TYPE_K, TYPE_V) and variables.get(name) in dropped:
            del variables[name]
    files, folders = values(REPO_FILE), values(FOLDER)
    return ProgramArguments(
        tuple(rest),
        variables,
        tuple(Path(model) for model in models if model),
        tuple(repo for repo in repos if repo),
        files[-1] if files else None,
        from_url,
        folders[-1] if folders else None,
        type_k,
        type_v,
    )


def with_hub_models(read: ProgramArguments) -> ProgramArguments:
    """Replace -hf by `-m FILE` and download the files, because our builds of llama.cpp cannot.

    Raises SubkvError about `hf_repo`.
    """
    from subkv.base import hub  # an extra

    files = [hub.fetch(repo, read.repo_file) for repo in read.repos]
    words = [word for file in files for word in ("-m", str(file))]
    rest, placed = list(read.arguments), False
    for flag in reversed(list(_flags(rest))):
        if flag.kind in (REPO, REPO_FILE) or (flag.kind == MODEL and not read.models):
            here = flag.kind == REPO and not placed
            rest[flag.index : flag.index + flag.n] = words if here else []
            placed = placed or here
    if not placed:  # the model came from a variable
        rest[:0] = words
    dropped = (REPO, REPO_FILE, MODEL)
    environment = {name: value for name, value in read.environment.items() if VARIABLES.get(name) not in dropped}
    return replace(read, arguments=tuple(rest), environment=environment, models=(*read.models, *files), repos=())
